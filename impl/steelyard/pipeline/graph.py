"""What every pass of a step waits for, as a graph that serves every set of durations.

The order of passes on a stage is the schedule's (``schedule.py``). Where stages exchange shapes, the calls in which
they meet (``exchange.py``) are nodes of the graph too: a call ends when all who take part have come to theirs. Nodes
are sorted into levels; those of one level do not depend on each other.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from steelyard.pipeline.exchange import meetings, stage_steps
from steelyard.pipeline.schedule import Pass, Pipeline, check_count, schedule_table, warmup_passes

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]


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
