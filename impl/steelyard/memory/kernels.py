"""CUDA kernels as a prediction sees them: operators that allocate and keep what the kernel does, and compute nothing.

Their values are never read, so on fake tensors they stand for the kernels exactly where memory is concerned: what is
allocated, what is kept for the backward pass, what the backward pass needs of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch

from steelyard.model.attention import FLASH_DTYPES

FLASH_TILE = 128


@dataclass(frozen=True)
class Kernels:
    """Which kernels the predicted step runs.

    Attributes:
        attention: ``flash``: one kernel that keeps queries, keys, values, output and log-sum-exp (half precision only,
            as on CUDA). ``exact``: attention sequence by sequence, as on a CPU.
        norm: ``fused`` keeps input and reciprocal deviation; ``plain`` is torch's decomposition, which keeps float32
            copies.
        rope: ``fused`` allocates the rotated tensor only; ``plain`` is a handful of operations. Both keep cosines and
            sines only.
        swiglu: ``fused`` keeps its input only (``bias_activation_fusion`` of megatron-core); ``plain`` also the
            activated half and a copy of the other one.
    """

    attention: Literal["flash", "exact"] = "flash"
    norm: Literal["fused", "plain"] = "fused"
    rope: Literal["fused", "plain"] = "plain"
    swiglu: Literal["fused", "plain"] = "fused"


KERNELS: dict[str, Kernels] = {
    # What build_model's models run on CUDA: torch's own kernels where it has them, and megatron-core's SwiGLU.
    "cuda": Kernels(),
    # Megatron-LM with TransformerEngine.
    "fused": Kernels(rope="fused"),
    # What the same models run on a CPU.
    "cpu": Kernels("exact", "plain", "plain", "plain"),
}


class _Flash(torch.autograd.Function):
    """FlashAttention 2 as PyTorch builds it (``mha_varlen_fwd`` and ``mha_varlen_bwd``), [T, N, D] x [T', K, D]."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rows: int) -> torch.Tensor:
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        log_sum_exp = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, log_sum_exp)
        ctx.rows = rows
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, _, log_sum_exp = ctx.saved_tensors
        heads, dim = query.shape[-2:]
        # Queries' gradients are added up in float32, over tiles that overhang each row by up to one tile.
        slots = math.prod(query.shape[:-2]) + FLASH_TILE * ctx.rows
        tile = 32 if dim <= 128 else 64
        _sums = query.new_empty((slots, heads, -(-dim // tile) * tile), dtype=torch.float32)
        _products = log_sum_exp.new_empty((heads, slots))
        if key.size(-2) != heads:
            # Each query head has its own gradient of the shared key and value before they are summed.
            _per_head = [x.new_empty((*x.shape[:-2], heads, dim)) for x in (key, value)]
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None


def flash(
    self: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    q_offsets: torch.Tensor,
    k_offsets: torch.Tensor,
    longest_query: int,
    longest_key: int,
) -> torch.Tensor:
    """For ``PackedAttention._flash``."""
    return cast(torch.Tensor, _Flash.apply(query, key, value, q_offsets.numel() - 1))


def flash_padded(self: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """For ``PackedAttention._padded``: torch's attention takes the same kernel, as [B, S, N, D]."""
    out_BSND = _Flash.apply(*(x.transpose(0, 1) for x in (query, key, value)), query.size(1))
    return cast(torch.Tensor, out_BSND.transpose(0, 1).flatten(2))


def has_flash(query: torch.Tensor) -> bool:
    """For ``attention._has_flash``: CUDA's answer."""
    return query.dtype in FLASH_DTYPES


class _RMSNorm(torch.autograd.Function):
    """``aten._fused_rms_norm`` on CUDA."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight, x.new_empty((*x.shape[:-1], 1), dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


def rms_norm(
    input: torch.Tensor, normalized_shape: list[int], weight: torch.Tensor | None = None, eps: float | None = None
) -> torch.Tensor:
    """For ``torch.nn.functional.rms_norm``."""
    return cast(torch.Tensor, _RMSNorm.apply(input, weight))


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return torch.empty_like(gradients[0]), None, None


def rotate(x_LBND: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """For ``attention._rotate``."""
    return cast(torch.Tensor, _Rotate.apply(x_LBND, cos, sin))


# megatron-core compiles these four into one kernel each (fusions/fused_bias_swiglu.py).


def swiglu(y: torch.Tensor) -> torch.Tensor:
    return y.new_empty((*y.shape[:-1], y.size(-1) // 2))


def weighted_swiglu(y: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return swiglu(y)


def swiglu_back(g: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(y)


def weighted_swiglu_back(g: torch.Tensor, y: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(y), torch.empty_like(weights)
