"""What the current device holds, and giving cached memory back to it.

Everything here concerns the current device, never device 0 by name, and does nothing where there is no CUDA device.
Emptying the cache costs time twice: now, and in every allocation after it. So it is done at a hand-over
(``handover.py``), and nowhere else in Steelyard.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from steelyard.errors import InputError

GIB = 2**30
MUCH = GIB  # an attempt that gave back less than this is the last


class DeviceApi(Protocol):
    """The part of ``torch.cuda`` that is used here; tests put another in its place."""

    def is_available(self) -> bool: ...
    def current_device(self) -> Any: ...
    def memory_allocated(self, device: int) -> int: ...
    def memory_reserved(self, device: int) -> int: ...
    def max_memory_allocated(self, device: int) -> int: ...
    def max_memory_reserved(self, device: int) -> int: ...
    def reset_peak_memory_stats(self, device: int) -> None: ...
    def reset_accumulated_memory_stats(self, device: int) -> None: ...
    def mem_get_info(self, device: int) -> tuple[int, int]: ...
    def synchronize(self, device: int) -> None: ...
    def empty_cache(self) -> None: ...


CUDA: DeviceApi = torch.cuda


@dataclass(frozen=True)
class MemoryInfo:
    """Bytes of the current device; all 0, and ``device`` None, where there is none.

    Attributes:
        device: index of the device.
        allocated: in tensors of this process.
        reserved: held by this process's allocator, with what is in tensors.
        free: free on the device, as the driver tells: what another allocator could get.
        total: the device's memory.
        peak_allocated: most bytes in tensors since the last ``reset_peak``.
        peak_reserved: most bytes held since then.
    """

    device: int | None = None
    allocated: int = 0
    reserved: int = 0
    free: int = 0
    total: int = 0
    peak_allocated: int = 0
    peak_reserved: int = 0


@dataclass(frozen=True)
class EmptyCacheReport:
    """What emptying the cache brought.

    Attributes:
        device: index of the device; None where there is none, and then all else is 0.
        freed_reserved: bytes given back to the device.
        freed_allocated: bytes in tensors that the garbage collection ended.
        attempts: how often it was tried.
        seconds: time it took.
    """

    device: int | None = None
    freed_reserved: int = 0
    freed_allocated: int = 0
    attempts: int = 0
    seconds: float = 0.0


@dataclass
class PeakMemory:
    """Most bytes in tensors and most bytes held inside a ``peak_memory`` context; final when it is left."""

    allocated: int = 0
    reserved: int = 0


# Contexts that are open now: the device has one peak, so whoever resets it first tells them what it was.
_watching: list[PeakMemory] = []


def current_device(api: DeviceApi = CUDA) -> int | None:
    """Index of the current CUDA device, or None where there is none or a CPU takes its place (``running_on``)."""
    if not api.is_available():
        return None
    device = api.current_device()
    return device if isinstance(device, int) else None


def memory_info(*, api: DeviceApi = CUDA) -> MemoryInfo:
    """What the current device holds now."""
    device = current_device(api)
    if device is None:
        return MemoryInfo()
    free, total = api.mem_get_info(device)
    return MemoryInfo(
        device,
        api.memory_allocated(device),
        api.memory_reserved(device),
        free,
        total,
        api.max_memory_allocated(device),
        api.max_memory_reserved(device),
    )


def aggressive_empty_cache(force_sync: bool = True, max_retries: int = 3, *, api: DeviceApi = CUDA) -> EmptyCacheReport:
    """Give back to the device what the allocator holds for nobody, also what only reference cycles still hold.

    Each attempt collects garbage, empties the cache and waits for the device; another follows while the last one gave
    back 1 GiB or more, since what it ended may hold more.

    Args:
        force_sync: wait for the device in each attempt, so that what comes next finds the memory free.
        max_retries: most attempts.
        api: stands for ``torch.cuda``.

    Raises:
        InputError: ``max_retries`` is negative.
    """
    if max_retries < 0:
        raise InputError(f"max_retries={max_retries} is negative: use 0 (no attempt) or more")
    device = current_device(api)
    if device is None:
        return EmptyCacheReport()
    start = time.perf_counter()
    allocated = first_allocated = api.memory_allocated(device)
    reserved = first_reserved = api.memory_reserved(device)
    attempts = 0
    while attempts < max_retries:
        attempts += 1
        gc.collect()
        api.empty_cache()
        if force_sync:
            api.synchronize(device)
        before, reserved = reserved, api.memory_reserved(device)
        allocated = api.memory_allocated(device)
        if before - reserved < MUCH:
            break
    return EmptyCacheReport(
        device, first_reserved - reserved, first_allocated - allocated, attempts, time.perf_counter() - start
    )


def reset_peak(*, api: DeviceApi = CUDA) -> None:
    """Let the peaks of the current device begin anew from what it holds now."""
    device = current_device(api)
    if device is not None:
        _note_peak(device, api)
        api.reset_peak_memory_stats(device)


@contextmanager
def peak_memory(*, api: DeviceApi = CUDA) -> Iterator[PeakMemory]:
    """Measures the peak of what runs inside. Contexts nest: an inner one does not lose the outer one's peak."""
    reset_peak(api=api)
    peak = PeakMemory()
    _watching.append(peak)
    try:
        yield peak
    finally:
        device = current_device(api)
        if device is not None:
            _note_peak(device, api)
        _watching[:] = [one for one in _watching if one is not peak]


def _note_peak(device: int, api: DeviceApi) -> None:
    allocated, reserved = api.max_memory_allocated(device), api.max_memory_reserved(device)
    for peak in _watching:
        peak.allocated, peak.reserved = max(peak.allocated, allocated), max(peak.reserved, reserved)
