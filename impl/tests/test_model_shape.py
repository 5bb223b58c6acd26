"""Shapes of models: shipped ones, those that Hugging Face configurations describe, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from steelyard.cost import ModelShape, presets
from steelyard.errors import ShapeError

# Parameters of the public checkpoints, and what one token meets: published roundly for mixtures of experts.
PUBLISHED = {
    "qwen2.5-0.5b": (494_032_768, 0.494e9),
    "qwen2.5-1.5b": (1_543_714_304, 1.544e9),
    "qwen2.5-7b": (7_615_616_512, 7.616e9),
    "qwen2.5-32b": (32_763_876_352, 32.76e9),
    "qwen2.5-72b": (72_706_203_648, 72.71e9),
    "qwen3-8b": (8_190_735_360, 8.191e9),
    "qwen3-30b-a3b": (30_532_122_624, 3.3e9),
    "qwen3-235b-a22b": (235_093_634_560, 22e9),
    "llama-3.1-8b": (8_030_261_248, 8.03e9),
    "llama-3.1-70b": (70_553_706_496, 70.55e9),
    # The card's 2.24 billion active leave out the two embeddings of 163,840 × 2,048.
    "moonlight-16b-a3b": (15_960_108_544, 2.24e9 + 2 * 163_840 * 2048),
    # Without the layer for multi-token prediction.
    "deepseek-v3": (671_026_404_352, 37e9),
}

SMALL = ModelShape(layers=3, hidden=64, ffn=160, heads=8, kv_heads=2, head_dim=16, vocab=500, qkv_bias=True, tied=True)
LATENT = {
    "kv_heads": 8,
    "head_dim": 24,
    "kv_lora": 32,
    "qk_nope": 16,
    "qk_rope": 8,
    "v_head_dim": 20,
    "qkv_bias": False,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_has_the_published_parameters(name: str) -> None:
    total, active = PUBLISHED[name]
    shape = ModelShape.preset(name)
    assert shape.name == name
    assert shape.parameters == total
    assert shape.parameters_active == pytest.approx(active, rel=0.02)


def test_presets_are_listed_and_found_in_any_case_and_by_their_other_names() -> None:
    assert presets() == list(PUBLISHED)
    assert ModelShape.preset("Qwen2.5-7B") == ModelShape.preset("qwen2.5-7b")
    assert ModelShape.preset("moonlight-16b") == ModelShape.preset("moonlight-16b-a3b")
    assert ModelShape.preset("moonlight-16b").name == "moonlight-16b-a3b"


def test_an_unknown_preset_is_met_with_close_names_and_the_list() -> None:
    with pytest.raises(ShapeError, match=r"unknown model preset 'qwen2.5-8b' \(did you mean qwen2.5-") as error:
        ModelShape.preset("qwen2.5-8b")
    assert all(name in str(error.value) for name in presets())


QWEN2 = {
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 500,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "max_position_embeddings": 4096,
}
QWEN2_MOE = QWEN2 | {
    "model_type": "qwen2_moe",
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 96,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [0],
}
DEEPSEEK = QWEN2 | {
    "model_type": "deepseek_v3",
    "n_routed_experts": 6,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "first_k_dense_replace": 1,
    "q_lora_rank": None,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "head_dim": 8,
}


def test_qwen2_has_biases_and_the_sizes_of_its_configuration() -> None:
    shape = ModelShape.from_hf(QWEN2)
    assert shape == ModelShape(
        layers=3,
        hidden=64,
        ffn=160,
        heads=8,
        kv_heads=2,
        head_dim=8,
        vocab=500,
        tied=True,
        qkv_bias=True,
        rope_theta=5e5,
        norm_eps=1e-5,
        max_positions=4096,
        name="qwen2",
    )


def test_qwen3_normalises_heads_and_has_their_size() -> None:
    shape = ModelShape.from_hf(QWEN2 | {"model_type": "qwen3", "head_dim": 32, "attention_bias": False})
    assert (shape.qk_norm, shape.qkv_bias, shape.out_bias, shape.head_dim) == (True, False, False, 32)


def test_llama_takes_transformers_defaults() -> None:
    sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    shape = ModelShape.from_hf({key: QWEN2[key] for key in sizes} | {"model_type": "llama"})
    assert (shape.kv_heads, shape.head_dim, shape.tied, shape.rope_theta) == (8, 8, False, 1e4)
    assert (shape.qkv_bias, shape.out_bias, shape.qk_norm) == (False, False, False)
    biased = ModelShape.from_hf(QWEN2 | {"model_type": "llama", "attention_bias": True})
    assert (biased.qkv_bias, biased.out_bias) == (True, True)


def test_experts_are_read_from_every_family() -> None:
    qwen2 = ModelShape.from_hf(QWEN2_MOE)
    assert (qwen2.experts, qwen2.experts_per_token, qwen2.moe_ffn, qwen2.shared_ffn) == (6, 2, 48, 96)
    assert (qwen2.shared_gate, qwen2.dense_layers, qwen2.moe_layers) == (True, 1, 2)
    qwen3 = ModelShape.from_hf(QWEN2_MOE | {"model_type": "qwen3_moe", "mlp_only_layers": []})
    assert (qwen3.experts, qwen3.shared_ffn, qwen3.shared_gate, qwen3.dense_layers) == (6, 0, False, 0)
    deepseek = ModelShape.from_hf(DEEPSEEK)
    assert (deepseek.experts, deepseek.shared_ffn, deepseek.dense_layers) == (6, 96, 1)


def test_weights_of_chosen_experts_are_as_the_configuration_says_or_as_transformers_has_it() -> None:
    assert not ModelShape.from_hf(QWEN2_MOE).norm_topk_prob
    assert ModelShape.from_hf(QWEN2_MOE | {"norm_topk_prob": True}).norm_topk_prob
    assert ModelShape.from_hf(DEEPSEEK | {"model_type": "deepseek_v3"}).norm_topk_prob
    assert ModelShape.preset("qwen3-30b-a3b").norm_topk_prob


def test_experts_are_read_under_their_newer_name() -> None:
    for config, old in ((QWEN2_MOE, "num_experts"), (DEEPSEEK, "n_routed_experts")):
        newer = {key: value for key, value in config.items() if key != old} | {"num_local_experts": 6}
        assert ModelShape.from_hf(newer) == ModelShape.from_hf(config)


def test_latent_attention_is_read() -> None:
    shape = ModelShape.from_hf(DEEPSEEK)
    assert (shape.q_lora, shape.kv_lora, shape.qk_nope, shape.qk_rope, shape.v_head_dim) == (0, 32, 16, 8, 20)
    assert (shape.heads, shape.kv_heads, shape.head_dim, shape.value_dim) == (8, 8, 24, 20)
    assert ModelShape.from_hf(DEEPSEEK | {"q_lora_rank": 40}).q_lora == 40


def test_configurations_come_as_files_folders_and_objects(tmp_path: Path) -> None:
    class Config:
        def to_dict(self) -> dict[str, Any]:
            return QWEN2

    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(QWEN2))
    expected = ModelShape.from_hf(QWEN2, name="my-model")
    assert ModelShape.from_hf(folder) == ModelShape.from_hf(str(folder / "config.json")) == expected
    assert ModelShape.from_hf(Config(), name="my-model") == expected


def test_the_newer_place_of_rope_theta_is_read() -> None:
    config = {key: value for key, value in QWEN2.items() if key != "rope_theta"}
    assert (
        ModelShape.from_hf(config | {"rope_parameters": {"rope_theta": 7e5, "rope_type": "default"}}).rope_theta == 7e5
    )


@pytest.mark.parametrize(
    "config",
    [
        QWEN2,
        QWEN2 | {"model_type": "qwen3", "head_dim": 16, "attention_bias": True},
        QWEN2 | {"model_type": "llama", "attention_bias": True, "tie_word_embeddings": False},
        QWEN2_MOE,
        QWEN2_MOE | {"model_type": "qwen3_moe", "head_dim": 16},
        DEEPSEEK,
        DEEPSEEK | {"model_type": "deepseek_v2", "q_lora_rank": 40},
    ],
    ids=lambda config: config["model_type"],
)
def test_transformers_builds_as_many_parameters(config: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {key: value for key, value in config.items() if key != "model_type"}
    built = transformers.AutoConfig.for_model(config["model_type"], **sizes)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(built)
    assert ModelShape.from_hf(built).parameters == sum(each.numel() for each in model.parameters())
    assert ModelShape.from_hf(built, name="same") == ModelShape.from_hf(config, name="same")


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (QWEN2 | {"model_type": "gpt2"}, "model_type='gpt2' is unknown.*qwen2, qwen3, llama"),
        ({"hidden_size": 4}, "model_type=None is unknown"),
        ({"model_type": "qwen2_vl", "text_config": QWEN2}, "text_config"),
        ({key: value for key, value in QWEN2.items() if key != "hidden_size"}, "no 'hidden_size'"),
        ({key: value for key, value in DEEPSEEK.items() if key != "kv_lora_rank"}, "no 'kv_lora_rank'"),
        ({key: value for key, value in QWEN2_MOE.items() if key != "num_experts"}, "no 'num_experts'"),
        (QWEN2 | {"hidden_size": "64"}, "hidden_size='64'"),
        (QWEN2 | {"num_hidden_layers": 0}, "num_hidden_layers=0"),
        (QWEN2 | {"vocab_size": True}, "vocab_size=True"),
        (QWEN2 | {"hidden_size": 66}, "hidden_size=66 is not a multiple of num_attention_heads=8"),
        (QWEN2 | {"num_key_value_heads": 3}, "8 heads are not a multiple of 3"),
        (QWEN2 | {"rms_norm_eps": -1}, "rms_norm_eps=-1"),
        (QWEN2 | {"tie_word_embeddings": "yes"}, "tie_word_embeddings='yes'"),
        (QWEN2 | {"use_sliding_window": True}, "use_sliding_window=True"),
        (QWEN2 | {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        (QWEN2 | {"model_type": "llama", "mlp_bias": True}, "mlp_bias=True"),
        (QWEN2_MOE | {"decoder_sparse_step": 2}, "decoder_sparse_step=2"),
        (QWEN2_MOE | {"mlp_only_layers": [1]}, r"mlp_only_layers=\[1\]"),
        (QWEN2_MOE | {"num_experts_per_tok": 7}, "experts_per_token=7 must be 1 to experts=6"),
        (DEEPSEEK | {"first_k_dense_replace": 4}, "dense_layers=4 is above layers=3"),
        (7, "a int is no configuration"),
    ],
)
def test_a_bad_configuration_is_refused(config: Any, named: str) -> None:
    with pytest.raises(ShapeError, match=named) as error:
        ModelShape.from_hf(config)
    assert "\n" not in str(error.value)


def test_a_bad_configuration_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ShapeError, match=r"cannot be read.*preset\('qwen2.5-7b'\)"):
        ModelShape.from_hf("qwen2.5-7b")
    for text, named in (("{", "not valid JSON"), ("[1]", "holds a list")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ShapeError, match=named):
            ModelShape.from_hf(tmp_path)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden": 0}, "hidden=0"),
        ({"layers": 2.0}, "layers=2.0"),
        ({"experts": -1}, "experts=-1"),
        ({"moe_ffn": 8}, "moe_ffn=8 needs experts"),
        ({"shared_gate": True}, "shared_gate=True needs experts"),
        ({"norm_topk_prob": True}, "norm_topk_prob=True needs experts"),
        ({"experts": 4, "experts_per_token": 2}, "moe_ffn=0"),
        ({"experts": 4, "moe_ffn": 8}, "experts_per_token=0"),
        ({"qk_nope": 8}, "qk_nope=8 needs kv_lora"),
        (LATENT | {"v_head_dim": 0}, "v_head_dim=0"),
        (LATENT | {"head_dim": 16}, "head_dim=16 must be qk_nope . qk_rope = 24"),
        (LATENT | {"qkv_bias": True}, "takes no qkv_bias"),
    ],
)
def test_contradicting_sizes_are_refused(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ShapeError, match=named):
        dataclasses.replace(SMALL, **change)
