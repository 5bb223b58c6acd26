"""The mirror of verl's memory_utils against the real one, on the same stand-in of a CUDA machine."""

from __future__ import annotations

import inspect
import logging
import sys
from pathlib import Path

import pytest

from steelyard.compat.verl.utils import memory_utils as ours
from steelyard.memory import cache

verl = pytest.importorskip("verl.utils.memory_utils", reason="the differential tests compare with verl")
sys.path.insert(0, str(Path(__file__).parents[1] / "memory"))
from stand_in import GIB, StandIn  # noqa: E402


@pytest.fixture
def machine(monkeypatch):
    """The same machine under both: the third of its devices is the current one."""
    machine = StandIn(current=2)
    monkeypatch.setattr(verl, "get_torch_device", lambda: machine)
    monkeypatch.setattr(cache, "CUDA", machine)
    return machine


@pytest.mark.parametrize("name", ours.__all__)
def test_arguments_and_defaults_are_verls(name):
    theirs, mine = (inspect.signature(getattr(module, name)).parameters.values() for module in (verl, ours))
    assert [(one.name, one.kind, one.default) for one in mine] == [(one.name, one.kind, one.default) for one in theirs]


def test_memory_is_told_as_by_verl(machine):
    first = machine.tensor(3 * GIB)
    del first
    held = machine.tensor(GIB)
    assert ours.get_memory_info() == verl.get_memory_info()
    ours.reset_memory_stats()
    assert {"reset_peak 2", "reset_accumulated 2"} <= set(machine.calls)
    assert ours.get_memory_info() == verl.get_memory_info()
    assert ours.get_memory_info()["max_memory_allocated_gb"] == 1
    del held


@pytest.mark.parametrize("force_sync", [True, False])
def test_the_cache_is_emptied_as_by_verl(machine, force_sync):
    seen = []
    for module in (verl, ours):
        tensors = [machine.tensor(2 * GIB), machine.tensor(GIB // 2)]
        tensors.clear()
        machine.calls.clear()
        assert module.aggressive_empty_cache(force_sync, max_retries=5) is None
        assert machine.memory_reserved() == 0
        seen.append([call for call in machine.calls if call != "current_device"])
    assert seen[0] == seen[1]
    assert seen[0].count("empty_cache") == 2


def test_what_happens_goes_to_the_log(machine, caplog):
    caplog.set_level(logging.INFO)
    held = machine.tensor(3 * GIB)
    ours.log_memory_usage("after the step")
    assert "[after the step]" in caplog.text
    assert "allocated 3.00 GB" in caplog.text
    ours.aggressive_empty_cache()
    assert "cache of device 2 emptied in 1 attempts" in caplog.text
    del held


def test_without_a_device_nothing_happens(machine, caplog):
    caplog.set_level(logging.INFO)
    machine.available = False
    assert ours.get_memory_info() == verl.get_memory_info() == {}
    assert ours.aggressive_empty_cache() is ours.reset_memory_stats() is ours.log_memory_usage() is None
    assert not caplog.text
    assert machine.calls == []
