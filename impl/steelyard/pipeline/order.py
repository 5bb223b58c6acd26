"""In which order to run given micro-batches, and what no order can beat."""

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
    distinct = np.unique(ranks, axis=0)
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


def makespan_lower_bound(work: ArrayLike, pipeline: Pipeline) -> float:
    """A makespan that no order of these micro-batches goes below.

    Two bounds, of which the greater counts.

    *One stage.* The first pass of stage s is the first forward pass through its first chunk, of some micro-batch i
    that has gone through the virtual stages before s already; the last pass of stage s is the backward pass through
    that chunk, of some micro-batch j that still travels back through them. i is the first and j the last micro-batch
    in the order of execution in all of the schedules, so they differ if there are several. So the makespan
    is at least the busy time of s, plus the least of (way to s of i) + (way back from s of j). With forward passes
    only, the last pass of stage s is that of its last chunk, and the way back is the way onward to the end.

    *One micro-batch.* It goes forward and back through every virtual stage, one after the other.

    Args:
        work: as in ``simulate``, in any order.
        pipeline: where it runs.
    """
    parts = checked_work(work, pipeline)
    stages, last = pipeline.stages, pipeline.stages * pipeline.virtual - 1
    forward_only = pipeline.backward == 0
    way = np.cumsum(parts + pipeline.p2p, axis=1)  # to the virtual stage after
    bounds = [float(parts.sum(axis=1).max() * (1 + pipeline.backward) + _transfers(pipeline))]
    for stage in range(stages):
        busy = float(parts[:, stage::stages].sum() * (1 + pipeline.backward))
        there = way[:, stage - 1] if stage else np.zeros(len(parts))
        if forward_only:
            final = last - (stages - 1 - stage)
            back = parts[:, final + 1 :].sum(axis=1) + pipeline.p2p * (last - final)
        else:
            back = parts[:, :stage].sum(axis=1) * pipeline.backward + pipeline.p2p * stage
        bounds.append(busy + _least_pair(there, back))
    return max(bounds)


def _transfers(pipeline: Pipeline) -> float:
    """Time that one micro-batch spends between stages."""
    hops = pipeline.stages * pipeline.virtual - 1 if pipeline.stages > 1 else 0
    return pipeline.p2p * hops * (1 if pipeline.backward == 0 else 2)


def _least_pair(there: Floats, back: Floats) -> float:
    """Least ``there[i] + back[j]`` over i != j, or over i = j for a single micro-batch."""
    if len(there) == 1:
        return float(there[0] + back[0])
    first, second = np.argsort(there, kind="stable")[:2]
    others = np.delete(back, first)
    return float(min(there[first] + others.min(), there[second] + np.delete(back, second).min()))
