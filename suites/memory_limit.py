"""A limit on a process's memory under which a step runs with more and more tokens, until it truly fails.

On a CPU it is a limit on address space (``RLIMIT_AS``) above what the process has when nothing of the step is there. So
that address space follows tensors, glibc's malloc takes every block of 64 KiB and more from the system and gives it
back; with its defaults, fragments of the heap cost a large share of the limit. On CUDA it is PyTorch's memory fraction.
"""

from __future__ import annotations

import ctypes
import gc
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from steelyard.errors import InputError
from steelyard.memory.live import only_new_garbage

GIB = 2**30
MMAP_BYTES = 65536
# Parameters of mallopt in glibc's malloc.h.
M_MMAP_THRESHOLD, M_ARENA_MAX = -3, -8
CLOSE_ENOUGH = 0.01


@dataclass(frozen=True)
class Found:
    """Where a step fails.

    Attributes:
        passed: the most tokens with which it ran.
        failed: the fewest with which it ran out of memory.
        message: first line of what that failure said.
        steps: how many were tried.
    """

    passed: int
    failed: int
    message: str
    steps: int


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocator said that there is no more; any other failure is a defect."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error)


def until_it_fails(step: Callable[[int], object], start: int) -> Found:
    """Double or halve the tokens from ``start`` until one count runs and one does not; then bisect to 1 %.

    Raises:
        InputError: a step of 2 tokens is already out of memory.
    """
    passed, failed, message, steps = 0, None, "", 0
    tokens = max(2, start)
    with only_new_garbage():
        while failed is None or failed - passed > max(1, CLOSE_ENOUGH * failed):
            steps += 1
            trouble = _attempt(step, tokens)
            if trouble is None:
                passed = tokens
            elif tokens <= 2:
                raise InputError(f"a step of {tokens} tokens is out of memory: raise capacity_gib ({trouble})")
            else:
                failed, message = tokens, trouble
            tokens = 2 * passed if failed is None else (passed + failed) // 2
    return Found(passed, failed, message, steps)


def _attempt(step: Callable[[int], object], tokens: int) -> str | None:
    """What the failure said, or None."""
    try:
        step(tokens)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        message = (str(error).splitlines() or ["MemoryError"])[0]
    else:
        message = None
    # What the failed step held went with its traceback, or lies in cycles.
    gc.collect()
    return message


def follow_tensors() -> None:
    """Make the address space of this process follow its tensors; to be called before they are made.

    Raises:
        InputError: the C library is not glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if not sys.platform.startswith("linux") or mallopt is None:
        raise InputError(f"a real threshold on a CPU needs Linux with glibc, and this is {sys.platform}: use a GPU")
    mallopt(M_ARENA_MAX, 1)
    mallopt(M_MMAP_THRESHOLD, MMAP_BYTES)


@contextmanager
def limited(bytes_: int, state_bytes: int, device: torch.device) -> Iterator[None]:
    """At most so many bytes for the step.

    Args:
        bytes_: for everything that the step holds, its state included.
        state_bytes: what of it is there already: parameters, gradients and optimizer.
        device: of the step.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(bytes_ / torch.cuda.get_device_properties(device).total_memory)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    gc.collect()
    resource.setrlimit(resource.RLIMIT_AS, (_address_space() - state_bytes + bytes_, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _address_space() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()
