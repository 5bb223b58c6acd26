"""The tables of a run as plain text, for the terminal (rich) and for the report (Markdown) alike."""

from __future__ import annotations

from dataclasses import dataclass
from textwrap import fill
from typing import TYPE_CHECKING

from bench.bubbles import METRICS as BUBBLE_METRICS
from bench.bubbles import Bubbles
from bench.handover import METRICS as HANDOVER_METRICS
from bench.handover import Four, Handover
from bench.oom import METRICS as OOM_METRICS
from bench.oom import Oom
from bench.overrides import METRICS as OVERRIDE_METRICS
from bench.overrides import NAIVE, Override
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
    "overhead_over_best_other",
    "time_over_bound",
    *PACKING_METRICS,
    *BUBBLE_METRICS,
    *HANDOVER_METRICS,
    *OOM_METRICS,
    *OVERRIDE_METRICS,
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
    makers = (
        throughput_table, parity_table, planning_table, packing_table, bubble_table, handover_table,
        oom_table, override_table, problem_table,
    )  # fmt: skip
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
        NONE if ours is None else _figure(ours.bound, ".1f"),
        NONE if ours is None else _figure(ours.count, ".1f"),
        NONE if fewest is None else f"{_figure(fewest.count, '.1f')} {fewest.planner}",
        NONE if ours is None or board.stages == 1 else _figure(ours.time, ".3f"),
        NONE if fastest is None else f"{_figure(fastest.time, '.3f')} {fastest.planner}",
        _figure(board.time_ratio, ".3f"),
        _overhead_text(board),
        NONE if ours is None or board.stages == 1 else _figure(ours.gap, ".1%"),
        NONE if ours is None else f"{_figure(ours.milliseconds, '.3g')} [{_figure(ours.worst_milliseconds, '.3g')}]",
        NONE if naive is None else _figure(naive.milliseconds, ",.3g" if (naive.milliseconds or 0) < 1000 else ",.0f"),
    )


def _overhead_text(board: Scoreboard) -> str:
    mean, of_means = _figure(board.overhead_ratio, ".3f"), _figure(board.ratio_of_means, ".3f")
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


def bubble_table(summary: Summary) -> Table:
    return Table(
        title="Pipeline bubbles: the naive order against the plan, on Megatron's real schedules",
        caption=(
            "Two figures: naive / optimised. naive: contiguous rows in the order in which they came. makespan and "
            "overhead are traced on paced stages, medians. ratio: naive over optimised makespan with its 95 % "
            "bootstrap interval over pairs of steps. predicted: overhead by the simulator that knows the exchange of "
            "shapes. error: fastest traced over predicted makespan, less 1; plain error: the same for the simulator "
            "that knows no exchange. over bound: predicted makespan over what no order goes below, less 1."
        ),
        columns=(
            "cell", "micro-\nbatches", "makespan\ns", "ratio", "overhead\n%", "predicted\n%", "error\n%",
            "plain error\n%", "over bound\n%",
        ),
        left=1,
        rows=tuple(
            Row(_bubble_texts(cell, row), cell.lines, bad=cell.status != "passed") for cell, row in summary.bubbles
        ),
    )  # fmt: skip


def _bubble_texts(cell: CellRecords, row: Bubbles) -> tuple[str, ...]:
    workload, layout, rows = cell.label
    return (
        f"{workload}\n{layout}, {rows}, {row.source}",
        _two(row.micro_batches),
        _two(row.makespan),
        ratio_text(row.ratio),
        _percents(row.overhead),
        _percents(row.predicted_overhead),
        _percents(row.error, 1),
        _percents(row.error_without_exchange, 1),
        _percents(row.gap),
    )


def _percents(pair: tuple[float | None, float | None], digits: int = 0) -> str:
    return " / ".join(NONE if one is None else f"{100 * one:.{digits}f}" for one in pair)


def handover_table(summary: Summary) -> Table:
    return Table(
        title="Hand-over: what a rollout engine can get of a GPU after a training step, and what it costs",
        caption=(
            "Four figures: N10 alone / N10 + N11, below them hand_over with parameters kept / hand_over. N10 is a "
            "plain empty_cache, N11 leaves parameters and gradients on the device. state: parameters, gradients, "
            "optimizer on that GPU. for the engine: what is left of the capacity, predicted by a replay of the "
            "allocator over the real step on fake tensors, on the stage with the least. gain: hand_over over N10 + "
            "N11, predicted, and measured where the device was. device free: measured on CUDA. out, back: measured, "
            "medians; host: copies went from host memory to host memory, which tells nothing of a GPU. step: with the "
            "cache emptied before every micro-batch / without, measured on CUDA. loss: difference of the step after a "
            "hand-over to one without, which must be 0."
        ),
        columns=(
            "cell", "capacity\nGiB", "state\nGiB", "for the\nengine\nGiB", "gain\nGiB", "device\nfree\nGiB",
            "out\nms", "back\nms", "step\nms", "loss",
        ),
        left=1,
        rows=tuple(
            Row(_handover_texts(cell, row), cell.lines, bad=cell.status != "passed") for cell, row in summary.handover
        ),
    )  # fmt: skip


def _handover_texts(cell: CellRecords, row: Handover) -> tuple[str, ...]:
    workload, layout, what = cell.label
    where = "" if row.on_cuda or row.out[0] is None else "\nhost"
    measured = "" if row.measured_gain is None else f"\n{row.measured_gain:.2f} measured"
    return (
        f"{workload}\n{layout}, {what}",
        _figure(row.capacity, "g"),
        "\n".join(_figure(one, ".2f") for one in row.state) or NONE,
        _four(row.predicted, ".2f"),
        _figure(row.gain, ".2f") + measured,
        _four(row.measured, ".2f"),
        _four(row.out, ",.3g") + where,
        _four(row.back, ",.3g") + where,
        _two(row.step),
        _figure(row.loss_difference, "g"),
    )


def _four(figures: Four, style: str) -> str:
    texts = [_figure(one, style) for one in figures]
    return NONE if all(one is None for one in figures) else f"{' / '.join(texts[:2])}\n{' / '.join(texts[2:])}"


def oom_table(summary: Summary) -> Table:
    return Table(
        title="Out of memory: the longest response that fits",
        caption=(
            "Tokens of the longest row, prompt and response, predicted: the real step on fake tensors. 0: nothing "
            "fits. ext.: continued from two depths of the model; every threshold was run that way. naive: fixed "
            "micro-batches, padded (N1, N5) / log-probabilities of all rows with their graphs (N14); - where such "
            "code did not run. optimised: micro-batches of fixed rows (computed) / dynamic, one "
            "longest row each. at 16k: batch, if a rank's whole batch were moved before the split / activations and "
            "temporaries / logits and loss, in the phase of the peak. few -> many: GiB for log-probabilities of so "
            "many micro-batches of 16k, naive (N14), below it optimised. real: the most tokens that ran under a limit "
            "on memory, and how far the prediction is from it; naive, below it optimised."
        ),
        columns=(
            "cell", "GiB", "naive\ntokens", "optimised\ntokens", "ratio", "at 16k\nGiB",
            "few -> many\nmicro-batches", "real", "breaks first",
        ),
        left=1,
        rows=tuple(Row(_oom_texts(cell, row), cell.lines, bad=cell.status != "passed") for cell, row in summary.oom),
    )  # fmt: skip


def _oom_texts(cell: CellRecords, row: Oom) -> tuple[str, ...]:
    _, layout, what = cell.label
    parts = None if row.activations is None else (row.batch, *row.activations)
    return (
        f"{row.model}\n{layout}, {what}" + (", ext." if row.extrapolated else ""),
        _figure(row.capacity, "g"),
        " / ".join(map(number, row.thresholds[:2])),
        " / ".join(map(number, row.thresholds[2:])),
        _figure(row.gain, ".2f"),
        NONE if parts is None else " / ".join(_figure(one, ".2f") for one in parts),
        "\n".join(
            " -> ".join(f"{peak:.1f}" for (whose, _), peak in row.log_probs.items() if whose == side)
            for side in ("naive", "optimised")
        ).strip() or NONE,
        "\n".join(
            f"{number(one.tokens)} ({_figure(one.error, '.1%')})\n{one.failure}"
            for side in ("naive", "optimised") if (one := row.real.get(side))
        ) or NONE,
        fill(row.breaks_first, 32) or NONE,
    )  # fmt: skip


def override_table(summary: Summary) -> Table:
    names = summary.overrides[0].names if summary.overrides else ()
    return Table(
        title="Overrides: what was asked, and what was observed through each builder",
        caption=(
            "One row for each case over all layouts; what was observed is that of the first layout, on the first rank "
            "that shows anything. N12 loses the override and must be caught. Observed are buffers, buckets and "
            "collectives of a step, or layers and what runs in them, never the configuration. LOST ON, NOT CAUGHT ON: "
            "the layouts where it is otherwise."
        ),
        columns=("field", "asked", *names, "layouts"),
        left=2 + len(names),
        rows=tuple(Row(_override_texts(row), row.lines, bad=not row.passed) for row in summary.overrides),
    )


def _override_texts(row: Override) -> tuple[str, ...]:
    texts = []
    for builder in row.builders:
        wrong = "NOT CAUGHT ON" if builder.name == NAIVE else "LOST ON"
        texts.append(builder.observed + (f"\n{wrong} {', '.join(builder.missed)}" if builder.missed else ""))
    return row.field, row.asked.replace(", ", "\n"), *texts, str(max(one.layouts for one in row.builders))


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
