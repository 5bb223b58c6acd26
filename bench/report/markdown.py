"""``report.md``: the page as Markdown that fits a comment on a pull request, with pictures by relative path."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from bench.report.page import Page
from bench.report.runs import Source
from bench.table import Row, Table

TEMPLATES = Path(__file__).parent / "templates"
LIMIT = 65_536  # characters of a comment on GitHub


@dataclass(frozen=True)
class Short:
    """What is left out of a page that is too long.

    Attributes:
        sides: metrics without a table of their own.
        pictures: pictures and trace files.
        rows: of a table, those beyond so many; captions and tracebacks too.
    """

    sides: bool = False
    pictures: bool = False
    rows: int | None = None

    @property
    def words(self) -> str:
        parts = ["other metrics"] * self.sides + ["pictures"] * self.pictures
        if self.rows is not None:
            parts += [f"rows of tables beyond {self.rows}", "explanations", "tracebacks"]
        return f"{', '.join(parts)} are in report.html alone" if parts else ""


# From a whole page to the shortest.
LENGTHS = (
    Short(), Short(sides=True), Short(sides=True, pictures=True),
    *(Short(sides=True, pictures=True, rows=rows) for rows in (64, 32, 16, 8, 4, 2, 1, 0)),
)  # fmt: skip


def write_markdown(page: Page) -> Path:
    """Write the longest form that fits a comment into the page's folder; returns its path."""
    path = page.folder / "report.md"
    text = next((text for short in LENGTHS if len(text := render(page, short)) <= LIMIT), None)
    path.write_text(text or render(page, LENGTHS[-1])[:LIMIT], encoding="utf-8")
    return path


def render(page: Page, short: Short = LENGTHS[0], template: str = "report.md.j2", **more: object) -> str:
    """The page as Markdown.

    Args:
        more: what another template needs, or has in the place of the common facts.
    """
    jinja = Environment(
        loader=FileSystemLoader(TEMPLATES), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        keep_trailing_newline=True,
    )  # fmt: skip
    jinja.filters["cell"] = table_cell

    def file(source: Source) -> str:
        return Path(os.path.relpath(source.file, page.folder)).as_posix()

    def link(lines: tuple[int, int]) -> str:
        if not lines[0]:
            return "-"
        (source, first), (other, last) = map(page.runs.place, lines)
        if other != source:  # a row over several runs
            return f"[{first}…]({file(source)}#L{first})"
        return f"[{first}]({file(source)}#L{first})" if first == last else (
            f"[{first}-{last}]({file(source)}#L{first}-L{last})"
        )  # fmt: skip

    def shown(table: Table) -> tuple[Row, ...]:
        """Those that need a look are never left out before others."""
        if short.rows is None or len(table.rows) <= short.rows:
            return table.rows
        keep = sorted(range(len(table.rows)), key=lambda at: (not table.rows[at].bad, at))[: short.rows]
        return tuple(table.rows[at] for at in sorted(keep))

    facts = {
        "page": page,
        "short": short,
        "shown": shown,
        "link": link,
        "file": file,
        "pictures": "",
        "started": min(record.time for record in page.runs.lines),
        "seconds": sum(cell.outcome.seconds for cell in page.summary.cells if cell.outcome),
    }
    return jinja.get_template(template).render({**facts, **more})


def table_cell(text: str) -> str:
    """``text`` so that it stays one cell of a Markdown table."""
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("\n", "<br>")
