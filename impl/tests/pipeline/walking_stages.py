"""The step with its exchange of shapes once more, by another way: stages that walk through their steps and meet.

``simulate`` computes it from a graph of passes and calls; here every stage keeps a clock of its own.
"""

from __future__ import annotations

from collections import Counter, deque

import numpy as np

from steelyard.pipeline import PassTimeline, Pipeline, Span
from steelyard.pipeline.exchange import PARTNERS, Call, Port, Step, stage_steps
from steelyard.pipeline.schedule import Pass
from steelyard.pipeline.simulate import checked_work

Floats = np.ndarray


def walk(work: Floats, pipeline: Pipeline, fixed: float = 0.0) -> PassTimeline:
    """What ``simulate(work, pipeline, fixed=fixed)`` must say of a pipeline with exchange."""
    parts = checked_work(work, pipeline)
    runs = [_Stage(stage, stage_steps(stage, len(parts), pipeline)) for stage in range(pipeline.stages)]
    reached: dict[_Key, float] = {}
    while any(run.steps for run in runs):
        before = sum(len(run.steps) for run in runs), len(reached)
        for run in runs:
            run.advance(parts, pipeline, fixed, reached)
        assert before != (sum(len(run.steps) for run in runs), len(reached)), "a deadlock"
    return PassTimeline(tuple(span for run in runs for span in run.spans), pipeline.stages)


_Key = tuple[int, Port, int]  # stage, port, how many times it was used before


class _Stage:
    """One stage on its way through its steps."""

    def __init__(self, number: int, steps: list[Step]) -> None:
        self.number, self.steps = number, deque(steps)
        self.now = 0.0
        self.spans: list[Span] = []
        self._used: Counter[Port] = Counter()

    def advance(self, parts: Floats, pipeline: Pipeline, fixed: float, reached: dict[_Key, float]) -> None:
        """Go on until the stage waits for another; ``reached`` holds when every port was come to."""
        while self.steps:
            step = self.steps[0]
            if isinstance(step, Pass):
                self._run(step, parts, pipeline, fixed)
            elif not self._meet(step, pipeline, reached):
                return
            self.steps.popleft()

    def _run(self, one: Pass, parts: Floats, pipeline: Pipeline, fixed: float) -> None:
        work = float(parts[one.micro_batch, one.chunk * pipeline.stages + self.number])
        end = self.now + work * (1.0 if one.direction == "F" else pipeline.backward) + fixed
        self.spans.append(Span(self.number, one.chunk, one.micro_batch, one.direction, self.now, end))
        self.now = end

    def _meet(self, call: Call, pipeline: Pipeline, reached: dict[_Key, float]) -> bool:
        """Come to a call; whether all who take part have. The n-th use of a port meets the n-th of its partner."""
        partners = []
        for port in call:
            reached.setdefault((self.number, port, self._used[port]), self.now)
            other, further = PARTNERS[port]
            partners.append(((self.number + further) % pipeline.stages, other, self._used[port]))
        if not all(partner in reached for partner in partners):
            return False
        self.now = max(self.now, *(reached[partner] for partner in partners)) + pipeline.p2p
        self._used.update(call)
        return True
