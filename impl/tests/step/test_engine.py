"""The engine on 1, 2 and 4 gloo ranks: it agrees on plans, refuses what cannot run, and does not know the split."""

import pytest

from steelyard.errors import InputError
from steelyard.step.engine import StepSettings


def test_data_parallel_ranks_with_unequal_rows_agree_on_a_count(ranks):
    ranks("plans_itself_with_unequal_rows", 2)


def test_a_row_above_the_budget_is_refused_by_all_ranks_before_any_starts(ranks):
    ranks("refuses_a_long_row_on_every_rank", 2)


def test_a_count_that_megatron_refuses_is_an_error_with_the_next_legal_one(ranks):
    ranks("refuses_an_illegal_fixed_count", 2)


def test_settings_that_hang_in_megatron_are_refused(ranks):
    ranks("refuses_virtual_stages_without_overlap", 1)


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_fillers_make_up_the_count_and_change_nothing(ranks, role):
    ranks("runs_fillers", 2, role)


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (2, 2), (1, 4)])
def test_outputs_come_back_in_the_order_of_the_batch_on_every_rank(ranks, tp, pp):
    ranks("restores_the_order", tp * pp, str(tp), str(pp))


@pytest.mark.parametrize("dp", [1, 2])
def test_three_steps_with_other_budgets_and_optimizers_end_at_the_same_weights(ranks, dp):
    ranks("learns_the_same_under_either_optimizer", dp, str(dp))


def test_ddp_overrides_arrive_and_do_not_change_the_gradient(ranks):
    ranks("ddp_does_what_was_asked", 2, "2")


@pytest.mark.parametrize(("dp", "cp"), [(1, 1), (2, 1), (2, 2)])
def test_every_path_of_the_loss_through_the_schedule_gives_the_same_gradient(ranks, dp, cp):
    ranks("scales_the_loss_alike_on_every_path", dp * cp, str(dp), str(cp))


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_peak_memory_of_a_step_does_not_grow_with_the_number_of_micro_batches(ranks, role):
    ranks("does_not_grow_with_the_count", 1, role)


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_masked_rows_ranks_and_mini_batches_are_finite_and_exact(ranks, role):
    ranks("survives_masks", 4, role)


def test_ppo_epochs_take_one_step_per_mini_batch(ranks):
    ranks("trains_in_mini_batches", 2)


@pytest.mark.parametrize(
    ("first", "second"), [("dp=2", "tp=2"), ("tp=2", "pp=2,vpp=2"), ("pp=2", "cp=2"), ("dp=2,cp=2", "tp=2,pp=2")]
)
def test_importance_ratios_are_one_whatever_plan_and_layout_gave_the_old_log_probabilities(ranks, first, second):
    world = 4 if "," in first else 2
    ranks("has_ratio_one", world, first, second)


def test_a_model_parallel_peer_with_other_micro_batches_is_found_before_any_work(ranks):
    ranks("finds_a_peer_with_other_micro_batches", 4)


def test_a_count_with_a_legal_remainder_runs_on_virtual_stages(ranks):
    ranks("runs_a_legal_remainder", 2)


def test_what_is_kept_of_a_micro_batch_carries_no_graph(ranks):
    ranks("keeps_no_graph", 1)


def test_scores_stand_at_the_last_token_of_each_row(ranks):
    ranks("scores_at_the_last_token", 1)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({}, "set either micro_batch_size .* or max_tokens"),
        ({"micro_batch_size": 1, "max_tokens": 1}, "set either micro_batch_size .* or max_tokens"),
        ({"max_tokens": 0}, "max_tokens=0 must be at least 1"),
        ({"micro_batch_size": -1}, "micro_batch_size=-1 must be at least 1"),
    ],
)
def test_contradictory_settings_are_refused(settings, text):
    with pytest.raises(InputError, match=text):
        StepSettings(**settings)


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("where", ["host", "device"])
def test_the_host_waits_for_the_device_once_in_a_step(ranks, where, stages):
    ranks("reads_once_in_a_step", stages, where)
