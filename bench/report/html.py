"""``report.html``: the whole page in one file, with its pictures and styles inside; it loads nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from bench.report.page import Page
from bench.stats import median

TEMPLATES = Path(__file__).parent / "templates"
MOST_SAMPLES = 6


def write_html(page: Page) -> Path:
    """Write the page into its folder; returns its path."""
    jinja = Environment(
        loader=FileSystemLoader(TEMPLATES), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        autoescape=True,
    )  # fmt: skip
    summary, runs = page.summary, page.runs

    def place(number: int) -> str:
        source, line = runs.place(number)
        return f"{source.run}, {line}"

    text = jinja.get_template("report.html.j2").render(
        page=page,
        names=", ".join(source.run for source in runs.sources),
        started=min(record.time for record in runs.lines),
        seconds=sum(cell.outcome.seconds for cell in summary.cells if cell.outcome),
        css=(TEMPLATES / "report.css").read_text(),
        median=median,
        samples=samples,
        place=place,
    )
    path = page.folder / "report.html"
    path.write_text(text.lstrip(), encoding="utf-8")
    return path


def samples(values: Sequence[float]) -> str:
    """The first samples, and how many more there are."""
    shown = ", ".join(f"{value:.6g}" for value in values[:MOST_SAMPLES])
    return shown + (f" and {len(values) - MOST_SAMPLES} more" if len(values) > MOST_SAMPLES else "")
