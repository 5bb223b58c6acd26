"""The longest response that fits a GPU, from few predictions.

Between two lengths at which a step runs the same way, every storage grows in a straight line with the tokens of a
micro-batch, and so does the peak of each section of a step. Two predictions of every kind of stage give those lines.
Where the first of them meets the capacity, that length is predicted too; as long as the lines through the newest
lengths then meet the capacity elsewhere (another moment became the highest one), the search goes on there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from steelyard.cost import ModelShape
from steelyard.errors import CapacityError
from steelyard.memory.predict import GIB, MemoryPrediction, predict_peak, stage_ranks
from steelyard.memory.record import Holding
from steelyard.parallel import ParallelLayout
from steelyard.pipeline import legal_count
from steelyard.step import StepSettings

RESERVE_GIB = 4.0
"""What is left free unless told otherwise: CUDA context, buffers of NCCL, workspaces, and fragmentation."""
# Where the lines are taken from, in tokens of a row on one rank.
PROBES = (2048, 4096)
TOLERANCE = 0.005
"""A threshold is at most this share below the longest row that fits, or one step of alignment if that is more."""
REFINEMENTS = 10
# Lines are not drawn through two lengths nearer than this: rounding to blocks would turn them.
APART = 0.75
# Another stage is looked at where its line comes this near to what is available.
NEARLY_FULL = 0.9

MicroBatches = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Threshold:
    """The longest row that fits.

    Attributes:
        tokens: of that row, prompt and response together, over all context-parallel ranks.
        limit: what stops longer ones: ``memory``, or the model's ``positions``.
        breaks_first: in words, what no longer fits beyond it.
        stage: the pipeline stage with the highest peak.
        prediction: of that stage, run at ``tokens``.
        available_bytes: the capacity less the reserve.
        runs: predictions that were made.
        tried: those of that stage, shortest row first.
    """

    tokens: int
    limit: Literal["memory", "positions"]
    breaks_first: str
    stage: str
    prediction: MemoryPrediction
    available_bytes: int
    runs: int
    tried: tuple[MemoryPrediction, ...] = ()

    def peak_at(self, tokens: float) -> Holding:
        """Peak of that stage for a longest row of so many tokens, in the lines between the lengths that were run."""
        return peak_between(*_neighbours(self.tried, tokens), tokens)


def usual_micro_batches(layout: ParallelLayout, tokens: int) -> list[list[int]]:
    """One row of ``tokens`` in each micro-batch, and enough micro-batches for every stage to hold what it ever does."""
    count = legal_count(layout.pp + 1, StepSettings(max_tokens=1, layout=layout).pipeline())
    return [[tokens]] * count


def largest_response(
    shape: ModelShape,
    layout: ParallelLayout,
    capacity_gib: float,
    *,
    reserve_gib: float = RESERVE_GIB,
    micro_batches: Callable[[int], MicroBatches] | None = None,
    **settings: Any,
) -> Threshold:
    """The longest row whose step fits ``capacity_gib - reserve_gib`` on every pipeline stage.

    Args:
        shape, layout: the model, and how it is spread.
        capacity_gib: memory of a GPU.
        reserve_gib: what is left free of it.
        micro_batches: the micro-batches of a step whose longest row has so many tokens; by default one such row in
            each. Their tokens must grow in proportion.
        settings: as for ``predict_peak``: step, role, dtype, recompute, kernels, overrides, extrapolate ...

    Raises:
        CapacityError: not even the shortest row fits.
        InputError: what ``predict_peak`` refuses.
    """
    search = _Search(
        shape,
        layout,
        micro_batches or (lambda tokens: usual_micro_batches(layout, tokens)),
        settings,
        math.floor((capacity_gib - reserve_gib) * GIB),
    )
    search.probe(capacity_gib, reserve_gib)
    stage, found = search.longest()
    tried = tuple(search.of(stage))
    if found.longest == search.most:
        limit: Literal["memory", "positions"] = "positions"
        words = f"the model's {shape.max_positions} positions"
    else:
        limit, words = "memory", _what_grows(tried[0], found, stage)
    return Threshold(found.longest, limit, words, stage, found, search.available, search.runs, tried)


@dataclass
class _Search:
    """Predictions of one model on one layout, by stage and length."""

    shape: ModelShape
    layout: ParallelLayout
    micro_batches: Callable[[int], MicroBatches]
    settings: Mapping[str, Any]
    available: int
    found: dict[str, dict[int, MemoryPrediction]] = field(default_factory=dict)

    @property
    def runs(self) -> int:
        return sum(map(len, self.found.values()))

    @property
    def alignment(self) -> int:
        return self.layout.row_alignment

    @property
    def most(self) -> int:
        """The longest row that the model has positions for."""
        return self.aligned(self.shape.max_positions)

    def aligned(self, tokens: float) -> int:
        """The next lower length that splits over the ranks, within the model's positions."""
        within = min(tokens, self.shape.max_positions)
        return max(self.alignment, math.floor(within / self.alignment) * self.alignment)

    def at(self, stage: str, tokens: int) -> MemoryPrediction:
        runs = self.found.setdefault(stage, {})
        if tokens not in runs:
            rank = stage_ranks(self.layout)[stage]
            runs[tokens] = predict_peak(self.shape, self.layout, self.micro_batches(tokens), rank=rank, **self.settings)
        return runs[tokens]

    def of(self, stage: str) -> list[MemoryPrediction]:
        """Predictions of a stage so far, shortest row first."""
        return [one for _, one in sorted(self.found[stage].items())]

    def probe(self, capacity_gib: float, reserve_gib: float) -> None:
        """The first two lengths on every stage.

        Raises:
            CapacityError: the shorter one does not fit.
        """
        near, far = (self.aligned(tokens * self.layout.cp) for tokens in PROBES)
        shortest = {stage: self.at(stage, near) for stage in stage_ranks(self.layout)}
        stage, worst = max(shortest.items(), key=lambda item: item[1].static_bytes)
        if worst.static_bytes > self.available:
            raise too_small(self.shape, self.layout, stage, worst, capacity_gib, reserve_gib)
        stage, worst = max(shortest.items(), key=lambda item: item[1].peak_bytes)
        if worst.peak_bytes > self.available:
            raise CapacityError(
                f"capacity={capacity_gib:g} GiB less {reserve_gib:g} in reserve does not hold rows of {worst.longest} "
                f"tokens: the {stage} stage needs {worst.peak_gib:.1f} GiB, so use at least "
                f"{math.ceil(worst.peak_gib + reserve_gib)} GiB or more ranks"
            )
        for stage in shortest:
            self.at(stage, far)

    def longest(self) -> tuple[str, MemoryPrediction]:
        """The stage that breaks first, and its longest row that was run and fits."""
        stage, *others = sorted(self.found, key=lambda name: self._meets(*self._newest(name)))
        best = self._refine(stage)
        for other in others:
            line = peak_between(*_neighbours(self.of(other), best.longest), best.longest)
            if line.bytes < NEARLY_FULL * self.available:
                continue
            if self.at(other, best.longest).peak_bytes > self.available:
                stage, best = other, self._refine(other)
        return stage, best

    def _refine(self, stage: str) -> MemoryPrediction:
        """The longest row of a stage that fits, to ``TOLERANCE``: one more step was run and does not fit.

        Where the peak bends upwards, as the highest of straight lines does, the line through two lengths that fit meets
        the capacity beyond the threshold, and the line through one that fits and one that does not before it.
        """
        for _ in range(REFINEMENTS):
            best, over = self._bracket(stage)
            step = self.aligned(TOLERANCE * best.longest)
            if best.longest == self.most or (over and over.longest - best.longest <= step):
                break
            line = (best, over) if over else self._newest(stage)
            tokens = max(self.aligned(self._meets(*line)), best.longest + step)
            self.at(stage, min(tokens, over.longest - self.alignment if over else self.most))
        return self._bracket(stage)[0]

    def _bracket(self, stage: str) -> tuple[MemoryPrediction, MemoryPrediction | None]:
        """The longest row that fits, and the shortest that does not, if one was run."""
        runs = self.of(stage)
        fit = [one for one in runs if one.peak_bytes <= self.available]
        return fit[-1], runs[len(fit)] if len(fit) < len(runs) else None

    def _newest(self, stage: str) -> tuple[MemoryPrediction, MemoryPrediction]:
        """The two longest rows that were run."""
        return _neighbours(self.of(stage), math.inf)

    def _meets(self, near: MemoryPrediction, far: MemoryPrediction) -> float:
        """Where the line of some section through two lengths first meets what is available."""
        if near is far:
            return near.longest
        first = math.inf
        for section, held in near.sections.items():
            slope = (far.sections[section].bytes - held.bytes) / (far.longest - near.longest)
            if slope > 0:
                first = min(first, near.longest + (self.available - held.bytes) / slope)
        return first


def _neighbours(runs: Sequence[MemoryPrediction], tokens: float) -> tuple[MemoryPrediction, MemoryPrediction]:
    """The two lengths, of several in growing order, through which the lines at ``tokens`` are drawn."""
    far = next((one for one in runs[1:] if one.longest >= tokens), runs[-1])
    shorter = [one for one in runs if one.longest < far.longest]
    if not shorter:
        return far, far
    return next((one for one in reversed(shorter) if one.longest <= APART * far.longest), shorter[0]), far


def peak_between(near: MemoryPrediction, far: MemoryPrediction, tokens: float) -> Holding:
    """The highest section at ``tokens``, with what it holds, in straight lines through two predictions."""
    share = (tokens - near.longest) / (far.longest - near.longest) if far is not near else 0.0

    def line(low: int, high: int) -> int:
        return max(0, round(low + share * (high - low)))

    def size(section: str) -> int:
        return line(near.sections[section].bytes, far.sections[section].bytes)

    highest = max(near.sections, key=size)
    low, high = near.sections[highest].parts, far.sections[highest].parts
    parts = {part: line(low.get(part, 0), high.get(part, 0)) for part in {**low, **high}}
    return Holding(size(highest), {part: held for part, held in parts.items() if held})


def _what_grows(near: MemoryPrediction, far: MemoryPrediction, stage: str) -> str:
    held = near.phases[far.phase].parts if far.phase in near.phases else {}
    part = max(far.parts, key=lambda name: far.parts[name] - held.get(name, 0))
    return f"{part} of the {stage} stage in the phase {far.phase!r}"


def too_small(
    shape: ModelShape,
    layout: ParallelLayout,
    stage: str,
    prediction: MemoryPrediction,
    capacity_gib: float,
    reserve_gib: float,
) -> CapacityError:
    """The error for a capacity that does not hold what a step needs before its first token."""
    least = math.ceil(prediction.static_bytes / GIB + reserve_gib)
    return CapacityError(
        f"capacity={capacity_gib:g} GiB less {reserve_gib:g} in reserve is too small for {shape.name} on {layout}: "
        f"parameters, gradients and optimizer alone take {prediction.static_bytes / GIB:.1f} GiB on the {stage} stage; "
        f"use at least {least} GiB, or more ranks (tp, pp or dp)"
    )
