"""The ranking is what judging every candidate would give, and its plan is the planner's."""

import itertools
import json
from dataclasses import replace

import pytest

from steelyard.advise import Setting, check
from steelyard.advise.changes import changes, whether_nodes_help, whether_ranks_help, with_more_nodes
from steelyard.advise.memory import least_gib, row_tokens
from steelyard.advise.rank import candidates, ranked
from steelyard.advise.speed import (
    EFFICIENCY,
    _on_group,
    _pipeline,
    calibrated,
    least_seconds,
    slots_of,
    speed,
    stated,
    traffic,
)
from steelyard.balance import plan_step
from steelyard.balance.plan import summarize_step
from steelyard.errors import InputError
from steelyard.lengths import workload
from steelyard.parallel import ParallelLayout
from steelyard.pipeline import simulate


@pytest.fixture(scope="module")
def tight(job):
    """A shallow model on two GPUs that hold some settings, and others only with recomputation or not at all."""
    return replace(job, shape=replace(job.shape, layers=2), gpus=2, gpu=replace(job.gpu, gib=4 + 1.7))


@pytest.fixture(scope="module")
def clock(job):
    return stated(job.shape, job.gpu)


@pytest.mark.parametrize("at_once", [1, 3, 8])
@pytest.mark.parametrize("gib", [1.62, 1.7, 2.95, 6.0])
def test_the_fastest_that_fits_comes_first_and_nothing_is_left_out(tight, predictions, clock, gib, at_once):
    some = replace(tight, gpu=replace(tight.gpu, gib=tight.reserve_gib + gib))
    # Judging everything; which needs no new predictions after the first time.
    best = {}
    for setting in candidates(some):
        if check(some, setting, predictions).fits:
            family = replace(setting.layout, sp=False, vpp=1)
            best[family] = min(best.get(family, float("inf")), speed(some, setting, clock).middle)
    found = list(ranked(some, predictions, clock, at_once))
    assert best
    assert {replace(one.setting.layout, sp=False, vpp=1): one.speed.middle for one in found} == best
    assert [one.speed.middle for one in found] == sorted(best.values())


def test_only_as_much_is_predicted_as_is_asked_for(job, clock):
    from steelyard.advise.predictions import Predictions

    with Predictions() as few:
        (first,) = itertools.islice(ranked(job, few, clock), 1)
        assert few.runs <= 4
    assert first.fit.fits


def test_no_setting_is_faster_than_its_bound(job, clock):
    for setting in candidates(job):
        bound, planned = least_seconds(job, setting, clock), speed(job, setting, clock)
        assert bound <= planned.middle * (1 + 1e-9), setting
        assert planned.seconds[0] < planned.seconds[1]
        assert planned.tokens_per_gpu[0] < planned.tokens_per_gpu[1]


@pytest.mark.parametrize(
    "layout", [ParallelLayout(dp=4), ParallelLayout(tp=2, pp=2, vpp=2), ParallelLayout(cp=2, pp=2)]
)
def test_plan_figures_are_those_of_plan_step(job, clock, layout):
    job = replace(job, lengths=workload("rl-code-16k-cap").draw(48, 3, scale=2))
    setting = Setting(layout, row_tokens(layout, job.longest))
    pipeline = _pipeline(job, setting, clock)
    budget, cost = setting.max_tokens * layout.cp, _on_group(clock, layout.tp * layout.cp)
    lengths = slots_of(job, layout.row_alignment)
    plans = plan_step(lengths, budget, layout.dp, cost=cost, pipeline=pipeline)
    found = speed(job, setting, clock)
    assert found.micro_batches == max(map(len, plans))
    assert found.imbalance == summarize_step(plans).imbalance
    if pipeline is not None:
        slowest = max((simulate(plan.work, pipeline) for plan in plans), key=lambda line: line.makespan)
        assert found.overhead == slowest.overhead
        assert pipeline.shares[-1] > pipeline.shares[0], "the last stage makes the logits too"


def test_fixed_micro_batches_pay_for_their_padding(job, clock):
    layout = ParallelLayout(dp=4)
    dynamic = speed(job, Setting(layout, job.longest), clock)
    fixed = speed(job, Setting(layout, micro_batch_size=1), clock)
    assert fixed.micro_batches == len(job.sample) // 4
    assert fixed.middle > 1.2 * dynamic.middle


def test_frozen_roles_add_forward_passes_and_critics_whole_updates(job, clock):
    setting = Setting(ParallelLayout(dp=4), job.longest)

    def busy(*roles):
        found = speed(replace(job, roles=roles), setting, clock)
        return found.middle

    actor = busy("actor")
    assert busy("actor", "critic") == pytest.approx(2 * actor, rel=1e-6)
    assert busy("actor", "reference") == pytest.approx(4 / 3 * actor, rel=0.05)


def test_the_range_is_that_of_the_stated_efficiencies(job, clock):
    one = replace(job, gpus=1)
    best, worst = speed(one, Setting(ParallelLayout(), job.longest), clock).seconds
    # A single GPU has no traffic, and its optimizer is quick.
    assert worst / best == pytest.approx(EFFICIENCY[1] / EFFICIENCY[0], rel=0.05)


def test_traffic_is_that_of_ring_collectives(job):
    tokens, hidden, layers = 10_000, job.shape.hidden, job.shape.layers
    nvlink = job.gpu.nvlink * 1e9
    tp = traffic(replace(job, gpus=2), Setting(ParallelLayout(tp=2, sp=False)), tokens)
    # Two all-reduces per layer forward and two backward; each moves 2 (n-1)/n of its bytes.
    assert tp == {"tp": pytest.approx(layers * 4 * 2 * 0.5 * 2 * hidden * tokens / nvlink)}
    dp = traffic(replace(job, gpus=2), Setting(ParallelLayout(dp=2)), tokens)
    assert dp == {"dp": pytest.approx(job.shape.parameters * 6 * 0.5 / nvlink)}
    far = traffic(replace(job, gpus=2, gpus_per_node=1), Setting(ParallelLayout(dp=2)), tokens)
    assert far["dp"] / dp["dp"] == pytest.approx(job.gpu.nvlink / job.gpu.network)
    gathered, ulysses = (
        traffic(replace(job, gpus=2), Setting(ParallelLayout(cp=2, cp_kind=kind)), tokens)["cp"]
        for kind in ("all_gather", "all_to_all")
    )
    kv, heads, dim = job.shape.kv_heads, job.shape.heads, job.shape.head_dim
    assert gathered == pytest.approx(2 * layers * 0.5 * 2 * 2 * kv * dim * tokens / nvlink)
    assert ulysses == pytest.approx(2 * layers * 0.5 * 2 * 2 * (heads + kv) * dim * tokens / 2 / nvlink)


def test_a_calibration_replaces_the_stated_efficiency(job, tmp_path):
    file = tmp_path / "mine.json"
    values = {"fixed": 1e-3, "per_linear": 1e-14, "per_attention": 2e-14, "max_error": 0.1}
    file.write_text(json.dumps(values))
    mine = calibrated(job.shape, file)
    assert mine.per_gpu.micro_batch([1000]) == pytest.approx(
        1e-3 + 1e-14 * mine.per_gpu.cost.linear([1000])[0] + 2e-14 * mine.per_gpu.cost.attention([1000])[0]
    )
    assert (mine.low, mine.high) == (0.9, 1.1)
    for wrong, message in (
        ({**values, "per_liner": 1}, "did you mean per_linear"),
        ({**values, "fixed": -1}, "fixed=-1 must be"),
        ([1], "holds a list"),
    ):
        file.write_text(json.dumps(wrong))
        with pytest.raises(InputError, match=message):
            calibrated(job.shape, file)


def test_changes_are_single_and_those_that_make_it_fit_come_first(tight, predictions, clock):
    setting = Setting(ParallelLayout(dp=2), 4 * tight.longest, chunked_logits=False)
    before = check(tight, setting, predictions)
    assert not before.fits
    found = {change.what: change for change in changes(tight, setting, predictions, clock)}
    order = [not change.fit.fits for change in found.values()]
    assert order == sorted(order)
    fitting = [change.slower for change in found.values() if change.fit.fits]
    assert fitting == sorted(fitting)
    assert {"full recomputation", "chunked logits", "cp 2", f"budget of {tight.longest} tokens"} <= set(found)
    assert "sequence parallelism" not in found, "there is no tensor parallelism"
    assert found["full recomputation"].slower > 0.2
    for change in found.values():
        assert change.freed_gib == pytest.approx(max(before.peak_gib.values()) - max(change.fit.peak_gib.values()))
        differs = [
            name
            for name in ("recompute", "offload", "chunked_logits", "optimizer_on_host", "micro_batch_size")
            if getattr(change.setting, name) != getattr(setting, name)
        ]
        assert len(differs) + (change.setting.layout != setting.layout) <= 1


def test_more_nodes_help_where_the_optimizers_state_is_what_is_too_much(tight, predictions):
    setting = Setting(ParallelLayout(dp=2), tight.longest)
    layout = ParallelLayout(dp=8)
    little = check(replace(tight, gpus=8), replace(setting, layout=layout), predictions).peak_gib["only"]
    state = replace(tight, gpu=replace(tight.gpu, gib=tight.reserve_gib + little + 0.001))
    assert whether_ranks_help(state, setting, predictions) == "yes: with dp 8 on 8 GPUs it fits"
    nothing = replace(tight, gpu=replace(tight.gpu, gib=tight.reserve_gib + 0.5))
    assert whether_ranks_help(nothing, setting, predictions).startswith("no: more data-parallel ranks divide only")


def test_more_nodes_are_answered_with_the_layout_that_uses_them(tight, predictions, clock):
    nodes = with_more_nodes(replace(tight, gpus_per_node=2), 2, predictions, clock)
    assert [each.gpus for each in nodes] == [2, 4]
    answer = whether_nodes_help(tight, nodes)
    assert answer.startswith("not to fit: ")
    assert str(nodes[1].best.setting.layout) in answer
    none = replace(tight, gpu=replace(tight.gpu, gib=tight.reserve_gib + 0.01), gpus_per_node=2)
    assert whether_nodes_help(none, with_more_nodes(none, 2, predictions, clock)) == (
        "no: nothing fits on 4 GPUs either"
    )


def test_what_the_bound_excludes_does_not_fit(tight, predictions):
    out = [setting for setting in candidates(tight) if least_gib(tight, setting) > tight.available_gib]
    for setting in out[:4]:
        assert not check(tight, setting, predictions).fits
