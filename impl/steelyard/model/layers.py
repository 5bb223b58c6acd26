"""The layers that models are built from where TransformerEngine is not needed: norm, value head and layer spec.

megatron-core's local layers with ``PackedAttention`` as core attention and ``RMSNorm`` below, which knows about
sequence parallelism (megatron-core's local norm refuses it).
"""

from __future__ import annotations

import importlib.util

import torch
import torch.nn.functional as F  # noqa: N812
from megatron.core import tensor_parallel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from steelyard.model.attention import PackedAttention, PackedSelfAttention


class RMSNorm(torch.nn.RMSNorm):
    """RMSNorm whose weight is marked for the gradient sum over tensor-parallel ranks under sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **unused: object) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=torch.cuda.current_device())
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010 - not declared by torch

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        # Under fp32_residual_connection a norm is where activations get the parameters' type again.
        return super().forward(hidden).to(self.weight.dtype)


class ValueHead(torch.nn.Module):
    """One value per token, in place of the output layer: [S, B, hidden] -> [S, B, 1], float32.

    Under sequence parallelism each rank computes the values of its tokens and the ranks gather them.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.sequence_parallel = config.sequence_parallel
        weight = torch.empty(1, config.hidden_size, dtype=config.params_dtype, device=torch.cuda.current_device())
        torch.nn.init.normal_(weight, std=config.init_method_std)
        self.weight = torch.nn.Parameter(weight)
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010

    def forward(
        self, hidden: torch.Tensor, weight: torch.Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[torch.Tensor, None]:
        values = F.linear(hidden, self.weight).float()
        if self.sequence_parallel:
            # Every rank goes on with all the values, so the gradient needs splitting, not summing.
            values = tensor_parallel.gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None


class LocalRouter(TopKRouter):
    """megatron-core's router with a gate that needs no TransformerEngine.

    The gate of megatron-core 0.16 reads a name that is defined only where TransformerEngine can be imported.
    """

    def gating(self, input: torch.Tensor) -> torch.Tensor:
        """Logits of the experts, [S, B, hidden] -> [S, B, experts], in ``config.moe_router_dtype``."""
        dtype = {"fp32": torch.float32, "fp64": torch.float64}.get(self.config.moe_router_dtype, input.dtype)
        bias = None if self.bias is None else self.bias.to(dtype)
        return F.linear(input.to(dtype), self.weight.to(dtype), bias)


def layer_specs(config: TransformerConfig, vp_stage: int | None = None) -> list[ModuleSpec]:
    """The layers of this rank's chunk: dense or mixture of experts, as ``config.moe_layer_freq`` places them."""
    first = get_transformer_layer_offset(config, vp_stage)
    mine = range(first, first + get_num_layers_to_build(config, vp_stage))
    return [layer_spec(config, experts=has_experts(config, layer)) for layer in mine]


def has_experts(config: TransformerConfig, layer: int) -> bool:
    """Whether the feed-forward of a layer (counted from 0 over the whole model) is a mixture of experts."""
    if config.num_moe_experts is None:
        return False
    every = config.moe_layer_freq
    return layer % every == 0 if isinstance(every, int) else bool(every[layer])


def layer_spec(config: TransformerConfig, *, experts: bool = False) -> ModuleSpec:
    """megatron-core's local layer with packed self-attention and the norm of this module.

    Args:
        config: of the model.
        experts: the feed-forward is a mixture of experts, one after the other on a rank (``SequentialMLP``), with the
            shared expert that ``config`` asks for.
    """
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts if experts else None,
        moe_grouped_gemm=config.moe_grouped_gemm,
        normalization="RMSNorm",
        qk_layernorm=config.qk_layernorm,
    )
    layer = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
    layer.self_attention.module = PackedSelfAttention
    attention = layer.self_attention.submodules
    attention.core_attention = core_attention()
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    if experts and not hasattr(moe_utils, "te_general_gemm"):
        layer.mlp.submodules.router = LocalRouter
    return spec


def uses_transformer_engine() -> bool:
    """Whether TransformerEngine's layers run: where it is installed and the model is for CUDA."""
    on_cuda = torch.device(torch.cuda.current_device()).type == "cuda"
    return on_cuda and importlib.util.find_spec("transformer_engine") is not None


def core_attention() -> type:
    """TransformerEngine's attention where it is installed and the model runs on CUDA, else ours."""
    if uses_transformer_engine():
        from megatron.core.extensions.transformer_engine import TEDotProductAttention

        return TEDotProductAttention
    return PackedAttention
