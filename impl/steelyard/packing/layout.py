"""Where every token of a packed micro-batch comes from and goes to: host integers only, no device is asked.

A row is a sequence of tokens somewhere in a padded batch. Packing lays the rows one after the other into *slots*; each
row takes a multiple of the alignment, so that tensor-, sequence- and context-parallel ranks get whole parts of it.
Under context parallelism a row of L slots is cut into 2·cp chunks, and rank r holds chunks r and 2·cp-1-r (zigzag):
early chunks attend to little and late ones to much, and so every rank has the same work.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from steelyard.errors import BatchError, InputError

if TYPE_CHECKING:
    import torch

    from steelyard.packing.params import HostPackedSeqParams

# Tokens of a matrix product come in multiples of this under each FP8 recipe (TransformerEngine's own checks: 16 for one
# scale per tensor, 32 for the blocks of MXFP8, 128 for square blocks).
FP8_MULTIPLES = {"delayed": 16, "tensorwise": 16, "mxfp8": 32, "blockwise": 128}


@dataclass(frozen=True, eq=False)
class Runs:
    """Tokens of a row that stand side by side in the padded batch, [R] each, row after row; none is empty.

    Attributes:
        rows: the row of each run.
        columns: its first column in the padded batch.
        positions: the position of its first token in the row, counted without holes.
        sizes: its tokens.
    """

    rows: np.ndarray
    columns: np.ndarray
    positions: np.ndarray
    sizes: np.ndarray


@dataclass(frozen=True, eq=False)
class PackedLayout:
    """Offsets of B rows with N real tokens in T slots, of which this context-parallel rank holds T/cp.

    Build it with ``PackedLayout.of``. Arrays are int64; indices into slots count from the start of the whole packed
    sequence unless they are called local.

    Attributes:
        lengths: [B] real tokens of each row.
        runs: where the tokens are in the padded batch: one run in each row, more where a mask has holes.
        padded_lengths: [B] slots that each row takes.
        cp, cp_rank: size of the context-parallel group and this rank's place in it.
    """

    lengths: np.ndarray
    runs: Runs
    padded_lengths: np.ndarray
    cp: int = 1
    cp_rank: int = 0

    @classmethod
    def of(
        cls,
        lengths: Sequence[int] | np.ndarray | None = None,
        *,
        starts: Sequence[int] | np.ndarray | None = None,
        mask: np.ndarray | None = None,
        tp: int = 1,
        cp: int = 1,
        cp_rank: int = 0,
        fp8_recipe: str | None = None,
    ) -> PackedLayout:
        """The layout of rows with these lengths.

        Args:
            lengths: real tokens of each row; 0 is a row without tokens.
            starts: first column of each row (left-padded prompts); None means column 0.
            mask: host array [B, S], nonzero at real tokens, in the place of lengths and starts; it may have holes,
                which packing closes.
            tp: tensor-parallel size; sequence parallelism splits the tokens of a rank over it.
            cp, cp_rank: context-parallel size and rank.
            fp8_recipe: ``delayed``, ``tensorwise``, ``mxfp8`` or ``blockwise``; the tokens of every rank are a multiple
                of what the recipe wants. The slots that this adds go behind the last row: fewer than the multiple
                times tp·cp, however many rows there are.

        Raises:
            BatchError: no rows, a negative length or start, or arguments that do not belong together.
            InputError: an unknown recipe, or a rank outside the group.
        """
        if cp < 1 or tp < 1 or not 0 <= cp_rank < cp:
            raise InputError(f"tp={tp}, cp={cp}, cp_rank={cp_rank}: sizes are at least 1 and 0 <= cp_rank < cp")
        rows, runs = _from_mask(lengths, starts, mask) if mask is not None else _from_lengths(lengths, starts)
        alignment = tp * 2 * cp if cp > 1 else tp
        padded = -(-rows // alignment) * alignment
        if fp8_recipe is not None:
            if fp8_recipe not in FP8_MULTIPLES:
                raise InputError(f"fp8_recipe={fp8_recipe!r} is unknown: use one of {', '.join(FP8_MULTIPLES)}")
            multiple = math.lcm(alignment, FP8_MULTIPLES[fp8_recipe] * tp * cp)
            padded[-1] += -int(padded.sum()) % multiple
        return cls(rows, runs, padded, cp, cp_rank)

    @cached_property
    def cu_seqlens(self) -> np.ndarray:
        """[B + 1] offsets of the real tokens, as if there were no padding."""
        return np.concatenate(([0], np.cumsum(self.lengths)))

    @cached_property
    def cu_seqlens_padded(self) -> np.ndarray:
        """[B + 1] first slot of each row; the last entry is the number of slots."""
        return np.concatenate(([0], np.cumsum(self.padded_lengths)))

    @property
    def max_seqlen(self) -> int:
        """Slots of the longest row. Never the total of several rows: megatron-core would not restart positions."""
        return int(self.padded_lengths.max())

    @property
    def total(self) -> int:
        """T, slots of the whole packed sequence."""
        return int(self.cu_seqlens_padded[-1])

    @property
    def local_total(self) -> int:
        """T/cp, slots of this rank: the tokens that it computes."""
        return self.total // self.cp

    @property
    def padding(self) -> float:
        """Share of the slots that hold no token."""
        return 1.0 - int(self.cu_seqlens[-1]) / self.total if self.total else 0.0

    def chunks(self, rank: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What a context-parallel rank holds of every row, [B, 1 or 2] each: the positions at which its chunks begin
        and end, and the local slot of their first position."""
        offsets = self.cu_seqlens_padded[:-1, None]
        if self.cp == 1:
            return np.zeros_like(offsets), self.padded_lengths[:, None], offsets
        size = self.padded_lengths[:, None] // (2 * self.cp)
        first = size * np.array([rank, 2 * self.cp - 1 - rank])
        return first, first + size, offsets // self.cp + size * np.array([0, 1])

    def slots_of_rank(self, rank: int) -> np.ndarray:
        """[T/cp] the slots that a context-parallel rank holds, in its own order."""
        if self.cp == 1:
            return np.arange(self.total)
        first, last, _ = self.chunks(rank)
        starts, sizes = (self.cu_seqlens_padded[:-1, None] + first).ravel(), (last - first).ravel()
        return np.arange(sizes.sum()) + np.repeat(starts - np.cumsum(sizes) + sizes, sizes)

    @cached_property
    def local_slots(self) -> np.ndarray:
        """[T/cp] the slots of this rank, in its own order."""
        return self.slots_of_rank(self.cp_rank)

    @cached_property
    def local_positions(self) -> np.ndarray:
        """[T/cp] the position of each local slot in its row, padding included: what RoPE needs."""
        rows = np.searchsorted(self.cu_seqlens_padded[1:], self.local_slots, side="right")
        return self.local_slots - self.cu_seqlens_padded[rows]

    @cached_property
    def gathered_index(self) -> np.ndarray:
        """[T] where each slot is when the ranks' parts are laid one after the other in the order of ranks."""
        return _inverse(self.zigzag_order)

    @cached_property
    def zigzag_order(self) -> np.ndarray:
        """[T] the slots of all ranks, rank after rank."""
        return np.concatenate([self.slots_of_rank(rank) for rank in range(self.cp)])

    def to_local(self, slots: np.ndarray) -> np.ndarray:
        """Local index of each of these slots on this rank, or -1 where another rank holds it."""
        at = self.gathered_index[slots] - self.cp_rank * self.local_total
        return np.where((at >= 0) & (at < self.local_total), at, -1)

    def packed_seq_params(self, device: torch.device | str) -> HostPackedSeqParams:
        """What megatron-core's attention and RoPE take, in the THD format; see ``HostPackedSeqParams``."""
        from steelyard.packing.params import HostPackedSeqParams

        return HostPackedSeqParams(self, device)


def _inverse(order: np.ndarray) -> np.ndarray:
    inverse = np.empty_like(order)
    inverse[order] = np.arange(order.size)
    return inverse


def _from_lengths(lengths: object, starts: object) -> tuple[np.ndarray, Runs]:
    rows = np.asarray([] if lengths is None else lengths, dtype=np.int64)
    if rows.ndim != 1 or rows.size == 0:
        raise BatchError(f"lengths must be a list of at least one whole number; got an array of shape {rows.shape}")
    first = np.zeros_like(rows) if starts is None else np.asarray(starts, dtype=np.int64)
    if first.shape != rows.shape:
        raise BatchError(f"{first.size} starts do not match {rows.size} lengths: give one start for each row")
    for name, values in (("length", rows), ("start", first)):
        if (values < 0).any():
            row = int(np.argmax(values < 0))
            raise BatchError(f"row {row} has the negative {name} {int(values[row])}")
    filled = np.flatnonzero(rows)
    return rows, Runs(filled, first[filled], np.zeros_like(filled), rows[filled])


def _from_mask(lengths: object, starts: object, mask: np.ndarray) -> tuple[np.ndarray, Runs]:
    if lengths is not None or starts is not None:
        raise BatchError("a mask says which tokens are real: give either a mask, or lengths and starts")
    real = np.asarray(mask) != 0
    if real.ndim != 2 or real.shape[0] == 0:
        raise BatchError(f"the mask has shape {real.shape}: [rows, width] with at least one row is needed")
    # A run begins where real follows not real, and ends where not real follows real.
    edges = np.diff(np.pad(real, ((0, 0), (1, 1))).view(np.int8), axis=1)
    rows, columns = np.nonzero(edges > 0)
    sizes = np.nonzero(edges < 0)[1] - columns
    in_rows = real.sum(1, dtype=np.int64)
    positions = np.cumsum(sizes) - sizes - (np.cumsum(in_rows) - in_rows)[rows]
    return in_rows, Runs(rows, columns, positions, sizes)
