"""Checks the replay against what an allocator really did: a snapshot of ``torch.cuda.memory``.

    torch.cuda.memory._record_memory_history(max_entries=10_000_000)   # before the first tensor on the device
    ...
    comparison = compare_snapshot(torch.cuda.memory._snapshot())

The format is the one documented at ``torch.cuda.memory._snapshot`` (torch 2.13). The snapshot does not say why a
segment was given back: every run of given-back segments is replayed as one emptying of the cache, which is what
``empty_cache`` and a full device do by default, but not ``max_split_size_mb`` or the garbage collection.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from steelyard.errors import InputError
from steelyard.memory.allocator import Event, Replay, replay
from steelyard.memory.allocator_settings import AllocatorSettings

_TAKEN, _GIVEN = ("segment_alloc", "segment_map"), ("segment_free", "segment_unmap")
_WHOLE = "record from before the first tensor on, with max_entries above the number of events"


class Recording(NamedTuple):
    """What a snapshot says of one device.

    Attributes:
        events: the trace, ready to be replayed.
        peak_reserved: the most bytes reserved at one moment.
        reserved: bytes reserved when the snapshot was taken.
        allocated: bytes in use then, in blocks as they were handed out.
    """

    events: list[Event]
    peak_reserved: int
    reserved: int
    allocated: int


class SnapshotComparison(NamedTuple):
    """A recording and the replay of its own events."""

    recording: Recording
    replayed: Replay

    @property
    def peak_error(self) -> float:
        """How far the replay's peak of reserved bytes is from the recorded one, relative to that."""
        return self.replayed.peak_reserved / self.recording.peak_reserved - 1

    @property
    def end_error(self) -> float:
        """Likewise for the bytes reserved at the end."""
        return sum(segment.size for segment in self.replayed.segments) / self.recording.reserved - 1


def compare_snapshot(
    snapshot: Mapping[str, Any],
    settings: AllocatorSettings | None = None,
    *,
    capacity: int | None = None,
    device: int | None = None,
) -> SnapshotComparison:
    """Replay the events of a snapshot and put both results side by side.

    Args:
        snapshot: what ``torch.cuda.memory._snapshot()`` returned.
        settings: the settings that the process ran with.
        capacity: bytes that its allocator could get.
        device: index of the device; None takes the one that has a trace.

    Raises:
        InputError: as ``from_snapshot``.
    """
    recording = from_snapshot(snapshot, device)
    return SnapshotComparison(recording, replay(recording.events, settings, capacity))


def from_snapshot(snapshot: Mapping[str, Any], device: int | None = None) -> Recording:
    """The events of one device's trace, a free where the block became usable again, and what was reserved.

    Raises:
        InputError: no device or several have a trace and none is named, the trace does not go back to the first
            segment, or it uses memory pools, which are not replayed.
    """
    traces = snapshot["device_traces"]
    used = [index for index, trace in enumerate(traces) if trace]
    if device is None and len(used) != 1:
        raise InputError(f"the snapshot has traces of the devices {used}: name one of them as device")
    device = used[0] if device is None else device
    if device not in used:
        raise InputError(f"the snapshot has no trace of device {device}: devices with one are {used}")
    segments = [one for one in snapshot["segments"] if one.get("device", device) == device]
    reserved = sum(one["total_size"] for one in segments)
    events, history = _events(traces[device])
    if history[-1] != reserved or min(history) < 0:
        raise InputError(
            f"the trace of device {device} ends at {history[-1]} reserved bytes but its segments have {reserved}: "
            f"{_WHOLE}"
        )
    return Recording(events, max(history), reserved, sum(one["allocated_size"] for one in segments))


def _events(trace: Iterable[Mapping[str, Any]]) -> tuple[list[Event], list[int]]:
    """Events for the replay, and the reserved bytes after each entry that changed them."""
    events: list[Event] = []
    numbers: dict[int, int] = {}  # address -> number of the block that is there
    history, giving = [0], False
    for count, entry in enumerate(trace):
        action, size = entry["action"], entry.get("size", 0)
        if any(entry.get("pool_id", (0, 0))):
            raise InputError(f"entry {count} of the trace uses memory pool {entry['pool_id']}: pools are not replayed")
        if action in _GIVEN and not giving:
            events.append(Event("empty_cache"))
        giving = action in _GIVEN
        if action in _TAKEN:
            history.append(history[-1] + size)
        elif action in _GIVEN:
            history.append(history[-1] - size)
        elif action == "alloc":
            numbers[entry["addr"]] = count
            events.append(Event("alloc", count, size, str(entry.get("user_metadata", "")), entry.get("stream", 0)))
        elif action == "free_completed":
            if entry["addr"] not in numbers:
                raise InputError(f"entry {count} of the trace frees a block that it never allocated: {_WHOLE}")
            events.append(Event("free", numbers.pop(entry["addr"]), size))
    return events, history
