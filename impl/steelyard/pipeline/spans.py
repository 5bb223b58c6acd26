"""A step on the pipeline as a list of passes with their times, in the words of ``simulate.Timeline``."""

from __future__ import annotations

from dataclasses import dataclass, field

from steelyard.pipeline.schedule import Pass
from steelyard.pipeline.simulate import Span, StageTimes


@dataclass(frozen=True)
class PassTimeline(StageTimes):
    """What every stage did, traced or predicted; times in one unit, 0 is the start of the first pass.

    Attributes:
        spans: every pass, by stage and then by time.
        stages: number of stages.
        makespan: from the first forward pass to the end of the last backward pass.
        busy: busy time of each stage.
        ideal: busy time of the mean stage.
    """

    spans: tuple[Span, ...]
    stages: int
    makespan: float = field(init=False)
    busy: tuple[float, ...] = field(init=False)
    ideal: float = field(init=False)

    def __post_init__(self) -> None:
        busy = tuple(sum(span.end - span.start for span in self.of_stage(stage)) for stage in range(self.stages))
        object.__setattr__(self, "makespan", max(span.end for span in self.spans))
        object.__setattr__(self, "busy", busy)
        object.__setattr__(self, "ideal", sum(busy) / self.stages)

    def of_stage(self, stage: int) -> list[Span]:
        """The passes of one stage by time."""
        return [span for span in self.spans if span.stage == stage]

    def order(self, stage: int) -> list[Pass]:
        """The passes of one stage as ``stage_order`` lists them."""
        return [Pass(span.direction, span.micro_batch, span.chunk) for span in self.of_stage(stage)]

    def waiting(self, stage: int) -> list[tuple[float, float]]:
        """(start, end) of everything between the passes of one stage, from the start of the step to its end."""
        spans = self.of_stage(stage)
        ends = [0.0, *(span.end for span in spans)]
        starts = [*(span.start for span in spans), self.makespan]
        return [(end, start) for end, start in zip(ends, starts, strict=True) if start > end]
