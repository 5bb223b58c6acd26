"""What the parity suite shows of the naive sides on its own case. Runs on ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from megatron.core import parallel_state

from steelyard.lengths import LengthSample
from steelyard.memory import LiveBytes
from steelyard.step import Actor, ActorRole, RolloutBatch, StepSettings
from suites import judging
from suites.baselines import fixed_split, graph_outputs
from suites.matrix import Cell
from suites.weights import load
from suites.workloads import make_batch, take_rows


def mean_of_means_error(
    cell: Cell, case: judging.Case, models: judging.Models, size: int, options: judging.LossOptions
) -> float:
    """Gradient error of the fixed split with a mean per micro-batch (N13), against the mean over all tokens."""
    layout = cell.layout.parallel()
    load(models.plain, case.weights, case.config)
    for model in models.plain:
        model.zero_grad_buffer()
    each = cell.rows // layout.dp
    first = parallel_state.get_data_parallel_rank() * each
    fixed_split.forward_backward(
        take_rows(case.batch, list(range(first, first + each))),
        cell.role,
        models.plain,
        size,
        multiple_of=layout.tokens_split_over_tp,
        temperature=judging.TEMPERATURE,
    )
    return judging.gradient_error(models.plain, case, case.verdicts[options]).error


def peak_growth(cell: Cell, models: judging.Models) -> dict[str, float]:
    """Peak of live bytes in computing log-probabilities at 16 micro-batches over the peak at 4, all of one row each."""
    worker = Actor(models.plain, StepSettings(micro_batch_size=1), role=ActorRole())

    def naive(batch: RolloutBatch) -> Any:
        return graph_outputs.compute_log_prob(batch, models.plain, [[row] for row in range(batch.rows)])

    return {"naive": _growth(cell, naive), "optimised": _growth(cell, worker.compute_log_prob)}


def _growth(cell: Cell, run: Callable[[RolloutBatch], Any]) -> float:
    peaks = []
    for rows in (4, 16):
        even = LengthSample(np.full(rows, 8), np.full(rows, 56), "even", "rows of equal length")
        batch = RolloutBatch.of(make_batch(even, cell.model.vocab, cell.seed))
        with LiveBytes() as live:
            kept = run(batch)
        peaks.append(live.peak)
        del kept
    return peaks[1] / peaks[0]
