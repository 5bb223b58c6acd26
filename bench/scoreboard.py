"""What the records of a planning cell say: one line per planner, and Steelyard's against the best of the others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from bench.stats import median

if TYPE_CHECKING:
    from bench.record import SeriesRecord, Status
    from bench.summary import CellRecords

METRICS = ("micro_batches", "share_over_cap", "rank_imbalance", "time_over_ideal", "time_over_bound", "planning_ms")

# All that stands in the tables of planners.
SHOWN = (
    *METRICS, "micro_batch_bound", "count_above_best_other", "time_over_best_other", "overhead_over_best_other",
)  # fmt: skip


@dataclass(frozen=True)
class PlannerScore:
    """One planner in one cell, over the draws in which it had a plan; None without any.

    Attributes:
        planner: its name; ``ours``: it is the optimised side's.
        draws, refused: how many draws, and in how many of them it had no plan that Megatron runs.
        count, bound: micro-batches per rank, and what no plan within the cap goes below: means.
        over_cap: mean share of micro-batches above the cap.
        imbalance: work of the rank with the most over the mean rank's: mean.
        time, worst_time: predicted time over ideal: mean and worst.
        gap: that time over what no order of the same micro-batches goes below, minus 1: mean.
        milliseconds, worst_milliseconds: planning time: median and worst.
    """

    planner: str
    ours: bool
    draws: int
    refused: int
    count: float | None
    bound: float | None
    over_cap: float | None
    imbalance: float | None
    time: float | None
    worst_time: float | None
    gap: float | None
    milliseconds: float | None
    worst_milliseconds: float | None

    @property
    def keeps_cap(self) -> bool:
        """Whether it had plans in all draws, all within the cap."""
        return self.refused == 0 and self.over_cap == 0


@dataclass(frozen=True)
class Scoreboard:
    """All planners of one cell, Steelyard's first.

    Attributes:
        stages: of the pipeline; 1 is none.
        at_bound: share of the draws in which Steelyard's count equals the proven bound.
        count_above: largest difference of its count from the least of the others that keep the cap.
        time_ratio: worst ratio of its predicted time to the least of theirs.
        overhead_ratio, ratio_of_means: its predicted overhead over the least of theirs: mean of the draws' ratios, and
            ratio of the mean overheads.
        fixed_tokens: what a micro-batch costs beside its rows, as the linear work of so many tokens.
        All but the first are None where the cell compares no such thing.
    """

    cell: str
    status: Status
    rows: int
    stages: int
    planners: tuple[PlannerScore, ...]
    at_bound: float | None
    count_above: float | None
    time_ratio: float | None
    overhead_ratio: float | None
    ratio_of_means: float | None
    fixed_tokens: float | None

    @classmethod
    def of(cls, cell: CellRecords) -> Scoreboard:
        case = cell.first.case
        bound = cell.find("micro_batch_bound")
        names: dict[str, bool] = {}
        for one in cell.series:
            if one.metric in METRICS and one.variant:
                names.setdefault(one.variant, one.side == "optimised")
        mine = next((one for one in cell.series if one.metric == "micro_batches" and one.side == "optimised"), None)
        count_above, time_ratio = cell.find("count_above_best_other"), cell.find("time_over_best_other")
        overheads = cell.find("overhead_over_best_other")
        return cls(
            cell=cell.id,
            status=cell.status,
            rows=case["rows"],
            stages=case["layout"]["pp"],
            planners=tuple(_score(cell, name, ours, bound) for name, ours in names.items()),
            at_bound=float(np.mean(np.equal(mine.values, bound.values))) if mine and bound else None,
            count_above=count_above.worst if count_above else None,
            time_ratio=time_ratio.worst if time_ratio else None,
            overhead_ratio=_mean(overheads.values) if overheads else None,
            ratio_of_means=overheads.notes.get("ratio_of_means") if overheads else None,
            fixed_tokens=time_ratio.notes.get("fixed_tokens") if time_ratio else None,
        )

    @property
    def ours(self) -> PlannerScore | None:
        return next((one for one in self.planners if one.ours), None)

    def best_other(self, figure: str) -> PlannerScore | None:
        """The other planner with the least ``figure`` of those that keep the cap."""
        others = [one for one in self.planners if not one.ours and one.keeps_cap]
        return min(others, key=lambda one: getattr(one, figure), default=None)


def _score(cell: CellRecords, name: str, ours: bool, bound: SeriesRecord | None) -> PlannerScore:
    values = {one.metric: one.values for one in cell.series if one.variant == name and one.metric in METRICS}
    times = values.get("time_over_ideal", ())
    milliseconds = values.get("planning_ms", ())
    over_bound = _mean(values.get("time_over_bound", ()))
    return PlannerScore(
        planner=name,
        ours=ours,
        draws=len(times),
        refused=sum(not math.isfinite(one) for one in times),
        count=_mean(values.get("micro_batches", ())),
        bound=_mean(bound.values) if bound else None,
        over_cap=_mean(values.get("share_over_cap", ())),
        imbalance=_mean(values.get("rank_imbalance", ())),
        time=_mean(times),
        worst_time=max(filter(math.isfinite, times), default=None),
        gap=None if over_bound is None else over_bound - 1,
        milliseconds=median(milliseconds) if milliseconds else None,
        worst_milliseconds=max(milliseconds, default=None),
    )


def _mean(values: Sequence[float]) -> float | None:
    """Mean of the finite ones."""
    finite = [one for one in values if math.isfinite(one)]
    return sum(finite) / len(finite) if finite else None


def planning_text(rows: Sequence[Scoreboard]) -> str:
    """The part of a run's sentence: empty without plans on a pipeline."""
    times = [row.time_ratio for row in rows if row.time_ratio is not None]
    return f"; predicted time of the plans at worst {max(times):.3f} of the best other planner's" if times else ""
