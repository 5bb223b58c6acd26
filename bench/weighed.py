"""The sides of every cell against each other, metric by metric, and what of it is tracked over commits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.record import SeriesRecord
from bench.stats import Ratio, median, ratio_of_medians
from bench.summary import KINDS, CellRecords, Summary


@dataclass(frozen=True)
class Weighed:
    """One metric of one cell.

    Attributes:
        naive, optimised: the samples of each side, None where it has none. What belongs to both is in ``optimised``.
        better: how many times better the optimised side is, whichever way is better; None without both sides, and
            where the metric is held against a limit.
    """

    cell: CellRecords
    metric: str
    naive: SeriesRecord | None
    optimised: SeriesRecord | None
    better: Ratio | None

    @property
    def first(self) -> SeriesRecord:
        return self.optimised or self.naive


def weigh_cell(cell: CellRecords, metrics: Sequence[str] | None = None) -> list[Weighed]:
    """Every metric of a cell (or those given), the sides of the same variant beside each other."""
    by_name: dict[tuple[str, str], dict[str, SeriesRecord]] = {}
    for one in cell.series:
        if metrics is None or one.metric in metrics:
            by_name.setdefault((one.metric, one.variant), {})["naive" if one.side == "naive" else "optimised"] = one
    return [
        Weighed(cell, metric, sides.get("naive"), sides.get("optimised"), _better(sides))
        for (metric, _), sides in by_name.items()
    ]


def headlines(summary: Summary) -> list[Weighed]:
    """The ratio by which each cell is known: of its kind's first metric, where both sides have it."""
    found = []
    for cell in summary.cells:
        if cell.kind:
            rows = weigh_cell(cell, KINDS[cell.kind].compared[:1])
            found += [row for row in rows if row.better and not row.first.variant][:1]
    return found


def _better(sides: dict[str, SeriesRecord]) -> Ratio | None:
    if len(sides) < 2 or sides["optimised"].side == "both" or sides["optimised"].direction == "none":
        return None
    if any(one.limit is not None for one in sides.values()):
        return None
    ours, theirs = sides["optimised"].values, sides["naive"].values
    paired = len(ours) == len(theirs)
    if median(ours) == 0 or median(theirs) == 0:
        return None
    if sides["optimised"].direction == "lower":
        ours, theirs = theirs, ours
    return ratio_of_medians(ours, theirs, paired=paired)
