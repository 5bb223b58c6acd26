"""Runs of made-up records and their reports, for tests: no process is started."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from bench.record import FILE_NAME, Environment, OutcomeRecord, RecordWriter, SeriesRecord
from bench.report.runs import Runs
from bench.report.write import write_report
from bench.tests.judged_runs import ENVIRONMENT
from bench.tests.made_up import bubble_series, make_cell, parity_series, planning_series, throughput_series
from suites.matrix import Cell, Layout
from suites.measure import Series

Weighed = Iterable[tuple[Cell, list[Series]]]


def markdown(folder: Path) -> str:
    """The report of a run as Markdown; its files are written into the run's folder."""
    return write_report(folder, Runs.read([folder])).markdown.read_text()


def write_run(
    root: Path, cells: Weighed, matrix: str = "smoke", hour: int = 12, environment: Environment = ENVIRONMENT
) -> Path:
    """A folder with the records of cells, failed where a limit is broken; returns its path."""
    folder = root / f"20261130T{hour:02}0000Z-{matrix}-{environment.commit[:7]}"
    folder.mkdir(parents=True)
    with RecordWriter(folder / FILE_NAME) as writer:
        for cell, series in cells:
            common = {
                "run": folder.name, "time": f"2026-11-30T{hour:02}:00:00Z", "cell": cell.id,
                "case": cell.model_dump(mode="json"), "seconds": 2.0, "environment": environment,
            }  # fmt: skip
            records = [SeriesRecord(**common, **vars(one)) for one in series]
            passed = all(one.keeps_limit for one in records)
            writer.write(*records, OutcomeRecord(**common, status="passed" if passed else "failed"))
    return folder


def every_kind() -> Weighed:
    """Cells of several suites, with pictures of most kinds."""
    for layout in (Layout(), Layout(dp=2)):
        yield make_cell("throughput", layout=layout), throughput_series()
        yield make_cell("parity", layout=layout), parity_series()
    yield make_cell("planning", layout=Layout(pp=4)), planning_series()
    for layout in (Layout(pp=2), Layout(pp=2, vpp=2)):
        cell = make_cell("bubbles", layout=layout).model_copy(update={"rows": 24, "scale": 1.0})
        yield cell, bubble_series(cell)
