"""The tables of a run: those of every kind of cell, in their order."""

from __future__ import annotations

from collections.abc import Callable

from bench import overrides
from bench.oom_tables import answer_table, oom_table
from bench.parity import Parity, error_text
from bench.scoreboard import PlannerScore, Scoreboard
from bench.stats import median
from bench.suite_tables import bubble_table, handover_table, memory_table, override_table, packing_table
from bench.summary import KINDS, CellRecords, Summary
from bench.table import NONE, Row, Table, figure, number, ratio_text
from bench.throughput import Throughput


def main_tables(summary: Summary) -> list[Table]:
    """The tables that a person wants to see first, those with rows."""
    makers = (problem_table, *(make for section in SECTIONS.values() for make in section if make is not planner_table))
    return [table for make in makers if (table := make(summary)).rows]


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
        f"{workload}\n{layout}, {role}" + ("" if row.source == "measured" else f", {row.source}"),
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
            "the cap, in the worst draw. overhead ratio: its overhead (time less 1) over the least of theirs, mean "
            "over the draws; ratio of the means in brackets. over bound: its time over what no order of its "
            "micro-batches goes below, less 1. ms: planning time on one core, measured, median over the draws; slowest "
            "draw in brackets."
        ),
        columns=(
            "cell",
            "bound",
            "micro-\nbatches",
            "best other",
            "time",
            "best other",
            "worst\nratio",
            "overhead\nratio",
            "over\nbound",
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
        NONE if ours is None else figure(ours.bound, ".1f"),
        NONE if ours is None else figure(ours.count, ".1f"),
        NONE if fewest is None else f"{figure(fewest.count, '.1f')} {fewest.planner}",
        NONE if ours is None or board.stages == 1 else figure(ours.time, ".3f"),
        NONE if fastest is None else f"{figure(fastest.time, '.3f')} {fastest.planner}",
        figure(board.time_ratio, ".3f"),
        _overhead_text(board),
        NONE if ours is None or board.stages == 1 else figure(ours.gap, ".1%"),
        NONE if ours is None else f"{figure(ours.milliseconds, '.3g')} [{figure(ours.worst_milliseconds, '.3g')}]",
        NONE if naive is None else figure(naive.milliseconds, ",.3g" if (naive.milliseconds or 0) < 1000 else ",.0f"),
    )


def _overhead_text(board: Scoreboard) -> str:
    mean, of_means = figure(board.overhead_ratio, ".3f"), figure(board.ratio_of_means, ".3f")
    return NONE if mean == NONE else f"{mean}\n[{of_means}]"


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
        figure(one.count, ".1f"),
        figure(one.bound, ".1f"),
        figure(one.over_cap, ".1%"),
        figure(one.imbalance, ".3f"),
        figure(one.time, ".3f"),
        figure(one.worst_time, ".3f"),
        figure(one.milliseconds, ".3g"),
        figure(one.worst_milliseconds, ".3g"),
        f"{one.refused} of {one.draws}" if one.refused else NONE,
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
            if series.metric not in (KINDS[cell.kind].metrics if cell.kind else overrides.METRICS)
        ),
    )


# By kind of cell; what a page has no table for stands in ``other_table``.
SECTIONS: dict[str, tuple[Callable[[Summary], Table], ...]] = {
    "throughput": (throughput_table,),
    "parity": (parity_table,),
    "planning": (planning_table, planner_table),
    "packing": (packing_table,),
    "bubbles": (bubble_table,),
    "handover": (handover_table,),
    "memory": (memory_table,),
    "oom": (oom_table, answer_table),
    "overrides": (override_table,),
}
