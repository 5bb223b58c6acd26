"""Moves rows into and out of a packed sequence; nothing on the device is read back.

Where the tokens are is known to the host (``PackedLayout``). A batch is moved as stretches of neighbouring tokens, all
of them in one call, however many rows there are; see ``segments.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeVar, overload

import numpy as np
import torch

from steelyard.errors import BatchError
from steelyard.packing.layout import PackedLayout
from steelyard.packing.segments import Segments, flat_columns, from_all_ranks, move, to_local

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
            offsets for each width.
        layout: where the tokens are and go.

    Raises:
        BatchError: the rows are not those of the layout.
    """
    if isinstance(rows, torch.Tensor):
        return pack({"rows": rows}, layout)["rows"]
    segments: dict[int, Segments] = {}
    packed = {}
    for name, tensor in rows.items():
        values, width = _flat(tensor, layout)
        if width not in segments:
            segments[width] = to_local(layout, flat_columns(layout, width), rank=layout.cp_rank)
        packed[name] = move(values, segments[width], layout.local_total)
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
    if cp_group is not None and layout.cp > 1:
        from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

        # Backward, every rank has the whole gradient and takes its own part.
        gathered = gather_from_sequence_parallel_region(packed, tensor_parallel_output_grad=False, group=cp_group)
        return unpack_gathered(gathered, layout, width)
    segments = to_local(layout, flat_columns(layout, width), rank=layout.cp_rank).reversed()
    return _rows(move(packed, segments, layout.lengths.size * width), layout, width)


def unpack_gathered(parts: torch.Tensor, layout: PackedLayout, width: int) -> torch.Tensor:
    """[T, ...] -> [B, width, ...]: ``unpack`` of the parts of all context-parallel ranks, one after the other."""
    _check_width(layout, width)
    segments = from_all_ranks(layout, flat_columns(layout, width))
    return _rows(move(parts, segments, layout.lengths.size * width), layout, width)


def next_token_labels(ids: torch.Tensor, layout: PackedLayout) -> torch.Tensor:
    """[B, S] or nested -> [T/cp]: in each slot the token that follows in the same row.

    Zero at row ends and in the padding. The token behind the end of a context-parallel chunk is on another rank; its
    label is right all the same.
    """
    values, width = _flat(ids, layout)
    segments = to_local(layout, flat_columns(layout, width), rank=layout.cp_rank, ahead=1)
    return move(values, segments, layout.local_total)


def compact(rows: torch.Tensor, layout: PackedLayout, width: int) -> torch.Tensor:
    """[B, S, ...] -> [B, width, ...]: each row's tokens at its left edge, zero behind them (BSHD). Differentiable.

    For models that cannot take packed input; ``expand`` is the way back.

    Raises:
        BatchError: a row has more than ``width`` tokens, or the rows are not those of the layout.
    """
    values, before = _flat(rows, layout)
    _check_compact(layout, width)
    segments = Segments.of(flat_columns(layout, before), _compacted(layout, width), layout.runs.sizes)
    return _rows(move(values, segments, layout.lengths.size * width), layout, width)


def expand(compacted: torch.Tensor, layout: PackedLayout, width: int) -> torch.Tensor:
    """[B, W, ...] -> [B, width, ...]: the tokens of compacted rows back in their columns. Differentiable."""
    _check_compact(layout, compacted.size(1))
    _check_width(layout, width)
    segments = Segments.of(_compacted(layout, compacted.size(1)), flat_columns(layout, width), layout.runs.sizes)
    return _rows(move(compacted.flatten(0, 1), segments, layout.lengths.size * width), layout, width)


def _compacted(layout: PackedLayout, width: int) -> np.ndarray:
    """[R] where each run begins in the flattened compacted batch."""
    return layout.runs.rows * width + layout.runs.positions


def _rows(flat: torch.Tensor, layout: PackedLayout, width: int) -> torch.Tensor:
    return flat.unflatten(0, (layout.lengths.size, width))


def _flat(rows: torch.Tensor, layout: PackedLayout) -> tuple[torch.Tensor, int]:
    """([B·S, ...], S) of a padded batch, or ([N, ...], 0) of a nested one."""
    if rows.size(0) != layout.lengths.size:
        raise BatchError(f"the batch has {rows.size(0)} rows, its layout {layout.lengths.size}: they belong together")
    if rows.is_nested:
        values = rows.values()
        tokens = int(layout.cu_seqlens[-1])
        if values.size(0) != tokens:
            raise BatchError(f"the nested rows hold {values.size(0)} tokens, the layout {tokens}")
        return values, 0
    _check_width(layout, rows.size(1))
    return rows.flatten(0, 1), rows.size(1)


def _check_width(layout: PackedLayout, width: int) -> None:
    last = layout.runs.columns + layout.runs.sizes - 1
    if last.size and int(last.max()) >= width:
        run = int(last.argmax())
        raise BatchError(
            f"row {int(layout.runs.rows[run])} has a token in column {int(last[run])}, beyond the width of {width}"
        )


def _check_compact(layout: PackedLayout, width: int) -> None:
    if (layout.lengths > width).any():
        row = int(np.argmax(layout.lengths > width))
        raise BatchError(f"row {row} has {int(layout.lengths[row])} tokens, which do not fit into a width of {width}")
