"""The short table of a run, a line for each suite: `python ci/short_table.py RUN_FOLDER`."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.record import read_records
from bench.summary import CellRecords, Summary


def short_table(summary: Summary) -> Table:
    """Suites in the order they ran: cells passed of all, seconds, and what the figures say."""
    by_suite: dict[str, list[CellRecords]] = {}
    for cell in summary.cells:
        by_suite.setdefault(cell.suite, []).append(cell)
    table = Table("suite", "passed", "seconds", "found")
    for suite, cells in by_suite.items():
        part = Summary(tuple(cells))
        seconds = sum(cell.outcome.seconds for cell in cells if cell.outcome)
        found = part.sentence.partition("; ")[2]
        problems = Counter(f"{cell.status.replace('_', ' ')}: {cell.reason}" for cell in cells if cell.reason)
        lines = [*filter(None, [found]), *(f"{count} {problem}" for problem, count in problems.items())]
        table.add_row(suite, f"{part.counts['passed']}/{len(cells)}", f"{seconds:.0f}", "\n".join(lines))
    return table


def main(folder: str) -> None:
    summary = Summary.of(read_records(Path(folder)).lines)
    # A run on GPUs also has cells that were computed on the processor.
    environments = [cell.first.environment for cell in summary.cells]
    machine = next((one for one in environments if one.device == "cuda"), environments[0])
    console = Console()
    console.width = max(console.width, 120)
    console.print(short_table(summary))
    console.print(f"{machine.device_name}, torch {machine.torch}, megatron-core {machine.megatron_core}")
    console.print(f"records: {folder}", soft_wrap=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
