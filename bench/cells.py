"""Which cells a run has, and what the machine (or the cluster) can make of each."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from steelyard.errors import InputError
from steelyard.hints import did_you_mean
from suites import MAY_SHARE, ON_ONE_DEVICE, PACED, PREDICTING, SUITES, WITHOUT_RANKS, matrix
from suites.launch.jobs import Job
from suites.matrix import Cell, LengthsFile
from suites.sides import attach_sides

Device = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class Machine:
    """Where cells would run. ``slots``: ranks that may compute at once on CPUs; None where they may share cores."""

    name: str
    cores: int
    gpus: int
    slots: int | None = None

    @classmethod
    def this(cls) -> Machine:
        import torch

        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return cls("this machine", cores, torch.cuda.device_count() if torch.cuda.is_available() else 0)

    def __str__(self) -> str:
        return f"{self.name}: {self.cores} cores, {self.gpus} GPUs"


@dataclass(frozen=True)
class Task:
    """A cell, and how it would be filled.

    Attributes:
        asked: device that the suite is told; None lets it choose.
        device, ranks: where it runs, on how many of them; no ranks for what computes in one process.
        reason: why it cannot run there; empty when it can.
    """

    cell: Cell
    asked: Device | None
    device: Device
    ranks: int
    reason: str = ""

    @classmethod
    def of(cls, cell: Cell, machine: Machine, asked: Device | None = None) -> Task:
        """How ``machine`` fills ``cell``: on CUDA where there are GPUs enough, unless the cell or ``asked`` says."""
        asked = cell.device or asked
        if cell.suite in WITHOUT_RANKS:
            return cls(cell, asked, "cpu", 0)
        ranks = 1 if cell.suite in ON_ONE_DEVICE else cell.layout.parallel().world
        device: Device = "cpu" if cell.suite in PACED else asked or ("cuda" if machine.gpus >= ranks else "cpu")
        room = machine.gpus if device == "cuda" else machine.slots
        reason = ""
        if room is not None and room < ranks:
            what = "GPU" if device == "cuda" else "CPU"
            reason = f"it needs {ranks} {what}{'s' * (ranks > 1)}, and {machine.name} has {room}"
        return cls(cell, asked, device, 0 if cell.suite in ON_ONE_DEVICE else ranks, reason)

    @property
    def how(self) -> str:
        """What fills the cell, or why nothing does."""
        if self.reason:
            return f"cannot run: {self.reason}"
        suite, where = self.cell.suite, "CUDA" if self.device == "cuda" else "the CPU"
        ranks = f", {self.ranks} rank{'s' * (self.ranks > 1)}" if self.ranks else ""
        if suite in PREDICTING:
            return "predicted" if self._only_predicted else f"predicted, measured on {where}"
        return (
            f"{'paced' if suite in PACED else 'computed' if suite in WITHOUT_RANKS else 'measured'} on {where}{ranks}"
        )

    @property
    def _only_predicted(self) -> bool:
        return self.cell.suite in PREDICTING and self.cell.layout.parallel().world > 1

    def job(self) -> Job:
        payload = {
            "cell": self.cell.model_dump(mode="json"),
            "module": SUITES[self.cell.suite],
            "device": self.asked,
            "runs_on": self.device,
        }
        timed = self.cell.suite not in MAY_SHARE and not self._only_predicted
        return Job(self.cell.id, "bench.weigh:weigh", payload, self.ranks, self.device, timed, self.cell.time_limit)


def choose(
    name: str,
    machine: Machine,
    only: Sequence[str] = (),
    lengths_file: LengthsFile | None = None,
    asked: Device | None = None,
    sides: Sequence[str] = (),
) -> list[Task]:
    """The cells of matrix ``name`` to run, all checked.

    Args:
        name: a shipped matrix, or a path to a ``.toml`` file.
        only: suites, or patterns of cell ids (``*`` and ``?``), to keep; empty keeps all.
        lengths_file: takes the place of every workload.
        asked: device where the cells must be able to run.
        sides: the user's own sides, each ``name=module:function``.

    Raises:
        InputError: what the user asked for cannot work; nothing was started or written.
    """
    every = matrix.load(name, list(SUITES)).cells(lengths_file)
    cells = [cell for cell in every if not only or any(_keeps(pattern, cell, every) for pattern in only)]
    cells = attach_sides(cells, sides)
    for cell in cells:
        cell.draw()
    tasks = [Task.of(cell, machine, asked) for cell in cells]
    unable = [task for task in tasks if task.reason]
    if unable and (asked == "cuda" or len(unable) == len(tasks)):
        one = unable[0]
        raise InputError(
            f"cell {one.cell.id} cannot run: {one.reason}: choose other cells with --only, --device cpu, or a machine "
            f"that has them"
        )
    return tasks


def _keeps(pattern: str, cell: Cell, every: Sequence[Cell]) -> bool:
    """Whether ``pattern`` names the cell; it must name some of ``every`` cell."""
    if pattern in SUITES:
        kept = [one for one in every if one.suite == pattern]
        if not kept:
            there = ", ".join(sorted({one.suite for one in every}))
            raise InputError(f"--only {pattern}: the matrix has no cell of suite {pattern}: choose one of {there}")
        return cell in kept
    if not any(character in pattern for character in "*?[/"):
        raise InputError(
            f"--only {pattern}: suite {pattern!r} does not exist{did_you_mean(pattern, SUITES)}: choose one of "
            f"{', '.join(SUITES)}, or give a pattern of cell ids such as 'throughput/*/dp2/*'"
        )
    if not any(fnmatch.fnmatchcase(one.id, pattern) for one in every):
        raise InputError(f"--only {pattern}: no cell has such a name: 'python -m bench list' shows all")
    return fnmatch.fnmatchcase(cell.id, pattern)
