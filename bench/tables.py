"""The tables of a run as plain text, for the terminal (rich) and for the report (Markdown) alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bench.stats import Ratio, median
from bench.summary import CellRecords, Parity, Summary, Throughput, error_text

if TYPE_CHECKING:
    from rich.table import Table as RichTable

NONE = "-"
# These metrics stand in tables of their own.
SHOWN_ELSEWHERE = {"tokens_per_second", "computed_tokens", "micro_batches", "parity_max_error"}


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


def main_tables(summary: Summary) -> list[Table]:
    """The tables that a person wants to see first, those with rows."""
    return [table for make in (throughput_table, parity_table, problem_table) if (table := make(summary)).rows]


def throughput_table(summary: Summary) -> Table:
    return Table(
        title="Throughput: the optimised step against the naive step",
        caption=(
            "tokens/s: medians, real tokens only. ratio: optimised over naive with its 95 % bootstrap interval over "
            "pairs of steps. padding ratio: tokens computed by the naive side over real tokens. padding removed: share "
            "of the naive side's padding that the optimised side leaves out. micro-batches: naive / optimised. loss "
            "difference: largest, absolute; it is the naive side's error, a mean of micro-batch means in the place of "
            "the mean over tokens."
        ),
        columns=(
            "cell",
            "naive\ntokens/s",
            "optimised\ntokens/s",
            "ratio",
            "padding\nratio",
            "naive\ncomputed",
            "optimised\ncomputed",
            "padding\nremoved",
            "micro-\nbatches",
            "loss\ndifference",
        ),
        left=1,
        rows=tuple(
            Row(_throughput_texts(cell, row), cell.lines, bad=cell.status != "passed")
            for cell, row in summary.throughput
        ),
    )


def _throughput_texts(cell: CellRecords, row: Throughput) -> tuple[str, ...]:
    workload, layout, role = cell.label
    batches = (row.naive_micro_batches, row.optimised_micro_batches)
    return (
        f"{workload}\n{layout}, {role}" + (", predicted" if row.source == "predicted" else ""),
        number(row.naive),
        number(row.optimised),
        ratio_text(row.ratio),
        NONE if row.padding_ratio is None else f"{row.padding_ratio:.2f}",
        number(row.naive_computed),
        number(row.optimised_computed),
        NONE if row.padding_removed is None else f"{row.padding_removed:.1%}",
        NONE if None in batches else " / ".join(map(number, batches)),
        NONE if row.loss_difference is None else error_text(row.loss_difference),
    )


def parity_table(summary: Summary) -> Table:
    return Table(
        title="Parity: loss, gradients and metrics against the float64 judge",
        caption="worst error: the largest relative error of all that is compared; found in: where that was.",
        columns=("workload", "layout", "role", "verdict", "found in", "worst error", "limit"),
        left=5,
        rows=tuple(
            Row((*cell.label, *_parity_texts(row)), cell.lines, bad=cell.status != "passed")
            for cell, row in summary.parity
        ),
    )


def _parity_texts(row: Parity) -> tuple[str, ...]:
    if row.error is None:
        return (row.status.replace("_", " "), NONE, NONE, NONE)
    return (
        "within limit" if row.keeps_limit else "above limit",
        row.where or NONE,
        error_text(row.error),
        NONE if row.limit is None else f"{row.limit:.0e}",
    )


def problem_table(summary: Summary) -> Table:
    return Table(
        title="Cells that failed or did not run",
        caption="",
        columns=("cell", "status", "reason"),
        left=3,
        rows=tuple(
            Row((cell.id, cell.status.replace("_", " "), cell.reason), cell.lines, bad=True)
            for cell in summary.cells
            if cell.status != "passed"
        ),
    )


def other_table(summary: Summary) -> Table:
    """Every series whose metric has no table of its own, whatever it is."""
    return Table(
        title="Other metrics",
        caption="",
        columns=("cell", "metric", "side", "source", "unit", "median", "least", "most", "samples", "limit"),
        left=5,
        rows=tuple(
            Row(
                (
                    cell.id,
                    series.metric,
                    series.side,
                    series.source,
                    series.unit,
                    *(f"{value:.4g}" for value in (median(series.values), min(series.values), max(series.values))),
                    str(len(series.values)),
                    NONE if series.limit is None else f"{series.limit:.4g}",
                ),
                (series.line, series.line),
                bad=not series.keeps_limit,
            )
            for cell in summary.cells
            for series in cell.series
            if series.metric not in SHOWN_ELSEWHERE
        ),
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
