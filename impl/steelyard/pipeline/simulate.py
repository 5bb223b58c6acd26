"""Predicted time of a step on a pipeline: every pass starts when its stage is free and its input has arrived.

The passes of one level of the graph (``graph.py``) are computed at once, for many candidates side by side. That is what
makes a search over orders and contents affordable without a compiled kernel.

Sends are assumed not to block the sender, which holds for Megatron's overlapped and unbatched transfers, unless stages
exchange shapes (``Pipeline.exchange``).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from steelyard.errors import PlanError
from steelyard.pipeline.graph import Program, program
from steelyard.pipeline.schedule import Direction, Pipeline

Floats = NDArray[np.float64]


class Span(NamedTuple):
    """One pass on the time axis; ``start`` and ``end`` in the unit of the simulated work."""

    stage: int
    chunk: int
    micro_batch: int
    direction: Direction
    start: float
    end: float


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
