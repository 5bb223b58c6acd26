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
    if shape.experts or shape.kv_lora:
        raise ShapeError(f"model {shape.name}: only dense models with ordinary attention can be built so far")
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
        "add_bias_linear": False,
        "add_qkv_bias": shape.qkv_bias,
        "qk_layernorm": shape.qk_norm,
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
        "expert_model_parallel_size": layout.ep,
        # Stages exchange shapes before every transfer; megatron-core then wants this dispatcher, for dense models too.
        "variable_seq_lengths": True,
        "moe_token_dispatcher_type": "alltoall",
        # The interleaved schedule frees a stage's output while its transfer still reads it: now and then the next stage
        # gets other bytes.
        "deallocate_pipeline_outputs": layout.vpp == 1,
        # With virtual stages, the schedule without overlap swaps or deadlocks the exchange of shapes.
        "overlap_p2p_comm": layout.vpp > 1,
        "batch_p2p_comm": layout.vpp == 1,
        **(overrides or {}),
    }
    config = TransformerConfig(**settings)
    if layout.vpp > 1 and config.variable_seq_lengths and not config.overlap_p2p_comm:
        raise LayoutError(
            f"vpp={layout.vpp} with variable_seq_lengths=True and overlap_p2p_comm=False hangs or swaps tensors in "
            f"megatron-core: set overlap_p2p_comm=True and batch_p2p_comm=False"
        )
    return config
