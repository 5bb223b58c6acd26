"""What test_trace.py runs on ranks: real steps under the tracer, next to a log kept by hooks of the model."""

import time

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from on_ranks import rollouts

from steelyard.cost import ModelShape
from steelyard.errors import PlanError
from steelyard.model.build import build_model, initialize_parallel
from steelyard.parallel import ParallelLayout
from steelyard.pipeline import Pipeline, stage_order
from steelyard.pipeline.exchange import stage_steps
from steelyard.pipeline.schedule import Pass
from steelyard.pipeline.trace import gather_timeline, trace_passes
from steelyard.step import ActorRole, StepSettings, forward_backward_batch


class Log:
    """Passes and calls of this rank as the model and the communicator see them; every row has a length of its own."""

    def __init__(self, layout):
        shape = ModelShape(layers=layout.pp * layout.vpp, hidden=16, ffn=16, heads=2, kv_heads=2, head_dim=8, vocab=96)
        self.steps = []
        self.layout = layout
        self.chunks = []
        self.models = build_model(shape, layout, callbacks=[self._watch])
        self.settings = StepSettings(micro_batch_size=1, layout=layout)

    def _watch(self, chunk):
        self.chunks.append(chunk)
        chunk.register_forward_hook(self._forward)

    def _forward(self, chunk, args, output):
        micro_batch, number = args[0].numel() - 2, self.chunks.index(chunk)
        self.steps.append(Pass("F", micro_batch, number))
        if output.requires_grad:
            output.register_hook(lambda _: self.steps.append(Pass("B", micro_batch, number)))

    def communicate(self, original):
        def logged(communicator, *, tensor_send_next, tensor_send_prev, recv_prev, recv_next, **rest):
            ports = {
                "send_forward": tensor_send_next is not None,
                "receive_forward": recv_prev,
                "send_backward": tensor_send_prev is not None,
                "receive_backward": recv_next,
            }
            if any(ports.values()):
                self.steps.append(tuple(port for port, used in ports.items() if used))
            return original(
                communicator,
                tensor_send_next=tensor_send_next,
                tensor_send_prev=tensor_send_prev,
                recv_prev=recv_prev,
                recv_next=recv_next,
                **rest,
            )

        return logged

    def step(self, count, forward_only=False):
        """One traced step of ``count`` micro-batches; micro-batch n has n + 2 tokens."""
        self.steps.clear()
        batch = rollouts([1] * count, list(range(1, count + 1)))
        original = P2PCommunicator._communicate
        P2PCommunicator._communicate = self.communicate(original)
        try:
            with trace_passes() as trace:
                forward_backward_batch(batch, ActorRole(), self.models, self.settings, forward_only=forward_only)
        finally:
            P2PCommunicator._communicate = original
        return trace, gather_timeline(trace)


def runs_in_the_predicted_order(pp, vpp, group, *counts):
    layout = ParallelLayout(pp=int(pp), vpp=int(vpp), group=int(group))
    initialize_parallel(layout)
    log = Log(layout)
    stage = parallel_state.get_pipeline_model_parallel_rank()
    for count in map(int, counts):
        for forward_only in (False, True):
            pipeline = Pipeline(layout.pp, layout.vpp, layout.group, backward=0.0 if forward_only else 2.0)
            trace, timeline = log.step(count, forward_only)
            assert trace.passes == [one for one in log.steps if isinstance(one, Pass)], (trace.passes, log.steps)
            for one in range(layout.pp):
                assert timeline.order(one) == stage_order(one, count, pipeline), (one, count, pipeline)
            assert log.steps == stage_steps(stage, count, pipeline), (count, pipeline)


def times_are_on_one_axis():
    """No pass starts before its input was sent, and busy, waiting and makespan belong together."""
    layout = ParallelLayout(pp=2)
    initialize_parallel(layout)
    log = Log(layout)
    log.step(4)
    before = time.perf_counter()
    _, timeline = log.step(4)
    elapsed = time.perf_counter() - before
    spans = {(span.stage, span.direction, span.micro_batch): span for span in timeline.spans}
    assert min(span.start for span in timeline.spans) == 0
    assert 0 < timeline.makespan < elapsed
    for micro_batch in range(4):
        assert spans[0, "F", micro_batch].end < spans[1, "F", micro_batch].start
        assert spans[1, "F", micro_batch].end < spans[1, "B", micro_batch].start
        assert spans[1, "B", micro_batch].end < spans[0, "B", micro_batch].start
    for stage in range(2):
        waiting = sum(end - start for start, end in timeline.waiting(stage))
        assert waiting == pytest.approx(timeline.idle[stage])
        assert timeline.busy[stage] + waiting == pytest.approx(timeline.makespan)
    assert timeline.overhead == pytest.approx(timeline.bubble / (1 - timeline.bubble))


def one_stage_is_traced():
    layout = ParallelLayout()
    initialize_parallel(layout)
    trace, timeline = Log(layout).step(3)
    assert trace.passes == stage_order(0, 3, Pipeline(1))
    assert timeline.makespan == pytest.approx(timeline.busy[0], rel=0.5)


def puts_the_schedules_back():
    layout = ParallelLayout(pp=2)
    initialize_parallel(layout)
    log = Log(layout)
    originals = schedules.forward_step, schedules.backward_step

    def break_off():
        with trace_passes():
            assert schedules.forward_step is not originals[0]
            assert schedules.backward_step is not originals[1]
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        break_off()
    assert (schedules.forward_step, schedules.backward_step) == originals
    trace, _ = log.step(3)
    assert (schedules.forward_step, schedules.backward_step) == originals
    seen = len(trace.passes)
    batch = rollouts([1] * 3, [1, 2, 3])
    forward_backward_batch(batch, ActorRole(), log.models, log.settings)
    assert len(trace.passes) == seen == 6


def a_rank_without_a_pass_is_an_error_on_all():
    layout = ParallelLayout(pp=2)
    initialize_parallel(layout)
    log = Log(layout)
    trace, _ = log.step(2)
    if dist.get_rank() == 1:
        with trace_passes() as trace:
            pass
    with pytest.raises(PlanError, match="hold trace_passes around the call"):
        gather_timeline(trace)


def tracing_changes_no_gradient():
    layout = ParallelLayout(pp=2)
    initialize_parallel(layout)
    log = Log(layout)
    batch = rollouts([1] * 4, [1, 2, 3, 4])

    def gradients():
        for model in log.models:
            model.zero_grad_buffer()
        forward_backward_batch(batch, ActorRole(), log.models, log.settings)
        return [parameter.main_grad.clone() for model in log.models for parameter in model.parameters()]

    plain = gradients()
    with trace_passes():
        traced = gradients()
    torch.testing.assert_close(traced, plain, rtol=0, atol=0)
