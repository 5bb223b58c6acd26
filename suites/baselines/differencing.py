"""The largest differencing method of Karmarkar and Karp (1982) for k parts, as trainers run it: pure Python and a heap.

It reproduces ``get_seqlen_balanced_partitions`` of verl 0.1 to 0.9.1 (slime has a copy): one candidate solution of k
parts per value, or per k neighbouring values where all parts must hold equally many; the two solutions with the widest
spread are joined, the largest part of one with the smallest of the other, until one is left. Each join touches all k
parts, so the time grows with values times parts.

Ties are broken as there, so the parts are the same ones; a test compares them with the real package.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence


class _Part:
    """Positions, and the sum of their values."""

    __slots__ = ("positions", "total")

    def __init__(self) -> None:
        self.total = 0
        self.positions: list[int] = []

    def __lt__(self, other: _Part) -> bool:
        if self.total != other.total:
            return self.total < other.total
        if len(self.positions) != len(other.positions):
            return len(self.positions) < len(other.positions)
        return self.positions < other.positions


class _Solution:
    """k parts, the largest first."""

    __slots__ = ("parts", "spread")

    def __init__(self, members: Sequence[tuple[int, int]], count: int) -> None:
        self.parts = [_Part() for _ in range(count)]
        for part, (value, position) in zip(self.parts, members, strict=False):
            part.total = value
            part.positions.append(position)
        self._settle()

    def join(self, other: _Solution) -> None:
        for mine, theirs in zip(self.parts, reversed(other.parts), strict=True):
            mine.total += theirs.total
            mine.positions += theirs.positions
        self._settle()

    def _settle(self) -> None:
        self.parts.sort(reverse=True)
        self.spread = self.parts[0].total - self.parts[-1].total

    def __lt__(self, other: _Solution) -> bool:
        """The wider spread leaves the heap first."""
        if self.spread != other.spread:
            return self.spread > other.spread
        return other.parts[0] < self.parts[0]


def partition(values: Sequence[int], count: int, *, equal_size: bool) -> list[list[int]]:
    """Positions in ``values`` in ``count`` parts of about equal sums; positions of a part ascend.

    Args:
        values: at least ``count`` numbers.
        count: parts.
        equal_size: all parts hold equally many; ``count`` must divide the number of values.
    """
    ascending = sorted((value, position) for position, value in enumerate(values))
    block = count if equal_size else 1
    heap: list[_Solution] = []
    for start in range(0, len(ascending), block):
        heapq.heappush(heap, _Solution(ascending[start : start + block], count))
    while len(heap) > 1:
        widest = heapq.heappop(heap)
        widest.join(heapq.heappop(heap))
        heapq.heappush(heap, widest)
    return [sorted(part.positions) for part in heap[0].parts]
