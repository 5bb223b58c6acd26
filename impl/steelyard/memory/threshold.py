"""The longest response that fits a GPU, from few predictions.

Between two lengths at which a step runs the same way, every storage grows in a straight line with the tokens of a
micro-batch, and so does the peak of each phase. Two predictions of every kind of stage give those lines; where the
first of them meets the capacity, one more prediction confirms it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from steelyard.cost import ModelShape
from steelyard.errors import CapacityError
from steelyard.memory.predict import GIB, MemoryPrediction, predict_peak, stage_ranks
from steelyard.parallel import ParallelLayout
from steelyard.pipeline import legal_count
from steelyard.step import StepSettings

RESERVE_GIB = 4.0
"""What is left free unless told otherwise: CUDA context, buffers of NCCL, workspaces, and fragmentation."""
# Where the lines are taken from, in tokens of a row on one rank.
PROBES = (2048, 4096)
REFINEMENTS = 4

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
    """

    tokens: int
    limit: Literal["memory", "positions"]
    breaks_first: str
    stage: str
    prediction: MemoryPrediction
    available_bytes: int
    runs: int


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
    search = _Search(shape, layout, micro_batches or (lambda tokens: usual_micro_batches(layout, tokens)), settings)
    available = math.floor((capacity_gib - reserve_gib) * GIB)
    near, far = (search.at(search.aligned(tokens * layout.cp)) for tokens in PROBES)
    search.refuse_unless_it_fits(near, available, capacity_gib, reserve_gib)
    estimate, stage = search.estimate(near, far, available)
    prediction = search.refine(near[stage], far[stage], estimate, stage, available)
    if prediction.longest == search.aligned(shape.max_positions):
        words = f"the model's {shape.max_positions} positions"
        return Threshold(prediction.longest, "positions", words, stage, prediction, available, search.runs)
    words = search.what_grows(near[stage], prediction, stage)
    return Threshold(prediction.longest, "memory", words, stage, prediction, available, search.runs)


@dataclass
class _Search:
    """Predictions of one model on one layout, by length and stage."""

    shape: ModelShape
    layout: ParallelLayout
    micro_batches: Callable[[int], MicroBatches]
    settings: Mapping[str, Any]
    runs: int = 0

    @property
    def alignment(self) -> int:
        return StepSettings(max_tokens=1, layout=self.layout).alignment

    def aligned(self, tokens: float) -> int:
        """The next lower length that splits over the ranks, within the model's positions."""
        most = min(tokens, self.shape.max_positions)
        return max(self.alignment, math.floor(most / self.alignment) * self.alignment)

    def at(self, tokens: int, stage: str | None = None) -> dict[str, MemoryPrediction]:
        """Predictions of every kind of stage, or of one, with a longest row of so many tokens."""
        found = {}
        for name, rank in stage_ranks(self.layout).items():
            if stage in (None, name):
                self.runs += 1
                found[name] = predict_peak(
                    self.shape, self.layout, self.micro_batches(tokens), rank=rank, **self.settings
                )
        return found

    def estimate(
        self, near: Mapping[str, MemoryPrediction], far: Mapping[str, MemoryPrediction], available: int
    ) -> tuple[int, str]:
        """Where the line of some phase of some stage first meets what is available."""
        tokens, stage = min(
            (near[name].longest + self._distance(near[name], far[name], phase, available), name)
            for name in near
            for phase in near[name].phases
        )
        return self.aligned(tokens), stage

    def refine(
        self, near: MemoryPrediction, far: MemoryPrediction, tokens: int, stage: str, available: int
    ) -> MemoryPrediction:
        """The longest row that was run and fits: beginning at an estimate, moved along the steepest line."""
        slope = max(self._slope(near, far, phase) for phase in near.phases)
        best = near
        for _ in range(REFINEMENTS):
            found = self.at(tokens, stage)[stage]
            spare = available - found.peak_bytes
            if spare >= 0:
                best = found
            following = self.aligned(tokens + (spare / slope if slope > 0 else 0))
            tokens = following if spare >= 0 else min(following, tokens - self.alignment)
            if tokens <= best.longest:
                break
        return best

    def _distance(self, near: MemoryPrediction, far: MemoryPrediction, phase: str, available: int) -> float:
        slope = self._slope(near, far, phase)
        return (available - near.phases[phase].bytes) / slope if slope > 0 else math.inf

    def _slope(self, near: MemoryPrediction, far: MemoryPrediction, phase: str) -> float:
        grown = far.phases[phase].bytes - near.phases[phase].bytes
        return grown / (far.longest - near.longest) if far.longest > near.longest else 0.0

    def refuse_unless_it_fits(
        self, found: Mapping[str, MemoryPrediction], available: int, capacity_gib: float, reserve_gib: float
    ) -> None:
        stage, worst = max(found.items(), key=lambda item: item[1].static_bytes)
        if worst.static_bytes > available:
            raise too_small(self.shape, self.layout, stage, worst, capacity_gib, reserve_gib)
        stage, worst = max(found.items(), key=lambda item: item[1].peak_bytes)
        if worst.peak_bytes > available:
            raise CapacityError(
                f"capacity={capacity_gib:g} GiB less {reserve_gib:g} in reserve does not hold rows of {worst.longest} "
                f"tokens: the {stage} stage needs {worst.peak_gib:.1f} GiB, so use at least "
                f"{math.ceil(worst.peak_gib + reserve_gib)} GiB or more ranks"
            )

    def what_grows(self, near: MemoryPrediction, far: MemoryPrediction, stage: str) -> str:
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
