"""The runner: checks everything first, then weighs cell by cell and writes records; a failing cell ends only itself."""

from __future__ import annotations

import importlib
import time
import traceback
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

from bench.environment import capture
from bench.record import OutcomeRecord, RecordWriter, SeriesRecord
from steelyard.errors import InputError
from steelyard.hints import did_you_mean
from suites import ON_ONE_DEVICE, SUITES, WITHOUT_RANKS, matrix
from suites.launch.local import RanksFailed
from suites.matrix import Cell, LengthsFile
from suites.measure import Series

Device = Literal["cpu", "cuda"]


def choose_cells(
    name: str, only: Sequence[str] = (), lengths_file: LengthsFile | None = None, device: Device | None = None
) -> list[Cell]:
    """The cells of matrix ``name`` to run, all checked.

    Args:
        name: a shipped matrix, or a path to a ``.toml`` file.
        only: suites to keep; empty keeps all.
        lengths_file: takes the place of every workload.
        device: where the cells must be able to run.

    Raises:
        InputError: what the user asked for cannot work; nothing was started or written.
    """
    for suite in only:
        if suite not in SUITES:
            raise InputError(
                f"suite {suite!r} does not exist{did_you_mean(suite, SUITES)}: choose one of {', '.join(SUITES)}"
            )
    every_cell = matrix.load(name, list(SUITES)).cells(lengths_file)
    cells = [cell for cell in every_cell if not only or cell.suite in only]
    if not cells:
        there = ", ".join(sorted({cell.suite for cell in every_cell}))
        raise InputError(f"matrix {name!r} has no cell of suite {', '.join(only)}: choose one of {there}")
    for cell in cells:
        cell.draw()
        device_of(cell, device)
    return cells


def device_of(cell: Cell, device: Device | None) -> Device:
    """Where the ranks of ``cell`` will run when ``device`` is asked for; None means CUDA if there are enough GPUs.

    What starts no ranks is computed on the CPU.
    """
    if cell.suite in WITHOUT_RANKS:
        return "cpu"
    from steelyard.model.host import pick_device

    return pick_device(device, world=1 if cell.suite in ON_ONE_DEVICE else cell.layout.parallel().world).type


def run_cells(
    cells: Sequence[Cell],
    folder: Path,
    device: Device | None,
    writer: RecordWriter,
    on_start: Callable[[str], None],
    on_end: Callable[[OutcomeRecord], None],
) -> bool:
    """Weigh ``cells`` in order and write their records; False when the user interrupted.

    After an interruption the cells that did not end are recorded as not run.
    """
    environment = cache(capture)
    interrupted = False
    for cell in cells:
        common = {
            "run": folder.name,
            "cell": cell.id,
            "case": cell.model_dump(),
            "environment": environment(device_of(cell, device)),
        }
        on_start(cell.id)
        if interrupted:
            series, outcome = [], _not_run(common, 0.0)
        else:
            start = time.monotonic()
            try:
                series, outcome = _weigh(cell, device, common)
            except KeyboardInterrupt:
                interrupted = True
                series, outcome = [], _not_run(common, time.monotonic() - start)
        for record in (*series, outcome):
            writer.write(record)
        on_end(outcome)
    return not interrupted


def _weigh(cell: Cell, device: Device | None, common: dict[str, Any]) -> tuple[list[SeriesRecord], OutcomeRecord]:
    """Run one cell; whatever it raises becomes its outcome, so that the other cells still get their turn."""
    start = time.monotonic()
    series: list[SeriesRecord] = []
    reason = detail = ""
    try:
        measured = importlib.import_module(SUITES[cell.suite]).measure(cell, device=device)
        _check_pairs(measured)
        common = {**common, "seconds": time.monotonic() - start}
        series = [SeriesRecord(**common, **vars(one)) for one in measured]
        reason = _complaint(series)
    except RanksFailed as error:
        reason, detail = error.reason, error.detail
    except InputError as error:
        reason, detail = str(error), traceback.format_exc()
    except Exception as error:
        reason, detail = f"{type(error).__name__}: {error}", traceback.format_exc()
    common = {**common, "seconds": time.monotonic() - start}
    status = "failed" if reason else "passed"
    return series, OutcomeRecord(**common, status=status, reason=" ".join(reason.split()), detail=detail)


def _check_pairs(measured: Sequence[Series]) -> None:
    """Samples of the two sides are read as pairs, so there must be equally many."""
    counts: dict[str, dict[str, int]] = {}
    for one in measured:
        if one.side != "both":
            counts.setdefault(one.metric, {})[f"{one.side} {one.variant}".strip()] = len(one.values)
    for metric, sides in counts.items():
        if len(set(sides.values())) > 1:
            raise ValueError(f"the suite returned {metric} in unequal numbers: {sides}")


def _complaint(series: Sequence[SeriesRecord]) -> str:
    """Why samples that a suite returned do not pass; empty when they do."""
    if not series:
        return "the suite returned no samples"
    broken = [one for one in series if not one.keeps_limit]
    if not broken:
        return ""
    first = broken[0]
    where = f" ({first.notes['worst']})" if "worst" in first.notes else ""
    bound = "below" if first.direction == "higher" else "above"
    return f"{first.metric} is {first.worst:.3g}{where}, {bound} its limit {first.limit:.3g}"


def _not_run(common: dict[str, Any], seconds: float) -> OutcomeRecord:
    return OutcomeRecord(**common, seconds=seconds, status="not_run", reason="interrupted by the user")
