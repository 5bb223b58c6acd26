"""mbridge as a builder: Hugging Face weights, the plain builder's loss and gradients, and what it gets wrong."""

import importlib.util
import sys

import hf_checkpoints
import pytest
import torch

from steelyard.cost import ModelShape
from steelyard.errors import InputError, LayoutError
from steelyard.model import host
from steelyard.model.bridges import mbridge, megatron_bridge
from steelyard.model.build import build_model
from steelyard.parallel import ParallelLayout

SHAPE = ModelShape(layers=4, hidden=32, ffn=48, heads=4, kv_heads=2, head_dim=8, vocab=96)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_a_checkpoint_gives_the_logits_of_transformers_and_is_saved_bit_for_bit(ranks, written, family):
    ranks("bridges_on_ranks:goes_there_and_back", 1, str(written(family)), "")


@pytest.fixture(scope="module")
def experts_everywhere(tmp_path_factory):
    folder = tmp_path_factory.mktemp("experts") / "qwen2_moe"
    return str(hf_checkpoints.write("qwen2_moe", folder, mlp_only_layers=[]))


def test_so_do_mixtures_of_experts_with_a_gated_shared_expert(ranks, experts_everywhere):
    ranks("bridges_on_ranks:goes_there_and_back", 1, experts_everywhere, "")


def test_weights_arrive_on_two_ranks(ranks, written):
    ranks("bridges_on_ranks:goes_there_and_back", 2, str(written("qwen2")), "tp=2", "pp=2", "pp=2,vpp=2")


def test_experts_arrive_on_two_ranks(ranks, experts_everywhere):
    ranks("bridges_on_ranks:goes_there_and_back", 2, experts_everywhere, "tp=2", "pp=2")


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "qwen2_moe"])
def test_a_step_has_the_loss_and_gradients_of_the_plain_builder(ranks, family):
    ranks("bridges_on_ranks:trains_as_the_plain_builder", 1, family, "")


def test_so_it_has_on_two_ranks(ranks):
    ranks("bridges_on_ranks:trains_as_the_plain_builder", 2, "qwen2", "tp=2", "pp=2,vpp=2", "dp=2", "cp=2")


def test_so_it_has_with_experts_on_two_ranks(ranks):
    ranks("bridges_on_ranks:trains_as_the_plain_builder", 2, "qwen2_moe", "dp=2,ep=2", "tp=2")


def test_a_tied_model_leaves_later_ones_alone(ranks, written):
    ranks("bridges_on_ranks:a_tied_model_leaves_later_ones_alone", 1, str(written("qwen2")), str(written("qwen3")))


def test_a_value_head_on_a_tied_model_is_no_embedding(ranks, written):
    ranks("bridges_on_ranks:gives_a_tied_model_a_value_head", 2, str(written("qwen2")))


def build(spec, builder, **layout):
    """Refused before any process group is needed."""
    with host.running_on("cpu"):
        build_model(spec, ParallelLayout(**layout), builder=builder)


def test_a_missing_package_is_named_with_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "mbridge", None)
    with pytest.raises(InputError, match=r"cannot import mbridge .*pip install 'steelyard\[mbridge\]'"):
        build(SHAPE, "mbridge")
    monkeypatch.setitem(sys.modules, "megatron.bridge", None)
    with pytest.raises(InputError, match=r"cannot import megatron.bridge .*pip install megatron-bridge"):
        build(SHAPE, "megatron-bridge")


def test_a_shape_is_no_configuration_for_a_bridge():
    with pytest.raises(InputError, match="needs a configuration of transformers, got ModelShape"):
        build(SHAPE, "mbridge")


def test_models_that_mbridge_does_not_know_or_builds_otherwise_are_refused():
    from transformers import AutoConfig

    with pytest.raises(InputError, match=r"does not know model_type='gpt2'.*it knows"):
        build(AutoConfig.for_model("gpt2"), "mbridge")
    dense_first = AutoConfig.for_model("qwen2_moe", **hf_checkpoints.FAMILIES["qwen2_moe"])
    with pytest.raises(InputError, match=r"mlp_only_layers=\[0\].*use builder='megatron'"):
        build(dense_first, "mbridge")


def test_a_layout_that_does_not_fit_is_refused_before_mbridge_sees_it():
    from transformers import AutoConfig

    with pytest.raises(LayoutError, match="tp=3 does not divide the model's 4 attention heads"):
        build(AutoConfig.for_model("qwen2", **hf_checkpoints.FAMILIES["qwen2"]), "mbridge", tp=3)


def test_weights_of_other_builders_are_not_mbridges():
    with pytest.raises(InputError, match="not built by mbridge"):
        mbridge.load_weights([torch.nn.Linear(1, 1)], "anywhere")


NO_BRIDGE = importlib.util.find_spec("megatron.bridge") is None


@pytest.mark.skipif(NO_BRIDGE, reason="megatron-bridge is not installed (pip install --no-deps megatron-bridge==0.3.1)")
def test_the_provider_of_megatron_bridge_loads_without_transformer_engine_and_leaves_no_half_package():
    provider = megatron_bridge.gpt_provider_class()
    assert provider.__module__ == "megatron.bridge.models.gpt_provider"
    assert callable(provider.provide_distributed_model)
    assert "megatron.bridge" not in sys.modules
