"""What the records of override cells say: each case over all layouts, through every builder and through N12."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bench.record import SeriesRecord
    from bench.summary import CellRecords

METRICS = ("override_arrives",)
NAIVE = "N12"


@dataclass(frozen=True)
class Builder:
    """One case through one builder.

    Attributes:
        name: of the builder; N12 is the naive side.
        observed: what was seen on the first layout.
        layouts: how many were tried.
        missed: the layouts where it did not come out as it must: lost, or for N12 not caught.
    """

    name: str
    observed: str
    layouts: int
    missed: tuple[str, ...]


@dataclass(frozen=True)
class Override:
    """One case: what was asked of which field, and each builder; ``lines`` of its records."""

    field: str
    asked: str
    builders: tuple[Builder, ...]
    lines: tuple[int, int]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(builder.name for builder in self.builders)

    @property
    def passed(self) -> bool:
        return not any(builder.missed for builder in self.builders)


def overrides_of(cells: Sequence[CellRecords]) -> list[Override]:
    """The cases of all cells, in the order in which they first ran."""
    by_case: dict[tuple[str, str], dict[str, list[tuple[str, SeriesRecord]]]] = {}
    for cell in cells:
        for series in cell.series:
            if series.metric in METRICS:
                case = by_case.setdefault((series.notes["field"], series.notes["asked"]), {})
                case.setdefault(series.notes["builder"], []).append((cell.label[1], series))
    return [
        Override(field, asked, tuple(_builder(*one) for one in builders.items()), _lines(builders))
        for (field, asked), builders in by_case.items()
    ]


def _builder(name: str, found: list[tuple[str, SeriesRecord]]) -> Builder:
    return Builder(
        name=name,
        observed=found[0][1].notes["observed"],
        layouts=len(found),
        missed=tuple(layout for layout, series in found if not series.keeps_limit),
    )


def _lines(builders: dict[str, list[tuple[str, SeriesRecord]]]) -> tuple[int, int]:
    numbers = [series.line for found in builders.values() for _, series in found]
    return min(numbers), max(numbers)


def overrides_text(rows: Sequence[Override]) -> str:
    """The part of a run's sentence: empty without rows."""
    builders = [builder for row in rows for builder in row.builders if builder.name != NAIVE]
    tried, missed = sum(one.layouts for one in builders), sum(len(one.missed) for one in builders)
    return f"; {tried - missed} of {tried} overrides arrive" if tried else ""
