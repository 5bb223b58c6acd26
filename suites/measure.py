"""What a suite hands back: series of samples, each with its metric, side and unit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Side = Literal["naive", "optimised", "both"]
Direction = Literal["higher", "lower", "none"]
Source = Literal["measured", "paced", "predicted"]


@dataclass(frozen=True)
class Series:
    """Raw samples of one metric on one side of one cell.

    Attributes:
        metric: what was observed, e.g. ``tokens_per_second``.
        side: which implementation produced it; ``both`` where the sides are compared with each other or with the judge.
        unit: unit of the values, e.g. ``tokens/s``; ``1`` for a plain number.
        direction: which way is better; ``none`` for facts that have no better way.
        values: raw samples in the order they were taken. Samples of the two sides (and their variants) with the same
            index form a pair: they were taken one after the other.
        source: ``measured`` on a device; ``paced``: timed on real ranks and schedules whose passes take planned times
            by waiting; ``predicted`` by a simulator or on fake tensors.
        limit: an exact bound that the values must keep (in the sense of ``direction``), or None.
        variant: which implementation of the side, where there are several, e.g. the name of a planner.
        notes: facts about this series that a reader needs, such as the gradient with the largest error.
    """

    metric: str
    side: Side
    unit: str
    direction: Direction
    values: Sequence[float]
    source: Source = "measured"
    limit: float | None = None
    variant: str = ""
    notes: dict[str, Any] = field(default_factory=dict)
