"""What test_bridges.py runs on ranks: models through mbridge, their weights, and steps against the plain builder."""

import re
from pathlib import Path

import hf_checkpoints
import torch
from hf_on_ranks import logits, tensors
from megatron.core import parallel_state
from megatron.core.utils import unwrap_model
from on_ranks import PROMPTS, RESPONSES, mine, rollouts
from transformers import AutoConfig

from steelyard.model.bridges import mbridge
from steelyard.model.build import build_model, initialize_parallel
from steelyard.model.layers import ValueHead
from steelyard.parallel import ParallelLayout
from steelyard.step import ActorRole, CriticRole, StepSettings, forward_backward_batch
from steelyard.step.metrics import reduce_metrics


def parse(sizes):
    layout = ParallelLayout(**{name: int(size) for name, size in re.findall(r"(\w+)=(\d+)", sizes)})
    initialize_parallel(layout)
    return layout


def through_mbridge(folder, layout, **settings):
    return build_model(AutoConfig.from_pretrained(folder), layout, builder="mbridge", **settings)


def goes_there_and_back(folder, *layouts):
    """Logits are those of transformers, and what is saved is what was loaded, bit for bit."""
    expected = torch.load(Path(folder).with_suffix(".pt"))
    for sizes in layouts:
        chunks = through_mbridge(folder, parse(sizes))
        mbridge.load_weights(chunks, folder)
        got = logits(chunks, expected["ids"])
        if got is not None:
            assert (got - expected["logits"]).abs().max() < 1e-4, sizes
        exported = dict(mbridge.export_weights(chunks))
        before = tensors(Path(folder))
        assert before.keys() == exported.keys()
        for name, tensor in before.items():
            assert torch.equal(tensor, exported[name]), (sizes, name)
        if len(layouts) == 1:
            saved = Path(f"{folder}-saved-by-mbridge")
            mbridge.save_weights(chunks, saved)
            assert before.keys() == tensors(saved).keys()
            assert all(torch.equal(tensor, tensors(saved)[name]) for name, tensor in before.items())
        parallel_state.destroy_model_parallel()


def plain_name(name):
    """The plain builder's name of a parameter that has the name of TransformerEngine's layers."""
    name = name.replace("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight")
    name = name.replace("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight")
    return re.sub(r"experts\.(linear_fc[12])\.weight(\d+)", r"experts.local_experts.\2.\1.weight", name)


def same_weights(plain, bridged):
    """Every parameter of both with its name, the plain builder's values copied into mbridge's."""
    found = []
    for ours, theirs in zip(plain, bridged, strict=True):
        parameters = dict(unwrap_model(ours).named_parameters())
        for name, same in unwrap_model(theirs).named_parameters():
            parameter = parameters.pop(plain_name(name))
            same.data.copy_(parameter.data)
            found.append((name, parameter, same))
        assert not parameters
    return found


def trains_as_the_plain_builder(family, *layouts):
    """From the same weights, copied by name: the same loss, and the same gradient of every parameter."""
    changes = {"mlp_only_layers": []} if family == "qwen2_moe" else {}
    config = AutoConfig.for_model(family, **hf_checkpoints.FAMILIES[family] | changes)
    settings = {"override_ddp_config": {"use_distributed_optimizer": False}}
    for sizes in layouts:
        layout = parse(sizes)
        for role, loss in ((ActorRole(), "actor/pg_loss"), (CriticRole(), "critic/vf_loss")):
            settings["value_head"] = isinstance(role, CriticRole)
            plain, bridged = (
                build_model(config, layout, builder=builder, **settings) for builder in ("megatron", "mbridge")
            )
            named = same_weights(plain, bridged)
            losses = []
            for chunks in (plain, bridged):
                rows, step = rollouts(PROMPTS, RESPONSES).select(mine(8)), StepSettings(max_tokens=40, layout=layout)
                losses.append(reduce_metrics(role, forward_backward_batch(rows, role, chunks, step)["output"])[loss])
            assert abs(losses[0] - losses[1]) <= 1e-6 * abs(losses[0]), (sizes, losses)
            for name, parameter, same in named:
                torch.testing.assert_close(same.main_grad, parameter.main_grad, rtol=1e-5, atol=1e-7, msg=name)
        parallel_state.destroy_model_parallel()


def a_tied_model_leaves_later_ones_alone(tied, untied):
    """mbridge keeps "the output layer is the embedding" in a dictionary that both classes share."""
    layout = parse("")
    for folder in (tied, untied):
        expected = torch.load(Path(folder).with_suffix(".pt"))
        chunks = through_mbridge(folder, layout)
        mbridge.load_weights(chunks, folder)
        assert (logits(chunks, expected["ids"]) - expected["logits"]).abs().max() < 1e-4
        assert dict(mbridge.export_weights(chunks)).keys() == tensors(Path(folder)).keys()


def gives_a_tied_model_a_value_head(tied):
    """The head is no embedding: the checkpoint leaves it alone, and it is exported under a name of its own."""
    chunks = through_mbridge(tied, parse("pp=2"), value_head=True)
    (head,) = [one for chunk in chunks for one in chunk.modules() if isinstance(one, ValueHead)] or [None]
    before = None if head is None else head.weight.detach().clone()
    mbridge.load_weights(chunks, tied)
    if head is not None:
        assert torch.equal(head.weight, before)
    exported, whole = dict(mbridge.export_weights(chunks)), tensors(Path(tied))
    assert exported.pop("lm_head.weight").shape == (1, 32)
    assert exported.keys() == whole.keys()
    assert torch.equal(exported["model.embed_tokens.weight"], whole["model.embed_tokens.weight"])
