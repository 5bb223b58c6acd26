"""What no order of given micro-batches can beat."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from steelyard.pipeline.schedule import Pipeline, check_count, stage_order
from steelyard.pipeline.simulate import checked_work

Floats = NDArray[np.float64]

LONGEST = 1_024  # passes of a stage in one direction beyond which windows are left out: they are short by then


def makespan_lower_bound(work: ArrayLike, pipeline: Pipeline) -> float:
    """A makespan that no order of these micro-batches goes below; unequal stages, chunks and transfers are counted.

    *A stage.* A stage runs one pass at a time, so the makespan is the sum of four times, each with a bound of its own:

    - until the first pass of the stage. It is the forward pass through its first chunk of the micro-batch that runs
      first, i, which has gone through the virtual stages before: at least the way there of i;
    - its passes: exactly its busy time;
    - its waiting between the first and the last pass. Take any micro-batch k. Between the end of its forward pass
      through the first chunk and the start of its backward pass there, it travels to the last virtual stage and back,
      which takes at least D(k). Meanwhile the stage runs what the schedule puts between these two passes: the passes
      of k through the later chunks, and passes of other micro-batches, so and so many of each direction by their place
      in the order. Whatever the places, and whoever is there, this is at most I(k): the passes of the place with most
      of them, the heaviest micro-batches where the most is run (a sum of products is greatest when both factors are
      sorted alike). So the stage waits at least D(k) - I(k);
    - after its last pass. That is the backward pass through its first chunk of the micro-batch that runs last, j,
      which then travels back: at least the way back of j. With forward passes only it is that through its last
      chunk, and j travels onward to the end.

    i is first and j last in all of the schedules, so they differ if there are several micro-batches: the two ways
    together are at least the least sum over i != j.

    *One micro-batch.* It goes forward and back through every virtual stage, one after the other.

    The greatest of these bounds over all stages counts.

    Args:
        work: as in ``simulate``, in any order.
        pipeline: where it runs.

    Raises:
        PlanError: as ``simulate``.
    """
    parts = checked_work(work, pipeline)
    check_count(len(parts), pipeline)
    hops = pipeline.stages * pipeline.virtual - 1
    ways = 1 if pipeline.backward == 0 else 2
    alone = float(parts.sum(axis=1).max() * (1 + pipeline.backward) + pipeline.p2p * hops * ways)
    return max(alone, *(_stage_bound(parts, pipeline, stage) for stage in range(pipeline.stages)))


def _stage_bound(parts: Floats, pipeline: Pipeline, stage: int) -> float:
    """The bound of one stage; ``parts`` is [M, stages * virtual]."""
    last, ratio = parts.shape[1] - 1, pipeline.backward
    own = parts[:, stage :: pipeline.stages]
    there = parts[:, :stage].sum(axis=1) + pipeline.p2p * stage
    if ratio == 0:
        final = last - (pipeline.stages - 1 - stage)
        back = parts[:, final + 1 :].sum(axis=1) + pipeline.p2p * (last - final)
        return float(own.sum()) + _least_pair(there, back)
    back = parts[:, :stage].sum(axis=1) * ratio + pipeline.p2p * stage
    return float(own.sum() * (1 + ratio)) + _least_pair(there, back) + _waiting(parts, own, pipeline, stage)


def _least_pair(there: Floats, back: Floats) -> float:
    """Least ``there[i] + back[j]`` over i != j, or over i = j for a single micro-batch."""
    if len(there) == 1:
        return float(there[0] + back[0])
    first, second = np.argsort(there, kind="stable")[:2]
    return float(min(there[first] + np.delete(back, first).min(), there[second] + np.delete(back, second).min()))


def _waiting(parts: Floats, own: Floats, pipeline: Pipeline, stage: int) -> float:
    """D(k) - I(k) for the micro-batch that travels longest, or 0 if that is more."""
    count, virtual = own.shape
    if count * virtual > LONGEST:
        return 0.0
    hops = parts.shape[1] - 1 - stage
    travel = parts[:, stage + 1 :].sum(axis=1) * (1 + pipeline.backward) + 2 * pipeline.p2p * hops
    longest = int(np.argmax(travel))
    others = -np.sort(-np.delete(own.max(axis=1), longest))  # a pass through any chunk takes at most this
    windows = _windows(stage, count, pipeline.stages, virtual, pipeline.group_size, pipeline.backward)
    busy = float((windows * others).sum(axis=1).max()) + float(own[longest, 1:].sum() * (1 + pipeline.backward))
    return max(0.0, float(travel[longest]) - busy)


@lru_cache(maxsize=256)
def _windows(stage: int, count: int, stages: int, virtual: int, group: int, backward: float) -> Floats:
    """[places, count - 1] what ``stage`` runs between the forward and the backward pass through its first chunk of the
    micro-batch at each place: passes of each other one, a backward pass counted ``backward`` times, most first.
    """
    order = stage_order(stage, count, Pipeline(stages, virtual, group, backward))
    direction, micro_batch, chunk = (np.array(column) for column in zip(*order, strict=True))
    weight = np.zeros((len(order) + 1, count))
    weight[np.arange(len(order)) + 1, micro_batch] = np.where(direction == "F", 1.0, backward)
    run = np.cumsum(weight, axis=0)  # up to each pass
    begin, end = (np.flatnonzero((direction == kind) & (chunk == 0)) for kind in "FB")
    begin, end = begin[np.argsort(micro_batch[begin])], end[np.argsort(micro_batch[end])]
    between = run[end] - run[begin + 1]
    between[np.arange(count), np.arange(count)] = -1.0  # its own passes are not those of others
    return np.unique(-np.sort(-between, axis=1)[:, : count - 1], axis=0)
