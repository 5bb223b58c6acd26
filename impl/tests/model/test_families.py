"""Which families the plain builder builds, what it refuses by name, and how it configures a mixture of experts."""

import hf_checkpoints
import pytest
import torch

from steelyard.cost import ModelShape
from steelyard.errors import LayoutError, ShapeError
from steelyard.model import host
from steelyard.model.config import routing_losses, transformer_config
from steelyard.model.layers import LocalRouter, has_experts, layer_spec
from steelyard.parallel import ParallelLayout


def shape_of(family, **changes):
    return ModelShape.from_hf(hf_checkpoints.FAMILIES[family] | {"model_type": family} | changes, name="mine")


def test_every_family_trains_in_half_precision(ranks, written):
    folders = [str(written(family)) for family in hf_checkpoints.FAMILIES]
    ranks("experts_on_ranks:trains_in_half_precision", 1, *folders)


@pytest.mark.parametrize("preset", ["moonlight-16b-a3b", "deepseek-v3"])
def test_latent_attention_is_refused_by_name(preset):
    with pytest.raises(ShapeError, match=f"model {preset}: multi-head latent attention .kv_lora=512"):
        transformer_config(ModelShape.preset(preset), ParallelLayout())


def test_a_bias_that_megatron_cannot_have_alone_is_refused():
    with pytest.raises(ShapeError, match="model mine: out_bias=True cannot be built"):
        transformer_config(shape_of("llama", attention_bias=True), ParallelLayout())


def test_one_expert_per_token_with_weights_that_add_up_to_one_is_refused():
    with pytest.raises(ShapeError, match="norm_topk_prob=True with experts_per_token=1.*set norm_topk_prob=False"):
        transformer_config(shape_of("qwen3_moe", num_experts_per_tok=1), ParallelLayout())
    transformer_config(shape_of("qwen3_moe", num_experts_per_tok=1, norm_topk_prob=False), ParallelLayout())


def test_experts_on_tensor_parallel_ranks_need_sequence_parallelism():
    with pytest.raises(LayoutError, match="sp=False with tp=2.*use sp=True"):
        transformer_config(shape_of("qwen3_moe"), ParallelLayout(tp=2, sp=False))


def test_routing_trains_nothing_unless_it_is_asked_to():
    shape = shape_of("qwen2_moe")
    assert routing_losses(transformer_config(shape, ParallelLayout())) == []
    overrides = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.01, "moe_z_loss_coeff": 0.1}
    config = transformer_config(shape, ParallelLayout(), overrides=overrides)
    assert routing_losses(config) == ["moe_aux_loss_coeff=0.01", "moe_z_loss_coeff=0.1"]


def test_an_override_places_the_layers_with_experts():
    config = transformer_config(shape_of("qwen2_moe"), ParallelLayout(), overrides={"moe_layer_freq": 2})
    assert [has_experts(config, layer) for layer in range(4)] == [True, False, True, False]


def test_the_router_computes_in_the_dtype_that_is_asked_for():
    shape = shape_of("qwen2_moe")
    with host.running_on("cpu"):
        spec = layer_spec(transformer_config(shape, ParallelLayout()), experts=True)
        assert spec.submodules.mlp.submodules.router is LocalRouter
        half = torch.bfloat16
        for asked, dtype in ((None, half), ("fp32", torch.float32), ("fp64", torch.float64)):
            config = transformer_config(shape, ParallelLayout(), half, {"moe_router_dtype": asked})
            router = LocalRouter.__new__(LocalRouter)
            torch.nn.Module.__init__(router)
            router.config, router.bias = config, None
            router.weight = torch.nn.Parameter(torch.full((4, 32), 0.01, dtype=half))
            assert router.gating(torch.ones(3, 1, 32, dtype=half)).dtype == dtype
