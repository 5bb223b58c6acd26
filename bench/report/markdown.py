"""``report.md``: the run as one Markdown page beside its records, with pictures by relative path."""

from __future__ import annotations

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from bench.record import FILE_NAME, Records
from bench.report.plots import draw_all
from bench.report.traces import write_traces
from bench.summary import Summary
from bench.tables import main_tables, side_tables

TEMPLATES = Path(__file__).parent / "templates"


def write_report(folder: Path, records: Records) -> Path:
    """Draw the pictures of a run and write ``report.md`` into its folder; returns the path of the page."""
    summary = Summary.of(records.lines)
    environments: list = []
    for record in records.lines:
        if record.environment not in environments:
            environments.append(record.environment)
    jinja = Environment(
        loader=FileSystemLoader(TEMPLATES), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        keep_trailing_newline=True,
    )  # fmt: skip
    jinja.filters["cell"] = _table_cell
    page = jinja.get_template("report.md.j2").render(
        summary=summary,
        run=records.lines[0].run,
        started=min(record.time for record in records.lines),
        seconds=sum(cell.outcome.seconds for cell in summary.cells if cell.outcome),
        environments=environments,
        main_tables=main_tables(summary),
        side_tables=side_tables(summary),
        plots=draw_all(summary, folder),
        traces=write_traces(summary, folder),
        dropped=records.dropped,
        file=FILE_NAME,
        lines=len(records.lines),
    )
    path = folder / "report.md"
    path.write_text(page, encoding="utf-8")
    return path


def _table_cell(text: str) -> str:
    """``text`` so that it stays one cell of a Markdown table."""
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("\n", "<br>")
