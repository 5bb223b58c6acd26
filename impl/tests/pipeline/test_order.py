"""Orders of execution: small at both ends, the best that is found, and profiles of sizes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.errors import PlanError
from steelyard.pipeline import Pipeline, best_order, both_ends, makespan_lower_bound, simulate
from steelyard.pipeline.profile import profiles

PIPELINES = [Pipeline(2), Pipeline(4), Pipeline(8), Pipeline(4, backward=0), Pipeline(4, p2p=0.2)]


def time_of(work: np.ndarray, order: list[int], pipeline: Pipeline) -> float:
    return simulate(np.asarray(work)[order], pipeline).makespan


def test_both_ends_is_small_at_both_ends() -> None:
    order = both_ends([5, 1, 4, 2, 3])
    assert [[5, 1, 4, 2, 3][at] for at in order] == [1, 3, 5, 4, 2]
    assert both_ends([1, 1, 1]) == [0, 2, 1]
    assert both_ends([]) == []


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0.0, 100.0), min_size=1, max_size=14), st.sampled_from(PIPELINES))
def test_best_order_is_a_permutation_and_never_worse_than_both_ends(work: list[float], pipeline: Pipeline) -> None:
    order = best_order(work, pipeline)
    assert sorted(order) == list(range(len(work)))
    assert time_of(work, order, pipeline) <= time_of(work, both_ends(work), pipeline) * (1 + 1e-12)
    assert time_of(work, order, pipeline) >= makespan_lower_bound(work, pipeline) * (1 - 1e-12)
    assert order == best_order(work, pipeline)


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_best_order_of_few_micro_batches_is_near_the_best_of_all_orders(pipeline: Pipeline) -> None:
    work = np.random.default_rng(3).lognormal(0.0, 1.0, 6)
    best = min(time_of(work, list(order), pipeline) for order in itertools.permutations(range(6)))
    assert time_of(work, best_order(work, pipeline), pipeline) <= best * 1.02


def test_best_order_beats_both_ends_on_long_tails_with_interleaving() -> None:
    gains = []
    for seed in range(5):
        work = np.random.default_rng(seed).lognormal(0.0, 1.2, 16)
        pipeline = Pipeline(4, 2)
        gains.append(time_of(work, both_ends(work), pipeline) / time_of(work, best_order(work, pipeline), pipeline))
    assert min(gains) >= 1.0
    assert np.mean(gains) > 1.03


def test_best_order_knows_unequal_stages_and_work_per_virtual_stage() -> None:
    parts = np.random.default_rng(0).random((8, 4))
    order = best_order(parts, Pipeline(4))
    assert sorted(order) == list(range(8))
    assert (
        simulate(parts[order], Pipeline(4)).makespan <= simulate(parts[both_ends(parts.sum(1))], Pipeline(4)).makespan
    )


def test_best_order_refuses_what_megatron_refuses() -> None:
    with pytest.raises(PlanError, match="use 4"):
        best_order([1.0, 2.0], Pipeline(4, 2))


@pytest.mark.parametrize("pipeline", [*PIPELINES, Pipeline(4, 2), Pipeline(8, 2)])
@pytest.mark.parametrize("count", [8, 16, 24])
def test_profiles_are_sizes_up_to_one_and_know_their_time(pipeline: Pipeline, count: int) -> None:
    found = profiles(count, pipeline, 1.0)
    assert found.sizes.shape[1] == count
    assert found.sizes.max(axis=1) == pytest.approx(1.0)
    assert (found.sizes > 0).all()
    assert found.totals == pytest.approx(found.sizes.sum(axis=1))
    assert found.sizes[0] == pytest.approx(np.ones(count))
    if not pipeline.p2p:
        for at in (0, len(found.sizes) // 2, -1):
            assert found.times[at] == pytest.approx(simulate(found.sizes[at], pipeline).makespan)


def test_a_profile_with_room_to_spare_has_far_less_overhead_than_equal_sizes() -> None:
    pipeline, count, work = Pipeline(4), 24, 19.0  # the work of 19 full micro-batches in 24
    found = profiles(count, pipeline)
    unit = work / found.totals
    time = (found.times * unit)[unit <= 1.0].min()
    ideal = work * 3 / 4
    assert time / ideal - 1 < 0.08
    assert 3 / count > 0.12


def test_work_too_small_to_divide_by_is_ordered_too() -> None:
    assert sorted(best_order([2e-311, 1e-311, 3e-311], Pipeline(4, p2p=0.2))) == [0, 1, 2]
