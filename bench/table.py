"""A table as plain text, for the terminal (rich) and the report (Markdown) alike, and how its figures are written."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bench.stats import Ratio

if TYPE_CHECKING:
    from rich.table import Table as RichTable

NONE = "-"


@dataclass(frozen=True)
class Row:
    """Texts by column, and the numbers of the records they come from.

    Attributes:
        lines: first and last record of the row; (0, 0) where it has none.
        bad: whether a reader must look at it.
        records: by column, where single figures have records of their own; 0 for none, negative for one of the
            reference results.
    """

    texts: tuple[str, ...]
    lines: tuple[int, int]
    bad: bool = False
    records: tuple[int, ...] = ()

    def record(self, column: int) -> int:
        """The record of the figure in a column."""
        return self.records[column] if self.records else self.lines[0]


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


def range_text(values: Sequence[float], digits: int) -> str:
    """The least and the greatest, once where they are written alike."""
    low, high = f"{min(values):.{digits}f}", f"{max(values):.{digits}f}"
    return low if low == high else f"{low} to {high}"


def number(value: float | None) -> str:
    """A count or a rate with thousands separators, at least four digits where it has them."""
    if value is None:
        return NONE
    return f"{value:,.0f}" if math.isfinite(value) and (value >= 1000 or value == int(value)) else f"{value:.4g}"


def ratio_text(ratio: Ratio | None, digits: int = 2) -> str:
    if ratio is None:
        return NONE
    value, *ends = (NONE if one is None else f"{one:.{digits}f}" for one in (ratio.value, ratio.low, ratio.high))
    return value if ratio.low is None else f"{value} [{', '.join(ends)}]"
