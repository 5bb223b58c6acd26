"""Paced stages: the real model on the real schedule, whose passes take planned times by waiting.

Where ranks outnumber cores they would share a core, and a stage that waits for its turn looks busy. A paced chunk still
computes (a small model, with real activations and gradients in real transfers), but each of its passes then waits
until its planned time is over. Waiting needs no core, so a pipeline of 8 stages can be traced on two.

The planned time of a pass must be well above what the small model computes in it; ``Pace.late`` says by how much the
passes missed their plan.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch


@dataclass
class Pace:
    """Planned times of the passes of this rank; give ``attach`` to ``build_model`` as a callback.

    Attributes:
        backward: time of a backward pass over that of its forward pass.
        forward_seconds: [micro-batches, chunks] of the step that comes next; None leaves the chunks unpaced.
        late: seconds by which each pass since ``plan`` ended after its plan: it had to wait for a core.
    """

    backward: float = 2.0
    forward_seconds: np.ndarray | None = None
    late: list[float] = field(default_factory=list)
    _runs: list[int] = field(default_factory=list)

    def plan(self, forward_seconds: np.ndarray) -> None:
        """Set the planned times of one step, [micro-batches, chunks of this rank]."""
        self.forward_seconds = forward_seconds
        self._runs = [0] * forward_seconds.shape[1]
        self.late = []

    def attach(self, chunk: torch.nn.Module) -> None:
        """Pace this chunk; chunks come in their order."""
        paced = _PacedChunk(self, len(self._runs))
        self._runs.append(0)
        chunk.register_forward_pre_hook(paced.begin)
        # The first layer: what comes before it has next to no work, and nothing of the gradient goes past a stage.
        chunk.decoder.layers[0].register_forward_pre_hook(paced.mark_input, with_kwargs=True)
        chunk.register_forward_hook(paced.end)

    def next_seconds(self, chunk: int) -> float:
        """Planned seconds of the next forward pass of ``chunk``."""
        if self.forward_seconds is None:
            return 0.0
        self._runs[chunk] += 1
        return float(self.forward_seconds[self._runs[chunk] - 1, chunk])

    def wait_until(self, deadline: float) -> None:
        left = deadline - time.perf_counter()
        if left > 0:
            time.sleep(left)
        self.late.append(time.perf_counter() - deadline)


class _Deadline:
    """When the backward pass of one micro-batch is over; set where it enters the chunk, kept where it leaves."""

    def __init__(self, pace: Pace, seconds: float) -> None:
        self.pace, self.seconds, self.at = pace, seconds, 0.0


class _Enter(torch.autograd.Function):
    """Behind the chunk's output: a backward pass begins."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, deadline: _Deadline) -> torch.Tensor:
        ctx.deadline = deadline
        # A copy: the schedule frees the output that it sends, and refuses to free a view.
        return output.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.deadline.at = time.perf_counter() + ctx.deadline.seconds
        return gradient, None


class _Leave(torch.autograd.Function):
    """Before the chunk's first layer: a backward pass ends, once its time is over."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, deadline: _Deadline) -> torch.Tensor:
        ctx.deadline = deadline
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.deadline.pace.wait_until(ctx.deadline.at)
        return gradient, None


class _PacedChunk:
    """The hooks of one chunk."""

    def __init__(self, pace: Pace, number: int) -> None:
        self._pace, self._number = pace, number
        self._until = 0.0
        self._backward: _Deadline | None = None

    def begin(self, chunk: torch.nn.Module, args: tuple) -> None:
        seconds = self._pace.next_seconds(self._number)
        self._until = time.perf_counter() + seconds
        self._backward = _Deadline(self._pace, self._pace.backward * seconds)

    def mark_input(self, layer: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        if args:
            return (_Leave.apply(args[0], self._backward), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": _Leave.apply(kwargs["hidden_states"], self._backward)}

    def end(self, chunk: torch.nn.Module, args: tuple, output: torch.Tensor) -> torch.Tensor:
        output = _Enter.apply(output, self._backward)
        self._pace.wait_until(self._until)
        return output
