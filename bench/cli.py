"""The command line of the harness.

``python -m bench run --matrix smoke`` weighs the optimised step against the naive one, ``list`` shows what can be run;
``cli_report.py`` holds the report, ``cli_verdicts.py`` the commands that judge. Exit codes of ``run``: 0 fine, 1 a cell
failed or broke its limit, 2 bad input, 3 no cell failed but some did not run or were lost, 130 interrupted. Modules
that need torch or matplotlib are imported in the commands, so that ``--help`` is quick.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bench import cli_report, cli_verdicts
from bench.cli_parts import AsJson, DeviceName, print_json
from steelyard.cli import bad_input_in_one_line
from steelyard.errors import InputError

if TYPE_CHECKING:
    from bench.session import Session
    from bench.summary import Summary

RESPONSE_COLUMN = "response_tokens"

app = typer.Typer(
    help="Weigh the optimised training step against the naive one.",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    add_completion=False,
    no_args_is_help=True,
)


class Where(StrEnum):
    here = "here"
    ray = "ray"


@app.command()
def run(
    context: typer.Context,
    matrix: Annotated[
        str, typer.Option(metavar="NAME|FILE", help="A shipped matrix by name, or a .toml file.")
    ] = "smoke",
    only: Annotated[
        list[str] | None,
        typer.Option(
            "--only", "--suite", metavar="SUITE|PATTERN", help="Run only this suite, or cells such as 'parity/*/dp2/*'."
        ),
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
    side: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=MODULE:FUNCTION", help="Weigh a function of yours too: see suites/sides.py."),
    ] = None,
    on: Annotated[Where, typer.Option(help="This machine, or the Ray cluster that it is part of.")] = Where.here,
    pairs: Annotated[
        str | None,
        typer.Option(metavar="N|auto", help="Pairs of every cell; auto: as many as 'selftest' found enough here."),
    ] = None,
    time_budget: Annotated[
        str | None, typer.Option(metavar="TIME", help="End the run after 90s, 20m or 1.5h; --resume goes on.")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(metavar="RUN_FOLDER", help="Go on with a run: cells without a result run (again).")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the cells and what would fill them.")] = False,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Folder that gets a folder for this run.")] = Path(
        "results/runs"
    ),
    as_json: AsJson = False,
) -> None:
    """Run a matrix and leave records, a report and pictures."""
    with bad_input_in_one_line():
        from bench import session
        from bench.report.runs import Runs
        from suites.matrix import LengthsFile

        budget = None if time_budget is None else session.seconds(time_budget)
        if resume is not None:
            _refuse_with_resume(context)
            opened = session.resumed(resume)
        else:
            if lengths is None and (prompt_column or response_column):
                raise InputError("--prompt-column and --response-column name columns of a file: add --lengths FILE")
            lengths_file = lengths and LengthsFile(
                path=str(lengths), prompt_column=prompt_column, response_column=response_column or RESPONSE_COLUMN
            )
            opened = session.new(matrix, only or (), lengths_file, device and device.value, side or (), on.value, pairs)
        with opened as one:
            for note in one.notes:
                typer.echo(f"note: {note}", err=True)
            if dry_run:
                _show_tasks(one, as_json)
                return
            folder, stop = one.run(out, budget)
        if stop is not None:
            typer.echo(f"the run is not complete: {stop.value}: go on with --resume {folder}", err=True)
        summary = cli_report.conclude(folder, Runs.read([folder]), as_json=as_json)
    raise typer.Exit(_exit_code(summary, stop))


def _refuse_with_resume(context: typer.Context) -> None:
    for name in (
        "matrix",
        "only",
        "lengths",
        "prompt_column",
        "response_column",
        "device",
        "side",
        "on",
        "pairs",
        "out",
    ):
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise InputError(
                f"--{name.replace('_', '-')} cannot be given with --resume: the run goes on as it began; leave it out"
            )


def _show_tasks(session: Session, as_json: bool) -> None:
    for task in session.tasks:
        typer.echo(f"{task.cell.id}: {task.how}, at most {task.cell.time_limit:g} s")
    typer.echo(f"{len(session.tasks)} cells; nothing was run")
    if as_json:
        print_json({"matrix": session.plan.matrix, "cells": {task.cell.id: task.how for task in session.tasks}})


def _exit_code(summary: Summary, stop: StrEnum | None) -> int:
    if stop is not None and stop.name == "interrupted":
        return 130
    if summary.counts["failed"]:
        return 1
    return 0 if summary.verdict == "passed" else 3


@app.command("list")
def list_(as_json: AsJson = False) -> None:
    """Show suites, workloads and matrices, and what this machine can fill."""
    with bad_input_in_one_line():
        from bench.cells import Machine, Task
        from steelyard import lengths
        from suites import SUITES, describe, matrix

        machine = Machine.this()
        suites = {name: describe(name) for name in SUITES}
        matrices = [matrix.load(name, list(SUITES)) for name in matrix.names()]
        tasks = {one.name: [Task.of(cell, machine) for cell in one.cells()] for one in matrices}
    typer.echo(f"{machine}\n\nsuites:")
    for name, text in suites.items():
        typer.echo(f"  {name}: {text}")
    typer.echo(f"\nworkloads: {', '.join(lengths.names())}")
    for one in matrices:
        can = sum(not task.reason for task in tasks[one.name])
        typer.echo(f"\nmatrix {one.name}: {one.description}\n  {can} of {len(tasks[one.name])} cells can run here:")
        for task in tasks[one.name]:
            typer.echo(f"  {task.cell.id}: {task.how}")
    if as_json:
        print_json(
            {
                "machine": {"cores": machine.cores, "gpus": machine.gpus},
                "suites": suites,
                "workloads": lengths.names(),
                "matrices": {
                    one.name: {
                        "description": one.description,
                        "cells": {task.cell.id: task.how for task in tasks[one.name]},
                    }
                    for one in matrices
                },
            }
        )


app.command()(cli_report.report)
cli_verdicts.register(app)
