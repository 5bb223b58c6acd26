"""megatron-core's configuration of a model shape on a parallel layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from megatron.core.transformer.transformer_config import TransformerConfig

from steelyard.cost import ModelShape
from steelyard.errors import LayoutError, ShapeError
from steelyard.parallel import ParallelLayout


def transformer_config(
    shape: ModelShape,
    layout: ParallelLayout,
    dtype: torch.dtype = torch.float32,
    overrides: Mapping[str, Any] | None = None,
) -> TransformerConfig:
    """Megatron's configuration of a shape on a layout, with what variable micro-batches need.

    Raises:
        ShapeError, LayoutError: what megatron-core could not build, or would hang on.
    """
    _refuse_what_cannot_be_built(shape)
    layout.check(shape)
    settings: dict[str, Any] = {
        "num_layers": shape.layers,
        "hidden_size": shape.hidden,
        "ffn_hidden_size": shape.ffn,
        "num_attention_heads": shape.heads,
        "num_query_groups": shape.kv_heads,
        "kv_channels": shape.head_dim,
        "layernorm_epsilon": shape.norm_eps,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": F.silu,
        # One kernel that keeps its input only: the product and its parts would be two more [T, ffn/tp] of every layer.
        "bias_activation_fusion": _on_cuda(),
        "add_bias_linear": False,
        "add_qkv_bias": shape.qkv_bias,
        "qk_layernorm": shape.qk_norm,
        **layout_settings(layout, dtype),
        **_experts(shape, layout),
        **(overrides or {}),
    }
    config = TransformerConfig(**settings)
    refuse_hanging_schedule(config, layout)
    return config


def _on_cuda() -> bool:
    """Whether models are built for CUDA now: under ``running_on("cpu")`` they are not, though a GPU may be there."""
    return torch.cuda.is_available() and torch.device(torch.cuda.current_device()).type == "cuda"


def layout_settings(layout: ParallelLayout, dtype: torch.dtype) -> dict[str, Any]:
    """What any model needs on a layout, whoever builds it: parallel sizes, types, and variable micro-batches."""
    return {
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        "tensor_model_parallel_size": layout.tp,
        "sequence_parallel": layout.sequence_parallel,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp if layout.vpp > 1 else None,
        "microbatch_group_size_per_vp_stage": layout.group,
        "context_parallel_size": layout.cp,
        "cp_comm_type": {"all_gather": "all_gather", "all_to_all": "a2a"}[layout.cp_kind],
        # Stages exchange shapes before every transfer; megatron-core then wants this dispatcher, for dense models too.
        "variable_seq_lengths": True,
        "moe_token_dispatcher_type": "alltoall",
        # The interleaved schedule frees a stage's output while its transfer still reads it: now and then the next stage
        # gets other bytes.
        "deallocate_pipeline_outputs": layout.vpp == 1,
        # With virtual stages, the schedule without overlap swaps or deadlocks the exchange of shapes.
        "overlap_p2p_comm": layout.vpp > 1,
        "batch_p2p_comm": layout.vpp == 1,
    }


def refuse_hanging_schedule(config: TransformerConfig, layout: ParallelLayout) -> None:
    """Raise ``LayoutError`` for settings with which megatron-core's ranks would wait for each other for ever."""
    if layout.vpp > 1 and config.variable_seq_lengths and not config.overlap_p2p_comm:
        raise LayoutError(
            f"vpp={layout.vpp} with variable_seq_lengths=True and overlap_p2p_comm=False hangs or swaps tensors in "
            f"megatron-core: set overlap_p2p_comm=True and batch_p2p_comm=False"
        )


def _refuse_what_cannot_be_built(shape: ModelShape) -> None:
    if shape.kv_lora:
        raise ShapeError(
            f"model {shape.name}: multi-head latent attention (kv_lora={shape.kv_lora}) cannot be built from "
            f"megatron-core's local layers; the builder knows ordinary attention"
        )
    if shape.out_bias:
        raise ShapeError(
            f"model {shape.name}: out_bias=True cannot be built: megatron-core has one switch for the biases of all "
            f"linear layers but those of queries, keys and values"
        )
    if shape.experts and shape.experts_per_token == 1 and shape.norm_topk_prob:
        raise ShapeError(
            f"model {shape.name}: norm_topk_prob=True with experts_per_token=1 gives every token the weight 1 and the "
            f"router no gradient: set norm_topk_prob=False"
        )


def _experts(shape: ModelShape, layout: ParallelLayout) -> dict[str, Any]:
    """Settings of a mixture of experts that routes exactly as the shape says: no auxiliary loss, no dropped token."""
    if not shape.experts:
        return {}
    return {
        "num_moe_experts": shape.experts,
        "moe_ffn_hidden_size": shape.moe_ffn,
        "moe_layer_freq": [int(layer >= shape.dense_layers) for layer in range(shape.layers)],
        "moe_router_topk": shape.experts_per_token,
        # The softmax runs over all experts, or over a token's chosen ones, whose weights then add up to 1.
        "moe_router_pre_softmax": not shape.norm_topk_prob,
        "moe_router_load_balancing_type": "none",
        "moe_shared_expert_intermediate_size": shape.shared_ffn or None,
        "moe_shared_expert_gate": shape.shared_gate,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.expert_tensor_parallel,
    }


def routing_losses(config: TransformerConfig) -> list[str]:
    """Settings by which every token that passes a router trains the model, also one that counts in no loss."""
    coefficients = config.moe_aux_loss_coeff
    balancing = any(coefficients if isinstance(coefficients, list) else [coefficients])
    return [
        f"{name}={getattr(config, name)}"
        for name, active in (
            ("moe_aux_loss_coeff", balancing and config.moe_router_load_balancing_type != "none"),
            ("moe_z_loss_coeff", config.moe_z_loss_coeff),
            ("moe_router_enable_expert_bias", config.moe_router_enable_expert_bias),
        )
        if active
    ]
