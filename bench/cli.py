"""The command line of the harness.

``python -m bench run --matrix smoke`` weighs the optimised step against the naive one; ``list`` shows what can be run
and ``report`` writes the page of an earlier run again. Exit codes: 0 fine, 1 a cell failed or broke its limit, 2 bad
input, 130 interrupted. Modules that need torch or matplotlib are imported in the commands, so that ``--help`` is quick.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from steelyard.errors import InputError

if TYPE_CHECKING:
    from bench.summary import Summary

RESPONSE_COLUMN = "response_tokens"
# Columns that fit the widest table. A narrower terminal wraps its lines, which cuts no figure off.
LEAST_WIDTH = 132

app = typer.Typer(
    help="Weigh the optimised training step against the naive one.",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    add_completion=False,
    no_args_is_help=True,
)


class DeviceName(StrEnum):
    cpu = "cpu"
    cuda = "cuda"


AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on the last line.")]


@app.command()
def run(
    matrix: Annotated[
        str, typer.Option(metavar="NAME|FILE", help="A shipped matrix by name, or a .toml file.")
    ] = "smoke",
    suite: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Run only this suite; can be repeated.")
    ] = None,
    lengths: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Your own CSV or JSONL file of lengths, instead of the matrix's workloads."),
    ] = None,
    prompt_column: Annotated[
        str | None,
        typer.Option(metavar="COLUMN", help="Column of the prompt lengths; without it every prompt has one token."),
    ] = None,
    response_column: Annotated[
        str | None,
        typer.Option(metavar="COLUMN", help=f"Column of the response lengths (default: {RESPONSE_COLUMN})."),
    ] = None,
    device: Annotated[
        DeviceName | None, typer.Option(help="Default: CUDA where there is a GPU for every rank, else the CPU.")
    ] = None,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Folder that gets a folder for this run.")] = Path(
        "results/runs"
    ),
    as_json: AsJson = False,
) -> None:
    """Run a matrix and leave records, a report and pictures."""
    with _bad_input_in_one_line():
        from bench.environment import commit
        from bench.progress import CellProgress
        from bench.record import FILE_NAME, RecordWriter, new_run_folder
        from bench.run import choose_cells, run_cells
        from suites.matrix import LengthsFile

        if lengths is None and (prompt_column or response_column):
            raise InputError("--prompt-column and --response-column name columns of a file: add --lengths FILE")
        lengths_file = lengths and LengthsFile(
            path=str(lengths), prompt_column=prompt_column, response_column=response_column or RESPONSE_COLUMN
        )
        device_name = device and device.value
        cells = choose_cells(matrix, suite or (), lengths_file, device_name)
        folder = new_run_folder(out, Path(matrix).stem, commit())
    with RecordWriter(folder / FILE_NAME) as writer, CellProgress(len(cells)) as progress:
        complete = run_cells(cells, folder, device_name, writer, progress.start, progress.end)
    summary = _conclude(folder, as_json)
    if not complete:
        raise typer.Exit(130)
    raise typer.Exit(1 if summary.counts["failed"] else 0)


@app.command()
def report(
    run_folder: Annotated[Path, typer.Argument(metavar="RUN_FOLDER", help="A folder under results/runs.")],
    as_json: AsJson = False,
) -> None:
    """Write the report of an earlier run again."""
    with _bad_input_in_one_line():
        if not run_folder.is_dir():
            raise InputError(f"run folder {run_folder}: is not a folder: name one that 'python -m bench run' made")
        _conclude(run_folder, as_json)


@app.command("list")
def list_(as_json: AsJson = False) -> None:
    """Show suites, workloads and matrices."""
    with _bad_input_in_one_line():
        from steelyard import lengths
        from suites import SUITES, matrix

        matrices = [matrix.load(name, list(SUITES)) for name in matrix.names()]
    typer.echo(f"suites: {', '.join(SUITES)}")
    typer.echo(f"workloads: {', '.join(lengths.names())}")
    for one in matrices:
        typer.echo(f"\nmatrix {one.name}: {one.description}")
        for cell in one.cells():
            typer.echo(f"  {cell.id}")
    if as_json:
        _print_json(
            {
                "suites": list(SUITES),
                "workloads": lengths.names(),
                "matrices": {
                    one.name: {"description": one.description, "cells": [cell.id for cell in one.cells()]}
                    for one in matrices
                },
            }
        )


def _conclude(folder: Path, as_json: bool) -> Summary:
    """Write the report of a run folder and print what it found."""
    from rich.console import Console

    from bench.record import read_records
    from bench.report.markdown import write_report
    from bench.summary import Summary
    from bench.tables import main_tables

    records = read_records(folder)
    if records.dropped:
        typer.echo(f"warning: {records.dropped}", err=True)
    summary = Summary.of(records.lines)
    page = write_report(folder, records)
    console = Console()
    console.width = max(console.width, LEAST_WIDTH)
    for table in main_tables(summary):
        console.print(table.rich())
        console.print()
    typer.echo(summary.sentence)
    typer.echo(f"report: {page}")
    if as_json:
        _print_json(
            {
                "run": str(folder),
                "report": str(page),
                "verdict": summary.verdict,
                "sentence": summary.sentence,
                "cells": summary.counts,
                "throughput": [row for _, row in summary.throughput],
                "parity": [row for _, row in summary.parity],
                "planning": [row for _, row in summary.planning],
                "packing": [row for _, row in summary.packing],
                "problems": {cell.id: cell.reason for cell in summary.cells if cell.status != "passed"},
            }
        )
    return summary


def _print_json(value: Any) -> None:
    from pydantic_core import to_json

    typer.echo(to_json(value, inf_nan_mode="strings"))


@contextlib.contextmanager
def _bad_input_in_one_line() -> Iterator[None]:
    try:
        yield
    except InputError as error:
        typer.echo(f"error: {' '.join(str(error).splitlines())}", err=True)
        raise typer.Exit(2) from None
