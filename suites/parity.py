"""Does the optimised step compute what the judge computes? Loss, every gradient, every metric, every output.

The same weights go into a Megatron model on this cell's layout and into the independent float64 model of
``suites.reference``. Each variant of the optimised step (fixed and dynamic micro-batches, packed and padded rows) runs
once, and its loss, gradients, metrics and outputs are compared. Errors are relative: the norm of a gradient's
difference over the norm of the judge's gradient, with a floor of a thousandth of the whole gradient's norm, below which
float32 holds no digits.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np

from steelyard.errors import InputError
from steelyard.pipeline import Pipeline, legal_count
from suites.launch.local import run_ranks
from suites.matrix import Cell
from suites.measure import Series

LIMIT = 1e-5
KINDS = ("loss_error", "gradient_error", "metrics_error", "output_error")


def measure(cell: Cell, device: str | None = None) -> list[Series]:
    """Run the cell on its own ranks and report the worst relative errors over all variants.

    Raises:
        RanksFailed: a rank died or hung.
    """
    errors = run_ranks(
        "suites.parity:on_rank",
        cell.layout.parallel().world,
        cell.model_dump(),
        time_limit=cell.time_limit,
        device=device,
    )
    series = []
    for kind in KINDS:
        worst = max(errors, key=lambda variant: errors[variant][kind]["error"])
        notes = {"variant": worst, "worst": errors[worst][kind]["where"]}
        values = [errors[variant][kind]["error"] for variant in errors]
        series.append(Series(kind, "optimised", "1", "lower", values, limit=LIMIT, notes=notes))
    worst_series = max(series, key=lambda one: max(one.values))
    notes = {"kind": worst_series.metric, **worst_series.notes}
    series.append(
        Series("parity_max_error", "optimised", "1", "lower", [max(worst_series.values)], limit=LIMIT, notes=notes)
    )
    return series


def on_rank(payload: dict[str, Any]) -> dict[str, dict[str, dict[str, Any]]]:
    """What every rank runs; rank 0's result is {variant: {kind of error: {"error", "where"}}}."""
    from suites.ranks import parallel_groups

    cell = Cell.model_validate(payload)
    with parallel_groups(cell.layout.parallel(), cell.seed):
        return _compare(cell)


def _compare(cell: Cell) -> dict[str, dict[str, dict[str, Any]]]:
    from steelyard.balance import plan_step
    from steelyard.step import StepSettings
    from suites import judging

    layout = cell.layout.parallel()
    case = judging.make_case(cell)
    lengths = case.sample.totals
    size = _fixed_size(len(lengths) // layout.dp, cell)
    contiguous = [(rows.tolist(), None) for rows in np.split(np.arange(len(lengths)), layout.dp)]
    found = {}
    for packed in (True, False) if layout.cp == 1 else (True,):
        form = "packed" if packed else "padded"
        settings = StepSettings(max_tokens=_budget(cell), packed=packed, layout=layout)
        plans = plan_step(settings.slots(lengths), settings.budget, layout.dp, pipeline=settings.pipeline())
        found[f"dynamic {form}"] = judging.compare(cell, case, settings, [(plan.rows, plan) for plan in plans])
        settings = StepSettings(micro_batch_size=size, packed=packed, layout=layout)
        found[f"fixed {form}"] = judging.compare(cell, case, settings, contiguous)
    return {variant: {kind: asdict(error) for kind, error in errors.items()} for variant, errors in found.items()}


def _budget(cell: Cell) -> int:
    """The cell's token budget, or one that makes several micro-batches of several rows on each data-parallel rank."""
    totals = cell.draw().totals
    whole = max(-(-int(totals.max()) // 64) * 64, int(totals.sum()) // (3 * cell.layout.dp))
    return cell.max_tokens or -(-whole // cell.layout.cp)


def _fixed_size(rows: int, cell: Cell) -> int:
    """The most rows of a fixed micro-batch, at most half of them, whose count Megatron's schedule takes."""
    pipeline = Pipeline(cell.layout.pp, virtual=cell.layout.vpp)
    for size in range(max(rows // 2, 1), 0, -1):
        count = -(-rows // size)
        if legal_count(count, pipeline) == count:
            return size
    raise InputError(
        f"rows={cell.rows} give {rows} on each data-parallel rank, and no fixed split of them is legal for {pipeline}"
    )
