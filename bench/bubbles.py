"""What the records of a bubbles cell say: the naive order against the plan, traced and predicted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bench.stats import Ratio, median, ratio_of_medians
from bench.table import range_text
from steelyard.pipeline.simulate import Span

if TYPE_CHECKING:
    from bench.record import SeriesRecord, Status
    from bench.summary import CellRecords
    from suites.measure import Side, Source

METRICS = (
    "micro_batches", "makespan", "overhead", "predicted_makespan", "predicted_overhead", "lower_bound_gap",
    "prediction_error", "error_without_exchange", "overhead_by_count", "late_ms",
)  # fmt: skip
SIDES: tuple[Side, Side] = ("naive", "optimised")
Pair = tuple[float | None, float | None]


@dataclass(frozen=True)
class Bubbles:
    """One cell; pairs are (naive, optimised), and None stands for samples that the cell does not have.

    Attributes:
        stages, virtual: of the pipeline.
        source: of the traced times.
        micro_batches: of each side.
        makespan, overhead: traced, medians.
        ratio: naive over optimised makespan.
        predicted_makespan, predicted_overhead: of ``simulate`` with the exchange of shapes.
        error: fastest traced over predicted makespan, less 1.
        error_without_exchange: the same for ``simulate``.
        gap: predicted makespan over what no order goes below, less 1.
    """

    cell: str
    status: Status
    stages: int
    virtual: int
    source: Source
    micro_batches: Pair
    makespan: Pair
    overhead: Pair
    ratio: Ratio | None
    predicted_makespan: Pair
    predicted_overhead: Pair
    error: Pair
    error_without_exchange: Pair
    gap: Pair

    @classmethod
    def of(cls, cell: CellRecords) -> Bubbles:
        def pair(metric: str) -> Pair:
            return cell.median(metric, "naive"), cell.median(metric, "optimised")

        def signed(metric: str) -> Pair:
            found = [cell.find(metric, side) for side in SIDES]
            naive, optimised = (one.notes.get("signed") if one else None for one in found)
            return naive, optimised

        naive, optimised = (cell.find("makespan", side) for side in SIDES)
        return cls(
            cell=cell.id,
            status=cell.status,
            stages=cell.first.case["layout"]["pp"],
            virtual=cell.first.case["layout"]["vpp"],
            source=naive.source if naive else "paced",
            micro_batches=pair("micro_batches"),
            makespan=pair("makespan"),
            overhead=pair("overhead"),
            ratio=ratio_of_medians(naive.values, optimised.values) if naive and optimised else None,
            predicted_makespan=pair("predicted_makespan"),
            predicted_overhead=pair("predicted_overhead"),
            error=signed("prediction_error"),
            error_without_exchange=signed("error_without_exchange"),
            gap=pair("lower_bound_gap"),
        )


def timelines(cell: CellRecords) -> dict[tuple[Side, Source], list[Span]]:
    """The passes that the records keep, in seconds, by side and source; traced ones are those of the fastest step."""
    found: dict[tuple[Side, Source], list[Span]] = {}
    for side in SIDES:
        for metric in ("makespan", "predicted_makespan"):
            series: SeriesRecord | None = cell.find(metric, side)
            if series and "spans" in series.notes:
                found[side, series.source] = [Span(*span) for span in series.notes["spans"]]
    return found


def bubbles_text(rows: list[Bubbles]) -> str:
    """What a run found about pipelines, as a part of its sentence; empty without such cells."""
    ratios = [row.ratio.value for row in rows if row.ratio]
    errors = [abs(error) for row in rows for error in row.error if error is not None]
    if not ratios or not errors:
        return ""
    return (
        f"; on pipelines the plan is {range_text(ratios, 2)} times as fast as the naive order "
        f"(paced), its predicted time off by {median(errors):.1%} in the median and {max(errors):.1%} at worst"
    )
