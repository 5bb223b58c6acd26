"""Progress on stderr: a bar on a terminal, one line per cell anywhere else."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from bench.record import OutcomeRecord

_COLOURS = {"passed": "green", "failed": "red", "lost": "red", "not_run": "yellow"}


class CellProgress:
    """Use as a context; call ``start`` and ``end`` for each cell. Cells may run side by side, or not start at all."""

    def __init__(self, total: int) -> None:
        self._console = Console(stderr=True)
        self._total, self._number = total, 0
        self._running: list[str] = []
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
        # A cell whose node went away starts again.
        self._running = [*(one for one in self._running if one != cell), cell]
        self._show()

    def end(self, outcome: OutcomeRecord) -> None:
        self._number += 1
        self._running = [one for one in self._running if one != outcome.cell]
        line = Text(f"[{self._number}/{self._total}] {outcome.cell}: ")
        line.append(outcome.status.replace("_", " "), style=_COLOURS[outcome.status])
        busy = outcome.conditions.busy if outcome.conditions else ""
        line.append(f" in {outcome.seconds:.1f} s" + (f": {outcome.reason}" if outcome.reason else ""))
        line.append(f" (busy machine: {busy})" if busy else "", style="yellow")
        self._bar.advance(self._task)
        self._console.print(line, soft_wrap=True, highlight=False)
        self._show()

    def _show(self) -> None:
        more = f" and {len(self._running) - 1} more" if len(self._running) > 1 else ""
        self._bar.update(self._task, description=f"{self._running[0]}{more}" if self._running else "")

    def __enter__(self) -> CellProgress:
        self._bar.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bar.stop()
