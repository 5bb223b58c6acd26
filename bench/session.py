"""A run from its start, or from where it was cut off, to its last record: what ``python -m bench run`` does."""

from __future__ import annotations

import contextlib
import fcntl
import re
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Literal

from bench.cells import Device, Machine, Task, choose
from bench.environment import commit
from bench.progress import CellProgress
from bench.record import FILE_NAME, RecordWriter, new_run_folder
from bench.resume import PLAN_NAME, Plan, drop_unfinished
from bench.run import Place, Stop, run_cells
from steelyard.errors import InputError
from suites.launch import alone
from suites.matrix import LengthsFile

Where = Literal["here", "ray"]
_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600}


@dataclass(frozen=True)
class Session:
    """Cells that are to be run, and where.

    Attributes:
        tasks: the cells that are left to do.
        plan: all that was asked for.
        folder: of the run that goes on; None for a new one.
        notes: what a reader of the terminal should know.
    """

    tasks: Sequence[Task]
    plan: Plan
    place: Place
    folder: Path | None = None
    notes: tuple[str, ...] = ()

    def run(self, out: Path, budget: float | None) -> tuple[Path, Stop | None]:
        """Weigh the cells; returns the run's folder, and why it ended early or None.

        Raises:
            InputError: the folder cannot be made, or another process works in it.
        """
        folder = self.folder
        if folder is None:
            folder = new_run_folder(out, Path(self.plan.matrix).stem, commit())
            self.plan.save(folder)
        with (
            _sole_user(folder),
            _ended_as_interrupted(),
            RecordWriter(folder / FILE_NAME) as writer,
            CellProgress(len(self.tasks)) as progress,
        ):
            stop = run_cells(self.tasks, folder.name, writer, self.place, progress.start, progress.end, budget)
        return folder, stop


@contextlib.contextmanager
def new(
    matrix: str,
    only: Sequence[str] = (),
    lengths_file: LengthsFile | None = None,
    device: Device | None = None,
    sides: Sequence[str] = (),
    on: Where = "here",
    pairs: str | None = None,
) -> Iterator[Session]:
    """A run of the cells that ``bench.cells.choose`` takes; nothing is written yet.

    Args:
        pairs: of every cell, a number or ``auto``; None leaves those of the matrix.

    Raises:
        InputError: what was asked for cannot work.
    """
    with where_cells_run(on) as (machine, place):
        tasks = choose(matrix, machine, only, lengths_file, device, sides)
        if pairs is not None:
            from bench.selftest import with_pairs

            cells = with_pairs([task.cell for task in tasks], pairs, device)
            tasks = [replace(task, cell=cell) for task, cell in zip(tasks, cells, strict=True)]
        cells = tuple(task.cell for task in tasks)
        yield Session(tasks, Plan(matrix=matrix, commit=commit(), device=device, on=on, cells=cells), place)


@contextlib.contextmanager
def resumed(folder: Path) -> Iterator[Session]:
    """The rest of a run: the cells that neither passed nor failed in it. Records of others are dropped from its file.

    Raises:
        InputError: the folder holds no run that can go on.
    """
    plan = Plan.load(folder)
    with where_cells_run(plan.on) as (machine, place):
        with _sole_user(folder):
            done, dropped = drop_unfinished(folder)
        notes = [dropped] if dropped else []
        if plan.commit != commit():
            notes.append(f"the run began at commit {plan.commit}, and goes on at {commit()}")
        tasks = [Task.of(cell, machine, plan.device) for cell in plan.cells if cell.id not in done]
        yield Session(tasks, plan, place, folder, tuple(notes))


@contextlib.contextmanager
def where_cells_run(on: Where) -> Iterator[tuple[Machine, Place]]:
    """This machine, or the Ray cluster that it belongs to."""
    if on == "here":
        if (preloaded := "bench.weigh") not in alone.PRELOADED:
            alone.PRELOADED.append(preloaded)
        yield Machine.this(), alone.run_here
        return
    from suites.launch.on_ray import Cluster

    with Cluster() as cluster:
        cpus, gpus = cluster.capacity()
        yield Machine("the Ray cluster", cpus, gpus, slots=cpus), cluster.run


def seconds(text: str) -> float:
    """A time such as ``90``, ``90s``, ``20m`` or ``1.5h`` in seconds.

    Raises:
        InputError: it is none.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text.strip())
    if match is None or float(match[1]) == 0:
        raise InputError(f"--time-budget {text!r}: give a time such as 90s, 20m or 1.5h")
    return float(match[1]) * _UNITS[match[2]]


@contextlib.contextmanager
def _sole_user(folder: Path) -> Iterator[None]:
    """Hold the run's plan against a second process; the lock goes with the process that holds it."""
    with (folder / PLAN_NAME).open("rb") as plan:
        try:
            fcntl.flock(plan, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InputError(f"--resume {folder}: another process is running it: wait for its end") from None
        yield


@contextlib.contextmanager
def _ended_as_interrupted() -> Iterator[None]:
    """A polite request to end (SIGTERM, as CI sends it) counts as Ctrl-C: records are written first."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
