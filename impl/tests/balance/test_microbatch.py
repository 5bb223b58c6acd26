"""Plans for one rank and for a step: what every plan promises, and the cases that broke other systems."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.balance import MicroBatchPlan, plan_micro_batches, plan_step
from steelyard.balance.bounds import count_lower_bound
from steelyard.errors import SequenceTooLong
from steelyard.lengths import workload
from steelyard.pipeline import Pipeline, is_legal_count


def tokens_of(plan: MicroBatchPlan, lengths: list[int]) -> list[list[int]]:
    return [sorted((lengths[row] for row in one), reverse=True) for one in plan.indices]


@st.composite
def requests(draw: st.DrawFn) -> tuple[list[int], int, int, dict[str, Any]]:
    lengths = draw(st.lists(st.integers(1, 60), min_size=1, max_size=30))
    pipeline = draw(st.sampled_from([None, Pipeline(1), Pipeline(4), Pipeline(2, 2), Pipeline(3, 2, 4, p2p=5.0)]))
    arguments = {
        "multiple_of": draw(st.integers(1, 3)),
        "min_count": draw(st.integers(1, 5)),
        "pipeline": pipeline,
        "order": draw(st.sampled_from(["auto", "largest_first", "as_given", "both_ends"])),
        "groups": draw(st.none() | st.lists(st.integers(0, 12), min_size=len(lengths), max_size=len(lengths))),
        "cost": draw(st.sampled_from([None, np.float64, np.zeros_like])),
        "oversize": "alone",
    }
    return lengths, draw(st.integers(20, 90)), draw(st.integers(1, 4)), arguments


@settings(max_examples=250, deadline=None)
@given(requests())
def test_every_row_is_in_one_micro_batch_of_one_rank(request_: tuple) -> None:
    lengths, cap, ranks, arguments = request_
    plans = plan_step(lengths, cap, ranks, **arguments)
    assert sorted(row for plan in plans for row in plan.rows) == list(range(len(lengths)))
    for plan in plans:
        assert sorted(row for one in plan.indices for row in one) == plan.rows
        assert plan.tokens == [sum(lengths[row] for row in one) for one in plan.indices]


@settings(max_examples=250, deadline=None)
@given(requests())
def test_no_micro_batch_exceeds_the_cap_unless_one_item_does_alone(request_: tuple) -> None:
    lengths, cap, ranks, arguments = request_
    names = arguments["groups"] or range(len(lengths))
    for plan in plan_step(lengths, cap, ranks, **arguments):
        for one, tokens in zip(plan.indices, plan.tokens, strict=True):
            assert tokens <= cap or len({names[row] for row in one}) == 1


@settings(max_examples=250, deadline=None)
@given(requests())
def test_counts_are_legal_equal_over_ranks_and_not_below_the_bound(request_: tuple) -> None:
    lengths, cap, ranks, arguments = request_
    plans = plan_step(lengths, cap, ranks, **arguments)
    assert len({len(plan) for plan in plans}) == 1
    assert len({plan.lower_bound for plan in plans}) == 1
    count, pipeline = len(plans[0]), arguments["pipeline"]
    assert count % arguments["multiple_of"] == 0
    assert count >= arguments["min_count"]
    assert pipeline is None or is_legal_count(count, pipeline)
    assert count >= plans[0].lower_bound


@settings(max_examples=150, deadline=None)
@given(requests())
def test_rows_of_a_group_stay_in_one_micro_batch(request_: tuple) -> None:
    lengths, cap, ranks, arguments = request_
    names = arguments["groups"]
    if names is None:
        return
    where: dict[int, set] = {}
    for rank, plan in enumerate(plan_step(lengths, cap, ranks, **arguments)):
        for at, one in enumerate(plan.indices):
            for row in one:
                where.setdefault(names[row], set()).add((rank, at))
    assert all(len(places) == 1 for places in where.values())


@settings(max_examples=100, deadline=None)
@given(requests())
def test_the_same_request_gives_the_same_plan(request_: tuple) -> None:
    lengths, cap, ranks, arguments = request_
    first = plan_step(lengths, cap, ranks, **arguments)
    second = plan_step(np.array(lengths), cap, ranks, **arguments)
    assert first == second
    assert [plan.digest for plan in first] == [plan.digest for plan in second]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=30), st.integers(60, 90))
def test_one_rank_of_a_step_is_planned_like_a_rank_alone(lengths: list[int], cap: int) -> None:
    assert plan_step(lengths, cap, 1)[0] == plan_micro_batches(lengths, cap)


def test_never_above_the_cap_where_pairs_would_be() -> None:
    assert plan_micro_batches([7] * 8, 8).tokens == [7] * 8
    plan = plan_micro_batches([30720] * 16, 32768)
    assert max(plan.tokens) == 30720
    assert plan.summary().gap == 0


def test_least_count_that_fits() -> None:
    plan = plan_micro_batches([8, 7, 6, 5, 4], 15)
    assert sorted(tokens_of(plan, [8, 7, 6, 5, 4])) == [[6, 5, 4], [8, 7]]
    assert plan.lower_bound == 2
    assert len(plan_micro_batches([8, 7, 6, 5, 4], 15, multiple_of=2)) == 2


def test_no_refusal_where_a_packing_exists() -> None:
    lengths = [7, 6, 11, 12, 4, 3, 3]
    plan = plan_micro_batches(lengths, 12, multiple_of=4)
    assert sorted(tokens_of(plan, lengths)) == [[6, 3, 3], [7, 4], [11], [12]]


def test_fewer_rows_than_stages_get_fillers() -> None:
    plan = plan_micro_batches([5, 6, 7], 20, pipeline=Pipeline(4, 2))
    assert len(plan) == 4
    assert sorted(map(len, plan.indices)) == [0, 1, 1, 1]
    assert plan.summary().fillers == 1
    assert [plan.tokens[at] for at in range(4) if not plan.indices[at]] == [0]


def test_ranks_of_a_step_have_one_count_though_their_rows_would_differ() -> None:
    lengths = [10] * 9 + [1] * 3
    plans = plan_step(lengths, 10, 2)
    assert {len(plan) for plan in plans} == {5}


def test_a_row_above_the_cap_is_a_clear_error_or_alone() -> None:
    with pytest.raises(SequenceTooLong) as error:
        plan_micro_batches([100, 4500, 20], 4096)
    assert (error.value.position, error.value.length, error.value.max_tokens) == (1, 4500, 4096)
    for fact in ("sequence 1", "4500", "4096"):
        assert fact in str(error.value)
    plan = plan_micro_batches([100, 4500, 20], 4096, oversize="alone")
    assert sorted(plan.indices) == [[0, 2], [1]]


def test_a_count_is_rounded_up_to_a_legal_one_never_down() -> None:
    plan = plan_micro_batches([10] * 5, 10, pipeline=Pipeline(4, 2))
    assert len(plan) == 8
    assert max(plan.tokens) <= 10
    assert plan.lower_bound == 8


def test_real_lengths_count_not_the_padded_width() -> None:
    plan = plan_micro_batches([500] * 32, 8192)
    assert len(plan) == 2
    assert max(plan.tokens) == 8000


def test_the_cap_is_that_of_all_context_parallel_ranks_together() -> None:
    assert len(plan_micro_batches([6000], 2 * 4096)) == 1
    with pytest.raises(SequenceTooLong):
        plan_micro_batches([6000], 4096)


def test_splits_what_can_be_split_before_it_adds_fillers() -> None:
    assert sorted(map(len, plan_micro_batches([3, 3, 3, 3], 100, min_count=3).indices)) == [1, 1, 2]
    assert sorted(map(len, plan_micro_batches([3, 3], 100, min_count=4).indices)) == [0, 0, 1, 1]
    assert sorted(len(one) for plan in plan_step([5] * 3, 50, 4) for one in plan.indices) == [0, 1, 1, 1]


def test_same_count_false_spares_the_fillers() -> None:
    plans = plan_step([5, 5, 5], 5, 2, same_count=False)
    assert sorted(len(plan) for plan in plans) == [1, 2]
    assert all(all(plan.indices) for plan in plans)
    kept = plan_step([5, 5, 5], 5, 2, same_count=False, multiple_of=2)
    assert sorted(len(plan) for plan in kept) == [2, 2]


def test_orders_of_execution() -> None:
    lengths = [9, 3, 8, 10, 5]
    assert plan_micro_batches(lengths, 10, order="largest_first").tokens == [10, 9, 8, 8]
    assert plan_micro_batches(lengths, 10).tokens == [10, 9, 8, 8]
    given_ = plan_micro_batches(lengths, 10, order="as_given").indices
    assert [one[0] for one in given_] == sorted(one[0] for one in given_)
    work = plan_micro_batches([1, 2, 3, 4, 5, 6, 7], 7, min_count=7, order="both_ends").tokens
    assert work == [1, 3, 5, 7, 6, 4, 2]


class FixedCost:
    """Tokens, and something for every micro-batch; without the attribute ``fixed``."""

    def __init__(self, fixed: float) -> None:
        self._fixed = fixed

    def __call__(self, lengths: Any) -> np.ndarray:
        return np.asarray(lengths, np.float64)

    def micro_batch(self, lengths: Any) -> float:
        return float(np.sum(lengths)) + self._fixed


def test_work_includes_the_fixed_cost_also_of_fillers() -> None:
    plan = plan_micro_batches([5, 6], 20, cost=FixedCost(100.0), min_count=3)
    assert sorted(plan.work) == [100.0, 105.0, 106.0]
    assert plan_micro_batches([5, 6], 20, cost=np.float64).work == [11.0]


def test_a_dear_micro_batch_keeps_the_count_low() -> None:
    lengths = workload("rl-code-16k-cap").draw(64, 1).totals
    counts = [
        len(plan_micro_batches(lengths, int(lengths.max()), cost=FixedCost(fixed), pipeline=Pipeline(4)))
        for fixed in (0.0, 1e4, 1e6)
    ]
    assert counts[0] >= counts[2]
    assert counts[0] > counts[2]


def test_a_sum_of_many_long_rows_does_not_overflow() -> None:
    lengths = [2**40] * 50 + [1]
    plan = plan_micro_batches(lengths, 2**41)
    assert len(plan) == 26
    assert max(plan.tokens) == 2**41
    assert sum(plan.tokens) == 50 * 2**40 + 1
    assert len(plan_micro_batches(lengths, 2**200)) == 1


@pytest.mark.parametrize(("name", "rows"), [("rl-code-16k-cap", 128), ("rl-math-long-mixture", 512)])
def test_without_a_pipeline_counts_meet_the_bound_on_real_lengths(name: str, rows: int) -> None:
    met = 0
    for seed in range(12):
        lengths = workload(name).draw(rows, seed).totals
        cap = -(-int(lengths.max()) // 256) * 256
        plans = plan_step(lengths, cap, 4)
        work = [sum(plan.work) for plan in plans]
        assert max(work) <= 1.01 * np.mean(work)
        assert len(plans[0]) >= -(-count_lower_bound(lengths, cap) // 4)
        met += plans[0].summary().gap == 0
    assert met >= 11
