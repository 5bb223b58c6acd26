"""Does the optimised step compute what the judge computes? Loss, every gradient, every metric, every output.

The same weights go into a Megatron model on this cell's layout and into the independent float64 model of
``suites.reference``. The optimised step then runs in many variants: fixed and dynamic micro-batches, packed and padded
rows, four budgets, five aggregation modes, loss terms and denominators as they are by default and otherwise. At every
commit the variants of a cell hold every pair of these choices; ``whole_product`` runs them all. Errors are relative:
the norm of a gradient's difference over the norm of the judge's gradient, with a floor of a thousandth of the whole
gradient's norm, below which float32 holds no digits. In bfloat16 the limit is what rounding alone may do.

The suite also weighs two naive sides, which must miss the same limits: the mean of micro-batch means, and outputs that
keep their graph, whose peak memory grows with the number of micro-batches.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from steelyard.errors import InputError
from steelyard.pipeline import Pipeline, legal_count
from suites.launch.local import run_ranks
from suites.matrix import Cell
from suites.measure import Series

LIMIT = 1e-5
# The judge's weights and sums are float64. bfloat16 rounds each to 8 bits, which adds up over the layers: what is left
# to show is that the optimised step stays within that, and the naive mean of means does not.
LIMITS = {"float64": LIMIT, "float32": LIMIT, "bfloat16": 0.1}
# Peak memory at 16 micro-batches over the peak at 4: outputs are kept, activations are not.
GROWTH_LIMIT = 1.1
KINDS = ("loss_error", "gradient_error", "metrics_error", "output_error")
BUDGETS = (0, 1, 2, 3)


@dataclass(frozen=True)
class Variant:
    """One way to run the optimised step: how the batch is split, in which form, and what the loss is made of."""

    split: str
    form: str
    budget: int
    mode: str = "token-mean"
    extras: bool = False

    def __str__(self) -> str:
        extras = ", all loss terms" if self.extras else ""
        return f"{self.split} {self.form}, budget {self.budget + 1} of {len(BUDGETS)}, {self.mode}{extras}"


def measure(cell: Cell, device: str | None = None) -> list[Series]:
    """Run the cell on its own ranks and report the worst relative errors over all variants.

    Raises:
        RanksFailed: a rank died or hung.
    """
    found = run_ranks(
        "suites.parity:on_rank",
        cell.layout.parallel().world,
        cell.model_dump(),
        time_limit=cell.time_limit,
        device=device,
    )
    errors, limit = found["errors"], LIMITS[cell.dtype]
    series = []
    for kind in (kind for kind in KINDS if kind in errors[0]["errors"]):
        worst = max(errors, key=lambda one: one["errors"][kind]["error"])
        notes = {"variant": worst["variant"], "worst": worst["errors"][kind]["where"], "variants": len(errors)}
        values = [one["errors"][kind]["error"] for one in errors]
        series.append(Series(kind, "optimised", "1", "lower", values, limit=limit, notes=notes))
    worst_kind = max(series, key=lambda one: max(one.values))
    notes = {"kind": worst_kind.metric, **worst_kind.notes}
    series.append(
        Series("parity_max_error", "optimised", "1", "lower", [max(worst_kind.values)], limit=limit, notes=notes)
    )
    # The naive sides must miss what the optimised side keeps.
    if "naive_error" in found:
        series.append(Series("naive_error", "naive", "1", "higher", [found["naive_error"]], limit=limit))
    for side, direction in (("optimised", "lower"), ("naive", "higher")):
        if growth := found.get("growth"):
            series.append(Series("peak_growth", side, "1", direction, [growth[side]], limit=GROWTH_LIMIT))
    return series


def variants(cell: Cell) -> list[Variant]:
    """The variants of a cell: every pair of choices, or with ``whole_product`` every combination."""
    from allpairspy import AllPairs

    from steelyard.step.losses import AGGREGATIONS

    forms = ["packed", "padded"] if cell.layout.cp == 1 else ["packed"]
    axes: list[list[Any]] = [["dynamic", "fixed"], forms, list(BUDGETS)]
    if cell.role != "reward":
        axes += [list(AGGREGATIONS), [False, True]]
    rows = itertools.product(*axes) if cell.whole_product else _pairs(AllPairs, axes)
    return [Variant(*row) for row in rows]


def _pairs(all_pairs: Any, axes: list[list[Any]]) -> Iterator[list[Any]]:
    # The library wants two choices on every axis; one choice stands in every row.
    several = [axis for axis in axes if len(axis) > 1]
    for row in all_pairs(several):
        left = iter(row)
        yield [next(left) if len(axis) > 1 else axis[0] for axis in axes]


def on_rank(payload: dict[str, Any]) -> dict[str, Any]:
    """What every rank runs; rank 0's result is the errors of each variant, and those of the naive sides."""
    from suites.ranks import parallel_groups

    cell = Cell.model_validate(payload)
    with parallel_groups(cell.layout.parallel(), cell.seed):
        return _compare(cell)


def _compare(cell: Cell) -> dict[str, Any]:
    from steelyard.balance import plan_step
    from steelyard.step import StepSettings
    from suites import judging

    layout, chosen = cell.layout.parallel(), variants(cell)
    options = {variant: judging.LossOptions(variant.mode, variant.extras) for variant in chosen}
    case = judging.make_case(cell, [judging.LossOptions(), *options.values()] if cell.role != "reward" else [])
    models = judging.build_models(cell, layout)
    lengths = case.sample.totals
    contiguous = [(rows.tolist(), None) for rows in np.split(np.arange(len(lengths)), layout.dp)]
    errors = []
    for variant in chosen:
        packed = variant.form == "packed"
        if variant.split == "fixed":
            size = _fixed_size(len(lengths) // layout.dp, variant.budget, cell)
            settings = StepSettings(micro_batch_size=size, packed=packed, layout=layout)
            shares = contiguous
        else:
            settings = StepSettings(max_tokens=_budget(lengths, variant.budget, cell), packed=packed, layout=layout)
            plans = plan_step(settings.slots(lengths), settings.budget, layout.dp, pipeline=settings.pipeline())
            shares = [(plan.rows, plan) for plan in plans]
        found = judging.compare(cell, case, models, settings, shares, options[variant])
        errors.append({"variant": str(variant), "errors": {kind: asdict(error) for kind, error in found.items()}})
    return {"errors": errors, **_naive_sides(cell, case, models)}


def _budget(lengths: np.ndarray, number: int, cell: Cell) -> int:
    """Tokens per GPU: from what the longest row needs to the whole batch of a data-parallel rank in one micro-batch."""
    alignment = 2 * cell.layout.tp * cell.layout.cp
    share = int(lengths.sum()) // cell.layout.dp
    least = int(lengths.max()) + alignment
    whole = (least, max(least, share // 4), max(least, share // 2), 2 * share + alignment * len(lengths))[number]
    return -(-whole // cell.layout.cp)


def _fixed_size(rows: int, number: int, cell: Cell) -> int:
    """Rows of a fixed micro-batch: 1, 2, half or all of them, or the next smaller size whose count Megatron takes."""
    pipeline = Pipeline(cell.layout.pp, virtual=cell.layout.vpp)
    for size in range((1, min(2, rows), max(rows // 2, 1), rows)[number], 0, -1):
        count = -(-rows // size)
        if legal_count(count, pipeline) == count:
            return size
    raise InputError(
        f"rows={cell.rows} give {rows} on each data-parallel rank, and no fixed split of them is legal for {pipeline}"
    )


def _naive_sides(cell: Cell, case: Any, models: Any) -> dict[str, Any]:
    """What the naive sides do on the same case; each is weighed where it ran: N13 without context parallelism, N14 on
    one rank.
    """
    from suites import judging, naive_checks

    found: dict[str, Any] = {}
    if cell.role != "reward" and cell.layout.cp == 1:
        size = _fixed_size(cell.rows // cell.layout.dp, 1, cell)
        found["naive_error"] = naive_checks.mean_of_means_error(cell, case, models, size, judging.LossOptions())
    if cell.role == "actor" and cell.layout.parallel().world == 1:
        found["growth"] = naive_checks.peak_growth(cell, models)
    return found
