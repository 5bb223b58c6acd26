"""The calls in which stages exchange shapes, between the passes of a step.

With micro-batches of unequal lengths (``variable_seq_lengths``), megatron-core (p2p_communication.py, 0.16) sends the
shape of a tensor ahead and waits for the exchange at once, in calls that send and receive together, also where the
transfer itself is overlapped. So a stage stands still in a call until every neighbour that takes part has come to its
own call:

- before a backward pass of the interleaved schedule, a stage waits until the previous stage has finished the forward
  pass whose output comes next, though it needs that output only afterwards;
- before its last warm-up pass hands over to the steady state, it waits for the first gradient.

Equal micro-batches lose nothing by it. Unequal ones on virtual stages do. With one chunk per stage the calls meet where
the stages would have waited anyway, except now and then in warm-up and cool-down.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Literal

from steelyard.pipeline.schedule import Pass, Pipeline, schedule_table, stage_order, warmup_passes

Port = Literal["send_forward", "receive_forward", "send_backward", "receive_backward"]
Call = tuple[Port, ...]
Step = Pass | Call

# What a port waits for: the port on the other side, and how many stages further that side is.
PARTNERS: dict[Port, tuple[Port, int]] = {
    "send_forward": ("receive_forward", 1),
    "receive_forward": ("send_forward", -1),
    "send_backward": ("receive_backward", -1),
    "receive_backward": ("send_backward", 1),
}


def stage_steps(stage: int, count: int, pipeline: Pipeline) -> list[Step]:
    """The passes of a stage, and between them the calls in which it sends and receives together.

    These are the calls of ``forward_backward_pipelining_without_interleaving`` and, with virtual stages,
    ``forward_backward_pipelining_with_interleaving`` with overlapped transfers (schedules.py, 0.16).

    Raises:
        PlanError: ``count`` is one that the schedule refuses.
    """
    schedule = _interleaved if pipeline.virtual > 1 else _one_chunk
    return [one for one in schedule(stage, count, pipeline) if one]


def _passes(stage: int, count: int, pipeline: Pipeline) -> tuple[list[Pass], list[Pass], int]:
    """Forward passes, backward passes, and how many of the former are warm-up."""
    order = stage_order(stage, count, pipeline)
    forward = [one for one in order if one.direction == "F"]
    return forward, [one for one in order if one.direction == "B"], warmup_passes(stage, count, pipeline)


def _call(**ports: bool) -> Call:
    return tuple(port for port in PARTNERS if ports.get(port))


def _one_chunk(stage: int, count: int, pipeline: Pipeline) -> Iterator[Step]:
    forward, backward, warmup = _passes(stage, count, pipeline)
    behind, ahead = stage > 0, stage < pipeline.stages - 1
    for one in forward[:warmup]:
        yield _call(receive_forward=behind)
        yield one
        yield _call(send_forward=ahead)
    steady = len(forward) - warmup
    yield _call(receive_forward=behind and steady > 0)
    for at in range(steady):
        yield forward[warmup + at]
        yield _call(send_forward=ahead, receive_backward=ahead)
        yield backward[at]
        yield _call(send_backward=behind, receive_forward=behind and at < steady - 1)
    for one in backward[steady:]:
        yield _call(receive_backward=ahead)
        yield one
        yield _call(send_backward=behind)


def _interleaved(stage: int, count: int, pipeline: Pipeline) -> Iterator[Step]:
    forward, backward, warmup = _passes(stage, count, pipeline)
    total, steady = len(forward), len(forward) - warmup
    first, last = stage == 0, stage == pipeline.stages - 1
    chunks = [chunk for _, chunk in schedule_table(count, pipeline)]

    def sends(one: Pass) -> bool:
        if one.direction == "F":
            return not (last and one.chunk == pipeline.virtual - 1)
        return not (first and one.chunk == 0)

    def receives(at: int, leads: bool) -> bool:
        """Whether the call after pass ``at`` of a direction receives; ``leads``: the stage is where it enters."""
        if not leads:
            return True
        # The other end of the ring is (stages - 1) passes behind; nothing comes from its final chunk.
        behind = at - (pipeline.stages - 1)
        return behind >= 0 and chunks[behind] != pipeline.virtual - 1

    yield _call(receive_forward=not first)
    for at in range(warmup):
        yield forward[at]
        yield _call(send_forward=sends(forward[at]), receive_forward=at < total - 1 and receives(at, first))
    if backward:
        yield _call(receive_backward=not last)
    for at in range(steady):
        one = forward[warmup + at]
        yield one
        yield _call(send_forward=sends(one), receive_forward=at < steady - 1 and receives(warmup + at, first))
        yield backward[at]
        yield _call(send_backward=sends(backward[at]), receive_backward=receives(at, last))
    for at in range(steady, len(backward)):
        yield backward[at]
        yield _call(send_backward=sends(backward[at]), receive_backward=at < len(backward) - 1 and receives(at, last))


Place = tuple[int, int]  # stage, and which of its steps


def meetings(steps: list[list[Step]]) -> dict[Place, list[Place]]:
    """For every call, those that it waits for: the n-th use of a port meets the n-th of its partner.

    Args:
        steps: of every stage, as ``stage_steps`` gives them.
    """
    places: dict[tuple[int, Port, int], Place] = {}
    for stage, one in enumerate(steps):
        used: Counter[Port] = Counter()
        for at, call in enumerate(one):
            if not isinstance(call, Pass):
                places |= {(stage, port, used[port]): (stage, at) for port in call}
                used.update(call)
    found: dict[Place, list[Place]] = {}
    for (stage, port, number), place in places.items():
        other, further = PARTNERS[port]
        found.setdefault(place, []).append(places[(stage + further) % len(steps), other, number])
    return found
