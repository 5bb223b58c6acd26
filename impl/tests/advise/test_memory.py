"""Lines over tokens and data-parallel ranks against full predictions, and what follows from them."""

from dataclasses import replace

import pytest

from steelyard.advise import Setting, check
from steelyard.advise.memory import (
    GIB,
    least_gib,
    micro_batch_tokens,
    questions,
    row_tokens,
)
from steelyard.advise.predictions import ROW, Question, predict, stages
from steelyard.cost import ModelShape
from steelyard.memory.predict import predict_peak, stage_ranks
from steelyard.memory.threshold import usual_micro_batches
from steelyard.parallel import ParallelLayout
from steelyard.step import CriticRole, StepSettings

EXPERTS = {"experts": 4, "experts_per_token": 2, "moe_ffn": 128}


def on(job, layout, **more):
    return replace(job, gpus=layout.world, **more)


def in_full(shape, setting, stage, tokens, **more):
    """A prediction of the whole model on the very ranks and tokens."""
    layout = setting.layout
    rows = [ROW * layout.cp] * (tokens // ROW)
    count = len(usual_micro_batches(layout, 1))
    rank = stage_ranks(layout)[stage]
    return predict_peak(shape, layout, [rows] * count, rank=rank, recompute=setting.recompute, **more)


@pytest.mark.parametrize(
    ("layout", "recompute"),
    [
        (ParallelLayout(dp=4), "none"),
        (ParallelLayout(tp=2, pp=2, dp=2), "full"),
    ],
    ids=str,
)
def test_other_tokens_and_data_parallel_ranks_cost_what_a_full_prediction_says(
    job, predictions, shape, layout, recompute
):
    tokens = 3 * ROW  # not where the lines were drawn through
    setting = Setting(layout, tokens, recompute=recompute)
    fit = check(on(job, layout), setting, predictions)
    assert list(fit.peak_gib) == list(stage_ranks(layout))
    for stage, peak in fit.peak_gib.items():
        assert peak == pytest.approx(in_full(shape, setting, stage, tokens).peak_gib, rel=0.01), stage


def test_experts_too(job, predictions, shape):
    layout = ParallelLayout(tp=1, dp=4, ep=2)
    mixed = replace(shape, **EXPERTS, name="tiny experts")
    setting = Setting(layout, 3 * ROW)
    fit = check(on(job, layout, shape=mixed), setting, predictions)
    assert fit.peak_gib["only"] == pytest.approx(in_full(mixed, setting, "only", 3 * ROW).peak_gib, rel=0.01)


def test_only_the_optimizers_state_is_divided_by_more_data_parallel_ranks(job, predictions):
    setting = Setting(ParallelLayout(dp=2), ROW)
    runs = predictions.runs
    two = check(on(job, setting.layout), setting, predictions)
    asked = predictions.runs
    wide = replace(setting, layout=ParallelLayout(dp=8))
    eight = check(on(job, wide.layout), wide, predictions)
    assert predictions.runs == asked <= runs + 2, "other ranks need no runs"
    for part in ("master weights", "Adam"):
        assert eight.parts_gib[part] == pytest.approx(two.parts_gib[part] / 4)
    assert eight.parts_gib["parameters"] == two.parts_gib["parameters"]


def test_the_longest_response_is_the_longest_that_fits(job, predictions):
    layout = ParallelLayout(tp=2, dp=2)
    # So little memory that the model's positions are not what stops it.
    small = on(job, layout, gpu=replace(job.gpu, gib=6.0))
    setting = Setting(layout, row_tokens(layout, small.longest))
    longest = check(small, setting, predictions).largest_response
    assert 0 < longest < small.shape.max_positions - small.max_prompt

    def fits(response):
        one = replace(small, max_response=response)
        return check(one, replace(setting, max_tokens=row_tokens(layout, one.longest)), predictions).fits

    assert fits(longest)
    assert not fits(longest + layout.row_alignment)
    fixed = check(small, replace(setting, micro_batch_size=2), predictions)
    assert fixed.largest_response + small.max_prompt == pytest.approx((longest + small.max_prompt) / 2, abs=2)


def test_what_is_short_is_said_with_its_stage(job, predictions):
    layout = ParallelLayout(tp=2, dp=2)
    setting = Setting(layout, 65536)
    fit = check(on(job, layout, gpu=replace(job.gpu, gib=6.0)), setting, predictions)
    assert not fit.fits
    assert fit.short_gib == pytest.approx(max(fit.peak_gib.values()) - fit.available_gib)
    assert f"{fit.short_gib:.1f} too many" in fit.why
    assert sum(fit.parts_gib.values()) == pytest.approx(fit.peak_gib[fit.stage], rel=1e-3)


def test_a_micro_batch_holds_its_budget_or_one_longest_row_or_its_fixed_rows(job):
    layout = ParallelLayout(cp=2, dp=2)
    assert micro_batch_tokens(job, Setting(layout, 100)) == job.longest // 2
    assert micro_batch_tokens(job, Setting(layout, 20000)) == 20000
    # A fixed micro-batch takes no notice of the budget, and pads every row to the full width.
    assert micro_batch_tokens(job, Setting(layout, 20000, micro_batch_size=3)) == 3 * job.longest // 2


@pytest.mark.parametrize("layout", [ParallelLayout(tp=4), ParallelLayout(tp=2, cp=2), ParallelLayout(tp=2, sp=False)])
def test_rows_are_aligned_as_the_engine_aligns_them(layout):
    assert layout.row_alignment == StepSettings(max_tokens=1, layout=layout).alignment


@pytest.mark.parametrize("pp", [1, 2, 4])
def test_kinds_of_stages_are_those_of_the_prediction(pp):
    assert list(stages(ParallelLayout(pp=pp))) == list(stage_ranks(ParallelLayout(pp=pp)))


def test_other_roles_keep_what_they_hold_between_steps_unless_it_is_offloaded(job, predictions, shape):
    layout = ParallelLayout(dp=2)
    setting = Setting(layout, ROW)
    alone = check(on(job, layout), setting, predictions)
    shared = on(job, layout, roles=("actor", "critic", "reference"))
    fit = check(shared, setting, predictions)
    critic = in_full(shape, setting, "only", ROW, role=CriticRole())
    frozen = alone.parts_gib["parameters"]
    assert fit.peak_gib["only"] == pytest.approx(alone.peak_gib["only"] + critic.static_bytes / GIB + frozen, rel=1e-3)
    assert fit.parts_gib["other roles"] == pytest.approx(critic.static_bytes / GIB + frozen, rel=1e-3)
    away = check(shared, replace(setting, offload=True), predictions)
    assert away.peak_gib["only"] == pytest.approx(alone.peak_gib["only"])


def test_the_rollout_engine_and_the_reserve_take_their_share(job):
    one = replace(job, rollout_gib=10.0, reserve_gib=3.0)
    assert one.available_gib == one.gpu.gib - 13


def test_the_rollout_engine_must_fit_beside_what_is_not_offloaded(job, predictions):
    setting = Setting(ParallelLayout(dp=2), ROW)
    alone = check(on(job, setting.layout), setting, predictions)
    kept = sum(alone.parts_gib[name] for name in ("parameters", "gradients", "master weights", "Adam"))
    room = (job.available_gib - kept) / job.gpu.gib
    fitting = check(on(job, setting.layout, rollout_share=room - 0.001), setting, predictions)
    assert fitting.fits
    assert fitting.largest_response == alone.largest_response
    crowded = on(job, setting.layout, rollout_share=room + 0.001)
    fit = check(crowded, setting, predictions)
    assert (fit.fits, fit.phase, fit.largest_response) == (False, "rollout", 0)
    assert check(crowded, replace(setting, offload=True), predictions).fits


def test_whole_logits_cost_half_of_their_float32_copy(job, predictions, shape):
    setting = Setting(ParallelLayout(dp=2), 8 * ROW)
    chunked = check(on(job, setting.layout), setting, predictions)
    whole = check(on(job, setting.layout), replace(setting, chunked_logits=False), predictions)
    # Logits and their gradient in bfloat16 with chunks; the softmax in float32 and a bfloat16 gradient without.
    copy = 4 * 8 * ROW * shape.vocab / GIB
    assert whole.peak_gib["only"] - chunked.peak_gib["only"] == pytest.approx(copy / 2, rel=0.1)


def test_an_optimizer_on_the_host_leaves_parameters_and_gradients(job, predictions):
    setting = Setting(ParallelLayout(dp=2), ROW)
    here = check(on(job, setting.layout), setting, predictions)
    away = check(on(job, setting.layout), replace(setting, optimizer_on_host=True), predictions)
    state = here.parts_gib["master weights"] + here.parts_gib["Adam"]
    assert away.peak_gib["only"] == pytest.approx(here.peak_gib["only"] - state)
    assert {"master weights", "Adam"}.isdisjoint(away.parts_gib)


def test_selective_recomputation_frees_next_to_nothing_with_a_flash_kernel(job, predictions):
    # Which is why the ranking leaves it out.
    setting = Setting(ParallelLayout(dp=2), 8 * ROW)
    none = check(on(job, setting.layout), setting, predictions)
    selective = check(on(job, setting.layout), replace(setting, recompute="selective"), predictions)
    assert selective.peak_gib["only"] == pytest.approx(none.peak_gib["only"], rel=0.02)


@pytest.mark.parametrize(
    ("layout", "recompute"),
    [
        (ParallelLayout(dp=4), "none"),
        (ParallelLayout(tp=2, dp=2), "none"),
        (ParallelLayout(tp=2, sp=False, dp=2), "none"),
        (ParallelLayout(cp=2, dp=2), "none"),
        (ParallelLayout(tp=2, pp=2, dp=2), "full"),
        (ParallelLayout(pp=2, vpp=2), "none"),
    ],
    ids=str,
)
def test_the_bound_in_closed_form_is_below_every_prediction(job, predictions, layout, recompute):
    for tokens in (ROW, 8 * ROW):
        setting = Setting(layout, tokens, recompute=recompute)
        one = on(job, layout)
        assert least_gib(one, setting) <= max(check(one, setting, predictions).peak_gib.values())


def test_the_bound_holds_for_experts(job, predictions, shape):
    mixed = replace(shape, **EXPERTS, name="tiny experts")
    for layout in (ParallelLayout(dp=4, ep=2), ParallelLayout(tp=2, dp=2, ep=2, etp=1)):
        one, setting = on(job, layout, shape=mixed), Setting(layout, 8 * ROW)
        assert least_gib(one, setting) <= max(check(one, setting, predictions).peak_gib.values())


def test_jobs_that_differ_in_lengths_ask_the_same_questions(job):
    layout = ParallelLayout(tp=2, dp=2)
    longer = replace(job, max_response=16384, rows=512)
    assert questions(job, Setting(layout, 16384)) == questions(longer, Setting(layout, 32768))


def test_a_prediction_says_that_layers_were_continued(shape):
    question = Question(shape, ParallelLayout(), "only", "actor", "none", True, ROW)
    assert predict(question).extrapolated
    assert not predict(replace(question, shape=replace(shape, layers=3))).extrapolated
    assert ModelShape.preset("qwen2.5-7b").layers > 3
