"""How large the micro-batches of a step should be, place by place, before anything is known about the rows.

Micro-batches of equal size waste ``(stages - 1)`` passes at each end of a step. Small ones at the ends waste less, as
long as no stage waits for a larger one that is still on its way. With one chunk per stage the second micro-batch
reaches the last stage after ``first + (stages - 1) * second`` (a stage's forward pass as the unit), while that stage
is busy until ``(stages + backward) * first``: sizes may grow by ``(stages - 1 + backward) / (stages - 1)`` from one to
the next. At the end the same holds backwards in time, with the roles of forward and backward exchanged: ``1 + 1 /
((stages - 1) * backward)``. The best sizes of linear programs look like that in front; at the end they approach the
full size by a constant factor of what is missing, which is the other kind of back here. With several chunks the first
``stages`` micro-batches pass the first chunk together, so sizes grow from block to block.

Where one micro-batch holds a row far longer than all others, it stands out of every such sequence; so each also comes
with one micro-batch that does.

A profile is such a sequence of sizes, the largest being 1. Profiles depend on the pipeline and the count alone; their
makespans are simulated once, and those that others beat in every respect are dropped.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from steelyard.pipeline.graph import program
from steelyard.pipeline.schedule import Pipeline
from steelyard.pipeline.simulate import makespans

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

TRANSFERS_ONLY = 1e12  # time of a transfer over that of the largest micro-batch
PASSES = 1_000_000  # simulated passes that the profiles of one count may cost, twice
FIRST = (1.0, 0.75, 0.55, 0.42, 0.32, 0.24, 0.18, 0.13, 0.09, 0.06, 0.03)  # sizes of the first micro-batch
LAST = (1.0, 0.8, 0.65, 0.5, 0.4, 0.3)  # sizes of the last one
MISSING = (0.3, 0.45, 0.55, 0.65, 0.75, 0.85)  # what it lacks of the full size
FULL = 0.97  # size from which on a micro-batch counts as full
HEIGHTS = (1.15, 1.35, 1.7, 2.3)  # size of a micro-batch that stands out over the largest of the others
SMALLEST = (0.0, 0.03, 0.06, 0.1, 0.15, 0.25, 0.4)  # least sizes: a micro-batch must hold its fixed cost
TILT = 0.08  # what each micro-batch of a block may be smaller than the one before, with several chunks


@dataclass(frozen=True)
class Profiles:
    """Candidates for one pipeline and count, the flat one first and then those with more work first.

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
    if pipeline.stages == 1 or count < 3:
        return _best(np.ones((1, count)), pipeline)
    ends = _best(_both_ends(count, pipeline), pipeline)
    return _best(_with_one_that_stands_out(ends.sizes), pipeline)


def _best(sizes: Floats, pipeline: Pipeline) -> Profiles:
    """Those of the candidates that no other beats; as many are looked at as ``PASSES`` allows, the first ones."""
    sizes = sizes[: max(1, PASSES // program(sizes.shape[1], pipeline).size)]
    totals, times = sizes.sum(axis=1), makespans(sizes, pipeline)
    kept = _frontier(times, totals / times, sizes.min(axis=1))
    return Profiles(sizes[kept], totals[kept], times[kept])


def _frontier(times: Floats, rates: Floats, smallest: Floats) -> Ints:
    """Positions of the first candidate and of those with the most work per time among all that take less time, or among
    all that take more, with at least some smallest size.

    Time is that for the largest micro-batch as the unit. An item that cannot be split asks for little of it, a cap of
    tokens that keeps all micro-batches small for much.
    """
    order = np.lexsort((-rates, times))
    kept = {0}
    for least in SMALLEST:
        some = order[smallest[order] >= least]
        for way in (some, some[::-1]):
            best_before = np.maximum.accumulate(np.concatenate(([-np.inf], rates[way])))[:-1]
            kept.update(way[rates[way] > best_before].tolist())
    return np.array(sorted(kept), np.int64)


def _both_ends(count: int, pipeline: Pipeline) -> Floats:
    """[candidates, count] small at both ends, the flat one first and then the milder ones first."""
    sizes = np.minimum(_fronts(count, pipeline)[:, None], _backs(count, pipeline)).reshape(-1, count)
    if pipeline.virtual > 1:
        sizes = np.concatenate((sizes, sizes * (1.0 - TILT * (np.arange(count) % pipeline.stages)).clip(TILT)))
    sizes = sizes / sizes.max(axis=1, keepdims=True)
    distinct = np.array(list({size.tobytes(): size for size in sizes}.values()))
    return distinct[np.argsort(-distinct.sum(axis=1), kind="stable")]


def _fronts(count: int, pipeline: Pipeline) -> Floats:
    """[fronts, count] sizes that grow from the first micro-batch on."""
    far, ratio, place = pipeline.stages - 1, pipeline.backward, np.arange(count)
    growths, steps = [1 + ratio / far] if ratio else [1.1, 1.3, 1.6], [place]
    if pipeline.virtual > 1:  # a block may start one place late
        growths = [2.2, 1 + ratio * pipeline.stages / far]
        steps = [place // pipeline.stages, np.maximum(place - 1, 0) // pipeline.stages]
    found = [first * _powers(growth, step) for growth in growths for first in _few(FIRST, pipeline) for step in steps]
    return np.minimum(1.0, np.array(found))


def _backs(count: int, pipeline: Pipeline) -> Floats:
    """[backs, count] sizes that fall to the last micro-batch."""
    far, ratio = pipeline.stages - 1, pipeline.backward
    step, growths = np.arange(count), [1.1, 1.3, 1.6]
    rests: list[float] = []
    if pipeline.virtual > 1:
        step, growths, rests = step // pipeline.stages, [1.2, 1.5], [0.45, 0.7]
    elif ratio:
        rest = far / (far + (1 + ratio) / 2)
        growths, rests = [1 + 1 / (far * ratio), 1 + 1.5 / (far * ratio)], [rest, rest * rest]
    found = [last * _powers(growth, step) for growth in growths for last in _few(LAST, pipeline)]
    found += [1.0 - missing * _powers(rest, step) for rest in rests for missing in _few(MISSING, pipeline)]
    return np.minimum(1.0, np.array(found))[:, ::-1]


def _few(values: tuple[float, ...], pipeline: Pipeline) -> tuple[float, ...]:
    """Every second value with several chunks, where there are more ways to combine them."""
    return values if pipeline.virtual == 1 else values[::2]


def _with_one_that_stands_out(sizes: Floats) -> Floats:
    """``sizes``, and each with its first, middle or last full micro-batch larger than all others."""
    full = sizes >= FULL
    first, last = full.argmax(axis=1), sizes.shape[1] - 1 - full[:, ::-1].argmax(axis=1)
    found = [sizes]
    for place, height in itertools.product((first, (first + last) // 2, last), HEIGHTS):
        raised = sizes.copy()
        raised[np.arange(len(sizes)), place] = height
        found.append(raised / height)
    return np.concatenate(found)


def _powers(ratio: float, exponents: Ints) -> Floats:
    """``ratio ** exponents`` by multiplication, which every machine rounds alike, unlike its library of functions."""
    steps = itertools.accumulate(
        itertools.repeat(ratio, int(exponents[-1])), lambda value, _: value * ratio, initial=1.0
    )
    return np.minimum(np.array(list(steps)), 1e6)[exponents]
