"""Replays PyTorch's CUDA caching allocator over a trace: what a step reserves on the device, not only what it uses.

A trace is a list of ``Event`` in program order, from a prediction or from a recorded snapshot (``snapshot.py``). The
rules are those of ``caching.py``; a replay needs no GPU and takes some microseconds per event.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from steelyard.errors import InputError
from steelyard.memory.allocator_settings import NO_ALLOWANCES, AllocatorSettings, Allowances
from steelyard.memory.caching import Block, CachingAllocator, Segment


class Event(NamedTuple):
    """One thing that a program asks of the allocator.

    Attributes:
        kind: ``alloc``, ``free``, or ``empty_cache`` (whose other fields mean nothing).
        block: number of the storage, unique while it is alive.
        size: bytes that were requested; a free needs none.
        tag: what the storage is for, as in ``activations``.
        stream: number of the CUDA stream; blocks are reused on their own stream only.
    """

    kind: Literal["alloc", "free", "empty_cache"]
    block: int = 0
    size: int = 0
    tag: str = ""
    stream: int = 0


class Moment(NamedTuple):
    """Bytes in use and reserved right after the event at position ``at`` of a trace; -1 is before the first."""

    at: int
    allocated: int
    reserved: int


class OutOfMemory(NamedTuple):
    """The request that the device had no room for, and what was held then. Sizes in bytes.

    Attributes:
        at: position of the event in the trace.
        event: the event itself.
        allocated: in use.
        reserved: held by the allocator, after it gave back all it could.
        free: left on the device.
    """

    at: int
    event: Event
    allocated: int
    reserved: int
    free: int


@dataclass(frozen=True)
class Replay:
    """What the allocator did over a trace. All sizes are bytes.

    Attributes:
        allocated: in use after each event that ran, int64 ``[events]``.
        reserved: asked from the device and held after each event that ran, int64 ``[events]``.
        peak: the first moment with the most reserved bytes.
        peak_allocated: the most bytes in use at one moment.
        segments: segments after the last event that ran.
        out_of_memory: what could not be served, which ended the replay; None where all was.
        retries: requests that found the device full and made the cache give memory back.
        allowances: what the device held beside the trace.
    """

    allocated: np.ndarray
    reserved: np.ndarray
    peak: Moment
    peak_allocated: int
    segments: tuple[Segment, ...]
    out_of_memory: OutOfMemory | None
    retries: int
    allowances: Allowances

    @property
    def peak_reserved(self) -> int:
        """The most bytes held at one moment, as ``torch.cuda.max_memory_reserved`` reports them."""
        return self.peak.reserved

    @property
    def peak_device(self) -> int:
        """The most bytes of the device taken at one moment, with what is outside the allocator."""
        return self.peak.reserved + self.allowances.outside

    @property
    def fragmentation(self) -> float:
        """Share of the reserved bytes that no tensor used when most were reserved: 0 is perfect."""
        return 1 - self.peak.allocated / self.peak.reserved if self.peak.reserved else 0.0


def replay(
    events: Iterable[Event],
    settings: AllocatorSettings | None = None,
    capacity: int | None = None,
    *,
    allowances: Allowances = NO_ALLOWANCES,
) -> Replay:
    """Run the allocator over ``events``, to their end or to the first request that cannot be served.

    Args:
        events: the trace, in program order.
        settings: the allocator's settings; None is PyTorch's defaults.
        capacity: bytes of the device; None never runs out of memory.
        allowances: what the process holds beside the trace; nothing by default.

    Raises:
        InputError: the allowances leave nothing of ``capacity``, a memory fraction has no ``capacity``, or the trace
            frees what is not alive, allocates what is, or has an unknown kind.
    """
    settings = settings or AllocatorSettings()
    if settings.per_process_memory_fraction is not None and capacity is None:
        fraction = settings.per_process_memory_fraction
        raise InputError(f"per_process_memory_fraction={fraction} is a share of the device: give its capacity too")
    room = None if capacity is None else capacity - allowances.outside
    if room is not None and room <= 0:
        raise InputError(
            f"capacity={capacity} bytes is below the {allowances.outside} bytes outside the allocator: raise it, or "
            f"lower the allowances"
        )
    allocator = CachingAllocator(settings, room, capacity)
    held: dict[int, Block | None] = {}
    for number, size in enumerate(allowances.inside):
        held[-1 - number] = allocator.malloc(size)
    if None in held.values():
        raise InputError(f"capacity={capacity} bytes has no room for the workspaces {allowances.inside}: raise it")
    allocated, reserved = array("q"), array("q")
    peak, peak_allocated, failed = Moment(-1, allocator.allocated, allocator.reserved), allocator.allocated, None
    for index, event in enumerate(events):
        if not _apply(event, index, allocator, held):
            free = room - allocator.reserved if room is not None else 0
            failed = OutOfMemory(index, event, allocator.allocated, allocator.reserved, free)
            break
        allocated.append(allocator.allocated)
        reserved.append(allocator.reserved)
        if allocator.reserved > peak.reserved:
            peak = Moment(index, allocator.allocated, allocator.reserved)
        if allocator.allocated > peak_allocated:
            peak_allocated = allocator.allocated
    return Replay(
        np.array(allocated, np.int64),
        np.array(reserved, np.int64),
        peak,
        peak_allocated,
        tuple(allocator.segments(block for block in held.values() if block is not None)),
        failed,
        allocator.retries,
        allowances,
    )


def _apply(event: Event, index: int, allocator: CachingAllocator, held: dict[int, Block | None]) -> bool:
    """Do one event; False where there is no memory for it. Storages without bytes hold no block."""
    kind, number, size, _, stream = event
    if kind == "alloc":
        if number in held:
            raise InputError(f"event {index} allocates block {number}, which is alive: number blocks uniquely")
        block = allocator.malloc(size, stream) if size > 0 else None
        if block is None and size > 0:
            return False
        held[number] = block
    elif kind == "free":
        if number not in held:
            raise InputError(f"event {index} frees block {number}, which is not alive: keep each free after its alloc")
        block = held.pop(number)
        if block is not None:
            allocator.free(block)
    elif kind == "empty_cache":
        allocator.release_cached()
    else:
        raise InputError(f"event {index} has the kind {kind!r}: use 'alloc', 'free' or 'empty_cache'")
    return True
