"""What the records of a parity cell say: how far it is from the judge."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bench.record import Status
    from bench.summary import CellRecords
    from suites.measure import Source

METRICS = ("parity_max_error",)


@dataclass(frozen=True)
class Parity:
    """How far one cell is from the judge; None where the cell has no such samples. ``where``: what was worst."""

    cell: str
    status: Status
    source: Source
    error: float | None
    limit: float | None
    keeps_limit: bool | None
    where: str

    @classmethod
    def of(cls, cell: CellRecords) -> Parity:
        series = cell.find("parity_max_error")
        notes = series.notes if series else {}
        return cls(
            cell=cell.id,
            status=cell.status,
            source=series.source if series else "measured",
            error=series.worst if series else None,
            limit=series.limit if series else None,
            keeps_limit=series.keeps_limit if series else None,
            where=" of ".join(str(notes[key]) for key in ("kind", "worst") if key in notes),
        )

    @property
    def share(self) -> float:
        """The error as a share of its limit; what is not a number is the largest of all."""
        if self.error is None or math.isnan(self.error):
            return math.inf
        return self.error / self.limit if self.limit else self.error


def parity_text(rows: Sequence[Parity]) -> str:
    """The part of a run's sentence: the worst error under each limit; empty without errors."""
    worst: dict[float | None, Parity] = {}
    for row in rows:
        if row.error is not None and (row.limit not in worst or row.share > worst[row.limit].share):
            worst[row.limit] = row
    if not worst:
        return ""
    texts = [
        error_text(row.error or 0.0) + (f" (limit {limit:.0e})" if limit is not None else "")
        for limit, row in sorted(worst.items(), key=lambda pair: pair[0] or 0.0)
    ]
    return f"; worst parity error {' and '.join(texts)}"


def error_text(error: float) -> str:
    return "not a number" if math.isnan(error) else f"{error:.1e}"
