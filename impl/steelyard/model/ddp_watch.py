"""Sees what Megatron's DDP does during a step: which collective it starts, when, on what, and which checks it makes.

Nothing is read from a configuration: the calls themselves are recorded while ``watch_ddp`` is held. A collective that
starts while autograd runs a backward pass overlaps with it, whatever the settings say.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, param_and_grad_buffer

Purpose = Literal["gradients", "parameters"]
Phase = Literal["forward", "backward", "outside"]


@dataclass(frozen=True)
class Collective:
    """One collective that DDP started on this rank.

    Attributes:
        purpose: what it moves.
        kind: name of the function, e.g. ``all_reduce`` or ``reduce_scatter_tensor``.
        op: ``sum`` or ``avg`` for gradients, else empty.
        chunk: index of the model chunk.
        phase: what this rank was doing when it started.
        waits: the caller went on only when it was done.
        ahead: it was started for a bucket that nothing waited for yet, in the wait for another.
        dtype, elements, ranks: of the whole tensor, and of the group.
    """

    purpose: Purpose
    kind: str
    op: str
    chunk: int
    phase: Phase
    waits: bool
    ahead: bool
    dtype: torch.dtype
    elements: int
    ranks: int


@dataclass
class Watch:
    """What was seen.

    Attributes:
        collectives: in the order in which they were started.
        nan_checks, large_checks: how often DDP checked gradients for NaN and infinity, and for large values.
    """

    collectives: list[Collective] = field(default_factory=list)
    nan_checks: int = 0
    large_checks: int = 0

    def of(self, purpose: Purpose) -> list[Collective]:
        return [one for one in self.collectives if one.purpose == purpose]


@contextlib.contextmanager
def watch_ddp(chunks: list[DistributedDataParallel]) -> Iterator[Watch]:
    """Record what DDP does with these chunks, on this rank, while the context is held.

    In a first step with ``overlap_grad_reduce`` Megatron learns the order of gradients and reduces after the backward
    pass: watch a later one. The functions of ``torch.distributed`` that DDP calls are replaced for the time of the
    context.
    """
    watcher = _Watcher(Watch())
    with contextlib.ExitStack() as stack:
        for index, chunk in enumerate(chunks):
            stack.callback(chunk.register_forward_pre_hook(watcher.enter_forward).remove)
            stack.callback(chunk.register_forward_hook(watcher.leave_forward).remove)
            for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
                _replace(stack, group, "start_grad_sync", partial(watcher.start, group, index, "gradients"))
                _replace(stack, group, "start_param_sync", partial(watcher.start, group, index, "parameters"))
                _replace(stack, group, "finish_param_sync", partial(watcher.wait, group))
                _replace(stack, group, "check_grads", watcher.check)
        for owner, name in (
            (param_and_grad_buffer, "dist_reduce_scatter_func"),
            (param_and_grad_buffer, "dist_all_gather_func"),
            (dist, "all_reduce"),
        ):
            _replace(stack, owner, name, watcher.collective)
        yield watcher.watch


class _Watcher:
    """Follows one rank through its step; each method takes the place of a function and calls it."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self.in_forward = 0
        self.waiting: list[object] = []  # bucket groups whose parameters are waited for, the innermost last
        self.starting: list[tuple[object, int, Purpose]] = []

    def enter_forward(self, *unused: object) -> None:
        self.in_forward += 1

    def leave_forward(self, *unused: object) -> None:
        self.in_forward -= 1

    @property
    def phase(self) -> Phase:
        # Recomputation runs forward passes inside the backward pass. PyTorch has no public name for "autograd runs".
        if torch._C._current_graph_task_id() != -1:
            return "backward"
        return "forward" if self.in_forward else "outside"

    def wait(self, group: object, finish: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.waiting.append(group)
        try:
            return finish(*args, **kwargs)
        finally:
            self.waiting.pop()

    def start(
        self, group: object, chunk: int, purpose: Purpose, start: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        self.starting.append((group, chunk, purpose))
        try:
            return start(*args, **kwargs)
        finally:
            self.starting.pop()

    def check(self, check: Callable[..., Any], check_for_nan_or_inf: bool, check_for_large: bool) -> Any:
        self.watch.nan_checks += bool(check_for_nan_or_inf)
        self.watch.large_checks += bool(check_for_large)
        return check(check_for_nan_or_inf, check_for_large)

    def collective(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.starting:  # others than DDP call all_reduce too
            group, chunk, purpose = self.starting[-1]
            whole = max((one for one in args if isinstance(one, torch.Tensor)), key=torch.Tensor.numel)
            self.watch.collectives.append(
                Collective(
                    purpose=purpose,
                    kind=function.__name__,
                    op=_op_name(kwargs.get("op")),
                    chunk=chunk,
                    phase=self.phase,
                    waits=not kwargs["async_op"],
                    ahead=bool(self.waiting) and self.waiting[-1] is not group,
                    dtype=whole.dtype,
                    elements=whole.numel(),
                    ranks=dist.get_world_size(kwargs["group"]),
                )
            )
        return function(*args, **kwargs)


def _op_name(op: Any) -> str:
    return {dist.ReduceOp.SUM: "sum", dist.ReduceOp.AVG: "avg"}.get(op, "")


def _replace(stack: contextlib.ExitStack, owner: Any, name: str, instead: Callable[..., Any]) -> None:
    """Put ``instead(original, ...)`` in the place of a function of a module or a method of one object."""
    original = getattr(owner, name)
    of_class = name not in vars(owner)
    setattr(owner, name, partial(instead, original))
    stack.callback(delattr, owner, name) if of_class else stack.callback(setattr, owner, name, original)
