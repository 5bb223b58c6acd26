"""A table as plain text, for the terminal (rich) and the report (Markdown) alike, and how its figures are written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bench.stats import Ratio

if TYPE_CHECKING:
    from rich.table import Table as RichTable

NONE = "-"


@dataclass(frozen=True)
class Row:
    """Texts by column, and the lines of the records they come from."""

    texts: tuple[str, ...]
    lines: tuple[int, int]
    bad: bool = False


@dataclass(frozen=True)
class Table:
    """``left``: how many columns from the left hold words; the others hold numbers. A line break in a text is kept."""

    title: str
    caption: str
    columns: tuple[str, ...]
    left: int
    rows: tuple[Row, ...]

    def rich(self) -> RichTable:
        from rich import box
        from rich.table import Table as RichTable
        from rich.text import Text

        table = RichTable(title=self.title, title_justify="left", caption=self.caption, caption_justify="left")
        table.box = box.SIMPLE_HEAD
        table.padding = (0, 1, 0, 0)
        for index, column in enumerate(self.columns):
            number = index >= self.left
            table.add_column(column, justify="right" if number else "left", no_wrap=number or index == 0)
        for row in self.rows:
            # Text: square brackets in a cell are not markup.
            table.add_row(*map(Text, row.texts), style="red" if row.bad else None)
        return table


def figure(value: float | None, style: str) -> str:
    return NONE if value is None else format(value, style)


def two(pair: tuple[float | None, float | None], factor: float = 1.0) -> str:
    """Naive / optimised, with three digits at least."""
    scaled = [None if one is None else one * factor for one in pair]
    return " / ".join(
        NONE if one is None else f"{one:,.0f}" if one >= 100 or one == int(one) else f"{one:.{3 - len(f'{one:.0f}')}f}"
        for one in scaled
    )


def number(value: float | None) -> str:
    """A count or a rate with thousands separators, at least four digits where it has them."""
    if value is None:
        return NONE
    return f"{value:,.0f}" if value >= 1000 or value == int(value) else f"{value:.4g}"


def ratio_text(ratio: Ratio | None) -> str:
    if ratio is None:
        return NONE
    return f"{ratio.value:.2f}" + ("" if ratio.low is None else f" [{ratio.low:.2f}, {ratio.high:.2f}]")
