"""Fixtures that the tests share. Runs go through the real runner and writer; only their suites are made up."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from bench.record import FILE_NAME, RecordWriter
from bench.run import run_cells
from suites import SUITES
from suites.matrix import Cell


@pytest.fixture
def add_suite(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Callable], None]:
    """Register a function as the suite of a name, as a module that can be imported."""

    def add(name: str, measure: Callable) -> None:
        module = ModuleType(f"suite_{name}_of_a_test")
        module.measure = measure
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setitem(SUITES, name, module.__name__)

    return add


@pytest.fixture
def weigh(tmp_path: Path) -> Callable[..., Path]:
    """Run cells on the CPU through the real runner; returns the run folder."""

    def run(*cells: Cell) -> Path:
        folder = tmp_path / "run"
        folder.mkdir()
        with RecordWriter(folder / FILE_NAME) as writer:
            run_cells(cells, folder, "cpu", writer, lambda cell: None, lambda outcome: None)
        return folder

    return run
