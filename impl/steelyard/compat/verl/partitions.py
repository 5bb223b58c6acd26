"""A fixed number of parts with even sums: the planner's levelling, for callers that know no token cap."""

from __future__ import annotations

import heapq
from typing import Any

import numpy as np
from numpy.typing import NDArray

from steelyard.balance.bins import Bins
from steelyard.balance.partition import bin_sums, level, quantise, refine
from steelyard.errors import PlanError

Ints = NDArray[np.int64]

EXACT = 2**60  # whole numbers with a sum below it are levelled as they are
BUDGET = 400_000  # exchanges that refinement may look at
# Columns that differencing item by item may touch: it is worth its time where parts hold few items, and parts are few.
COLUMNS = 2**18


def balanced(values: Any, count: int, *, equal_size: bool) -> Bins:
    """Positions of ``values`` in ``count`` parts with the smallest greatest sum that is found, in falling order of sum.

    Args:
        values: finite numbers of at least 0, in a list, an array or a tensor.
        count: number of parts; with more parts than values some are empty.
        equal_size: all parts hold equally many values.

    Raises:
        PlanError: a value, or a number of parts, that allows no partition.
    """
    weights = _weights(values)
    if isinstance(count, bool) or not isinstance(count, int | np.integer) or count < 1:
        raise PlanError(f"k_partitions={count!r} must be a whole number of at least 1")
    if equal_size and len(weights) % count:
        raise PlanError(
            f"{len(weights)} values make no {count} partitions of equal size: add or drop values, or ask for fewer"
        )
    if not len(weights):
        return [[] for _ in range(count)]
    ones = np.ones(len(weights), np.int64)
    # With a value as one token, the cap of the planner is the number of values that a part may hold.
    cap = len(weights) // int(count) if equal_size else len(weights)
    parts = level(ones, weights, cap, int(count), budget=BUDGET)
    if not equal_size and 2 * count < len(weights) <= COLUMNS // count:
        other = refine(_difference(weights, int(count)), ones, weights, cap, np.zeros(count, np.int64), BUDGET)
        if all(other) and bin_sums(other, weights).max() < bin_sums(parts, weights).max():
            parts = other
    return [parts[at] for at in np.argsort(-bin_sums(parts, weights), kind="stable").tolist()]


def _weights(values: Any) -> Ints:
    array = np.asarray(values.tolist() if hasattr(values, "tolist") else [_plain(one) for one in values])
    if not array.size:
        return np.zeros(0, np.int64)
    try:
        floats = array.astype(np.float64)
    except (TypeError, ValueError) as error:
        raise PlanError(f"seqlen_list holds something that is no number: {error}") from error
    if array.ndim != 1:
        raise PlanError(f"seqlen_list has shape {array.shape}: give one number per sequence")
    bad = np.flatnonzero(~(np.isfinite(floats) & (floats >= 0)))
    if len(bad):
        raise PlanError(f"seqlen_list[{bad[0]}]={array[bad[0]]} must be finite and at least 0")
    if array.dtype.kind in "iub" and floats.sum() < EXACT:
        return array.astype(np.int64)
    return quantise(floats)[0]


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value


def _difference(weights: Ints, count: int) -> Bins:
    """Largest differencing in its plain form (Karmarkar and Karp 1982), one value per tuple at the start.

    The planner's form starts from ``count`` values per tuple, which is quicker and nearly as good with many values per
    part; this one is the better start with few.
    """
    heap: list[tuple[int, int, Ints, Bins]] = []  # (-spread, age, sums descending, members)
    for age, item in enumerate(np.argsort(-weights, kind="stable").tolist()):
        sums = np.zeros(count, np.int64)
        sums[0] = weights[item]
        heap.append((-int(weights[item]) if count > 1 else 0, age, sums, [[item]] + [[] for _ in range(count - 1)]))
    heapq.heapify(heap)
    for age in range(len(heap), 2 * len(heap) - 1):
        _, _, high, first = heapq.heappop(heap)
        _, _, low, second = heapq.heappop(heap)
        sums = high + low[::-1]
        members = [one + other for one, other in zip(first, reversed(second), strict=True)]
        order = np.lexsort((-np.array([len(one) for one in members]), -sums)).tolist()
        sums = sums[order]
        heapq.heappush(heap, (int(sums[-1] - sums[0]), age, sums, [members[at] for at in order]))
    return heap[0][3]
