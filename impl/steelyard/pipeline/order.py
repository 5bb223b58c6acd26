"""In which order to run given micro-batches, and how good any order could be."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from steelyard.pipeline.schedule import Pipeline
from steelyard.pipeline.simulate import _checked_work, makespans

Floats = NDArray[np.float64]


def both_ends(work: ArrayLike) -> list[int]:
    """Positions in an order that is small at both ends and large in the middle; ties by position."""
    ascending = np.argsort(np.asarray(work, np.float64), kind="stable").tolist()
    return ascending[::2] + ascending[1::2][::-1]


def best_order(work: ArrayLike, pipeline: Pipeline) -> list[int]:
    """Order of execution with the least predicted makespan among a few good ones; ties go to small-at-both-ends.

    Args:
        work: as in ``simulate``, in any order.
        pipeline: where it runs.

    Returns:
        positions in ``work``, in execution order.
    """
    whole = _checked_work(work, pipeline).sum(axis=1)
    candidates = _orders(whole, pipeline)
    times = makespans(whole[np.array(candidates)], pipeline)
    return candidates[int(np.argmin(times))]


def _orders(work: Floats, pipeline: Pipeline) -> list[list[int]]:
    ends = both_ends(work)
    ascending = np.argsort(work, kind="stable").tolist()
    return [ends, ends[::-1], ascending, ascending[::-1]]
