"""Made-up cells and samples that the tests share."""

from __future__ import annotations

from suites.bubbles import Costs, Task, _by_count, _series, _Step
from suites.matrix import Cell, Sizes
from suites.measure import Series

SIZES = Sizes(layers=4, hidden=64, ffn=96, heads=4, kv_heads=2, head_dim=16, vocab=128)


def make_cell(suite: str, workload: str = "rl-code-16k-cap", **settings: object) -> Cell:
    return Cell(suite=suite, workload=workload, model=SIZES, rows=4, scale=400.0, **settings)


def throughput_series(ratio: float = 2.0, *, naive_computed: float = 4000, source: str = "measured") -> list[Series]:
    """What a throughput suite returns for an optimised side ``ratio`` times as fast, 1,600 real tokens."""
    naive, optimised = [100.0, 103.0, 98.0, 101.0, 100.5], [100.0, 104.0, 97.0, 102.0, 101.0]
    tokens = {"unit": "tokens", "direction": "none", "source": source}
    lower = {**tokens, "direction": "lower"}
    loads = [{"tokens": [one], "cap": 1000} for one in ([1000] * 4, [600, 600, 416])]
    return [
        Series("tokens_per_second", "naive", "tokens/s", "higher", naive, source),
        Series("tokens_per_second", "optimised", "tokens/s", "higher", [ratio * x for x in optimised], source),
        Series("step_seconds", "naive", "s", "lower", [1600 / x for x in naive], source),
        Series("step_seconds", "optimised", "s", "lower", [1600 / x / ratio for x in optimised], source),
        Series("computed_tokens", "naive", values=[naive_computed], **lower),
        Series("computed_tokens", "optimised", values=[1616], **lower),
        Series("real_tokens", "both", values=[1600], **tokens),
        Series("micro_batches", "naive", "1", "none", [4], source, notes=loads[0]),
        Series("micro_batches", "optimised", "1", "none", [3], source, notes=loads[1]),
        Series("loss", "naive", "1", "none", [0.5, 0.4], source),
        Series("loss", "optimised", "1", "none", [0.5, 0.400001], source),
    ]


def parity_series(error: float = 3e-7, limit: float = 1e-5) -> list[Series]:
    worst = {"worst": "decoder.layers.0.mlp.linear_fc1.weight"}
    return [
        Series("parity_max_error", "both", "1", "lower", [error / 2, error], limit=limit, notes=worst),
        Series("loss_error", "both", "1", "lower", [error / 10], limit=limit),
    ]


def planning_series(ratio: float = 0.95) -> list[Series]:
    """What the planning suite returns for Steelyard, a planner that keeps the cap, and one that breaks it."""
    planners = {"Steelyard": ("optimised", 20, 0.0, 1.1, 3.0), "FFD+KK": ("naive", 21, 0.0, 1.2, 1.0)}
    planners["N4"] = ("naive", 18, 0.25, 1.3, 90.0)
    series = [Series("micro_batch_bound", "both", "micro-batches", "none", [20, 20])]
    for name, (side, count, over, time, milliseconds) in planners.items():
        lower = {"direction": "lower", "variant": name}
        series += [
            Series("micro_batches", side, "micro-batches", values=[count, count], **lower),
            Series("share_over_cap", side, "1", values=[over, over], **lower),
            Series("rank_imbalance", side, "1", values=[1.0, 1.02], **lower),
            Series("time_over_ideal", side, "1", values=[time, time + 0.1], source="predicted", **lower),
            Series("time_over_bound", side, "1", values=[1.02, 1.04], source="predicted", **lower),
            Series("planning_ms", side, "ms", values=[milliseconds, milliseconds], **lower),
        ]
    notes = {"ratio_of_means": 0.6}
    return [
        *series,
        Series("time_over_best_other", "both", "1", "lower", [ratio - 0.1, ratio], "predicted", 1.0),
        Series("overhead_over_best_other", "both", "1", "lower", [0.5, 0.7], "predicted", 1.0, notes=notes),
    ]


def bubble_series(cell: Cell, slower: float = 1.02) -> list[Series]:
    """What the bubbles suite returns for steps of ``slower`` times the predicted time, the middle one the fastest."""
    task, costs = Task.of(cell), Costs(call=0.001, fixed=0.001)
    series = [_by_count(task, costs, 8)]
    for side, indices in (("naive", task.naive), ("optimised", task.plan(costs))):
        loads = task.loads(indices)
        steps = [
            _Step(Costs(0.001 * factor, 0.001 * factor).predict(loads * factor, task.pipeline), late)
            for factor, late in ((slower + 0.02, 1.0), (slower, 1e-3), (slower + 0.04, 1.0))
        ]
        series += _series(side, loads, task.pipeline, costs, steps, {"pass_ms": cell.pass_ms})
    return series
