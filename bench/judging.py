"""How each metric is judged, read from ``thresholds.toml``."""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, PositiveFloat

from bench.record import SeriesRecord

FILE = Path(__file__).with_name("thresholds.toml")

Basis = Literal["exact", "limit", "interleaved", "apart", "alone"]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Threshold(_Strict):
    """How far a median must move, as a share, by the way two runs were made; the file says what each means."""

    interleaved: PositiveFloat
    apart: PositiveFloat
    alone: PositiveFloat
    by_index: bool = False


class _Names(_Strict):
    metrics: frozenset[str]


class Judging(_Strict):
    """The whole file."""

    default: Threshold
    exact: _Names
    ignored: _Names
    repeats: dict[str, str]
    metrics: dict[str, Threshold]

    def threshold(self, metric: str) -> Threshold:
        return self.metrics.get(metric, self.default)

    def is_ignored(self, series: SeriesRecord) -> bool:
        return not self.ignored.metrics.isdisjoint((series.metric, f"{series.case.get('suite')}/{series.metric}"))

    def is_exact(self, series: SeriesRecord) -> bool:
        """Whether any change of this series is one: it has no noise."""
        return series.source == "predicted" or series.metric in self.exact.metrics


@cache
def judging() -> Judging:
    raw = tomllib.loads(FILE.read_text())
    raw["metrics"] = {name: {**raw["default"], **own} for name, own in raw["metrics"].items()}
    return Judging.model_validate(raw)
