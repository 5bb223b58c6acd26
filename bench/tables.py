"""The tables of a run as plain text, for the terminal (rich) and for the report (Markdown) alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bench.packing import METRICS as PACKING_METRICS
from bench.packing import Packing
from bench.scoreboard import PlannerScore, Scoreboard
from bench.stats import Ratio, median
from bench.summary import CellRecords, Parity, Summary, Throughput, error_text

if TYPE_CHECKING:
    from rich.table import Table as RichTable

NONE = "-"
# These metrics stand in tables of their own.
SHOWN_ELSEWHERE = {
    "tokens_per_second",
    "computed_tokens",
    "micro_batches",
    "parity_max_error",
    "micro_batch_bound",
    "share_over_cap",
    "rank_imbalance",
    "time_over_ideal",
    "planning_ms",
    "count_above_best_other",
    "time_over_best_other",
    *PACKING_METRICS,
}


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
    makers = (throughput_table, parity_table, planning_table, packing_table, problem_table)
    return [table for make in makers if (table := make(summary)).rows]


def side_tables(summary: Summary) -> list[Table]:
    """The tables of a report that are too long for a terminal, those with rows."""
    return [table for make in (planner_table, other_table) if (table := make(summary)).rows]


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


def planning_table(summary: Summary) -> Table:
    return Table(
        title="Planning scoreboard: Steelyard's planner against the best of the others",
        caption=(
            "Means over the draws. bound: what no plan within the cap goes below. best other: of the planners that "
            "keep the cap in every draw, the one with the fewest micro-batches, and the one with the least time. time: "
            "predicted, slowest rank over ideal. worst ratio: Steelyard's time over the least of the others that keep "
            "the cap, in the worst draw. ms: planning time on one core, measured, median over the draws; slowest draw "
            "in brackets."
        ),
        columns=(
            "cell",
            "bound",
            "micro-\nbatches",
            "best other",
            "time",
            "best other",
            "worst\nratio",
            "Steelyard\nms",
            "N4\nms",
        ),
        left=1,
        rows=tuple(
            Row(_planning_texts(cell, board), cell.lines, bad=cell.status != "passed")
            for cell, board in summary.planning
        ),
    )


def _planning_texts(cell: CellRecords, board: Scoreboard) -> tuple[str, ...]:
    workload, layout, rows = cell.label
    ours, fewest = board.ours, board.best_other("count")
    fastest = board.best_other("time") if board.stages > 1 else None
    naive = next((one for one in board.planners if one.planner == "N4"), None)
    return (
        f"{workload}\n{layout}, {rows}",
        NONE if ours is None else _figure(ours.bound, ".1f"),
        NONE if ours is None else _figure(ours.count, ".1f"),
        NONE if fewest is None else f"{_figure(fewest.count, '.1f')} {fewest.planner}",
        NONE if ours is None or board.stages == 1 else _figure(ours.time, ".3f"),
        NONE if fastest is None else f"{_figure(fastest.time, '.3f')} {fastest.planner}",
        _figure(board.time_ratio, ".3f"),
        NONE if ours is None else f"{_figure(ours.milliseconds, '.3g')} [{_figure(ours.worst_milliseconds, '.3g')}]",
        NONE if naive is None else _figure(naive.milliseconds, ",.3g" if (naive.milliseconds or 0) < 1000 else ",.0f"),
    )


def planner_table(summary: Summary) -> Table:
    """Every planner of every cell."""
    return Table(
        title="Planning: every planner",
        caption=(
            "N2 is verl's first dynamic batching, N3 rounds its count up for virtual stages, N4 balances work and puts "
            "small micro-batches at both ends; none of the three checks the cap. verl-0.9.1 repeats N4 with a larger "
            "count until it fits. slime packs first-fit in arrival order, next-fit is NeMo-RL's concatenative packer. "
            "FFD+KK is the best combination of published parts: first-fit-decreasing, split, dealt by differencing, "
            "small at both ends. A plan that breaks the cap runs out of memory where the cap was tight; its count and "
            "time are shown, but nobody can use them. refused: draws without a plan that Megatron runs."
        ),
        columns=(
            "cell", "planner", "keeps the cap", "micro-batches", "bound", "over cap", "rank imbalance", "time",
            "worst time", "ms", "worst ms", "refused",
        ),
        left=3,
        rows=tuple(
            Row((" ".join(cell.label), *_planner_texts(one)), cell.lines, bad=one.ours and not one.keeps_cap)
            for cell, board in summary.planning
            for one in board.planners
        ),
    )  # fmt: skip


def _planner_texts(one: PlannerScore) -> tuple[str, ...]:
    return (
        one.planner,
        "yes" if one.over_cap == 0 else "-" if one.over_cap is None else "NO",
        _figure(one.count, ".1f"),
        _figure(one.bound, ".1f"),
        _figure(one.over_cap, ".1%"),
        _figure(one.imbalance, ".3f"),
        _figure(one.time, ".3f"),
        _figure(one.worst_time, ".3f"),
        _figure(one.milliseconds, ".3g"),
        _figure(one.worst_milliseconds, ".3g"),
        f"{one.refused} of {one.draws}" if one.refused else NONE,
    )


def _figure(value: float | None, style: str) -> str:
    return NONE if value is None else format(value, style)


def packing_table(summary: Summary) -> Table:
    return Table(
        title="Packing: Steelyard against packing with host reads (N6) and whole logits (N7)",
        caption=(
            "Two figures: naive / Steelyard. ms: pack, labels and unpack of one micro-batch on one rank, medians. "
            "ratio: naive over Steelyard with its 95 % bootstrap interval over pairs; below it that of pack, labels "
            "and unpack alone. host reads: how often the host waits for the device; on a CPU that costs nothing, so "
            "the ratios are without it. staging: temporary tensors, and indices copied to the device. padding: share "
            "of the padded batch, and of the packed one. log-probs: N7's time over Steelyard's, small vocabulary, few "
            "rows. logits: what exists at once for all rows and the whole vocabulary, computed."
        ),
        columns=(
            "cell", "ms", "ratio", "host reads", "staging\nMiB", "padding\n%", "log-probs\nratio", "logits\nGiB",
        ),
        left=1,
        rows=tuple(
            Row(_packing_texts(cell, row), cell.lines, bad=cell.status != "passed") for cell, row in summary.packing
        ),
    )  # fmt: skip


def _packing_texts(cell: CellRecords, row: Packing) -> tuple[str, ...]:
    workload, layout, rows = cell.label
    stages = [NONE if one is None else f"{one.value:.1f}" for one in row.stages.values()]
    return (
        f"{workload}\n{layout}, {rows}",
        _two(row.milliseconds),
        f"{ratio_text(row.ratio)}\n{', '.join(stages)}",
        _two(row.reads),
        _two(row.staging, 1 / 2**20),
        _two(row.padding, 100),
        NONE if row.log_probs is None else f"{row.log_probs.value:.1f}",
        _two(row.logits),
    )


def _two(pair: tuple[float | None, float | None], factor: float = 1.0) -> str:
    """Naive / optimised, with three digits at least."""
    scaled = [None if one is None else one * factor for one in pair]
    return " / ".join(
        NONE if one is None else f"{one:,.0f}" if one >= 100 or one == int(one) else f"{one:.{3 - len(f'{one:.0f}')}f}"
        for one in scaled
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
                    f"{series.side} {series.variant}".strip(),
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
