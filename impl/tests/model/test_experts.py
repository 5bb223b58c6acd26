"""Mixture of experts over expert-parallel ranks: what a step computes does not depend on how the experts are spread."""

import pytest


@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_moe"])
def test_two_expert_parallel_ranks_give_the_loss_and_gradients_of_one(ranks, written, family):
    layouts = ("dp=2,ep=2", "tp=2,ep=2,etp=1", "tp=2,etp=2", "cp=2,ep=2")
    ranks("experts_on_ranks:has_the_gradients_of_one_expert_parallel_rank", 2, str(written(family)), *layouts)


def test_so_do_four_ranks_in_other_combinations(ranks, written):
    layouts = ("dp=4,ep=4", "dp=4,ep=2", "tp=2,dp=2,ep=2", "pp=2,dp=2,ep=2,vpp=2", "cp=2,dp=2,ep=4")
    ranks("experts_on_ranks:has_the_gradients_of_one_expert_parallel_rank", 4, str(written("qwen2_moe")), *layouts)


def test_three_steps_learn_the_same_with_either_optimizer(ranks, written):
    ranks("experts_on_ranks:learns_the_same", 2, str(written("qwen2_moe")), "dp=2", "dp=2,ep=2", "tp=2,ep=2,etp=1")


def test_experts_have_gradient_buffers_of_their_own(ranks, written):
    ranks("experts_on_ranks:keeps_experts_in_buffers_of_their_own", 2, str(written("qwen2_moe")))


@pytest.mark.parametrize(("role", "sizes"), [("actor", "dp=2,ep=2"), ("critic", "pp=2,dp=2,ep=2")])
def test_fillers_change_nothing_without_a_loss_in_the_router(ranks, written, role, sizes):
    ranks("experts_on_ranks:runs_fillers", 4 if "pp" in sizes else 2, str(written("qwen2_moe")), role, sizes)


def test_fillers_are_refused_on_every_rank_where_the_router_would_learn_from_them(ranks, written):
    ranks("experts_on_ranks:refuses_fillers_that_would_change_the_result", 2, str(written("qwen2_moe")))


def test_expert_parallel_ranks_with_unequal_counts_are_an_error_not_a_hang(ranks, written):
    ranks("experts_on_ranks:refuses_unequal_counts", 2, str(written("qwen2_moe")), time_limit=40)


def test_leading_layers_are_dense_on_whichever_stage_they_are(ranks, written):
    ranks("experts_on_ranks:places_dense_and_expert_layers", 2, str(written("qwen2_moe")))
