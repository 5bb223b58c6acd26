"""In which order to run given micro-batches."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from steelyard.pipeline.profile import profiles
from steelyard.pipeline.schedule import Pipeline, check_count
from steelyard.pipeline.simulate import checked_work, makespans

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

WIDTH = 256  # exchanges simulated side by side
GAIN = 1e-6  # share of the makespan below which an exchange is not worth a round


def both_ends(work: ArrayLike) -> list[int]:
    """Positions in an order that is small at both ends and large in the middle; ties by position."""
    ascending = np.argsort(np.asarray(work, np.float64), kind="stable").tolist()
    return ascending[::2] + ascending[1::2][::-1]


def best_order(work: ArrayLike, pipeline: Pipeline, *, budget: int = 2_000) -> list[int]:
    """An order of execution with a small predicted makespan, never one above that of ``both_ends``.

    The orders that the profiles of ``profile.py`` suggest are simulated; the best of them is improved by exchanging two
    micro-batches at a time.

    Args:
        work: as in ``simulate``, in any order.
        pipeline: where it runs.
        budget: exchanges to simulate.

    Returns:
        positions in ``work``, in execution order.

    Raises:
        PlanError: as ``simulate``.
    """
    parts = checked_work(work, pipeline)
    check_count(len(parts), pipeline)
    orders = _orders(parts.sum(axis=1), pipeline)
    shared = np.ndim(work) == 1
    table = np.asarray(work, np.float64) if shared else parts
    times = makespans(table[orders], pipeline)
    best = int(np.argmin(times))
    return _exchanged(orders[best], float(times[best]), table, pipeline, budget).tolist()


def _orders(work: Floats, pipeline: Pipeline) -> Ints:
    """[orders, M]: small at both ends first, so that it wins ties."""
    ascending = np.argsort(work, kind="stable")
    ends = np.array(both_ends(work))
    sizes = profiles(len(work), pipeline, float(work.max())).sizes
    ranks = np.argsort(np.argsort(sizes, axis=1, kind="stable"), axis=1, kind="stable")
    distinct = np.array(list({one.tobytes(): one for one in ranks}.values()))
    return np.concatenate((ends[None], ends[None, ::-1], ascending[None, ::-1], ascending[distinct]))


def _exchanged(order: Ints, time: float, table: Floats, pipeline: Pipeline, budget: int) -> Ints:
    """Exchange the two micro-batches that lower the makespan most, until none of those looked at does."""
    first, second = np.triu_indices(len(order), 1)
    turn = 0
    while budget > 0 and len(first):
        stride = max(1, len(first) // WIDTH)
        left, right = first[turn % stride :: stride], second[turn % stride :: stride]
        turn += 1
        tried = np.repeat(order[None], len(left), axis=0)
        rows = np.arange(len(left))
        tried[rows, left], tried[rows, right] = order[right], order[left]
        times = makespans(table[tried], pipeline)
        budget -= len(tried)
        best = int(np.argmin(times))
        if times[best] < time * (1 - GAIN):
            order, time = tried[best], float(times[best])
        elif stride == 1:
            break
    return order
