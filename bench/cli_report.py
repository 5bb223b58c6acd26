"""``python -m bench report``, and what ``run`` says and writes at its end.

Exit codes of ``report``: 0, with ``--against`` those of ``compare`` (1 regressed, 3 something could not be compared), 2
bad input.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bench.cli_parts import AsJson, print_json
from bench.cli_verdicts import WIDTH
from steelyard.cli import bad_input_in_one_line

if TYPE_CHECKING:
    from bench.report.runs import Against, Runs
    from bench.summary import Summary

# Columns that fit the widest table. A narrower terminal wraps its lines, which cuts no figure off.
LEAST_WIDTH = 132
RUNS = Path("results/runs")


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders, merged into one page.")],
    against: Annotated[
        Path | None,
        typer.Option(metavar="REFERENCE", help="Judge the runs by another run, or by results/reference."),
    ] = None,
    publish: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Write a dated report to commit, such as into results.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Folder of the page (default: the run's, if it is one run).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write runs as a page to look at, as Markdown for a pull request, and as JSON."""
    with bad_input_in_one_line():
        from bench.report.runs import Runs

        read = Runs.read(runs)
        judged = read.against(against) if against else None
        folder = out or (read.sources[0].file.parent if len(runs) == 1 else _new_folder())
        conclude(folder, read, judged, publish, as_json)
    raise typer.Exit(judged.report.exit_code if judged else 0)


def _new_folder() -> Path:
    return RUNS / f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-report"


def conclude(
    folder: Path, runs: Runs, against: Against | None = None, publish: Path | None = None, as_json: bool = False
) -> Summary:
    """Print what ``runs`` found, and write their report into ``folder``."""
    from rich.console import Console

    from bench.report.page import report_data, sentence_of
    from bench.report.publish import publish as publish_dated
    from bench.report.write import write_report
    from bench.tables import main_tables
    from bench.weigh_tables import verdict_table

    if runs.dropped:
        typer.echo(f"warning: {runs.dropped}", err=True)
    page: Path | None = None
    try:
        page = write_report(folder, runs, against).html
    except OSError as error:
        # The records are what counts; a full disk may have no room for pages.
        again = " ".join(str(source.file.parent) for source in runs.sources)
        typer.echo(f"warning: no report was written ({error.strerror}): try 'python -m bench report {again}'", err=True)
    dated = publish_dated(publish, runs, against) if publish else None
    summary = runs.summary
    console = Console()
    console.width = max(console.width, WIDTH if against else LEAST_WIDTH)
    for table in main_tables(summary) + ([verdict_table(against.report)] if against else []):
        console.print(table.rich())
        console.print()
    typer.echo(sentence_of(summary, against))
    typer.echo(f"report: {page or 'none'}")
    if dated:
        typer.echo(f"published: {dated}")
    if as_json:
        files = {"run": str(folder), "report": page and str(page), "published": dated and str(dated)}
        print_json({**files, **report_data(runs, against)})
    return summary
