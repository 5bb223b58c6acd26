"""Fixtures that the tests share. Runs go through the real runner, cells' processes and writer; only their suites are
made up.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from bench import environment
from bench.cells import Machine, Task
from bench.record import FILE_NAME, RecordWriter
from bench.report.runs import Runs
from bench.report.write import Written, write_report
from bench.run import run_cells
from bench.tests.pages import every_kind, write_run
from suites import SUITES
from suites.launch import alone
from suites.launch.alone import run_here
from suites.matrix import Cell


@pytest.fixture
def add_suite(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Callable], None]:
    """Register a function as the suite of a name, as a module that can be imported.

    A cell's process is forked from the test, which alone has that module. What else runs on the machine must not change
    what pages say: it is taken for quiet.
    """
    monkeypatch.setattr(alone, "start_method", lambda device: "fork")
    monkeypatch.setattr(environment, "_busy_seconds", lambda: 0.0)

    def add(name: str, measure: Callable) -> None:
        module = ModuleType(f"suite_{name}_of_a_test")
        module.measure = measure
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setitem(SUITES, name, module.__name__)

    return add


@pytest.fixture
def weigh(tmp_path: Path) -> Callable[..., Path]:
    """Run cells on the CPU through the real runner; returns the run folder."""

    def run(*cells: Cell, budget: float | None = None) -> Path:
        folder = tmp_path / "run"
        folder.mkdir()
        machine = Machine("a machine", cores=2, gpus=0)
        tasks = [Task.of(cell, machine) for cell in cells]
        with RecordWriter(folder / FILE_NAME) as writer:
            run_cells(tasks, folder.name, writer, run_here, lambda cell: None, lambda outcome: None, budget)
        return folder

    return run


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """The report of a run with cells of most kinds."""
    folder = write_run(tmp_path_factory.mktemp("runs"), every_kind())
    return write_report(folder, Runs.read([folder]))
