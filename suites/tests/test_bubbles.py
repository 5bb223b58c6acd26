"""Paced stages keep their pace, the simulator predicts what is traced, and the suite says what it is."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from steelyard.errors import InputError, PlanError
from steelyard.pipeline import Pipeline, is_legal_count
from suites import bubbles
from suites.bubbles import Costs, Task
from suites.matrix import Cell, Layout, Sizes

SIZES = Sizes(layers=4, hidden=16, ffn=16, heads=2, kv_heads=2, head_dim=8, vocab=64)
# Other work on the machine disturbs a step; the figures of a quiet machine are in the report, not here.
LOOSE = 0.25


def make_cell(**settings) -> Cell:
    small = {"rows": 16, "scale": 400.0, "micro_batch_size": 4, "pass_ms": 12.0, "pairs": 3, "time_limit": 90.0}
    return Cell(suite="bubbles", workload="rl-code-16k-cap", model=SIZES, **{**small, **settings})


@pytest.mark.parametrize("layout", [Layout(pp=2), Layout(pp=2, vpp=2)], ids=["1F1B", "interleaved"])
def test_a_cell_traces_and_predicts_both_sides(layout):
    series = bubbles.measure(make_cell(layout=layout))
    found = {(one.metric, one.side): one for one in series}
    for side in ("naive", "optimised"):
        assert found["makespan", side].source == found["overhead", side].source == "paced"
        assert found["predicted_makespan", side].source == "predicted"
        assert len(found["makespan", side].values) == 3
        traced, predicted = min(found["makespan", side].values), found["predicted_makespan", side].values[0]
        error = found["prediction_error", side]
        assert error.notes["signed"] == pytest.approx(traced / predicted - 1)
        assert error.limit == bubbles.WORST_ERROR
        assert error.values[0] < LOOSE
        assert found["lower_bound_gap", side].values[0] > -1e-9
        count = found["micro_batches", side].values[0]
        assert is_legal_count(int(count), Pipeline(layout.pp, layout.vpp))
        for metric in ("makespan", "predicted_makespan"):
            spans = found[metric, side].notes["spans"]
            assert len(spans) == 2 * count * layout.pp * layout.vpp
            assert max(span[5] for span in spans) == pytest.approx(min(found[metric, side].values), abs=1e-5)
    assert (
        found["makespan", "naive"].notes["seconds_per_work"] == found["makespan", "optimised"].notes["seconds_per_work"]
    )
    task = Task.of(make_cell(layout=layout))
    planned = task.loads(task.naive) / (layout.pp * layout.vpp)
    for _, _, micro_batch, direction, start, end in found["makespan", "naive"].notes["spans"]:
        assert end - start > planned[micro_batch] * (1 if direction == "F" else 2) - 1e-4
    assert found["tracer_overhead", "both"].values[0] < found["tracer_overhead", "both"].limit


def test_the_mean_naive_pass_takes_what_the_cell_says_and_both_sides_do_the_same_work():
    task = Task.of(make_cell(layout=Layout(pp=2, vpp=2), pass_ms=30.0))
    naive = task.loads(task.naive)
    assert naive.mean() / 4 == pytest.approx(0.030)
    assert task.loads(task.plan(Costs(0.0, 0.0))).sum() == pytest.approx(naive.sum())
    indices, loads = task.calibration
    assert loads.sum() == pytest.approx(naive.sum())
    assert [row for part in indices for row in part] == list(range(16))
    assert len(indices) == len(loads) == 2 * len(naive)


def test_the_plan_keeps_the_tokens_of_the_largest_naive_micro_batch():
    task = Task.of(make_cell(layout=Layout(pp=4), rows=48))
    most = max(task.lengths[part].sum() for part in task.naive)
    planned = task.plan(Costs(1e-3, 1e-3))
    assert max(task.lengths[part].sum() for part in planned) <= most == task.budget
    assert sorted(row for part in planned for row in part) == list(range(48))


def test_a_planner_that_knows_dear_passes_makes_fewer_micro_batches():
    task = Task.of(make_cell(layout=Layout(pp=2), rows=64, micro_batch_size=2))
    assert len(task.plan(Costs(0.0, 1.0))) < len(task.plan(Costs(0.0, 0.0)))


@pytest.mark.parametrize("pipeline", [Layout(pp=2), Layout(pp=4, vpp=2)], ids=str)
def test_calibration_finds_the_costs_that_made_a_timeline(pipeline):
    task = Task.of(make_cell(layout=pipeline, rows=32))
    costs = Costs(call=0.003, fixed=0.002)
    slower = Costs(call=0.004, fixed=0.002)
    steps = [one.predict(task.calibration[1], task.pipeline) for one in (slower, costs)]
    found = Costs.calibrate(steps, task)
    assert found.call == pytest.approx(costs.call, abs=1e-5)
    assert found.fixed == pytest.approx(costs.fixed, abs=1e-9)


def test_predictions_are_never_below_the_bound():
    for seed in range(30):
        loads = np.random.default_rng(seed).lognormal(0, 1, 8)
        for pipeline in (Pipeline(2), Pipeline(4, 2), Pipeline(4, backward=3.0), Pipeline(2, 2, backward=0.5)):
            costs = Costs(call=0.05, fixed=0.3)
            for exchange in (False, True):
                predicted = costs.predict(loads, replace(pipeline, exchange=exchange))
                assert predicted.makespan >= costs.lower_bound(loads, pipeline) - 1e-9


def test_overhead_by_count_tells_legal_and_refused_counts_apart():
    task = Task.of(make_cell(layout=Layout(pp=2, vpp=2, group=4), rows=40))
    series = bubbles._by_count(task, Costs(0.0, 0.0), 10)
    assert series.notes["refused"] == [1, 2, 3, 5, 9]
    assert series.notes["counts"] == [4, 6, 7, 8, 10, 11, 12]
    assert len(series.values) == 7


def test_what_is_no_pipeline_or_a_refused_count_ends_before_any_rank_starts():
    with pytest.raises(InputError, match="pp > 1"):
        bubbles.measure(make_cell())
    with pytest.raises(InputError, match="pp > 1"):
        bubbles.measure(make_cell(layout=Layout(pp=2, dp=2)))
    with pytest.raises(PlanError, match="5 micro-batches are refused.*use 4 or 6"):
        bubbles.measure(make_cell(layout=Layout(pp=2, vpp=2), rows=20))
