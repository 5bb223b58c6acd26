"""Predicted time of a step on a pipeline: every pass starts when its stage is free and its input has arrived.

The order of passes on a stage is the schedule's (``schedule.py``), so one graph of dependencies serves every set of
durations. Passes are sorted into levels of that graph; the passes of one level do not depend on each other and are
computed at once, for many candidates side by side. That is what makes a search over orders and contents affordable
without a compiled kernel.

Sends are assumed not to block the sender, which holds for Megatron's overlapped and unbatched transfers. Where stages
exchange shapes (``Pipeline.exchange``), the calls in which they meet are nodes of the graph too: a call ends when all
who take part have come to theirs.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from steelyard.errors import PlanError
from steelyard.pipeline.exchange import meetings, stage_steps
from steelyard.pipeline.schedule import Direction, Pass, Pipeline, check_count, schedule_table, warmup_passes

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]


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
    """The passes of all stages, and the calls between them if there are any, sorted by level, and what each waits for.

    All arrays have one entry per node, a pass or a call. ``previous`` (the node before it on its stage), ``source``
    (the pass that produces a pass's input; for a call, what a partner does before its own call) and ``second`` (the
    same of a call's other partner; None without calls) are positions in the same arrays, or ``size`` for "nothing to
    wait for". A call has chunk and micro-batch 0.
    """

    stage: Ints
    chunk: Ints
    micro_batch: Ints
    is_pass: Flags
    is_forward: Flags
    previous: Ints
    source: Ints
    second: Ints | None
    crosses: Flags  # the input of a pass comes from another stage, without a call
    levels: Ints  # levels[i]:levels[i+1] are the nodes of level i

    @property
    def size(self) -> int:
        return len(self.stage)

    @cached_property
    def crossing(self) -> list[bool]:
        """``crosses`` for walking."""
        return self.crosses.tolist()

    @cached_property
    def before(self) -> list[tuple[int, ...]]:
        """(source, previous) or (source, previous, second) of each node, as Python numbers for walking."""
        columns = [self.source, self.previous, *([] if self.second is None else [self.second])]
        return list(zip(*(column.tolist() for column in columns), strict=True))


@lru_cache(maxsize=128)
def _program(stages: int, virtual: int, group: int, count: int, forward_only: bool, exchange: bool) -> Program:
    pipeline = Pipeline(stages, virtual, group, backward=0.0 if forward_only else 1.0)
    return (_with_calls if exchange else _passes_alone)(count, pipeline)


def _sorted(
    orders: list[Ints], source: Ints, second: Ints | None, crosses: Flags, **described: NDArray[Any]
) -> Program:
    """Sort nodes by level. They have names, numbers from 0; ``orders`` are those of each stage in its order, the other
    arrays have an entry for each name, -1 for "nothing to wait for".
    """
    waits = [source] if second is None else [source, second]
    level = np.array(_levels([one.tolist() for one in orders], [one.tolist() for one in waits]), np.int64)
    size = len(source)
    stage, previous = np.empty(size, np.int64), np.full(size, -1, np.int64)
    for number, one in enumerate(orders):
        stage[one] = number
        previous[one[1:]] = one[:-1]
    order = np.lexsort((stage, level))  # position -> name
    position = np.empty(size + 1, np.int64)
    position[order] = np.arange(size)
    position[-1] = size  # of nothing to wait for
    depth = level[order]
    return Program(
        stage=stage[order],
        previous=position[previous[order]],
        source=position[source[order]],
        second=None if second is None else position[second[order]],
        crosses=crosses[order],
        levels=np.searchsorted(depth, np.arange(depth[-1] + 2)),
        **{name: array[order] for name, array in described.items()},
    )


def _passes_alone(count: int, pipeline: Pipeline) -> Program:
    """A pass has a name made of direction, virtual stage and micro-batch, in this order."""
    stages, half = pipeline.stages, pipeline.stages * pipeline.virtual * count
    table = np.array(schedule_table(count, pipeline), np.int64)
    source = _sources(pipeline, count)[: half if pipeline.backward == 0 else None]
    name = np.arange(len(source))
    part = name % half // count
    return _sorted(
        [_names(stage, table, pipeline) for stage in range(stages)],
        source,
        None,
        crosses=(source >= 0) & ((source % half // count - part) % stages != 0),
        chunk=part // stages,
        micro_batch=name % count,
        is_pass=np.ones(len(source), np.bool_),
        is_forward=name < half,
    )


def _names(stage: int, table: Ints, pipeline: Pipeline) -> Ints:
    """The passes of ``stage`` in the order of ``stage_order``; ``table`` is the schedule's, [passes, 2]."""
    total, parts, count = len(table), pipeline.stages * pipeline.virtual, len(table) // pipeline.virtual
    micro_batch, chunk = table.T
    forward = (chunk * pipeline.stages + stage) * count + micro_batch
    warmup, at = warmup_passes(stage, count, pipeline), np.arange(total)
    if pipeline.backward == 0:
        return forward
    backward = (parts + (pipeline.virtual - 1 - chunk) * pipeline.stages + stage) * count + micro_batch
    names = np.empty(2 * total, np.int64)
    names[np.where(at < warmup, at, 2 * at - warmup)] = forward
    names[np.where(at < total - warmup, warmup + 2 * at + 1, total + at)] = backward
    return names


def _sources(pipeline: Pipeline, count: int) -> Ints:
    """For every name, that of the pass whose output it waits for; -1 for the forward passes of the first stage."""
    half = pipeline.stages * pipeline.virtual * count
    forward = np.maximum(np.arange(half) - count, -1)
    backward = np.arange(half) + half + count
    backward[half - count :] = np.arange(half - count, half)  # the last stage waits for its own forward pass
    return np.concatenate((forward, backward))


def _with_calls(count: int, pipeline: Pipeline) -> Program:
    """Steps are named in the order of the stages and, on each, of time."""
    steps = [stage_steps(stage, count, pipeline) for stage in range(pipeline.stages)]
    first = np.cumsum([0, *map(len, steps)])
    waits = np.full((2, first[-1]), -1, np.int64)
    for (stage, at), partners in meetings(steps).items():
        # A partner has come to its call when the step before it has ended; nothing is before the first.
        before = [first[other] + step - 1 for other, step in partners if step > 0]
        waits[: len(before), first[stage] + at] = before
    flat = [step if isinstance(step, Pass) else None for one in steps for step in one]
    return _sorted(
        [np.arange(start, end) for start, end in itertools.pairwise(first.tolist())],
        waits[0],
        waits[1],
        crosses=np.zeros(len(flat), np.bool_),
        chunk=np.array([one.chunk if one else 0 for one in flat]),
        micro_batch=np.array([one.micro_batch if one else 0 for one in flat]),
        is_pass=np.array([one is not None for one in flat]),
        is_forward=np.array([one is not None and one.direction == "F" for one in flat]),
    )


def _levels(orders: list[list[int]], waits: list[list[int]]) -> list[int]:
    """Depth of every node in the graph of dependencies, by name."""
    level = [-1] * len(waits[0]) + [0]  # -1: not known yet; the last is of nothing to wait for
    done, depth = [0] * len(orders), [0] * len(orders)
    missing = len(waits[0])
    while missing:
        before = missing
        for stage, order in enumerate(orders):
            at, now = done[stage], depth[stage]
            while at < len(order):
                name = order[at]
                arrived = [level[source[name]] for source in waits]
                if min(arrived) < 0:
                    break
                now = max(now, *arrived) + 1
                level[name] = now
                at += 1
            missing -= at - done[stage]
            done[stage], depth[stage] = at, now
        if missing == before:  # a defect of the order, never of the input
            raise AssertionError("the order of passes deadlocks")
    return level[:-1]


def program(count: int, pipeline: Pipeline) -> Program:
    """The graph of passes for ``count`` micro-batches; cached, because a search asks for the same one again and
    again.
    """
    check_count(count, pipeline)
    stages, virtual, group = pipeline.stages, pipeline.virtual, pipeline.group_size
    return _program(stages, virtual, group, count, pipeline.backward == 0, pipeline.exchange)


def _ends(graph: Program, durations: Floats, p2p: float) -> Floats:
    """End of every node; ``durations`` is [nodes] or [nodes, candidates], and so is the result plus one row of
    zeros.
    """
    ends = np.empty((graph.size + 1, *durations.shape[1:]))
    ends[graph.size] = 0.0
    delay = np.where(graph.crosses, p2p, 0.0).reshape(-1, *([1] * (durations.ndim - 1)))
    bounds = graph.levels.tolist()
    for low, high in itertools.pairwise(bounds):
        start = ends.take(graph.source[low:high], axis=0)
        if graph.second is not None:
            np.maximum(start, ends.take(graph.second[low:high], axis=0), out=start)
        elif p2p:
            start += delay[low:high]
        np.maximum(start, ends.take(graph.previous[low:high], axis=0), out=start)
        np.add(start, durations[low:high], out=ends[low:high])
    return ends


def _durations(graph: Program, work: Floats, pipeline: Pipeline, fixed: float) -> Floats:
    """Duration of every node; ``work`` is [M, stages * virtual], ``fixed`` what a pass takes beside it."""
    ratio = np.where(graph.is_forward, 1.0, pipeline.backward)
    part = graph.chunk * pipeline.stages + graph.stage
    return np.where(graph.is_pass, work[graph.micro_batch, part] * ratio + fixed, pipeline.p2p)


@lru_cache(maxsize=128)
def _factors(count: int, pipeline: Pipeline) -> Floats:
    """Duration of every node per unit of its micro-batch's work; read-only."""
    graph = program(count, pipeline)
    part = graph.chunk * pipeline.stages + graph.stage
    factors = np.asarray(pipeline.shares)[part] * np.where(graph.is_forward, 1.0, pipeline.backward) * graph.is_pass
    factors.flags.writeable = False
    return factors


@dataclass(frozen=True)
class Runs:
    """Many candidates of one count, simulated side by side.

    Attributes:
        times: [candidates] makespans in the unit of the work.
    """

    times: Floats
    _graph: Program = field(repr=False)
    _finishes: Floats = field(repr=False)
    _count: int = field(repr=False)
    _pipeline: Pipeline = field(repr=False)

    def slope(self, at: int) -> Floats:
        """[M] subgradient of the makespan at candidate ``at``: what each micro-batch adds to it per unit of its work.

        It is the time of the passes of each micro-batch on one critical path. The makespan is the greatest of many
        sums of durations, hence convex in the work: for any other sizes it is at least
        ``times[at] + slope @ (other - sizes)``.
        """
        graph = self._graph
        factor = _factors(self._count, self._pipeline)
        path = _critical(graph, self._finishes[:, at], self._pipeline.p2p)
        return np.bincount(graph.micro_batch[path], weights=factor[path], minlength=self._count).astype(np.float64)


def run_many(work: Floats, pipeline: Pipeline) -> Runs:
    """Simulate many candidates at once.

    Args:
        work: [candidates, M] forward work of each micro-batch over the whole model, in execution order, or
            [candidates, M, stages * virtual], the forward work in each virtual stage.
        pipeline: where it runs.
    """
    graph = program(work.shape[1], pipeline)
    if work.ndim == 2:
        durations = work.T[graph.micro_batch] * _factors(work.shape[1], pipeline)[:, None]
    else:
        part = graph.chunk * pipeline.stages + graph.stage
        ratio = np.where(graph.is_forward, 1.0, pipeline.backward) * graph.is_pass
        durations = work[:, graph.micro_batch, part].T * ratio[:, None]
    if pipeline.exchange and pipeline.p2p:
        durations[~graph.is_pass] = pipeline.p2p
    finishes = _ends(graph, durations, pipeline.p2p)
    return Runs(finishes.max(axis=0), graph, finishes, work.shape[1], pipeline)


def makespans(work: Floats, pipeline: Pipeline) -> Floats:
    """[candidates] makespans of ``run_many``."""
    return run_many(work, pipeline).times


def _critical(graph: Program, ends: Floats, p2p: float) -> list[int]:
    """A chain of nodes without slack, from the last to the first."""
    times, crosses, before, none = ends.tolist(), graph.crossing, graph.before, graph.size
    index = int(np.argmax(ends[:none]))
    path = [index]
    while True:
        latest, following = -1.0, none
        for at, one in enumerate(before[index]):
            arrival = times[one] + (p2p if at == 0 and crosses[index] else 0.0)
            if one != none and arrival > latest:
                latest, following = arrival, one
        if following == none:
            return path
        index = following
        path.append(index)


class StageTimes:
    """What follows from the makespan, the busy time of the mean stage (``ideal``) and that of each (``busy``)."""

    makespan: float
    ideal: float
    busy: tuple[float, ...]

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


@dataclass(frozen=True)
class Timeline(StageTimes):
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

    @cached_property
    def spans(self) -> list[Span]:
        """Every pass, by stage and then by time."""
        graph = self._graph
        order = np.lexsort((np.arange(graph.size), graph.stage))
        return [self._span(index) for index in order[graph.is_pass[order]]]

    @cached_property
    def critical_path(self) -> list[Span]:
        """A chain of passes without slack from the start of the step to its end."""
        path = _critical(self._graph, np.append(self._finishes, 0.0), self.pipeline.p2p)
        return [self._span(index) for index in reversed(path) if self._graph.is_pass[index]]

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


def simulate(work: ArrayLike, pipeline: Pipeline, *, fixed: float = 0.0) -> Timeline:
    """Run the schedule on given durations.

    Args:
        work: [M] forward work of each micro-batch over the whole model, shared out by ``pipeline.stage_cost``; or
            [M, stages * virtual], the forward work in each virtual stage. Execution order; any unit.
        pipeline: where it runs.
        fixed: what a pass of either direction takes beside its work.

    Raises:
        PlanError: a count that Megatron refuses, a wrong shape, or work that is negative or not finite.
    """
    parts = checked_work(work, pipeline)
    graph = program(len(parts), pipeline)
    durations = _durations(graph, parts, pipeline, fixed)
    finishes = _ends(graph, durations, pipeline.p2p)[: graph.size]
    busy = np.bincount(graph.stage, weights=durations * graph.is_pass, minlength=pipeline.stages)
    return Timeline(
        makespan=float(finishes.max()),
        ideal=float(busy.mean()),
        busy=tuple(busy.tolist()),
        pipeline=pipeline,
        _graph=graph,
        _starts=finishes - durations,
        _finishes=finishes,
    )
