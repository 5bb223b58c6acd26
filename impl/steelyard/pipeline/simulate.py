"""Predicted time of a step on a pipeline: every pass starts when its stage is free and its input has arrived.

The order of passes on a stage is the schedule's (``schedule.py``), so one graph of dependencies serves every set of
durations. Passes are sorted into levels of that graph; the passes of one level do not depend on each other and are
computed at once, for many candidates side by side. That is what makes a search over orders and contents affordable
without a compiled kernel.

Sends are assumed not to block the sender, which holds for Megatron's overlapped and unbatched transfers.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from steelyard.errors import PlanError
from steelyard.pipeline.schedule import Direction, Pipeline, check_count, stage_order

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Span(NamedTuple):
    """One pass on the time axis; ``start`` and ``end`` in the unit of the simulated work."""

    stage: int
    chunk: int
    micro_batch: int
    direction: Direction
    start: float
    end: float


@dataclass(frozen=True)
class Program:
    """The passes of all stages, sorted by level, and what each waits for.

    All arrays have one entry per pass. ``previous`` (the pass before it on its stage) and ``source`` (the pass that
    produces its input) are positions in the same arrays, or ``size`` for "nothing to wait for".
    """

    stage: Ints
    chunk: Ints
    micro_batch: Ints
    is_forward: NDArray[np.bool_]
    previous: Ints
    source: Ints
    crosses: NDArray[np.bool_]  # the input comes from another stage
    levels: Ints  # levels[i]:levels[i+1] are the passes of level i

    @property
    def size(self) -> int:
        return len(self.stage)

    @cached_property
    def before(self) -> list[tuple[int, int]]:
        """(previous, source) of each pass, as Python numbers for walking."""
        return list(zip(self.previous.tolist(), self.source.tolist(), strict=True))


@lru_cache(maxsize=128)
def _program(stages: int, virtual: int, group: int, count: int, forward_only: bool) -> Program:
    pipeline = Pipeline(stages, virtual, group, backward=0.0 if forward_only else 1.0)
    orders = [stage_order(stage, count, pipeline) for stage in range(stages)]
    level, last = _levels(orders, pipeline)
    keys = sorted(level, key=lambda key: (level[key], key[0] % stages))
    position = {key: index for index, key in enumerate(keys)}
    size = len(keys)
    sources = [_source(key, last) for key in keys]
    previous = np.full(size, size, np.int64)
    for stage, order in enumerate(orders):
        chain = [position[(one.chunk * stages + stage, one.micro_batch, one.direction)] for one in order]
        previous[chain[1:]] = chain[:-1]
    parts = np.array([key[0] for key in keys], np.int64)
    depth = np.array([level[key] for key in keys], np.int64)
    return Program(
        stage=parts % stages,
        chunk=parts // stages,
        micro_batch=np.array([key[1] for key in keys], np.int64),
        is_forward=np.array([key[2] == "F" for key in keys]),
        previous=previous,
        source=np.array([size if source is None else position[source] for source in sources], np.int64),
        crosses=np.array(
            [
                source is not None and (source[0] - key[0]) % stages != 0
                for key, source in zip(keys, sources, strict=True)
            ]
        ),
        levels=np.searchsorted(depth, np.arange(depth[-1] + 2)),
    )


_Key = tuple[int, int, str]  # virtual stage, micro-batch, direction


def _source(key: _Key, last: int) -> _Key | None:
    """The pass whose output ``key`` waits for."""
    part, micro_batch, direction = key
    if direction == "F":
        return None if part == 0 else (part - 1, micro_batch, "F")
    return (last, micro_batch, "F") if part == last else (part + 1, micro_batch, "B")


def _levels(orders: list[list], pipeline: Pipeline) -> tuple[dict[_Key, int], int]:
    """Depth of every pass in the graph of dependencies, and the last virtual stage."""
    stages, last = pipeline.stages, pipeline.stages * pipeline.virtual - 1
    level: dict[_Key, int] = {}
    done, depth = [0] * stages, [-1] * stages
    waiting = set(range(stages))
    while waiting:
        progress = False
        for stage in sorted(waiting):
            order, at, now = orders[stage], done[stage], depth[stage]
            while at < len(order):
                one = order[at]
                key = (one.chunk * stages + stage, one.micro_batch, one.direction)
                source = _source(key, last)
                arrived = -1 if source is None else level.get(source)
                if arrived is None:
                    break
                now = max(now, arrived) + 1
                level[key] = now
                at += 1
            progress |= at > done[stage]
            done[stage], depth[stage] = at, now
            if at == len(order):
                waiting.discard(stage)
        if waiting and not progress:  # a defect of the order, never of the input
            raise AssertionError(f"the order of passes deadlocks on {pipeline}")
    return level, last


def program(count: int, pipeline: Pipeline) -> Program:
    """The graph of passes for ``count`` micro-batches; cached, because a search asks for the same one again and
    again.
    """
    check_count(count, pipeline)
    return _program(pipeline.stages, pipeline.virtual, pipeline.group_size, count, pipeline.backward == 0)


def _ends(graph: Program, durations: Floats, p2p: float) -> Floats:
    """End of every pass; ``durations`` is [passes] or [passes, candidates], and so is the result plus one row of
    zeros.
    """
    ends = np.empty((graph.size + 1, *durations.shape[1:]))
    ends[graph.size] = 0.0
    delay = np.where(graph.crosses, p2p, 0.0).reshape(-1, *([1] * (durations.ndim - 1)))
    bounds = graph.levels.tolist()
    for low, high in itertools.pairwise(bounds):
        start = ends.take(graph.source[low:high], axis=0)
        if p2p:
            start += delay[low:high]
        np.maximum(start, ends.take(graph.previous[low:high], axis=0), out=start)
        np.add(start, durations[low:high], out=ends[low:high])
    return ends


def _durations(graph: Program, work: Floats, pipeline: Pipeline) -> Floats:
    """Duration of every pass; ``work`` is [M, stages * virtual] or, for candidates side by side, [M, candidates]."""
    ratio = np.where(graph.is_forward, 1.0, pipeline.backward)
    part = graph.chunk * pipeline.stages + graph.stage
    return work[graph.micro_batch, part] * ratio


def _factors(graph: Program, pipeline: Pipeline) -> Floats:
    """Duration of every pass per unit of its micro-batch's work."""
    part = graph.chunk * pipeline.stages + graph.stage
    return np.asarray(pipeline.shares)[part] * np.where(graph.is_forward, 1.0, pipeline.backward)


def makespans(work: Floats, pipeline: Pipeline) -> Floats:
    """Makespan of many candidates at once.

    Args:
        work: [candidates, M] forward work of each micro-batch over the whole model, in execution order, or
            [candidates, M, stages * virtual], the forward work in each virtual stage.
        pipeline: where it runs.

    Returns:
        [candidates] makespans in the unit of ``work``.
    """
    graph = program(work.shape[1], pipeline)
    if work.ndim == 2:
        durations = work.T[graph.micro_batch] * _factors(graph, pipeline)[:, None]
    else:
        part = graph.chunk * pipeline.stages + graph.stage
        durations = work[:, graph.micro_batch, part].T * np.where(graph.is_forward, 1.0, pipeline.backward)[:, None]
    return _ends(graph, durations, pipeline.p2p).max(axis=0)


def slopes(work: Floats, pipeline: Pipeline) -> Floats:
    """A subgradient of the makespan: what each micro-batch adds to it per unit of its work.

    The makespan is the greatest of many sums of durations, hence convex in ``work``: for any other sizes it is at least
    ``makespan + slopes @ (other - work)``.

    Args:
        work: [M] forward work over the whole model, in execution order.

    Returns:
        [M] time of the passes of each micro-batch on one critical path, per unit of work.
    """
    graph = program(len(work), pipeline)
    factor = _factors(graph, pipeline)
    ends = _ends(graph, work[graph.micro_batch] * factor, pipeline.p2p)
    path = _critical(graph, ends, pipeline.p2p)
    return np.bincount(graph.micro_batch[path], weights=factor[path], minlength=len(work)).astype(np.float64)


def _critical(graph: Program, ends: Floats, p2p: float) -> list[int]:
    """A chain of passes without slack, from the last to the first."""
    times, crosses = ends.tolist(), graph.crosses.tolist()
    index = int(np.argmax(ends[: graph.size]))
    path = [index]
    while True:
        previous, source = graph.before[index]
        if previous == graph.size and source == graph.size:
            return path
        arrival = times[source] + (p2p if crosses[index] else 0.0)
        take_source = previous == graph.size or (source != graph.size and arrival >= times[previous])
        index = source if take_source else previous
        path.append(index)


@dataclass(frozen=True)
class Timeline:
    """What the simulation says; times are in the unit of the work that went in.

    Attributes:
        makespan: from the first forward pass to the end of the last backward pass.
        ideal: busy time of the mean stage.
        busy: busy time of each stage.
        pipeline: the pipeline that was simulated.
    """

    makespan: float
    ideal: float
    busy: tuple[float, ...]
    pipeline: Pipeline
    _graph: Program = field(repr=False, compare=False)
    _starts: Floats = field(repr=False, compare=False)
    _finishes: Floats = field(repr=False, compare=False)

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

    @cached_property
    def spans(self) -> list[Span]:
        """Every pass, by stage and then by time."""
        graph, order = self._graph, np.lexsort((np.arange(self._graph.size), self._graph.stage))
        return [self._span(index) for index in order] if graph.size else []

    @cached_property
    def critical_path(self) -> list[Span]:
        """A chain of passes without slack from the start of the step to its end."""
        path = _critical(self._graph, np.append(self._finishes, 0.0), self.pipeline.p2p)
        return [self._span(index) for index in reversed(path)]

    def _span(self, index: int) -> Span:
        graph = self._graph
        return Span(
            stage=int(graph.stage[index]),
            chunk=int(graph.chunk[index]),
            micro_batch=int(graph.micro_batch[index]),
            direction="F" if graph.is_forward[index] else "B",
            start=float(self._starts[index]),
            end=float(self._finishes[index]),
        )


def checked_work(work: ArrayLike, pipeline: Pipeline) -> Floats:
    """``work`` as [M, stages * virtual]."""
    array = np.asarray(work, np.float64)
    parts = pipeline.stages * pipeline.virtual
    if array.ndim not in (1, 2) or (array.ndim == 2 and array.shape[1] != parts):
        raise PlanError(
            f"work has shape {array.shape}: give one number per micro-batch, or [micro-batches, {parts}] with one "
            f"column per virtual stage"
        )
    bad = np.argwhere(~(np.isfinite(array) & (array >= 0)))
    if len(bad):
        raise PlanError(f"work of micro-batch {bad[0][0]} is {array[tuple(bad[0])]}: it must be finite and at least 0")
    return array if array.ndim == 2 else array[:, None] * np.asarray(pipeline.shares)


def simulate(work: ArrayLike, pipeline: Pipeline) -> Timeline:
    """Run the schedule on given durations.

    Args:
        work: [M] forward work of each micro-batch over the whole model, shared out by ``pipeline.stage_cost``; or
            [M, stages * virtual], the forward work in each virtual stage. Execution order; any unit.
        pipeline: where it runs.

    Raises:
        PlanError: a count that Megatron refuses, a wrong shape, or work that is negative or not finite.
    """
    parts = checked_work(work, pipeline)
    graph = program(len(parts), pipeline)
    durations = _durations(graph, parts, pipeline)
    finishes = _ends(graph, durations, pipeline.p2p)[: graph.size]
    busy = np.bincount(graph.stage, weights=durations, minlength=pipeline.stages)
    return Timeline(
        makespan=float(finishes.max()),
        ideal=float(busy.mean()),
        busy=tuple(busy.tolist()),
        pipeline=pipeline,
        _graph=graph,
        _starts=finishes - durations,
        _finishes=finishes,
    )
