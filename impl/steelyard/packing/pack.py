"""Moves rows into and out of a packed sequence with one gather or scatter, however many rows there are.

The indices come from a ``PackedLayout``, on the host; nothing on the device is read back.
"""

from __future__ import annotations

import numpy as np
import torch

from steelyard.errors import BatchError
from steelyard.packing.layout import PackedLayout


def pack(rows: torch.Tensor, layout: PackedLayout) -> torch.Tensor:
    """[B, S, ...] -> [T, ...]: the tokens of each row in its slots, zero in the padding. Differentiable.

    Raises:
        BatchError: the rows are not those of the layout.
    """
    source, slots = _indices(layout, rows.size(0), rows.size(1), rows.device)
    packed = rows.new_zeros((layout.total, *rows.shape[2:]))
    return packed.index_copy(0, slots, rows.flatten(0, 1).index_select(0, source))


def unpack(packed: torch.Tensor, layout: PackedLayout, width: int) -> torch.Tensor:
    """[T, ...] -> [B, width, ...]: every token back in its row and column, zero elsewhere. Differentiable.

    Raises:
        BatchError: a row does not fit into ``width`` columns, or the packed tensor is not the layout's.
    """
    if packed.size(0) != layout.total:
        raise BatchError(
            f"the packed tensor has {packed.size(0)} slots, its layout {layout.total}: they belong together"
        )
    count = layout.lengths.size
    target, slots = _indices(layout, count, width, packed.device)
    rows = packed.new_zeros((count * width, *packed.shape[1:]))
    return rows.index_copy(0, target, packed.index_select(0, slots)).unflatten(0, (count, width))


def next_token_labels(ids: torch.Tensor, layout: PackedLayout) -> torch.Tensor:
    """[B, S] -> [T]: in each slot the token that follows in the same row; 0 at row ends and in the padding."""
    source, slots = _indices(layout, ids.size(0), ids.size(1), ids.device)
    followed = torch.from_numpy(np.flatnonzero(layout.token_positions + 1 < layout.lengths[layout.token_rows]))
    followed = followed.to(ids.device, non_blocking=True)
    labels = ids.new_zeros(layout.total)
    return labels.index_copy(0, slots.index_select(0, followed), ids.flatten().index_select(0, source[followed] + 1))


def _indices(layout: PackedLayout, count: int, width: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """([N] index into the flattened [B, width] batch, [N] slot) of every real token, in one copy to the device."""
    if count != layout.lengths.size:
        raise BatchError(f"the batch has {count} rows, its layout {layout.lengths.size}: they belong together")
    ends = layout.starts + layout.lengths
    if (ends > width).any():
        row = int(np.argmax(ends > width))
        raise BatchError(f"row {row} ends at column {int(ends[row])}, beyond the batch's width of {width}")
    both = np.stack((layout.token_rows * width + layout.token_columns, layout.token_slots))
    flat, slots = torch.from_numpy(both).to(device, non_blocking=True)
    return flat, slots
