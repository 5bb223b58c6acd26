"""Core attention for packed (THD) and padded (BSHD) input without TransformerEngine.

Tensor names carry their dimensions: T tokens of a packed micro-batch, S positions, B rows, N query heads, K key-value
heads, D head dimension.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own habit
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from steelyard.errors import InputError, LayoutError

FLASH_DTYPES = (torch.float16, torch.bfloat16)


class PackedAttention(MegatronModule):
    """Causal attention that megatron-core's ``SelfAttention`` takes as its ``core_attention``.

    Packed input runs one variable-length flash kernel where CUDA offers it (half precision), and exact attention
    sequence by sequence elsewhere: on a CPU that is several times faster than a padded batch or a document mask.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **unused: object,
    ) -> None:
        super().__init__(config=config)
        if config.context_parallel_size > 1:
            raise LayoutError(
                f"cp={config.context_parallel_size}: this attention sees only this rank's tokens; use cp=1"
            )
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        if dropout:
            raise InputError(
                f"attention_dropout={dropout}: reinforcement learning needs it at 0, or log-probabilities differ"
            )
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        """Packed: query [T, N, D], key and value [T, K, D] -> [T, N, D]. Padded: [S, B, N, D] -> [S, B, N*D]."""
        if packed_seq_params is None:
            return self._padded(query, key, value)
        cu_seqlens = packed_seq_params.cu_seqlens_q_padded
        if cu_seqlens is None:
            cu_seqlens = packed_seq_params.cu_seqlens_q
        if query.is_cuda and query.dtype in FLASH_DTYPES:
            return self._flash(query, key, value, cu_seqlens, packed_seq_params.max_seqlen_q)
        return self._by_sequence(query, key, value, cu_seqlens.tolist())

    def _padded(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        q_BNSD, k_BKSD, v_BKSD = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        out_BNSD = self._exact(q_BNSD, k_BKSD, v_BKSD)
        return out_BNSD.permute(2, 0, 1, 3).flatten(2)

    def _by_sequence(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seqlens: list[int]
    ) -> torch.Tensor:
        out_TND = []
        for start, end in pairwise(cu_seqlens):
            if start == end:
                continue
            q, k, v = (x[start:end].transpose(0, 1).unsqueeze(0) for x in (query, key, value))
            out_TND.append(self._exact(q, k, v).squeeze(0).transpose(0, 1))
        return torch.cat(out_TND)

    def _exact(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        grouped = query.size(1) != key.size(1)
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=self.scale, enable_gqa=grouped)

    def _flash(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seqlens: torch.Tensor, longest: int
    ) -> torch.Tensor:
        from torch.nn.attention.varlen import varlen_attn

        # window_size (-1, 0): everything to the left, nothing to the right, which is causal attention.
        out = varlen_attn(
            query,
            key,
            value,
            cu_seqlens,
            cu_seqlens,
            longest,
            longest,
            scale=self.scale,
            window_size=(-1, 0),
            enable_gqa=query.size(1) != key.size(1),
        )
        return cast(torch.Tensor, out)
