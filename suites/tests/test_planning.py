"""The scoreboard of planners: the others are what they say they are, and Steelyard's keeps what it promises."""

import math

import numpy as np
import pytest

from steelyard.balance import plan_step
from steelyard.errors import InputError
from steelyard.lengths import workload
from steelyard.pipeline import Pipeline, simulate
from suites import planning
from suites.baselines import planners
from suites.baselines.differencing import partition
from suites.baselines.planners import PLANNERS, Clock, RefusedError
from suites.calibrate import fixed_cost
from suites.matrix import Cell, Layout, Sizes

KEEP_THE_CAP = ("verl-0.9.1", "slime", "next-fit", "FFD+KK")
SIZES = Sizes(layers=64, hidden=64, ffn=96, heads=4, kv_heads=2, head_dim=16, vocab=128)
# Draws of lengths and rows, 4 data-parallel ranks, cap = longest row rounded up to 256.
SETTINGS = [("rl-code-16k-cap", 128), ("rl-math-long-mixture", 512)]


def draw(name, rows, seed):
    lengths = workload(name).draw(rows, seed).totals
    return lengths, -(-int(lengths.max()) // 256) * 256


def make_cell(**settings):
    return Cell(suite="planning", workload="rl-code-16k-cap", model=SIZES, **{"rows": 64, "pairs": 3, **settings})


@pytest.mark.parametrize("name", PLANNERS)
@pytest.mark.parametrize("pipeline", [None, Pipeline(4), Pipeline(4, 2)], ids=["no pipeline", "pp4", "pp4 vpp2"])
def test_every_planner_puts_each_row_into_one_micro_batch_and_counts_agree(name, pipeline):
    lengths, cap = draw("rl-code-16k-cap", 128, 0)
    hands = PLANNERS[name](lengths.tolist(), cap, 4, pipeline, Clock())
    assert sorted(row for hand in hands for one in hand for row in one) == list(range(128))
    assert len(hands) == 4
    assert len({len(hand) for hand in hands}) == 1
    assert all(one for hand in hands for one in hand)


def test_the_planners_that_check_the_cap_keep_it_and_the_older_ones_break_it():
    for name, rows in SETTINGS:
        lengths, cap = draw(name, rows, 1)
        for planner, plan in PLANNERS.items():
            hands = plan(lengths.tolist(), cap, 4, None, Clock())
            most = max(lengths[one].sum() for hand in hands for one in hand)
            assert (most <= cap) == (planner in KEEP_THE_CAP)


def test_differencing_makes_the_parts_that_verl_makes():
    verl = pytest.importorskip("verl.utils.seqlen_balancing")
    random = np.random.default_rng(0)
    for _ in range(200):
        count, each = (int(one) for one in random.integers(1, 7, 2))
        few_values = random.integers(1, 9, count * each).tolist()  # many ties
        for equal_size in (True, False):
            expected = verl.get_seqlen_balanced_partitions(few_values, count, equal_size=equal_size)
            assert partition(few_values, count, equal_size=equal_size) == expected


@pytest.mark.parametrize("pipeline", [None, Pipeline(4, 2)], ids=["no pipeline", "vpp2"])
def test_the_planner_called_verl_0_9_1_plans_what_verl_plans(pipeline):
    verl = pytest.importorskip("verl.utils.seqlen_balancing")
    import torch
    from tensordict import TensorDict

    for seed in range(5):
        lengths, cap = draw("rl-math-long-mixture", 96, seed)
        mask = torch.arange(cap) < torch.tensor(lengths.copy())[:, None]
        batch = TensorDict({"input_ids": mask.int(), "attention_mask": mask.int()}, batch_size=[96])
        group = None if pipeline is None else pipeline.group_size
        _, expected = verl.rearrange_micro_batches(batch, cap, num_batches_divided_by=group)
        assert planners.verl_0_9_1(lengths.tolist(), cap, 1, pipeline, Clock()) == [expected]


def test_what_ranks_do_at_the_same_time_is_counted_once():
    clock = Clock()
    assert clock.on_ranks(lambda rows: sum(range(300_000)) and len(rows), [[1], [2, 3], [4]]) == [1, 2, 1]
    assert clock.saved > 0


@pytest.mark.parametrize(("name", "rows", "draws"), [(*SETTINGS[0], 40), (*SETTINGS[1], 16)])
def test_without_a_pipeline_the_count_is_the_bound_and_never_above_another_planners(name, rows, draws):
    at_bound = 0
    for seed in range(draws):
        lengths, cap = draw(name, rows, seed)
        plans = plan_step(lengths, cap, 4)
        assert max(max(plan.tokens) for plan in plans) <= cap
        at_bound += len(plans[0]) == plans[0].lower_bound
        for planner in KEEP_THE_CAP:
            others = PLANNERS[planner](lengths.tolist(), cap, 4, None, Clock())
            assert plans[0].lower_bound <= len(others[0])
            assert len(plans[0]) <= len(others[0])
    assert draws - at_bound <= 2


@pytest.mark.parametrize(("name", "rows"), SETTINGS)
def test_with_a_pipeline_no_planner_that_keeps_the_cap_is_faster_on_any_draw(name, rows):
    pipeline = Pipeline(4)
    for seed in range(6):
        lengths, cap = draw(name, rows, seed)
        work = planners.workload(lengths.astype(np.float64))

        def slowest(hands, work=work):
            return max(simulate([work[one].sum() for one in hand], pipeline).makespan for hand in hands)

        plans = plan_step(lengths, cap, 4, pipeline=pipeline)
        assert max(max(plan.tokens) for plan in plans) <= cap
        ours = slowest([plan.indices for plan in plans])
        for planner in KEEP_THE_CAP:
            others = PLANNERS[planner](lengths.tolist(), cap, 4, pipeline, Clock())
            assert ours <= slowest(others) * (1 + 1e-9)


@pytest.mark.parametrize("pipeline", [Pipeline(4), Pipeline(8), Pipeline(4, 2)], ids=["pp4", "pp8", "pp4 vpp2"])
@pytest.mark.parametrize(("name", "rows"), [("rl-code-16k-cap", 128), ("deepseek-r1-reasoning", 512)])
def test_the_overhead_is_far_below_the_best_other_planners_on_every_draw(name, rows, pipeline):
    """With a fixed cost per micro-batch of about what calibration finds on a CPU, and with none."""
    ratios = {0.0: [], 130.0: []}
    for seed in range(3):
        lengths, cap = draw(name, rows, seed)
        others = [PLANNERS[planner](lengths.tolist(), cap, 4, pipeline, Clock()) for planner in KEEP_THE_CAP]
        for fixed, found in ratios.items():
            task = planning.Task(lengths, cap, 4, pipeline, 24576.0 * fixed)
            ours = planning._score(planning._ask_ours(task)[0], 0.0, task)
            least = min(planning._score(hands, 0.0, task).time_over_ideal for hands in others)
            assert ours.keeps_cap
            found.append((ours.time_over_ideal - 1) / (least - 1))
    for found in ratios.values():
        assert max(found) <= 1
        assert np.mean(found) <= 0.85


def test_many_micro_batches_which_leave_little_to_gain_are_not_above_the_best_other_planner():
    for seed in range(3):
        lengths, cap = draw("rl-code-16k-cap", 512, seed)
        task = planning.Task(lengths, cap, 4, Pipeline(4), 24576.0 * 256)
        other = PLANNERS["FFD+KK"](lengths.tolist(), cap, 4, Pipeline(4), Clock())
        ours = planning._score(planning._ask_ours(task)[0], 0.0, task)
        assert ours.time_over_ideal <= planning._score(other, 0.0, task).time_over_ideal * (1 + planning.ROUNDING)


def test_the_fixed_cost_is_calibrated_on_real_steps_and_named_in_the_notes():
    cell = make_cell(layout=Layout(dp=4, pp=4), pairs=1, warmup=0, planners=["next-fit"], fixed_cost="calibrated")
    found = {(one.metric, one.variant): one for one in planning.measure(cell)}
    notes = found["time_over_ideal", planning.OURS].notes
    assert 1 < notes["fixed_tokens"] < 10_000
    assert "samples" in notes["calibration"]
    assert notes["fixed_tokens"] == fixed_cost().tokens
    ratio = found["time_over_ideal", "next-fit"].values[0]
    free = planning.measure(make_cell(layout=Layout(dp=4, pp=4), pairs=1, warmup=0, planners=["next-fit"]))
    assert ratio > next(one for one in free if (one.metric, one.variant) == ("time_over_ideal", "next-fit")).values[0]


def test_a_cell_gives_every_metric_of_every_planner_for_every_draw():
    series = planning.measure(make_cell(layout=Layout(dp=4, pp=4)))
    found = {(one.metric, one.side, one.variant): one for one in series}
    for metric, *_ in planning.METRICS:
        for name in (planning.OURS, *PLANNERS):
            one = found[metric, "optimised" if name == planning.OURS else "naive", name]
            assert len(one.values) == 3
            assert one.source == ("predicted" if metric in ("time_over_ideal", "time_over_bound") else "measured")
    assert found["share_over_cap", "optimised", planning.OURS].limit == 0
    assert max(found["time_over_best_other", "both", ""].values) <= 1 + 1e-9
    assert all(value >= 1 for value in found["time_over_ideal", "optimised", planning.OURS].values)
    assert all(1 - 1e-12 <= value < 1.2 for value in found["time_over_bound", "optimised", planning.OURS].values)
    ours = np.array(found["time_over_ideal", "optimised", planning.OURS].values) - 1
    others = [found["time_over_ideal", "naive", name].values for name in KEEP_THE_CAP]
    overheads = found["overhead_over_best_other", "both", ""]
    assert overheads.values == pytest.approx(ours / (np.min(others, axis=0) - 1))
    assert overheads.notes["ratio_of_means"] == pytest.approx(ours.mean() / (np.min(others, axis=0) - 1).mean())
    assert overheads.notes["fixed_tokens"] == 0


def test_equal_micro_batches_take_the_time_that_the_formula_says():
    task = planning.Task(np.full(8, 100), 100, 1, Pipeline(4), 0.0)
    hands = [[[row] for row in range(8)]]
    assert planning._score(hands, 1.0, task).time_over_ideal == pytest.approx(1 + 3 / 8)
    fixed = planning.Task(np.full(8, 100), 100, 1, Pipeline(4), planners.workload(100))
    assert planning._score(hands, 1.0, fixed).time_over_ideal == pytest.approx(2 * (1 + 3 / 8))


def test_fewer_rows_than_stages_are_refused_by_others_and_planned_here():
    task = planning.Task.of(make_cell(rows=16, layout=Layout(dp=16, pp=4, vpp=2)))
    for plan in (planners.verl_v0_virtual, planners.verl_0_9_1, planners.slime_first_fit):
        with pytest.raises(RefusedError):
            plan(task.lengths.tolist(), task.max_tokens, 16, task.pipeline, Clock())
    series = planning.measure(make_cell(rows=16, pairs=1, layout=Layout(dp=16, pp=4, vpp=2)))
    times = {one.variant: one.values[0] for one in series if one.metric == "time_over_ideal"}
    assert math.isfinite(times.pop(planning.OURS))
    assert not any(map(math.isfinite, times.values()))


def test_a_count_that_megatron_refuses_has_no_time():
    task = planning.Task(np.full(5, 100), 100, 1, Pipeline(4, 2), 0.0)
    assert planning._score([[[row] for row in range(5)]], 1.0, task).time_over_ideal == math.inf


def test_an_unknown_planner_is_named_with_what_is_close():
    with pytest.raises(InputError, match="'slim' does not exist.*slime"):
        planning.measure(make_cell(planners=["slim"]))


def test_sizes_are_an_axis_and_stand_in_the_name_of_a_cell():
    assert make_cell(rows=4096, layout=Layout(dp=4)).id == "planning/rl-code-16k-cap/dp4/4096-rows"
    assert make_cell(rows=16, fixed_tokens=256).id == "planning/rl-code-16k-cap/1/16-rows-fixed-256"
