"""Count, contents and order chosen together for a pipeline: better than packing first and ordering afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from steelyard.balance import MicroBatchPlan, plan_micro_batches, plan_step
from steelyard.balance.improve import Cuts, Items, Step, improve
from steelyard.balance.request import Settings, read_batch
from steelyard.balance.search import Totals, _targets
from steelyard.lengths import workload
from steelyard.parallel import ParallelLayout
from steelyard.pipeline import Pipeline, best_order, is_legal_count, makespan_lower_bound, simulate
from steelyard.pipeline.schedule import legal_count
from steelyard.pipeline.simulate import makespans, run_many
from steelyard.step import StepSettings

PIPELINES = [Pipeline(4), Pipeline(8), Pipeline(4, 2)]


class Fixed:
    """``24576 * s + s * s``, and the work of 256 tokens for every micro-batch."""

    fixed = 24576.0 * 256

    def __call__(self, lengths: Sequence[int]) -> np.ndarray:
        tokens = np.asarray(lengths, np.float64)
        return 24576.0 * tokens + tokens * tokens

    def micro_batch(self, lengths: Sequence[int]) -> float:
        return float(self(lengths).sum()) + self.fixed


def step_time(plans: list[MicroBatchPlan], pipeline: Pipeline) -> float:
    return max(simulate(plan.work, pipeline).makespan for plan in plans)


def packed_then_ordered(lengths: np.ndarray, cap: int, pipeline: Pipeline, cost: object) -> float:
    """Level micro-batches of the least legal count, small at both ends."""
    plans = plan_step(lengths, cap, 4, pipeline=pipeline, cost=cost, order="both_ends")  # type: ignore[arg-type]
    return step_time(plans, pipeline)


@pytest.mark.parametrize("pipeline", PIPELINES, ids=["pp4", "pp8", "pp4 vpp2"])
@pytest.mark.parametrize(("name", "rows"), [("rl-code-16k-cap", 128), ("deepseek-r1-reasoning", 512)])
@pytest.mark.parametrize("cost", [None, Fixed()], ids=["no fixed cost", "fixed cost"])
def test_a_pipeline_plan_has_far_less_overhead_than_packing_and_then_ordering(
    pipeline: Pipeline, name: str, rows: int, cost: Fixed | None
) -> None:
    ratios = []
    for seed in range(5):
        lengths = workload(name).draw(rows, seed).totals
        cap = -(-int(lengths.max()) // 256) * 256
        plans = plan_step(lengths, cap, 4, pipeline=pipeline, cost=cost)
        assert len({len(plan) for plan in plans}) == 1
        assert is_legal_count(len(plans[0]), pipeline)
        assert max(max(plan.tokens) for plan in plans) <= cap
        # One ideal for both, so that micro-batches which cost something are not for free.
        ideal = (Fixed()(lengths).sum() / 4) * 3 / pipeline.stages
        ours, theirs = step_time(plans, pipeline), packed_then_ordered(lengths, cap, pipeline, cost)
        assert ours <= theirs * (1 + 1e-12)
        ratios.append((ours / ideal - 1) / (theirs / ideal - 1))
    assert np.mean(ratios) <= 0.85


def test_one_rank_alone_gains_too() -> None:
    pipeline = Pipeline(4)
    for seed in range(4):
        lengths = workload("rl-math-long-mixture").draw(96, seed).totals
        cap = int(lengths.max())
        ours = plan_micro_batches(lengths, cap, pipeline=pipeline)
        others = plan_micro_batches(lengths, cap, pipeline=pipeline, order="both_ends")
        assert simulate(ours.work, pipeline).makespan < simulate(others.work, pipeline).makespan
        assert ours.summary().gap >= 0
        assert ours.lower_bound == others.lower_bound


def test_a_pipeline_of_one_stage_keeps_the_least_count_when_micro_batches_cost() -> None:
    lengths = workload("rl-math-short").draw(64, 0).totals
    plan = plan_micro_batches(lengths, 16384, pipeline=Pipeline(1), cost=Fixed())
    assert len(plan) == len(plan_micro_batches(lengths, 16384))


@pytest.mark.parametrize("pipeline", [Pipeline(2, 2), Pipeline(4, 2)], ids=["pp2 vpp2", "pp4 vpp2"])
def test_a_plan_that_knows_of_the_exchange_loses_less_by_it(pipeline: Pipeline) -> None:
    """Megatron's virtual stages exchange shapes, so the engine's plans are made for that."""
    real = StepSettings(max_tokens=1, layout=ParallelLayout(pp=pipeline.stages, vpp=pipeline.virtual)).pipeline()
    assert real is not None
    for seed in range(3):
        lengths = workload("rl-code-16k-cap").draw(128, seed).totals
        times = []
        for planned_for in (real, pipeline):
            plans = plan_step(lengths, int(lengths.max()), 4, pipeline=planned_for)
            times.append(step_time(plans, replace(pipeline, exchange=True)))
        assert times[0] < times[1]


def test_forward_passes_only_are_planned_too() -> None:
    pipeline = Pipeline(4, backward=0)
    lengths = workload("rl-code-16k-cap").draw(64, 0).totals
    plan = plan_micro_batches(lengths, 20_000, pipeline=pipeline)
    assert simulate(plan.work, pipeline).makespan >= makespan_lower_bound(plan.work, pipeline)
    level = plan_micro_batches(lengths, 20_000, pipeline=pipeline, order="both_ends")
    assert simulate(plan.work, pipeline).makespan <= simulate(level.work, pipeline).makespan


def test_transfers_count_in_the_unit_of_the_cost() -> None:
    lengths = workload("rl-code-16k-cap").draw(64, 2).totals
    pipeline = Pipeline(4, p2p=24576.0 * 2000)
    ours = plan_micro_batches(lengths, 20_000, pipeline=pipeline)
    others = plan_micro_batches(lengths, 20_000, pipeline=pipeline, order="both_ends")
    assert simulate(ours.work, pipeline).makespan <= simulate(others.work, pipeline).makespan


@pytest.mark.parametrize("pipeline", PIPELINES, ids=["pp4", "pp8", "pp4 vpp2"])
def test_moves_lower_the_makespan_and_keep_items_cap_and_count(pipeline: Pipeline) -> None:
    draw = np.random.default_rng(0)
    lengths = draw.integers(50, 900, 90)
    batch = read_batch(lengths, Settings(4000), None, None)
    items = Items(batch.work, batch.tokens, 4000, batch.fixed)
    count = legal_count(10, pipeline)
    hands = [[list(range(rank * count + at, 90, 2 * count)) for at in range(count)] for rank in range(2)]
    step = Step.of(hands, items, pipeline)
    before = float(step.times.max())
    improve(step, items, pipeline, 200_000)
    assert step.times.max() < before
    again = Step.of(step.hands, items, pipeline)
    assert (again.work == step.work).all()
    assert (again.tokens == step.tokens).all()
    assert again.times == pytest.approx(step.times)
    assert sorted(item for hand in step.hands for one in hand for item in one) == list(range(90))
    assert step.tokens.max() <= 4000
    assert all(one for hand in step.hands for one in hand)


def test_where_a_few_rows_are_heavy_full_micro_batches_are_kept_as_they_were_packed() -> None:
    """Heavy rows stand out of any level plan; then short rows must not be spread thin over all micro-batches."""
    pipeline = Pipeline(4)
    for seed in range(3):
        lengths = workload("mooncake-conversation").draw(512, seed).totals
        cap = -(-int(lengths.max()) // 256) * 256
        ours = step_time(plan_step(lengths, cap, 4, pipeline=pipeline), pipeline)
        assert ours < 0.97 * packed_then_ordered(lengths, cap, pipeline, None)


@pytest.mark.parametrize("pipeline", PIPELINES, ids=["pp4", "pp8", "pp4 vpp2"])
@pytest.mark.parametrize("fixed", [0.0, 2.0])
def test_sizes_hold_the_work_and_the_heaviest_item_of_each_rank_in_the_time_that_is_named(
    pipeline: Pipeline, fixed: float
) -> None:
    heaviest = (30.0, 24.0, 5.0, 4.0)
    totals = Totals(work=100.0, heaviest=heaviest, fixed=fixed, largest=25.0, items=60)
    time, sizes = _targets(totals, 4, pipeline, 12)
    assert sizes.shape == (4, 12)
    assert (sizes - fixed).sum() >= 400
    assert (sizes.max(axis=1) - fixed >= np.array(heaviest) * (1 - 1e-12)).all()
    assert sizes.max() - fixed <= 30 * (1 + 1e-12)
    assert sizes.min() >= fixed
    assert (makespans(sizes, pipeline) <= time * (1 + 1e-12)).all()
    assert sizes[0].sum() < sizes[3].sum()  # the long row leaves less room for others
    even = Totals(work=100.0, heaviest=(5.0,) * 4, fixed=fixed, largest=25.0, items=60)
    time, sizes = _targets(even, 4, pipeline, 12)
    assert 400 <= (sizes - fixed).sum() < 402
    equal = simulate(np.full(12, (100 + 12 * fixed) / 12), pipeline).makespan
    assert time < 0.99 * equal


def test_a_cap_that_no_count_can_keep_has_no_sizes() -> None:
    totals = Totals(work=100.0, heaviest=(1.0,), fixed=0.0, largest=5.0, items=60)
    time, _ = _targets(totals, 1, Pipeline(4), 12)
    assert time == np.inf


@pytest.mark.parametrize("pipeline", PIPELINES, ids=["pp4", "pp8", "pp4 vpp2"])
def test_cuts_are_never_above_the_makespan_and_meet_it_where_they_were_made(pipeline: Pipeline) -> None:
    sizes = np.random.default_rng(1).lognormal(0.0, 1.0, (40, 16))
    runs, cuts = run_many(sizes, pipeline), Cuts(16)
    for at in range(10):
        cuts.add(sizes[at], float(runs.times[at]), runs.slope(at))
    for one, time in zip(sizes, runs.times, strict=True):
        assert cuts.at(one).max() <= time * (1 + 1e-12)
    assert [cuts.at(sizes[at])[at] for at in range(10)] == pytest.approx(runs.times[:10].tolist())


def test_no_budget_means_no_moves() -> None:
    pipeline = Pipeline(2)
    batch = read_batch([5, 9, 3, 8], Settings(20), None, None)
    items = Items(batch.work, batch.tokens, 20, batch.fixed)
    step = Step.of([[[0, 1], [2], [3]]], items, pipeline)
    improve(step, items, pipeline, 0)
    assert step.hands == [[[0, 1], [2], [3]]]


def test_the_order_of_a_plan_is_not_worse_than_a_new_search_by_much() -> None:
    pipeline = Pipeline(4)
    lengths = workload("rl-code-16k-cap").draw(128, 3).totals
    for plan in plan_step(lengths, 18_000, 4, pipeline=pipeline):
        again = np.array(plan.work)[best_order(plan.work, pipeline)]
        assert simulate(plan.work, pipeline).makespan <= simulate(again, pipeline).makespan * 1.03
