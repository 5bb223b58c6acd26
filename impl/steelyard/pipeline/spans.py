"""A step on the pipeline as a list of passes with their times, in the words of ``simulate.Timeline``."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from steelyard.pipeline.schedule import Pass
from steelyard.pipeline.simulate import Span


@dataclass(frozen=True)
class PassTimeline:
    """What every stage did, traced or predicted; times in one unit, 0 is the start of the first pass.

    Attributes:
        spans: every pass, by stage and then by time.
        stages: number of stages.
    """

    spans: tuple[Span, ...]
    stages: int

    @cached_property
    def makespan(self) -> float:
        """From the first forward pass to the end of the last backward pass."""
        return max(span.end for span in self.spans)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Busy time of each stage."""
        return tuple(sum(span.end - span.start for span in self.of_stage(stage)) for stage in range(self.stages))

    @property
    def ideal(self) -> float:
        """Busy time of the mean stage."""
        return sum(self.busy) / self.stages

    @property
    def overhead(self) -> float:
        """``makespan / ideal - 1``; 0 for a step without work."""
        return self.makespan / self.ideal - 1.0 if self.ideal > 0 else 0.0

    @property
    def bubble(self) -> float:
        """Idle share of the makespan, ``overhead / (1 + overhead)``."""
        return 1.0 - self.ideal / self.makespan if self.makespan > 0 else 0.0

    @property
    def idle(self) -> tuple[float, ...]:
        """Idle time of each stage within the makespan."""
        return tuple(self.makespan - busy for busy in self.busy)

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
