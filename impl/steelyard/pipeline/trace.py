"""What a real step did on the pipeline: every pass of Megatron's own schedules, with its start and end.

All schedules of megatron-core look up ``forward_step`` and ``backward_step`` in their module
(``pipeline_parallel/schedules.py``, 0.16) at every call. ``trace_passes`` puts a function that notes the time around
each of them while it is held, and the originals back at its end, also after an error.

- A chunk is known by its model: schedules begin with chunk 0 and come to the others in order.
- Micro-batches of a chunk run forward in their order, so the n-th forward pass of a chunk is that of micro-batch n.
- A backward pass is known by the output that it starts from, which a forward pass returned.

A pass counts as busy; what lies between the passes of a stage is waiting, transfers and the exchange of shapes
included. On a CPU times come from ``time.perf_counter``. On CUDA they come from events on the current stream, which are
read when the step is over, so that nothing waits for the device in between (not verified on CUDA).

The schedule that overlaps expert-parallel communication (``overlap_moe_expert_parallel_comm``) runs passes of its own
and is not traced.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules

from steelyard.errors import PlanError
from steelyard.pipeline.schedule import Direction, Pass
from steelyard.pipeline.simulate import Span
from steelyard.pipeline.spans import PassTimeline


class HostClock:
    """Seconds of ``time.perf_counter``."""

    mark = staticmethod(time.perf_counter)

    def seconds(self, mark: float) -> float:
        return mark


class DeviceClock:
    """Events on the current stream, on the time axis of ``time.perf_counter``."""

    def __init__(self) -> None:
        self._zero = self.mark()
        self._zero.synchronize()
        self._zero_seconds = time.perf_counter()

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, mark: torch.cuda.Event) -> float:
        mark.synchronize()
        return self._zero_seconds + self._zero.elapsed_time(mark) / 1e3


@dataclass
class Trace:
    """The passes of one rank in one call of a schedule, in the order in which they ran."""

    clock: Any
    passes: list[Pass] = field(default_factory=list)
    marks: list[tuple[Any, Any]] = field(default_factory=list)
    _chunks: dict[int, int] = field(default_factory=dict)
    _forwards: list[int] = field(default_factory=list)
    _outputs: dict[int, tuple[int, int]] = field(default_factory=dict)

    def forward(self, model: object, output: Any, start: Any, end: Any) -> None:
        """Note the next forward pass of ``model``, which returned ``output``."""
        chunk = self._chunks.setdefault(id(model), len(self._chunks))
        if chunk == len(self._forwards):
            self._forwards.append(0)
        micro_batch = self._forwards[chunk]
        self._forwards[chunk] += 1
        # The schedule keeps the output until its backward pass, so its address is its own until then.
        self._outputs[_address(output)] = (micro_batch, chunk)
        self._note("F", micro_batch, chunk, start, end)

    def backward(self, address: int, start: Any, end: Any) -> None:
        """Note the backward pass that started from the output at ``address``."""
        micro_batch, chunk = self._outputs.pop(address)
        self._note("B", micro_batch, chunk, start, end)

    def _note(self, direction: Direction, micro_batch: int, chunk: int, start: Any, end: Any) -> None:
        self.passes.append(Pass(direction, micro_batch, chunk))
        self.marks.append((start, end))

    def seconds(self) -> list[tuple[float, float]]:
        """Start and end of every pass on this machine's clock."""
        return [(self.clock.seconds(start), self.clock.seconds(end)) for start, end in self.marks]


def _address(output: Any) -> int:
    """Identity of a pass's output; the 1F1B schedule wraps it in a list."""
    return id(output[0] if isinstance(output, list) else output)


@contextmanager
def trace_passes() -> Iterator[Trace]:
    """Note every pass that Megatron's schedules run on this rank while this is held, around one call of a schedule.

    Call it where the model runs (inside ``running_on``); ``gather_timeline`` puts the ranks together afterwards.
    """
    on_device = torch.device(torch.cuda.current_device()).type == "cuda"
    trace = Trace(DeviceClock() if on_device else HostClock())
    mark = trace.clock.mark
    forward_step: Callable = schedules.forward_step
    backward_step: Callable = schedules.backward_step

    def traced_forward(forward_step_func: Callable, data_iterator: Any, model: Any, *rest: Any, **named: Any) -> Any:
        start = mark()
        output, tokens = forward_step(forward_step_func, data_iterator, model, *rest, **named)
        trace.forward(model, output, start, mark())
        return output, tokens

    def traced_backward(input_tensor: Any, output_tensor: Any, *rest: Any, **named: Any) -> Any:
        address = _address(output_tensor)  # the step may put a scaled loss in its place
        start = mark()
        gradient = backward_step(input_tensor, output_tensor, *rest, **named)
        trace.backward(address, start, mark())
        return gradient

    schedules.forward_step, schedules.backward_step = traced_forward, traced_backward
    try:
        yield trace
    finally:
        schedules.forward_step, schedules.backward_step = forward_step, backward_step


def gather_timeline(trace: Trace, group: dist.ProcessGroup | None = None) -> PassTimeline:
    """Put the passes of all stages on one time axis, the same on every rank.

    Ranks of one machine share its clock. Clocks of several machines are set by the moment at which they left a barrier,
    which is right to a fraction of a millisecond on a quiet network (not verified on several machines).

    Args:
        trace: this rank's passes.
        group: the ranks of one pipeline in the order of its stages; None is megatron-core's pipeline-parallel group.

    Raises:
        PlanError: on every rank, where some rank ran no pass.
    """
    group = parallel_state.get_pipeline_model_parallel_group() if group is None else group
    spans = [(*one, *times) for one, times in zip(trace.passes, trace.seconds(), strict=True)]
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.barrier(group=group)
    dist.all_gather_object(gathered, (platform.node(), time.perf_counter(), spans), group=group)
    if not all(spans for _, _, spans in gathered):
        raise PlanError("a traced step has a rank without a pass: hold trace_passes around the call of the schedule")
    if len({machine for machine, _, _ in gathered}) == 1:
        zeros = [0.0] * len(gathered)
    else:
        zeros = [zero for _, zero, _ in gathered]
    first = min(spans[0][3] - zero for zero, (_, _, spans) in zip(zeros, gathered, strict=True))
    return PassTimeline(
        tuple(
            Span(stage, chunk, micro_batch, direction, start - zero - first, end - zero - first)
            for stage, (zero, (_, _, spans)) in enumerate(zip(zeros, gathered, strict=True))
            for direction, micro_batch, chunk, start, end in spans
        ),
        len(gathered),
    )
