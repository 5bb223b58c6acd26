"""Hugging Face checkpoints through the plain builder: the logits of transformers, and the same bits when saved."""

import hf_checkpoints
import pytest
import torch

LAYOUTS = [
    ("qwen2", ""),
    ("qwen3", ""),
    ("llama", ""),
    ("qwen2_moe", ""),
    ("qwen3_moe", ""),
    ("qwen2", "tp=2"),
    ("qwen2", "pp=2"),
    ("llama", "pp=2,vpp=2"),
    ("qwen3", "tp=2"),
    ("llama", "tp=4"),  # twice the key-value heads
    ("qwen2_moe", "tp=2"),
    ("qwen2_moe", "pp=2,vpp=2"),
    ("qwen2_moe", "dp=2,ep=2"),
    ("qwen3_moe", "tp=2,ep=2,etp=1"),
    ("qwen3_moe", "pp=2,dp=2,ep=2"),
    ("qwen2_moe", "tp=2,dp=2,ep=2"),
]


def world(sizes):
    product = 1
    for part in sizes.split(","):
        name, _, size = part.partition("=")
        product *= int(size) if name in ("tp", "pp", "dp") else 1
    return product


@pytest.mark.parametrize(("family", "sizes"), LAYOUTS)
def test_a_checkpoint_gives_the_logits_of_transformers_and_is_saved_bit_for_bit(ranks, written, family, sizes):
    ranks("hf_on_ranks:goes_there_and_back", world(sizes), str(written(family)), sizes, "5000000000")


def test_transformers_reads_what_is_saved_in_several_files(ranks, written):
    from transformers import AutoModelForCausalLM

    folder = written("qwen2_moe")
    ranks("hf_on_ranks:goes_there_and_back", 2, str(folder), "pp=2", "40000")
    saved = folder.with_name("qwen2_moe-saved-pp=2-40000")
    assert len(list(saved.glob("model-0000?-of-0000?.safetensors"))) > 3
    expected = torch.load(folder.with_suffix(".pt"))
    model = AutoModelForCausalLM.from_pretrained(saved)
    assert torch.equal(hf_checkpoints.logits(model, expected["ids"]), expected["logits"])
    ranks("hf_on_ranks:goes_there_and_back", 1, str(saved_with_input(saved, folder)), "", "1000000")


def saved_with_input(saved, folder):
    saved.with_suffix(".pt").write_bytes(folder.with_suffix(".pt").read_bytes())
    return saved


def test_a_half_precision_model_is_saved_in_its_own_dtype(ranks, written):
    ranks("hf_on_ranks:keeps_half_precision", 1, str(written("qwen2")))


def test_a_critic_takes_no_output_layer_and_keeps_its_head(ranks, written):
    ranks("hf_on_ranks:skips_the_output_layer_of_a_critic", 2, str(written("llama")))


def test_parameters_still_on_their_way_are_saved_as_they_will_be(ranks, written):
    ranks("hf_on_ranks:saves_what_an_overlapped_gather_has_not_brought_yet", 2, str(written("llama")))


def test_tensors_that_are_missing_left_over_or_of_another_shape_are_named(ranks, written):
    ranks("hf_on_ranks:names_the_tensor_that_does_not_fit", 1, str(written("qwen2")))


def test_files_and_settings_that_do_not_fit_are_named(ranks, written):
    ranks("hf_on_ranks:names_the_file_or_setting_that_does_not_fit", 1, str(written("qwen2")))


def test_a_model_with_another_routing_rule_is_refused(ranks, written):
    ranks("hf_on_ranks:routes_as_the_checkpoint_says", 1, str(written("qwen2_moe")))


def test_a_problem_of_one_rank_is_raised_on_all(ranks, written):
    ranks("hf_on_ranks:raises_on_every_rank", 2, str(written("llama")))
