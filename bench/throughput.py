"""What the records of a throughput cell say: the optimised step against the naive one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bench.stats import Ratio, ratio_of_medians
from bench.table import range_text

if TYPE_CHECKING:
    from bench.record import Status
    from bench.summary import CellRecords
    from suites.measure import Source

METRICS = ("tokens_per_second", "computed_tokens", "micro_batches")


@dataclass(frozen=True)
class Throughput:
    """Naive against optimised step of one cell; None where the cell has no such samples.

    Attributes:
        naive, optimised: tokens/s, medians; only real tokens count.
        ratio: optimised over naive.
        real: tokens of the batch, without padding.
        naive_computed, optimised_computed: tokens that went through the model, padding included.
        padding_ratio: naive_computed over real: the gain from leaving out all padding if every token cost the same.
        padding_removed: share of the naive side's padding that the optimised side leaves out; None without padding.
        naive_micro_batches, optimised_micro_batches: per step.
        loss_difference: largest absolute difference of the two sides' losses at the same step.
    """

    cell: str
    status: Status
    source: Source
    naive: float | None
    optimised: float | None
    ratio: Ratio | None
    real: float | None
    naive_computed: float | None
    optimised_computed: float | None
    padding_ratio: float | None
    padding_removed: float | None
    naive_micro_batches: float | None
    optimised_micro_batches: float | None
    loss_difference: float | None

    @classmethod
    def of(cls, cell: CellRecords) -> Throughput:
        speed = {side: cell.find("tokens_per_second", side) for side in ("naive", "optimised")}
        loss = {side: cell.find("loss", side) for side in ("naive", "optimised")}
        real = cell.median("real_tokens")
        naive_computed = cell.median("computed_tokens", "naive")
        optimised_computed = cell.median("computed_tokens", "optimised")
        padding_ratio = padding_removed = None
        if real and naive_computed:
            padding_ratio = naive_computed / real
            if optimised_computed and naive_computed > real:
                padding_removed = (naive_computed - optimised_computed) / (naive_computed - real)
        return cls(
            cell=cell.id,
            status=cell.status,
            source=speed["optimised"].source if speed["optimised"] else "measured",
            naive=cell.median("tokens_per_second", "naive"),
            optimised=cell.median("tokens_per_second", "optimised"),
            ratio=ratio_of_medians(speed["optimised"].values, speed["naive"].values) if all(speed.values()) else None,
            real=real,
            naive_computed=naive_computed,
            optimised_computed=optimised_computed,
            padding_ratio=padding_ratio,
            padding_removed=padding_removed,
            naive_micro_batches=cell.median("micro_batches", "naive"),
            optimised_micro_batches=cell.median("micro_batches", "optimised"),
            loss_difference=_largest_difference(loss["naive"].values, loss["optimised"].values)
            if all(loss.values())
            else None,
        )


def throughput_text(rows: Sequence[Throughput]) -> str:
    """The part of a run's sentence: empty without ratios."""
    ratios = [row.ratio.value for row in rows if row.ratio]
    if not ratios:
        return ""
    return f"; the optimised step is {range_text(ratios, 2)} times as fast as the naive one"


def _largest_difference(one: Iterable[float], other: Iterable[float]) -> float:
    differences = [abs(a - b) for a, b in zip(one, other, strict=True)]
    return math.nan if any(map(math.isnan, differences)) else max(differences)
