"""Follows a training step through Megatron's schedules: where each phase begins, and the shapes of stage transfers.

A step is run twice. The first time, the *scouting* run, schedules only look at what each micro-batch would feed into
the model; the optimizer then makes its state. The second time all of it runs, and the shapes that stages exchange
before every transfer come from what was seen: a rank alone has nobody to exchange them with.

Source: megatron-core pipeline_parallel/schedules.py and p2p_communication.py, 0.16: the schedules look up
``forward_step`` and ``backward_step`` in their module at every call; every rank runs the same table of (micro-batch,
chunk), forward passes in its order and backward passes with the chunks reversed.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules
from megatron.core.utils import unwrap_model

from steelyard.errors import PlanError
from steelyard.memory.fakes import StandIn, replaced
from steelyard.memory.record import Recorder
from steelyard.parallel import ParallelLayout

Shape = tuple[int, ...]
_SCHEDULES = "megatron.core.pipeline_parallel.schedules"
_NAMES = (
    "forward_backward_no_pipelining",
    "forward_backward_pipelining_without_interleaving",
    "forward_backward_pipelining_with_interleaving",
)


class _SeenError(Exception):
    """Ends a forward pass at the model's door; carries the shape [b, s] of its token ids."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape


def _stop(module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    ids = args[0] if args else kwargs["input_ids"]
    raise _SeenError(tuple(ids.shape))


@dataclass
class Passes:
    """The schedule calls of one step.

    Attributes:
        recorder: told of every phase.
        layout: of the predicted step.
        hidden: size of the hidden state.
        seen: for each call of a schedule, the shape [b, s] of the token ids of its micro-batches.
    """

    recorder: Recorder
    layout: ParallelLayout
    hidden: int
    seen: list[list[Shape]] = field(default_factory=list)

    @contextlib.contextmanager
    def scouting(self) -> Iterator[None]:
        """Schedules look at their micro-batches and run nothing."""
        with replaced(tuple(StandIn(_SCHEDULES, name, lambda _: self._scout, "looks only") for name in _NAMES)):
            yield

    def _scout(
        self, *, forward_step_func: Callable, data_iterator: Any, model: Any, num_microbatches: int, **unused: Any
    ) -> list:
        chunk = model[0] if isinstance(model, list) else model
        data = data_iterator[0] if isinstance(data_iterator, list) else data_iterator
        shapes = []
        handle = chunk.register_forward_pre_hook(_stop, with_kwargs=True)
        try:
            for _ in range(num_microbatches):
                try:
                    forward_step_func(data, chunk)
                except _SeenError as seen:
                    shapes.append(seen.shape)
        finally:
            handle.remove()
        self.seen.append(shapes)
        return []

    @contextlib.contextmanager
    def running(self, models: Sequence[torch.nn.Module]) -> Iterator[None]:
        """Schedules run, phases are noted, and transfers get the shapes that were seen."""
        self._calls = iter(self.seen)
        self._incoming: deque[Shape] = deque()
        self._returning: deque[Shape] = deque()
        mine = [StandIn(_SCHEDULES, name, self._with_shapes, "hands shapes to transfers") for name in _NAMES]
        mine += [
            StandIn(_SCHEDULES, "forward_step", self._noting("forward", "activations"), "notes the phase"),
            StandIn(_SCHEDULES, "backward_step", self._noting("backward", "temporary"), "notes the phase"),
            StandIn(
                "megatron.core.pipeline_parallel.p2p_communication:P2PCommunicator",
                "_communicate_shapes",
                lambda _: self._next_shapes,
                "nobody to exchange shapes with",
            ),
        ]
        config: Any = models[0].config
        finish = config.finalize_model_grads_func
        config.finalize_model_grads_func = self._noting("gradient reduction", "temporary")(finish)
        handles = [handle for model in models for handle in self._watch_ends(model)]
        try:
            with replaced(tuple(mine)):
                yield
        finally:
            config.finalize_model_grads_func = finish
            for handle in handles:
                handle.remove()

    def _noting(self, phase: str, tag: str) -> Callable[[Callable], Callable]:
        def make(original: Callable) -> Callable:
            def noted(*args: Any, **kwargs: Any) -> Any:
                if phase == "backward" and _is_none(args[2]):
                    self.recorder.enter("backward: loss", "logits and loss")
                else:
                    self.recorder.enter(phase, tag)
                result = original(*args, **kwargs)
                self.recorder.tag = "temporary"
                return result

            return noted

        return make

    def _watch_ends(self, model: torch.nn.Module) -> Iterator[Any]:
        """Layers all need alike; what comes before the first and after the last of them is a section of its own."""
        recorder, bare = self.recorder, unwrap_model(model)

        def before_logits(module: torch.nn.Module, args: tuple) -> None:
            if recorder.phase == "forward":
                recorder.go_on("forward: logits", "logits and loss")
            if args[0].requires_grad:
                args[0].register_hook(lambda gradient: recorder.go_on("backward", "temporary"))

        def after_logits(module: torch.nn.Module, args: tuple, output: Any) -> None:
            logits = output[0] if isinstance(output, tuple) else output
            if logits.requires_grad:
                logits.register_hook(lambda gradient: recorder.go_on("backward: logits", "logits and loss"))

        def after_embedding(module: torch.nn.Module, args: tuple, output: torch.Tensor) -> None:
            if output.requires_grad:
                output.register_hook(lambda gradient: recorder.go_on("backward: embedding", "temporary"))

        if bare.post_process:
            yield bare.output_layer.register_forward_pre_hook(before_logits)
            yield bare.output_layer.register_forward_hook(after_logits)
        if bare.pre_process:
            yield bare.embedding.register_forward_hook(after_embedding)

    def _with_shapes(self, schedule: Callable) -> Callable:
        def run(**settings: Any) -> Any:
            shapes = next(self._calls, None)
            if shapes is None or len(shapes) != settings["num_microbatches"]:
                raise PlanError("the step ran other micro-batches the second time: it must repeat itself")
            self._plan_transfers(shapes)
            return schedule(**settings)

        return run

    def _plan_transfers(self, shapes: list[Shape]) -> None:
        layout = self.layout
        split = layout.tokens_split_over_tp
        states = [(length // split, rows, self.hidden) for rows, length in shapes]
        table = schedules.get_schedule_table(len(states), layout.vpp, layout.group)
        first = parallel_state.get_pipeline_model_parallel_rank() == 0
        last = parallel_state.get_pipeline_model_parallel_rank() == layout.pp - 1
        self._incoming = deque(states[number] for number, chunk in table if not (first and chunk == 0))
        # Backwards the chunks come in reverse: chunk 0 stands for the last one.
        self._returning = deque(states[number] for number, chunk in table if not (last and chunk == 0))

    def _next_shapes(
        self, tensor_send_next: Any, tensor_send_prev: Any, recv_prev: bool, recv_next: bool
    ) -> tuple[Shape, Shape]:
        return (
            self._incoming.popleft() if recv_prev else (0, 0, 0),
            self._returning.popleft() if recv_next else (0, 0, 0),
        )


def _is_none(gradient: Any) -> bool:
    """Whether a backward pass is handed no gradient: it begins at the loss."""
    return gradient is None or (isinstance(gradient, list) and gradient[0] is None)
