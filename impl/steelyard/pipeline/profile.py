"""How large the micro-batches of a step should be, place by place, before anything is known about the rows.

Micro-batches of equal size waste ``(stages - 1)`` passes at each end of a step. Small ones at the ends waste less, as
long as no stage waits for a larger one that is still on its way. With one chunk per stage the second micro-batch
reaches the last stage after ``first + (stages - 1) * second`` (a stage's forward pass as the unit), while that stage
is busy until ``(stages + backward) * first``: sizes may grow by ``(stages - 1 + backward) / (stages - 1)`` from one to
the next. At the end the same holds backwards in time, with the roles of forward and backward exchanged: ``1 + 1 /
((stages - 1) * backward)``. With several chunks the first ``stages`` micro-batches pass the first chunk together, so
sizes grow from block to block; how fast is searched.

A profile is such a sequence of sizes, the largest being 1. Profiles depend on the pipeline and the count alone; their
makespans are simulated once and kept.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from steelyard.pipeline.schedule import Pipeline
from steelyard.pipeline.simulate import makespans, program

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

TRANSFERS_ONLY = 1e12  # time of a transfer over that of the largest micro-batch
PASSES = 4_000_000  # simulated passes that the profiles of one count may cost


@dataclass(frozen=True)
class Profiles:
    """Candidates for one pipeline and count.

    Attributes:
        sizes: [candidates, M], the largest of each being 1.
        totals: [candidates] their sums.
        times: [candidates] their makespans.
    """

    sizes: Floats
    totals: Floats
    times: Floats


def profiles(count: int, pipeline: Pipeline, unit: float = 0.0) -> Profiles:
    """Profiles of ``count`` micro-batches.

    Args:
        count: a number that Megatron accepts.
        pipeline: where they run.
        unit: work of the largest micro-batch, which says how much a transfer weighs; unused without ``p2p``.
    """
    p2p = 0.0
    if pipeline.p2p and unit > 0:
        # Coarse, to be found again; and finite however small the unit: beyond the limit only transfers matter.
        p2p = float(f"{min(pipeline.p2p / unit, TRANSFERS_ONLY):.1e}")
    return _profiles(count, replace(pipeline, p2p=p2p))


@lru_cache(maxsize=512)
def _profiles(count: int, pipeline: Pipeline) -> Profiles:
    sizes = _candidates(count, pipeline)
    sizes = sizes[: max(1, PASSES // program(count, pipeline).size)]
    return Profiles(sizes, sizes.sum(axis=1), makespans(sizes, pipeline))


def _candidates(count: int, pipeline: Pipeline) -> Floats:
    """[candidates, count], the flat one first and then the milder ones first."""
    if pipeline.stages == 1 or count < 3:
        return np.ones((1, count))
    fronts, backs, block = _growth(pipeline)
    starts = (
        (1.0, 0.8, 0.65, 0.5, 0.4, 0.3, 0.22, 0.16, 0.1, 0.06)
        if pipeline.virtual == 1
        else (1.0, 0.75, 0.55, 0.4, 0.28, 0.18)
    )
    found: dict[bytes, Floats] = {}
    step = np.arange(count) // block
    for first, last, front, back in itertools.product(starts, starts, fronts, backs):
        size = np.minimum(1.0, np.minimum(first * _powers(front, step), last * _powers(back, step)[::-1]))
        size /= size.max()
        found.setdefault(size.tobytes(), size)
    return np.array(sorted(found.values(), key=lambda size: -size.sum()))


def _powers(ratio: float, exponents: Ints) -> Floats:
    """``ratio ** exponents`` by multiplication, which every machine rounds alike, unlike its library of functions."""
    steps = itertools.accumulate(
        itertools.repeat(ratio, int(exponents[-1])), lambda value, _: value * ratio, initial=1.0
    )
    return np.minimum(np.array(list(steps)), 1e6)[exponents]


def _growth(pipeline: Pipeline) -> tuple[tuple[float, ...], tuple[float, ...], int]:
    """Ratios of neighbouring sizes at the front and at the back, and how many neighbours are of one size."""
    far, backward = pipeline.stages - 1, pipeline.backward
    if pipeline.virtual > 1:
        return (1.5, 2.2, 4.0), (1.2, 1.4, 1.8), pipeline.stages
    if backward == 0:
        return (1.1, 1.3, 1.6), (1.1, 1.3, 1.6), 1
    front, back = 1 + backward / far, 1 + 1 / (far * backward)
    return (front,), (back, 1 + 1.5 * (back - 1)), 1
