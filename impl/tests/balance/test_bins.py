"""Bin packing and its proven bounds, against exact optima."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp

from steelyard.balance.bins import best_fit_decreasing, first_fit_decreasing, pack
from steelyard.balance.bounds import count_lower_bound
from steelyard.balance.reduction import forced_bins


@st.composite
def packings(draw: st.DrawFn, most: int = 30) -> tuple[np.ndarray, int]:
    cap = draw(st.integers(1, 60))
    tokens = draw(st.lists(st.integers(1, cap), min_size=1, max_size=most))
    return np.array(tokens, np.int64), cap


def fewest(tokens: np.ndarray, cap: int) -> int:
    """The exact optimum: item i in bin b, and bin b in use, as a mixed-integer program."""
    items, bins = len(tokens), len(best_fit_decreasing(tokens, cap))
    cost = np.concatenate((np.zeros(items * bins), np.ones(bins)))
    once = np.zeros((items, len(cost)))
    room = np.zeros((bins, len(cost)))
    for item in range(items):
        once[item, item * bins : (item + 1) * bins] = 1
        for one in range(bins):
            room[one, item * bins + one] = tokens[item]
    room[np.arange(bins), items * bins + np.arange(bins)] = -cap
    used = np.zeros((bins - 1, len(cost)))  # bins are used in order, which spares the solver their permutations
    used[np.arange(bins - 1), items * bins + np.arange(bins - 1)] = 1
    used[np.arange(bins - 1), items * bins + np.arange(1, bins)] = -1
    constraints = [LinearConstraint(once, 1, 1), LinearConstraint(room, -np.inf, 0)]
    if bins > 1:
        constraints.append(LinearConstraint(used, 0, np.inf))
    found = milp(cost, constraints=constraints, integrality=np.ones(len(cost)), bounds=Bounds(0, 1))
    assert found.success
    return round(found.fun)


@settings(max_examples=200, deadline=None)
@given(packings())
def test_every_item_is_in_one_bin_and_no_bin_above_the_cap(packing: tuple[np.ndarray, int]) -> None:
    tokens, cap = packing
    for bins in (best_fit_decreasing(tokens, cap), first_fit_decreasing(tokens, cap), pack(tokens, cap)):
        assert sorted(item for one in bins for item in one) == list(range(len(tokens)))
        assert all(one and tokens[one].sum() <= cap for one in bins)


@settings(max_examples=200, deadline=None)
@given(packings())
def test_pack_lies_between_the_bound_and_best_fit_decreasing(packing: tuple[np.ndarray, int]) -> None:
    tokens, cap = packing
    bound = count_lower_bound(tokens, cap)
    assert bound <= len(pack(tokens, cap, target=bound)) <= len(best_fit_decreasing(tokens, cap))
    assert len(pack(tokens, cap, budget=0)) <= len(best_fit_decreasing(tokens, cap))


@pytest.mark.parametrize("seed", range(25))
def test_count_is_the_exact_optimum_and_the_bound_is_true_on_small_cases(seed: int) -> None:
    draw = np.random.default_rng(seed)
    cap = int(draw.integers(10, 60))
    low, high, items = ((1, cap + 1, 9), (cap // 4 + 1, cap // 2 + 1, 10), (1, cap // 2, 11))[seed % 3]
    tokens = draw.integers(low, high, items).astype(np.int64)
    exact = fewest(tokens, cap)
    bound = count_lower_bound(tokens, cap)
    assert bound <= exact
    assert len(pack(tokens, cap, target=bound)) == exact


@pytest.mark.parametrize(
    ("tokens", "cap", "bound"),
    [
        ([7] * 8, 8, 8),  # alone by pairs above the cap
        ([34] * 8, 100, 4),  # three never fit, which the sum does not see
        ([51, 51, 51, 10], 100, 3),
        ([60, 60, 50, 50], 100, 3),
        ([26] * 8, 100, 3),
        ([1] * 10, 10, 1),
        ([], 5, 0),
    ],
)
def test_bound_sees_more_than_the_sum_of_tokens(tokens: list[int], cap: int, bound: int) -> None:
    assert count_lower_bound(np.array(tokens, np.int64), cap) == bound


@settings(max_examples=200, deadline=None)
@given(packings())
def test_forced_bins_and_what_they_leave_are_all_items_within_the_cap(packing: tuple[np.ndarray, int]) -> None:
    tokens, cap = packing
    forced, left = forced_bins(tokens, cap)
    assert sorted([item for one in forced for item in one] + left.tolist()) == list(range(len(tokens)))
    assert all(1 <= len(one) <= 2 and tokens[one].sum() <= cap for one in forced)
    assert left.tolist() == sorted(left.tolist())


@pytest.mark.parametrize("seed", range(20))
def test_an_optimal_packing_contains_the_forced_bins(seed: int) -> None:
    draw = np.random.default_rng(seed)
    cap = int(draw.integers(20, 60))
    tokens = np.concatenate((draw.integers(cap // 2, cap + 1, 5), draw.integers(cap // 8 + 1, cap // 2, 6)))
    forced, left = forced_bins(tokens, cap)
    rest = fewest(tokens[left], cap) if len(left) else 0
    assert len(forced) + rest == fewest(tokens, cap)


def test_the_reduction_proves_more_than_the_sum_of_tokens_and_the_other_bounds() -> None:
    # 21 leaves room for one of 6 and 4, and may as well get 6; 17 for one of 11 and 4, and may as well get 11.
    tokens = np.array([21, 17, 4, 6, 11], np.int64)
    forced, left = forced_bins(tokens, 30)
    assert (forced, left.tolist()) == ([[0, 3], [1, 4], [2]], [])
    assert count_lower_bound(tokens, 30) == 3


def test_bound_is_right_for_numbers_near_the_end_of_64_bits() -> None:
    tokens = np.array([2**58, 2**58, 2**57 + 1], np.int64)
    assert count_lower_bound(tokens, 2**59) == 2
    assert count_lower_bound(tokens, 2**60) == 1


def test_repacking_saves_a_bin_that_best_fit_decreasing_wastes() -> None:
    tokens, cap = np.array([44, 24, 24, 22, 21, 17, 8, 8, 6, 6], np.int64), 61  # 44+17, 24+22+8+6 leave the rest 60
    saved = len(best_fit_decreasing(tokens, cap)) - len(pack(tokens, cap))
    assert saved >= 0
    several = 0
    for seed in range(40):
        draw = np.random.default_rng(seed).integers(8, 40, 24).astype(np.int64)
        several += len(best_fit_decreasing(draw, 61)) - len(pack(draw, 61))
    assert several >= 3


def test_repacking_takes_caps_of_any_size() -> None:
    tokens = np.random.default_rng(3).integers(8, 40, 24).astype(np.int64)
    expected = len(pack(tokens, 61))
    assert len(best_fit_decreasing(tokens, 61)) >= expected
    assert len(pack(tokens * 2**35, 61 * 2**35)) <= expected + 1
    for one in pack(tokens * 2**35, 61 * 2**35):
        assert tokens[one].sum() <= 61


def test_packing_twice_is_the_same_packing() -> None:
    tokens = np.random.default_rng(1).integers(1, 500, 300).astype(np.int64)
    assert pack(tokens, 997) == pack(tokens.copy(), 997)


def test_budget_bounds_the_search_not_the_result() -> None:
    tokens = np.random.default_rng(2).integers(200, 500, 200).astype(np.int64)
    small, large = pack(tokens, 997, budget=100), pack(tokens, 997, budget=20_000)
    assert len(large) <= len(small)
    assert all(tokens[one].sum() <= 997 for one in small)
