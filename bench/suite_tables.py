"""The tables of the suites that have a module of their own for what their records say."""

from __future__ import annotations

from bench.bubbles import Bubbles
from bench.handover import Four, Handover
from bench.memory import Memory
from bench.overrides import NAIVE, Override
from bench.packing import Packing
from bench.summary import CellRecords, Summary
from bench.table import NONE, Row, Table, figure, ratio_text, two


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
        two(row.milliseconds),
        f"{ratio_text(row.ratio)}\n{', '.join(stages)}",
        two(row.reads),
        two(row.staging, 1 / 2**20),
        two(row.padding, 100),
        NONE if row.log_probs is None else f"{row.log_probs.value:.1f}",
        two(row.logits),
    )


def memory_table(summary: Summary) -> Table:
    return Table(
        title="Memory: the predicted peak and what the step took",
        caption=(
            "Two figures in GiB: predicted / counted; by storage on a CPU, by the allocator on CUDA. error: of the "
            "peak. reserved, and the replay's error (the allocator's own events replayed), on CUDA alone."
        ),
        columns=("cell", "peak\nGiB", "error", "limit", "reserved\nGiB", "replay\nerror"),
        left=1,
        rows=tuple(
            Row(_memory_texts(cell, row), cell.lines, bad=cell.status != "passed") for cell, row in summary.memory
        ),
    )


def _memory_texts(cell: CellRecords, row: Memory) -> tuple[str, ...]:
    error, limit, replayed = (NONE if one is None else f"{one:.2%}" for one in (row.error, row.limit, row.replay_error))
    return (", ".join(cell.label), two(row.peak), error, limit, two(row.reserved), replayed)


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
        two(row.micro_batches),
        two(row.makespan),
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
        figure(row.capacity, "g"),
        "\n".join(figure(one, ".2f") for one in row.state) or NONE,
        _four(row.predicted, ".2f"),
        figure(row.gain, ".2f") + measured,
        _four(row.measured, ".2f"),
        _four(row.out, ",.3g") + where,
        _four(row.back, ",.3g") + where,
        two(row.step),
        figure(row.loss_difference, "g"),
    )


def _four(figures: Four, style: str) -> str:
    texts = [figure(one, style) for one in figures]
    return NONE if all(one is None for one in figures) else f"{' / '.join(texts[:2])}\n{' / '.join(texts[2:])}"


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
