"""The files of a report: a page to look at, the same for a pull request, and as data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydantic_core import to_json

from bench.report.html import write_html
from bench.report.markdown import write_markdown
from bench.report.page import Page, report_data
from bench.report.runs import Against, Runs


@dataclass(frozen=True)
class Written:
    """A report and its files."""

    page: Page
    html: Path
    markdown: Path
    json: Path


def write_report(folder: Path, runs: Runs, against: Against | None = None) -> Written:
    """Draw the pictures of ``runs`` and write ``report.html``, ``report.md`` and ``report.json`` into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    page = Page.draw(folder, runs, against)
    data = folder / "report.json"
    data.write_bytes(to_json(report_data(runs, against), indent=1, inf_nan_mode="strings") + b"\n")
    return Written(page, write_html(page), write_markdown(page), data)
