"""The engine on 1, 2 and 4 gloo ranks: it agrees on plans, refuses what cannot run, and does not know the split."""

import pytest

from steelyard.errors import InputError
from steelyard.step.engine import StepSettings


def test_data_parallel_ranks_with_unequal_rows_agree_on_a_count(torchrun):
    torchrun("plans_itself_with_unequal_rows", 2)


def test_a_row_above_the_budget_is_refused_by_all_ranks_before_any_starts(torchrun):
    torchrun("refuses_a_long_row_on_every_rank", 2)


def test_a_count_that_megatron_refuses_is_an_error_with_the_next_legal_one(torchrun):
    torchrun("refuses_an_illegal_fixed_count", 2)


def test_settings_that_hang_in_megatron_are_refused(torchrun):
    torchrun("refuses_virtual_stages_without_overlap", 1)


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_fillers_make_up_the_count_and_change_nothing(torchrun, role):
    torchrun("runs_fillers", 2, role)


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (2, 2), (1, 4)])
def test_outputs_come_back_in_the_order_of_the_batch_on_every_rank(torchrun, tp, pp):
    torchrun("restores_the_order", tp * pp, str(tp), str(pp))


@pytest.mark.parametrize("dp", [1, 2])
def test_three_steps_with_other_budgets_and_optimizers_end_at_the_same_weights(torchrun, dp):
    torchrun("learns_the_same_under_either_optimizer", dp, str(dp))


def test_ddp_overrides_arrive_and_do_not_change_the_gradient(torchrun):
    torchrun("ddp_does_what_was_asked", 2, "2")


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
