"""Self-attention for packed (THD) and padded (BSHD) input without TransformerEngine, context parallelism included.

Tensor names carry their dimensions: T slots of a packed micro-batch over all context-parallel ranks, L those of this
rank, S positions, B rows, N query heads, K key-value heads, D head dimension.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - torch's own habit
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.mappings import all_to_all
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn.attention.bias import causal_lower_right

from steelyard.errors import InputError
from steelyard.packing.layout import PackedLayout
from steelyard.packing.params import HostPackedSeqParams, layout_of, to_device

FLASH_DTYPES = (torch.float16, torch.bfloat16)


class PackedSelfAttention(SelfAttention):
    """megatron-core's self-attention with RoPE from positions that the host made.

    megatron-core's own unfused RoPE reads ``cu_seqlens`` back at every call, twice a layer. Here the rotation of packed
    queries and keys follows ``HostPackedSeqParams.positions``; its cosines and sines are computed by the first layer
    and kept for the others. Padded input takes megatron-core's way.
    """

    _rotary: tuple[torch.Tensor, torch.Tensor] | None = None

    def forward(self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None, **inputs: Any) -> Any:
        params, frequencies = inputs.get("packed_seq_params"), inputs.get("rotary_pos_emb")
        if isinstance(params, HostPackedSeqParams) and frequencies is not None:
            if params.rotary is None:
                params.rotary = _cos_sin(frequencies, params, self.config.params_dtype)
            self._rotary = params.rotary
            inputs["rotary_pos_emb"] = None
        try:
            return super().forward(hidden_states, attention_mask, **inputs)
        finally:
            self._rotary = None

    def get_query_key_value_tensors(self, *inputs: Any, **settings: Any) -> Any:
        query, key, *rest = super().get_query_key_value_tensors(*inputs, **settings)
        if self._rotary is not None:
            query, key = (_rotate(x, *self._rotary) for x in (query, key))
        return query, key, *rest


def _cos_sin(
    frequencies: torch.Tensor, params: HostPackedSeqParams, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """cosine and sine [L, 1, 1, D] of each local slot, from megatron-core's [positions, 1, 1, D].

    They get the type of the queries here, once: cast in every layer, each cast would be kept for the backward pass.
    """
    table = frequencies[0] if isinstance(frequencies, tuple) else frequencies
    angles = table.index_select(0, params.positions)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def _rotate(x_LBND: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of the first dimensions of each head, in halves (not interleaved)."""
    turned, rest = x_LBND.split((cos.size(-1), x_LBND.size(-1) - cos.size(-1)), dim=-1)
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat((-second, first), dim=-1) * sin
    return torch.cat((turned, rest), dim=-1)


class PackedAttention(MegatronModule):
    """Causal attention that megatron-core's ``SelfAttention`` takes as its ``core_attention``.

    Packed input runs one variable-length flash kernel where CUDA offers it (half precision), and exact attention
    sequence by sequence elsewhere: on a CPU that is several times faster than a padded batch or a document mask.

    Under context parallelism a rank holds two chunks of every row (see ``PackedLayout``). ``cp_comm_type`` chooses how
    it sees the rest: ``all_gather`` gathers keys and values, and the two chunks attend to what comes before them;
    ``a2a`` (Ulysses) exchanges heads for tokens, so that each rank attends over whole rows with its share of the heads.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__(config=config)
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        if dropout:
            raise InputError(
                f"attention_dropout={dropout}: reinforcement learning needs it at 0, or log-probabilities differ"
            )
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        self.cp = config.context_parallel_size
        self.exchanges_heads = cp_comm_type == "a2a"
        if self.cp > 1:
            self.cp_group = pg_collection.cp if pg_collection else parallel_state.get_context_parallel_group()

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
        """Packed: query [L, N, D], key and value [L, K, D] -> [L, N, D]. Padded: [S, B, N, D] -> [S, B, N*D]."""
        if packed_seq_params is None:
            if self.cp > 1:
                raise InputError(f"cp={self.cp} needs packed input: padded rows are not split over its ranks")
            return self._padded(query, key, value)
        if self.cp == 1:
            return self._packed(query, key, value, packed_seq_params)
        layout = layout_of(packed_seq_params, self.cp, dist.get_rank(self.cp_group))
        if self.exchanges_heads:
            return self._over_heads(query, key, value, layout, packed_seq_params)
        return self._over_keys(query, key, value, layout, packed_seq_params)

    def _padded(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        q_BNSD, k_BKSD, v_BKSD = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        return self._exact(q_BNSD, k_BKSD, v_BKSD).permute(2, 0, 1, 3).flatten(2)

    def _packed(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: PackedSeqParams
    ) -> torch.Tensor:
        """Whole rows on this rank: queries and keys share their offsets."""
        if _has_flash(query):
            padded = params.cu_seqlens_q_padded
            offsets = params.cu_seqlens_q if padded is None else padded
            return self._flash(query, key, value, offsets, offsets, params.max_seqlen_q, params.max_seqlen_q)
        ends = layout_of(params, 1, 0).cu_seqlens_padded
        return self._by_sequence(query, key, value, ends, ends)

    def _over_heads(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layout: PackedLayout,
        params: PackedSeqParams,
    ) -> torch.Tensor:
        """Ulysses: all tokens of a share of the heads, attention over whole rows, and back."""
        if key.size(1) % self.cp:
            # Fewer key-value heads than ranks: each query head brings its own.
            repeats = query.size(1) // key.size(1)
            key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
        gathered, zigzag = _orders(layout, params, query.device)
        q_TND, k_TKD, v_TKD = (self._heads_to_tokens(x).index_select(0, gathered) for x in (query, key, value))
        out_TND = self._packed(q_TND, k_TKD, v_TKD, params).index_select(0, zigzag)
        return self._tokens_to_heads(out_TND)

    def _heads_to_tokens(self, x_LND: torch.Tensor) -> torch.Tensor:
        """[L, N, D] -> [T, N/cp, D], the ranks' parts one after the other."""
        by_rank = x_LND.unflatten(1, (self.cp, -1)).movedim(1, 0).contiguous()
        return all_to_all(self.cp_group, by_rank).flatten(0, 1)

    def _tokens_to_heads(self, x_TND: torch.Tensor) -> torch.Tensor:
        """[T, N/cp, D] -> [L, N, D]."""
        by_rank = all_to_all(self.cp_group, x_TND.unflatten(0, (self.cp, -1)).contiguous())
        return by_rank.movedim(0, 1).flatten(1, 2)

    def _over_keys(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layout: PackedLayout,
        params: PackedSeqParams,
    ) -> torch.Tensor:
        """This rank's two chunks of every row against the keys of all ranks that come before their ends."""
        both = torch.cat((key, value), dim=1)
        whole = gather_from_sequence_parallel_region(both, tensor_parallel_output_grad=True, group=self.cp_group)
        gathered, _ = _orders(layout, params, query.device)
        keys, q_ends, k_ends = _prefixes(layout)
        (index,) = to_device([keys], query.device)
        k_KD, v_KD = whole.index_select(0, gathered.index_select(0, index)).chunk(2, dim=1)
        if not _has_flash(query):
            return self._by_sequence(query, k_KD, v_KD, q_ends, k_ends)
        q_offsets, k_offsets = (ends.to(torch.int32) for ends in to_device([q_ends, k_ends], query.device))
        longest = int(np.diff(q_ends).max()), int(np.diff(k_ends).max())
        return self._flash(query, k_KD, v_KD, q_offsets, k_offsets, *longest)

    def _by_sequence(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, q_ends: np.ndarray, k_ends: np.ndarray
    ) -> torch.Tensor:
        """Exact attention of each segment of queries to its segment of keys, whose ends coincide."""
        out = [query.new_zeros((0, *query.shape[1:]))]
        for (q_start, q_end), (k_start, k_end) in zip(
            pairwise(q_ends.tolist()), pairwise(k_ends.tolist()), strict=True
        ):
            if q_start == q_end:
                continue
            q, k, v = (
                x[start:end].transpose(0, 1).unsqueeze(0)
                for x, start, end in ((query, q_start, q_end), (key, k_start, k_end), (value, k_start, k_end))
            )
            out.append(self._exact(q, k, v).squeeze(0).transpose(0, 1))
        return torch.cat(out)

    def _exact(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """[B, N, S, D] against [B, K, S' >= S, D]: the last query sees all keys, the one before it all but one."""
        grouped, same = query.size(1) != key.size(1), query.size(2) == key.size(2)
        mask = None if same else _lower_right(query, key)
        if grouped and not same:
            # torch's biases do not take grouped heads.
            key, value = (x.repeat_interleave(query.size(1) // key.size(1), dim=1) for x in (key, value))
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=same, scale=self.scale, enable_gqa=grouped and same
        )

    def _flash(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        q_offsets: torch.Tensor,
        k_offsets: torch.Tensor,
        longest_query: int,
        longest_key: int,
    ) -> torch.Tensor:
        from torch.nn.attention.varlen import varlen_attn

        # window_size (-1, 0): everything to the left of a query's own place, counted from the segment's end.
        out = varlen_attn(
            query,
            key,
            value,
            q_offsets,
            k_offsets,
            longest_query,
            longest_key,
            scale=self.scale,
            window_size=(-1, 0),
            enable_gqa=query.size(1) != key.size(1),
        )
        return cast(torch.Tensor, out)


def _lower_right(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """The mask [S, S'] whose last query sees all keys."""
    if query.is_cuda:
        # Kernels there know this mask by its kind.
        return cast(torch.Tensor, causal_lower_right(query.size(2), key.size(2)))
    # Elsewhere torch writes it out, but cannot while operators are watched (torch.utils._python_dispatch).
    whole = torch.ones(query.size(2), key.size(2), dtype=torch.bool, device=query.device)
    return whole.tril(key.size(2) - query.size(2))


def _has_flash(query: torch.Tensor) -> bool:
    return query.is_cuda and query.dtype in FLASH_DTYPES


def _orders(layout: PackedLayout, params: PackedSeqParams, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(slot order out of gathered order, and the way back) on the device."""
    if isinstance(params, HostPackedSeqParams):
        return params.gathered_index, params.zigzag_order
    gathered, zigzag = to_device([layout.gathered_index, layout.zigzag_order], device)
    return gathered, zigzag


def _prefixes(layout: PackedLayout) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For this rank's chunks in their order: slots of the keys they may see, offsets of queries, offsets of keys.

    Chunk j of a row sees the row's first j + 1 chunks. The two chunks of a rank are r and 2·cp-1-r, so together their
    prefixes hold 2·cp + 1 chunks: hardly more than the row itself.
    """
    chunk = layout.padded_lengths // (2 * layout.cp)
    seen = np.stack(((layout.cp_rank + 1) * chunk, (2 * layout.cp - layout.cp_rank) * chunk), axis=1).ravel()
    starts = np.repeat(layout.cu_seqlens_padded[:-1], 2)
    k_ends = np.concatenate(([0], np.cumsum(seen)))
    q_ends = np.concatenate(([0], np.cumsum(np.repeat(chunk, 2))))
    keys = np.arange(k_ends[-1]) - np.repeat(k_ends[:-1] - starts, seen)
    return keys, q_ends, k_ends
