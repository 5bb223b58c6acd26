"""Progress on stderr: a bar on a terminal, one line per cell anywhere else."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from bench.record import OutcomeRecord

_COLOURS = {"passed": "green", "failed": "red", "not_run": "yellow"}


class CellProgress:
    """Use as a context; call ``start`` and ``end`` for each cell."""

    def __init__(self, total: int) -> None:
        self._console = Console(stderr=True)
        self._total, self._number = total, 0
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("", total=total)

    def start(self, cell: str) -> None:
        self._number += 1
        self._bar.update(self._task, description=cell)

    def end(self, outcome: OutcomeRecord) -> None:
        line = Text(f"[{self._number}/{self._total}] {outcome.cell}: ")
        line.append(outcome.status.replace("_", " "), style=_COLOURS[outcome.status])
        line.append(f" in {outcome.seconds:.1f} s" + (f": {outcome.reason}" if outcome.reason else ""))
        self._bar.advance(self._task)
        self._console.print(line, soft_wrap=True, highlight=False)

    def __enter__(self) -> CellProgress:
        self._bar.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bar.stop()
