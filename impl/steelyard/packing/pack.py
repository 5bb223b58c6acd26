"""Moves rows into and out of a packed sequence with one gather and one scatter, however many rows there are.

The indices come from a ``PackedLayout``, on the host, in one copy to the device; nothing on the device is read back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeVar, overload

import numpy as np
import torch

from steelyard.errors import BatchError
from steelyard.packing.layout import PackedLayout
from steelyard.packing.params import to_device

if TYPE_CHECKING:
    import torch.distributed as dist

Key = TypeVar("Key")


@overload
def pack(rows: torch.Tensor, layout: PackedLayout) -> torch.Tensor: ...
@overload
def pack(rows: Mapping[Key, torch.Tensor], layout: PackedLayout) -> dict[Key, torch.Tensor]: ...
def pack(
    rows: torch.Tensor | Mapping[Key, torch.Tensor], layout: PackedLayout
) -> torch.Tensor | dict[Key, torch.Tensor]:
    """[B, S, ...] -> [T/cp, ...]: this rank's tokens in their slots, zero in the padding. Differentiable.

    Args:
        rows: a padded batch, a nested (jagged) tensor of B rows, or a mapping of such tensors, which share one set of
            indices for each width.
        layout: where the tokens are and go.

    Raises:
        BatchError: the rows are not those of the layout.
    """
    if isinstance(rows, torch.Tensor):
        return pack({"rows": rows}, layout)["rows"]
    indices: dict[tuple[int, torch.device], tuple[torch.Tensor, torch.Tensor]] = {}
    packed = {}
    for name, tensor in rows.items():
        values, width = _flat(tensor, layout)
        key = (width, values.device)
        if key not in indices:
            indices[key] = _indices(layout, width, values.device)
        source, slots = indices[key]
        empty = values.new_zeros((layout.local_total, *values.shape[1:]))
        packed[name] = empty.index_copy(0, slots, values.index_select(0, source))
    return packed


def unpack(
    packed: torch.Tensor, layout: PackedLayout, width: int, cp_group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """[T/cp, ...] -> [B, width, ...]: every token back in its row and column, zero elsewhere. Differentiable.

    Args:
        packed: this rank's slots.
        layout: the layout they were packed with.
        width: columns of the result.
        cp_group: the context-parallel group, whose parts are gathered; gradients go to this rank's part. Without it,
            tokens of other ranks are zero.

    Raises:
        BatchError: a row does not fit into ``width`` columns, or the packed tensor is not the layout's.
    """
    if packed.size(0) != layout.local_total:
        raise BatchError(
            f"the packed tensor has {packed.size(0)} slots, its layout {layout.local_total}: they belong together"
        )
    _check_width(layout, width)
    flat = layout.token_rows * width + layout.token_columns
    if cp_group is not None and layout.cp > 1:
        from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

        # Backward, every rank has the whole gradient and takes its own part.
        packed = gather_from_sequence_parallel_region(packed, tensor_parallel_output_grad=False, group=cp_group)
        slots = layout.gathered_index[layout.token_slots]
    else:
        slots = layout.to_local(layout.token_slots)
        flat, slots = flat[slots >= 0], slots[slots >= 0]
    target, source = to_device([flat, slots], packed.device)
    rows = packed.new_zeros((layout.lengths.size * width, *packed.shape[1:]))
    return rows.index_copy(0, target, packed.index_select(0, source)).unflatten(0, (layout.lengths.size, width))


def next_token_labels(ids: torch.Tensor, layout: PackedLayout) -> torch.Tensor:
    """[B, S] or nested -> [T/cp]: in each slot the token that follows in the same row.

    Zero at row ends and in the padding. The token behind the end of a context-parallel chunk is on another rank; its
    label is right all the same.
    """
    values, width = _flat(ids, layout)
    # Token n is followed by token n + 1 unless it is the last of its row.
    followed = np.flatnonzero(layout.token_positions + 1 < layout.lengths[layout.token_rows])
    slots = layout.to_local(layout.token_slots[followed])
    source = _flat_index(layout, width)[followed[slots >= 0] + 1]
    index, target = to_device([source, slots[slots >= 0]], values.device)
    return values.new_zeros(layout.local_total).index_copy(0, target, values.index_select(0, index))


def compact(rows: torch.Tensor, layout: PackedLayout, width: int) -> torch.Tensor:
    """[B, S, ...] -> [B, width, ...]: each row's tokens at its left edge, zero behind them (BSHD). Differentiable.

    For models that cannot take packed input; ``expand`` is the way back.

    Raises:
        BatchError: a row has more than ``width`` tokens, or the rows are not those of the layout.
    """
    values, before = _flat(rows, layout)
    _check_compact(layout, width)
    source, target = to_device(
        [_flat_index(layout, before), layout.token_rows * width + layout.token_positions], values.device
    )
    return _moved(values, source, target, layout.lengths.size, width)


def expand(compacted: torch.Tensor, layout: PackedLayout, width: int) -> torch.Tensor:
    """[B, W, ...] -> [B, width, ...]: the tokens of compacted rows back in their columns. Differentiable."""
    _check_compact(layout, compacted.size(1))
    _check_width(layout, width)
    source, target = to_device(
        [
            layout.token_rows * compacted.size(1) + layout.token_positions,
            layout.token_rows * width + layout.token_columns,
        ],
        compacted.device,
    )
    return _moved(compacted.flatten(0, 1), source, target, layout.lengths.size, width)


def _moved(values: torch.Tensor, source: torch.Tensor, target: torch.Tensor, count: int, width: int) -> torch.Tensor:
    rows = values.new_zeros((count * width, *values.shape[1:]))
    return rows.index_copy(0, target, values.index_select(0, source)).unflatten(0, (count, width))


def _flat(rows: torch.Tensor, layout: PackedLayout) -> tuple[torch.Tensor, int]:
    """([B·S, ...], S) of a padded batch, or ([N, ...], 0) of a nested one."""
    if rows.size(0) != layout.lengths.size:
        raise BatchError(f"the batch has {rows.size(0)} rows, its layout {layout.lengths.size}: they belong together")
    if rows.is_nested:
        values = rows.values()
        if values.size(0) != layout.token_rows.size:
            raise BatchError(f"the nested rows hold {values.size(0)} tokens, the layout {layout.token_rows.size}")
        return values, 0
    _check_width(layout, rows.size(1))
    return rows.flatten(0, 1), rows.size(1)


def _flat_index(layout: PackedLayout, width: int) -> np.ndarray:
    """[N] where each real token is in what ``_flat`` made; width 0 stands for nested rows."""
    return layout.token_rows * width + layout.token_columns if width else np.arange(layout.token_rows.size)


def _indices(layout: PackedLayout, width: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(index into the flat batch, local slot) of every real token of this rank."""
    slots = layout.to_local(layout.token_slots)
    source, local = to_device([_flat_index(layout, width)[slots >= 0], slots[slots >= 0]], device)
    return source, local


def _check_width(layout: PackedLayout, width: int) -> None:
    if layout.token_columns.size and int(layout.token_columns.max()) >= width:
        token = int(layout.token_columns.argmax())
        raise BatchError(
            f"row {int(layout.token_rows[token])} has a token in column {int(layout.token_columns[token])}, beyond the "
            f"width of {width}"
        )


def _check_compact(layout: PackedLayout, width: int) -> None:
    if (layout.lengths > width).any():
        row = int(np.argmax(layout.lengths > width))
        raise BatchError(f"row {row} has {int(layout.lengths[row])} tokens, which do not fit into a width of {width}")
