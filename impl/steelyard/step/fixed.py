"""Fixed micro-batches: so many rows each, in the order of the batch; and what other sizes would cost."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from steelyard.balance.request import Cost, default_cost
from steelyard.pipeline import Pipeline, is_legal_count, simulate


def split_rows(rows: int, size: int) -> list[list[int]]:
    """``rows`` positions in micro-batches of ``size``; the last may be smaller."""
    return [list(range(start, min(start + size, rows))) for start in range(0, rows, size)]


def legal_sizes(rows: int, size: int, pipeline: Pipeline) -> list[int]:
    """The nearest sizes above and below ``size`` that give a count Megatron accepts; those there are."""
    larger = next((one for one in range(size + 1, rows + 1) if is_legal_count(-(-rows // one), pipeline)), None)
    smaller = next((one for one in range(size - 1, 0, -1) if is_legal_count(-(-rows // one), pipeline)), None)
    return [one for one in (larger, smaller) if one is not None]


def time_over_ideal(
    indices: list[list[int]], lengths: NDArray[np.int64], pipeline: Pipeline, cost: Cost | None, *, packed: bool
) -> float:
    """Predicted makespan over the time that the rows alone take the mean stage.

    Args:
        indices: rows of each micro-batch.
        lengths: [rows] tokens.
        cost: work of sequences; None for the planner's default.
        packed: else every row is padded to the longest of its micro-batch.
    """
    cost = default_cost if cost is None else cost
    whole = getattr(cost, "micro_batch", None) or (lambda tokens: np.sum(cost(tokens)))
    work = [float(whole(lengths[rows] if packed else np.full(len(rows), lengths[rows].max()))) for rows in indices]
    ideal = float(np.sum(cost(lengths))) * (1 + pipeline.backward) / pipeline.stages
    return simulate(work, pipeline).makespan / ideal
