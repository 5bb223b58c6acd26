"""Stretches of tokens that lie side by side before and after a move: how pack and unpack see a batch.

A row of thousands of tokens is one stretch, two under context parallelism. On a CPU the stretches are copied as they
are, which is several times faster than one by one. On CUDA, and where stretches are short (a mask full of holes), each
token gets an index: one copy of indices to the device, one gather, one scatter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from steelyard.packing.params import to_device

if TYPE_CHECKING:
    from steelyard.packing.layout import PackedLayout

LEAST_MEAN_TOKENS = 32
"""Stretches shorter than this on average are moved token by token: handling a stretch costs about as much as that."""

ZERO_ELEMENTS = 2**18
"""Gaps are filled from one block of zeros of at most so many elements, which stays in a cache."""


@dataclass(frozen=True, eq=False)
class Segments:
    """Stretches to move, [K] each, in the order of their targets; neither sources nor targets overlap."""

    source: np.ndarray
    target: np.ndarray
    sizes: np.ndarray
    _on_device: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, source: np.ndarray, target: np.ndarray, sizes: np.ndarray) -> Segments:
        """In any order; empty stretches are dropped."""
        kept = np.flatnonzero(sizes > 0)
        order = kept[np.argsort(target[kept], kind="stable")]
        return cls(source[order], target[order], sizes[order])

    def reversed(self) -> Segments:
        """The way back."""
        return Segments.of(self.target, self.source, self.sizes)

    @property
    def by_token(self) -> bool:
        """Whether ``move`` gives each token an index: the stretches are short, or there are none (the result must have
        a place in the autograd graph all the same)."""
        return int(self.sizes.sum()) <= len(self.sizes) * LEAST_MEAN_TOKENS

    def gaps(self, total: int) -> np.ndarray:
        """[K + 1] targets without a source before, between and behind the stretches."""
        ends = np.concatenate(([0], self.target + self.sizes))
        return np.concatenate((self.target, [total])) - ends

    def indices(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """(source, target) of every token; one copy to the device, however many tensors are moved."""
        if device not in self._on_device:
            within = np.arange(self.sizes.sum()) - np.repeat(np.cumsum(self.sizes) - self.sizes, self.sizes)
            arrays = [np.repeat(ends, self.sizes) + within for ends in (self.source, self.target)]
            source, target = to_device(arrays, device)
            self._on_device[device] = (source, target)
        return self._on_device[device]


def flat_columns(layout: PackedLayout, width: int) -> np.ndarray:
    """[R] where each run of the layout begins in the flattened batch [B·width]; width 0 stands for nested rows."""
    runs = layout.runs
    return runs.rows * width + runs.columns if width else layout.cu_seqlens[runs.rows] + runs.positions


def to_local(layout: PackedLayout, source: np.ndarray, *, rank: int, ahead: int = 0) -> Segments:
    """From the runs, which begin at ``source``, into the local slots of a context-parallel rank.

    Args:
        layout: where the tokens go.
        source: [R] where each run begins in what is moved.
        rank: of the context-parallel group.
        ahead: a slot gets the token that is so many further on in the same row.
    """
    runs = layout.runs
    first, last, slot = (bounds[runs.rows] for bounds in layout.chunks(rank))
    positions = (runs.positions - ahead)[:, None]
    begin = np.maximum(positions, first)
    sizes = np.minimum(positions + runs.sizes[:, None], last) - begin
    return Segments.of((source[:, None] + begin - positions).ravel(), (slot + begin - first).ravel(), sizes.ravel())


def from_all_ranks(layout: PackedLayout, target: np.ndarray) -> Segments:
    """From the parts of all context-parallel ranks, one after the other, to the runs, which begin at ``target``."""
    parts = [to_local(layout, target, rank=rank) for rank in range(layout.cp)]
    return Segments.of(
        np.concatenate([part.target + rank * layout.local_total for rank, part in enumerate(parts)]),
        np.concatenate([part.source for part in parts]),
        np.concatenate([part.sizes for part in parts]),
    )


def move(values: torch.Tensor, segments: Segments, total: int) -> torch.Tensor:
    """[M, ...] -> [total, ...]: the stretches at their targets, zero elsewhere. Differentiable; reads nothing back."""
    # On CUDA one gather and one scatter, whatever the rows; a copy of each stretch is what a CPU is fast at.
    if segments.by_token or values.is_cuda:
        source, target = segments.indices(values.device)
        return values.new_zeros((total, *values.shape[1:])).index_copy(0, target, values.index_select(0, source))
    gaps = segments.gaps(total).tolist()
    zeros = _Zeros(values, max(gaps))
    parts: list[torch.Tensor] = []
    for gap, piece in zip(gaps, _pieces(values, segments), strict=False):
        parts += zeros.fill(gap)
        parts.append(piece)
    return torch.cat(parts + zeros.fill(gaps[-1]))


def _pieces(values: torch.Tensor, segments: Segments) -> list[torch.Tensor]:
    """A view of each stretch, all made in one call: what lies between two of them is a view too, and left alone."""
    order = np.argsort(segments.source, kind="stable")
    source, sizes = segments.source[order], segments.sizes[order]
    split = np.empty(2 * len(order) + 1, np.int64)
    split[1::2] = sizes
    split[0::2] = np.concatenate((source, [values.size(0)])) - np.concatenate(([0], source + sizes))
    pieces = values.split_with_sizes(split.tolist())[1::2]
    return [pieces[at] for at in np.argsort(order, kind="stable").tolist()]


class _Zeros:
    """Zeros of any length, as views of one block."""

    def __init__(self, like: torch.Tensor, longest: int) -> None:
        row = max(1, math.prod(like.shape[1:]))
        self._size = max(1, min(longest, ZERO_ELEMENTS // row))
        self._block = like.new_zeros((self._size, *like.shape[1:]))

    def fill(self, count: int) -> list[torch.Tensor]:
        whole, rest = divmod(count, self._size)
        return [self._block] * whole + ([self._block.narrow(0, 0, rest)] if rest else [])
