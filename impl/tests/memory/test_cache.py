"""Emptying the cache and reading memory, on a stand-in of several devices and on none."""

import ast
import gc
from pathlib import Path

import pytest
import torch
from stand_in import GIB, StandIn

import steelyard
from steelyard.errors import InputError
from steelyard.memory.cache import (
    EmptyCacheReport,
    MemoryInfo,
    PeakMemory,
    aggressive_empty_cache,
    memory_info,
    peak_memory,
    reset_peak,
)
from steelyard.model.host import running_on


@pytest.fixture(params=[0, 3])
def cuda(request):
    """Four devices of which the current one is the first or the last, with garbage on another one."""
    machine = StandIn(current=request.param)
    machine.other = machine.tensor(5 * GIB, device=1)
    machine.calls.clear()
    return machine


def cycle(cuda, size):
    """A tensor that only a reference cycle holds."""
    tensor = cuda.tensor(size)
    tensor.other = tensor


def test_it_frees_what_plain_empty_cache_leaves(cuda):
    gc.disable()
    try:
        cycle(cuda, 2 * GIB)
        cuda.empty_cache()
        assert cuda.memory_reserved() == 2 * GIB
        report = aggressive_empty_cache(api=cuda)
    finally:
        gc.enable()
    assert (report.device, report.freed_reserved, report.freed_allocated) == (cuda.current, 2 * GIB, 2 * GIB)
    assert report.seconds > 0
    assert cuda.memory_reserved() == 0
    assert cuda.allocated[1] == 5 * GIB


def ends_one_more(cuda, kept):
    """Let each emptying end the owner of the next tensor, as a finalizer would."""
    empty = cuda.empty_cache

    def slowly():
        if kept:
            kept.pop(0)
        empty()

    cuda.empty_cache = slowly


def test_it_tries_again_while_much_is_freed(cuda):
    kept = [cuda.tensor(2 * GIB), cuda.tensor(GIB), cuda.tensor(GIB // 2)]
    ends_one_more(cuda, kept)
    report = aggressive_empty_cache(max_retries=9, api=cuda)
    assert report.attempts == 3, "2 GiB, 1 GiB, then half a GiB, which is little"
    assert report.freed_reserved == 3 * GIB + GIB // 2


def test_it_stops_after_the_most_attempts(cuda):
    kept = [cuda.tensor(2 * GIB) for _ in range(5)]
    ends_one_more(cuda, kept)
    assert aggressive_empty_cache(max_retries=2, api=cuda).attempts == 2
    assert aggressive_empty_cache(max_retries=0, api=cuda).attempts == 0
    with pytest.raises(InputError, match="max_retries=-1 is negative"):
        aggressive_empty_cache(max_retries=-1, api=cuda)


def test_each_attempt_collects_empties_and_synchronizes_the_current_device(cuda):
    aggressive_empty_cache(api=cuda)
    assert cuda.calls == ["current_device", "empty_cache", f"synchronize {cuda.current}"]
    cuda.calls.clear()
    aggressive_empty_cache(force_sync=False, api=cuda)
    assert cuda.calls == ["current_device", "empty_cache"]


def test_memory_is_that_of_the_current_device(cuda):
    tensor = cuda.tensor(3 * GIB)
    del tensor
    held = cuda.tensor(GIB)
    assert memory_info(api=cuda) == MemoryInfo(cuda.current, GIB, 4 * GIB, 76 * GIB, 80 * GIB, 3 * GIB, 4 * GIB)
    reset_peak(api=cuda)
    assert memory_info(api=cuda).peak_allocated == GIB
    assert f"reset_peak {cuda.current}" in cuda.calls
    del held


def test_peaks_nest(cuda):
    with peak_memory(api=cuda) as outer:
        del_me = cuda.tensor(4 * GIB)
        del del_me
        cuda.empty_cache()
        with peak_memory(api=cuda) as inner:
            held = cuda.tensor(GIB)
        reset_peak(api=cuda)
        more = cuda.tensor(GIB)
    assert (inner.allocated, inner.reserved) == (GIB, GIB)
    assert (outer.allocated, outer.reserved) == (4 * GIB, 4 * GIB)
    late = cuda.tensor(9 * GIB)
    reset_peak(api=cuda)
    assert outer.allocated == 4 * GIB, "it is final"
    del held, more, late


def test_without_a_device_nothing_happens():
    machine = StandIn(available=False)
    assert aggressive_empty_cache(api=machine) == EmptyCacheReport()
    assert memory_info(api=machine) == MemoryInfo()
    with peak_memory(api=machine) as peak:
        reset_peak(api=machine)
    assert peak == PeakMemory()
    assert machine.calls == []


def test_where_a_cpu_takes_the_place_of_the_device_nothing_happens():
    with running_on("cpu"):
        assert torch.cuda.current_device() == torch.device("cpu")
        machine = StandIn(current=torch.device("cpu"))
        assert memory_info(api=machine) == memory_info() == MemoryInfo()
        assert aggressive_empty_cache() == EmptyCacheReport()


def test_the_cache_is_emptied_at_hand_overs_and_nowhere_else():
    package = Path(steelyard.__file__).parent if steelyard.__file__ else Path(next(iter(steelyard.__path__)))
    users = set()
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                name = getattr(node.func, "attr", getattr(node.func, "id", ""))
                if name.endswith("empty_cache"):
                    users.add(path.relative_to(package).as_posix())
    # cache.py is the one that does it, and verl's name for it must do the same.
    assert users == {"memory/cache.py", "memory/handover.py", "compat/verl/utils/memory_utils.py"}
