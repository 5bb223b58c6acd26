"""The tables of the oom suite: the longest response of every cell, and what a single change of a setting does to it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from textwrap import fill
from typing import Any

from bench.oom import FIXED, OPTIMISED, PADDED, WHOLE, Oom
from bench.summary import CellRecords, Summary
from bench.table import NONE, Row, Table, figure, number

Settings = Mapping[str, Any]
Test = Callable[[Settings], bool]
# What a cell is called and where it ran; the layout counts by its sizes.
NAMES_ONLY = ("layout", "axis", "repeat", "time_limit")


def oom_table(summary: Summary) -> Table:
    return Table(
        title="Out of memory: the longest response that fits",
        caption=(
            "Tokens of the longest row, prompt and response, predicted: the real step on fake tensors. 0: nothing "
            "fits. ext.: continued from two depths of the model; every threshold was run that way. naive: fixed "
            "micro-batches, padded (N1, N5) / whole logits restored (N7), one row each / log-probabilities of all rows "
            "with their graphs (N14); - where such code did not run. optimised: micro-batches of fixed rows (computed) "
            "/ dynamic, one longest row each. ratio: optimised, dynamic, over N1 + N5. At 16k, inputs: a rank's whole "
            "batch if it were moved before the split; the rest: activations and temporaries / logits and loss, in the "
            "phase of the peak. micro-batches: GiB of few -> many of 16k, naive (N14) and optimised. real: the most "
            "tokens that ran under a limit on memory, and how far the prediction is from it; naive, below it optimised."
        ),
        columns=(
            "cell", "GiB", "naive\ntokens", "optimised\ntokens", "ratio", "inputs\nMiB", "the rest\nGiB",
            "micro-\nbatches", "real", "breaks first",
        ),
        left=1,
        rows=tuple(Row(_oom_texts(cell, row), cell.lines, bad=cell.status != "passed") for cell, row in summary.oom),
    )  # fmt: skip


def _oom_texts(cell: CellRecords, row: Oom) -> tuple[str, ...]:
    _, layout, what = cell.label
    return (
        f"{row.model}\n{layout}, {what}" + (", ext." if row.extrapolated else ""),
        figure(row.capacity, "g"),
        " / ".join(map(number, row.thresholds[:FIXED])),
        " / ".join(map(number, row.thresholds[FIXED:])),
        figure(row.gain, ".2f"),
        NONE if row.batch is None else f"{row.batch * 1024:.0f}",
        NONE if row.activations is None else " / ".join(f"{one:.2f}" for one in row.activations),
        "\n".join(
            f"{'N14 ' if side == 'naive' else ''}{what} {' -> '.join(map(str, one.counts))}:\n"
            + " -> ".join(f"{peak:.2f}" for peak in one.peaks)
            for (side, what), one in row.growth.items()
        ) or NONE,
        "\n".join(
            f"{number(one.tokens)} ({figure(one.error, '.1%')})\n{one.failure}"
            for side in ("naive", "optimised") if (one := row.real.get(side))
        ) or NONE,
        fill(row.breaks_first, 32) or NONE,
    )  # fmt: skip


@dataclass(frozen=True)
class Change:
    """A question that two cells answer which differ in nothing else.

    Attributes:
        question: in words.
        free: sizes of the layout, or settings of the cell, in which the two differ.
        before, after: whether the settings of a cell are those of the one, or of the other.
        same_gpus: whether both use equally many GPUs; else the first is the one with the fewest.
    """

    question: str
    free: tuple[str, ...]
    before: Test
    after: Test
    same_gpus: bool = True


def _size(name: str, value: object) -> Test:
    return lambda case: case["layout"][name] == value


def _any(case: Settings) -> bool:
    return True


CHANGES = (
    Change("Does tensor parallelism help?", ("tp", "dp"), _size("tp", 1), _any),
    Change("Does sequence parallelism help?", ("sp",), _size("sp", False), _any),
    Change("Does context parallelism help?", ("cp", "dp"), _size("cp", 1), _size("cp_kind", "all_gather")),
    Change("Does Ulysses help?", ("cp", "cp_kind", "dp"), _size("cp", 1), _size("cp_kind", "all_to_all")),
    Change("Do pipeline stages help?", ("pp", "dp"), _size("pp", 1), _any),
    Change("Does recomputing help?", ("recompute",), lambda case: case["recompute"] == "none", _any),
    Change("What does a larger budget cost?", ("max_tokens",), lambda case: case["max_tokens"] is None, _any),
    Change("Do more nodes help?", ("dp", "rows"), _any, _any, same_gpus=False),
)


@dataclass(frozen=True)
class Answer:
    """Two cells, or twice the same one, and which numbers of ``WAYS`` are compared, each pair with its name."""

    question: str
    before: Oom
    after: Oom
    ways: tuple[tuple[str, int, int], ...]


def answers(rows: list[Oom]) -> list[Answer]:
    """Every question that some cells of a run answer."""
    found = []
    predicted = [row for row in rows if row.curves and not row.real]
    both_sides = [row for row in predicted if row.thresholds[PADDED] and row.thresholds[WHOLE]]
    for first in {row.model: row for row in reversed(both_sides)}.values():
        found += [
            Answer("What does the naive step cost?", first, first, (("N1 + N5, packed", PADDED, FIXED),)),
            Answer("What do whole logits cost?", first, first, (("N7, without", WHOLE, OPTIMISED),)),
            Answer("What do dynamic batches change?", first, first, (("fixed, dynamic", FIXED, OPTIMISED),)),
        ]
    both = (("fixed", FIXED, FIXED), ("dynamic", OPTIMISED, OPTIMISED))
    for change in CHANGES:
        for row in filter(lambda one: change.before(one.case), predicted):
            others = [one for one in predicted if _differ_only(change, row, one)]
            if change.same_gpus or all(_gpus(row.case) < _gpus(one.case) for one in others):
                found += [Answer(change.question, row, one, both) for one in others if change.after(one.case)]
    return found


def _differ_only(change: Change, one: Oom, other: Oom) -> bool:
    """Whether two cells differ in what the change leaves free, and in nothing else."""

    def rest(case: Settings) -> dict[str, Any]:
        whole = {**case, **case["layout"]}
        return {name: value for name, value in whole.items() if name not in (*NAMES_ONLY, *change.free)}

    if one is other or rest(one.case) != rest(other.case):
        return False
    return not change.same_gpus or _gpus(one.case) == _gpus(other.case)


def _gpus(case: Settings) -> int:
    return math.prod(case["layout"][name] for name in ("tp", "pp", "cp", "dp"))


def answer_table(summary: Summary) -> Table:
    return Table(
        title="Out of memory: what a single change does",
        caption=(
            "Two figures: before -> after the change; all else is the same, the number of GPUs too unless it is the "
            "question. fixed, dynamic: micro-batches of fixed rows, or one longest row each, on the optimised side. at "
            "16k: peak on the stage that breaks first; longest: tokens of the longest row that fits. Predicted."
        ),
        columns=("question", "before", "after", "what", "at 16k\nGiB", "longest\ntokens", "times\nas long"),
        left=4,
        rows=tuple(_answer_row(summary, answer) for answer in answers([row for _, row in summary.oom])),
    )


def _answer_row(summary: Summary, answer: Answer) -> Row:
    before, after = answer.before, answer.after
    ways = answer.ways
    longest = [(before.thresholds[one], after.thresholds[other]) for _, one, other in ways]
    return Row(
        (
            f"{answer.question}\n{before.model}",
            _name(before),
            _name(after),
            "\n".join(name for name, *_ in ways),
            "\n".join(_arrow(before.peak(one), after.peak(other), ".1f") for _, one, other in ways),
            "\n".join(_arrow(*pair, ",.0f") for pair in longest),
            "\n".join(figure(new / old if old and new else None, ".2f") for old, new in longest),
        ),
        next(cell.lines for cell, row in summary.oom if row.cell == after.cell),
    )


def _arrow(one: float | None, other: float | None, style: str) -> str:
    return f"{figure(one, style)} -> {figure(other, style)}"


def _name(row: Oom) -> str:
    layout, what = row.cell.split("/")[-2:]
    _, _, axis = what.partition("-")
    return layout.replace("-", " ") + (f"\n{axis.replace('-', ' ')}" if axis else "")
