"""The runner: weighs cells and writes their records; whatever ends a cell or the run, the file is whole.

Cells run here one after the other, each in a process group of its own, or side by side on a Ray cluster.
"""

from __future__ import annotations

import contextlib
import math
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import StrEnum
from functools import cache
from typing import Any

from bench.cells import Task
from bench.environment import capture, commit, is_dirty
from bench.record import Conditions, DiskFull, Environment, OutcomeRecord, RecordWriter, SeriesRecord, Status
from suites.launch.jobs import Ended, Job

# A place where cells run: it takes jobs, tells of each when it starts, and yields how they ended.
Place = Callable[[Iterable[Job], Callable[[Job], None], float], Iterator[Ended]]


class Stop(StrEnum):
    """Why a run ended before all its cells did."""

    interrupted = "interrupted by the user"
    time = "the time budget was used up"
    disk = "the disk is full"


def run_cells(
    tasks: Sequence[Task],
    run: str,
    writer: RecordWriter,
    place: Place,
    on_start: Callable[[str], None],
    on_end: Callable[[OutcomeRecord], None],
    budget: float | None = None,
) -> Stop | None:
    """Weigh the cells of ``tasks`` and write their records.

    Args:
        run: id of the run.
        place: where they run, e.g. ``suites.launch.alone.run_here``.
        on_start, on_end: progress.
        budget: seconds for all; a cell that is not done by then is ended, and did not run.

    Returns:
        None when every cell had its turn. Else why not, and the other cells are recorded as not run.
    """
    left = {task.cell.id: task for task in tasks}
    stop: Stop | None = None

    def end(task: Task, *records: SeriesRecord | OutcomeRecord) -> None:
        with _undisturbed():
            try:
                writer.write(*records)
            except DiskFull as full:
                if full.written:
                    del left[task.cell.id]
                raise
            del left[task.cell.id]
        on_end(records[-1])

    try:
        for task in [task for task in tasks if task.reason]:
            end(task, _not_run(task, run, task.reason))
        jobs = [task.job() for task in left.values()]
        deadline = math.inf if budget is None else time.monotonic() + budget
        with contextlib.closing(place(jobs, lambda job: on_start(job.name), deadline)) as all_ended:
            for ended in all_ended:
                task = left[ended.job.name]
                end(task, *_records(task, run, ended))
        stop = Stop.time if left else None
    except KeyboardInterrupt:
        stop = Stop.interrupted
    except DiskFull:
        stop = Stop.disk
    with contextlib.suppress(DiskFull):
        for task in list(left.values()):
            end(task, _not_run(task, run, stop))
    return stop


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Signals wait: records and what is known of them change together."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _records(task: Task, run: str, ended: Ended) -> list[SeriesRecord | OutcomeRecord]:
    """The lines of a cell, its outcome last."""
    common: dict[str, Any] = {
        "run": run,
        "cell": task.cell.id,
        "case": task.cell.model_dump(),
        "seconds": ended.seconds,
    }
    if ended.status != "done":
        common["environment"] = _environment(task.device)
        return [OutcomeRecord(**common, status=ended.status, reason=_line(ended.reason), detail=ended.detail)]
    result = ended.result
    common["seconds"] = result["seconds"]
    common["environment"] = Environment.model_validate({**result["environment"], **_checkout()})
    common["conditions"] = Conditions.model_validate(result["conditions"])
    series = [SeriesRecord(**common, **one) for one in result["series"]]
    reason = result["reason"] or _unequal(series)
    # Samples that form no pairs cannot be compared.
    series, reason = ([], reason) if reason else (series, _complaint(series))
    status: Status = "failed" if reason else "passed"
    return [*series, OutcomeRecord(**common, status=status, reason=_line(reason), detail=result["detail"])]


def _not_run(task: Task, run: str, reason: str) -> OutcomeRecord:
    return OutcomeRecord(
        run=run,
        cell=task.cell.id,
        case=task.cell.model_dump(),
        seconds=0.0,
        environment=_environment(task.device),
        status="not_run",
        reason=reason,
    )


_environment = cache(capture)


@cache
def _checkout() -> dict[str, Any]:
    """What the runner knows of its sources; a worker of a cluster has a copy without their history."""
    return {"commit": commit(), "dirty": is_dirty()}


def _line(text: str) -> str:
    return " ".join(text.split())


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


def _unequal(series: Sequence[SeriesRecord]) -> str:
    """Samples of the two sides are read as pairs, so there must be equally many."""
    counts: dict[str, dict[str, int]] = {}
    for one in series:
        if one.side != "both":
            counts.setdefault(one.metric, {})[f"{one.side} {one.variant}".strip()] = len(one.values)
    for metric, sides in counts.items():
        if len(set(sides.values())) > 1:
            return f"the suite returned {metric} in unequal numbers: {sides}"
    return ""
