"""megatron-core's ``PackedSeqParams``, with what the host knows kept beside it so that no layer has to read it back."""

from __future__ import annotations

import dataclasses
from typing import cast

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from steelyard.packing.layout import PackedLayout


class HostPackedSeqParams(PackedSeqParams):
    """Parameters of the THD format, and the indices that attention and RoPE derive from them otherwise.

    Attributes:
        layout: the host's own offsets.
        positions: [T/cp] on the device, position of each local slot in its row.
        gathered_index: [T] on the device, slot order out of the ranks' parts laid one after the other (empty without
            context parallelism).
        zigzag_order: [T] on the device, the ranks' parts out of slot order (empty without context parallelism).
        rotary: cosines and sines of the positions, kept by the first layer for the others.
    """

    def __init__(self, layout: PackedLayout, device: torch.device | str) -> None:
        """Everything in one copy to the device."""
        none = np.zeros(0, np.int64)
        real, padded, self.positions, self.gathered_index, self.zigzag_order = to_device(
            [
                layout.cu_seqlens,
                layout.cu_seqlens_padded,
                layout.local_positions,
                layout.gathered_index if layout.cp > 1 else none,
                layout.zigzag_order if layout.cp > 1 else none,
            ],
            device,
        )
        offsets, padded_offsets = real.to(torch.int32), padded.to(torch.int32)
        super().__init__(
            qkv_format="thd",
            cu_seqlens_q=offsets,
            cu_seqlens_kv=offsets,
            cu_seqlens_q_padded=padded_offsets,
            cu_seqlens_kv_padded=padded_offsets,
            max_seqlen_q=layout.max_seqlen,
            max_seqlen_kv=layout.max_seqlen,
        )
        self.layout = layout
        self.rotary: tuple[torch.Tensor, torch.Tensor] | None = None


def to_device(arrays: list[np.ndarray], device: torch.device | str) -> tuple[torch.Tensor, ...]:
    """Several int64 arrays in one copy, from pinned memory without waiting where the device is CUDA."""
    whole = torch.from_numpy(np.concatenate(arrays).astype(np.int64, copy=False))
    if torch.device(device).type == "cuda":
        whole = whole.pin_memory()
    parts = whole.to(device, non_blocking=True).split([array.size for array in arrays])
    return cast(tuple[torch.Tensor, ...], parts)


def layout_of(params: PackedSeqParams, cp: int, cp_rank: int) -> PackedLayout:
    """The host's offsets behind any ``PackedSeqParams``; those that others made are read back from the device."""
    if isinstance(params, HostPackedSeqParams):
        return params.layout
    offsets = params.cu_seqlens_q_padded if params.cu_seqlens_q_padded is not None else params.cu_seqlens_q
    lengths = np.diff(np.asarray(offsets.tolist(), dtype=np.int64))
    # Their padding counts as tokens: which slots hold none is not known.
    return dataclasses.replace(PackedLayout.of(lengths, cp=cp, cp_rank=cp_rank), padded_lengths=lengths)
