"""What suites ask of CUDA, as far as a machine without it can show: which calls are made, and what is claimed."""

import time
from types import SimpleNamespace

import pytest
import torch

from suites import memory_limit, oom, packing, throughput
from suites.matrix import Cell, Layout

CUDA = torch.device("cuda", 0)
GIB = 2**30


@pytest.fixture
def calls(monkeypatch):
    """Calls of ``torch.cuda``, in their order; its device has 80 GiB."""
    noted = []

    def note(name, answer=None):
        monkeypatch.setattr(torch.cuda, name, lambda *given: noted.append((name, *given)) or answer)

    note("synchronize")
    note("empty_cache")
    note("set_per_process_memory_fraction")
    note("get_device_properties", SimpleNamespace(total_memory=80 * GIB))
    return noted


def test_a_stopwatch_waits_for_the_device_before_and_after(calls):
    watch = packing.Stopwatch(CUDA)
    with watch("pack"):
        assert calls == [("synchronize", CUDA)]
        time.sleep(0.01)
    assert calls == [("synchronize", CUDA)] * 2
    assert watch.milliseconds["pack"] >= 10
    with packing.Stopwatch(torch.device("cpu"))("pack"):
        pass
    assert len(calls) == 2, "a CPU has nothing to wait for"


def test_a_limit_is_a_share_of_the_device_and_is_lifted_again(calls):
    with pytest.raises(torch.OutOfMemoryError), memory_limit.limited(20 * GIB, 3 * GIB, CUDA):
        raise torch.OutOfMemoryError("CUDA out of memory")
    # The fraction counts all that the process holds, so what is there already is part of it.
    assert [call for call in calls if call[0] != "get_device_properties"] == [
        ("empty_cache",),
        ("set_per_process_memory_fraction", 0.25),
        ("set_per_process_memory_fraction", 1.0),
    ]


def test_a_step_that_cuda_cannot_hold_is_a_figure():
    def step(tokens):
        if tokens > 5000:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB\nmore")

    found = memory_limit.until_it_fails(step, 1000)
    assert found.passed <= 5000 < found.failed <= 1.01 * found.passed + 1
    assert found.message == "CUDA out of memory. Tried to allocate 2.00 GiB"


def make_case(device, **settings):
    return oom.Case(Cell(suite="oom", workload="rl-code-16k-cap", model="qwen2.5-0.5b", **settings), device)


def test_a_gpu_fails_for_real_at_any_capacity_and_is_predicted_with_its_own_kernels():
    case = make_case(CUDA)
    assert case.real
    assert (case.settings["kernels"], case.settings["extrapolate"]) == ("cuda", False)
    assert not make_case(torch.device("cpu")).real, "a CPU would have to fill 80 GiB"
    assert not make_case(CUDA, layout=Layout(dp=2), rows=2).real, "one rank takes part"


@pytest.mark.parametrize(("device", "limit"), [(CUDA, None), (torch.device("cpu"), oom.TOLERANCE)])
def test_nothing_is_claimed_of_a_threshold_on_a_gpu(device, limit):
    case = make_case(device)
    tried = {"passed": 900, "failed": 908, "message": "CUDA out of memory", "steps": 7}
    found = oom.compared(case, "naive", tried, [oom._threshold("naive", "", 990, {})])
    real, error = found
    assert (real.values, error.limit) == ([900], limit)
    assert error.values == pytest.approx([0.1])
    assert ("not verified" in real.notes["limit"]) == (limit is None)


def test_the_host_has_no_processor_time_to_show_for_a_gpu():
    assert throughput._processor("naive", []) == []
