"""Levelling of work at a given count, and dealing of micro-batches to ranks."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.balance.bins import best_fit_decreasing, pack
from steelyard.balance.partition import _best_swap, _greedy, _keys, bin_sums, deal, level, quantise


@st.composite
def levellings(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, int, int, np.ndarray]:
    cap = draw(st.integers(1, 60))
    tokens = np.array(draw(st.lists(st.integers(1, cap), min_size=1, max_size=30)), np.int64)
    work = tokens * tokens + draw(st.integers(0, 100)) * tokens if draw(st.booleans()) else tokens * 0 + 5
    count = len(best_fit_decreasing(tokens, cap)) + draw(st.integers(0, 5))
    start = np.array(draw(st.lists(st.integers(0, 2000), min_size=count, max_size=count)), np.int64)
    return tokens, work, cap, count, start if draw(st.booleans()) else start * 0


@settings(max_examples=300, deadline=None)
@given(levellings())
def test_level_keeps_items_cap_and_count(case: tuple[np.ndarray, np.ndarray, int, int, np.ndarray]) -> None:
    tokens, work, cap, count, start = case
    packed = best_fit_decreasing(tokens, cap)
    bins = level(tokens, work, cap, count, packed=packed, start=start)
    assert len(bins) == count
    assert sorted(item for one in bins for item in one) == list(range(len(tokens)))
    assert all(tokens[one].sum() <= cap for one in bins if one)
    assert sum(bool(one) for one in bins) == min(count, len(tokens))
    assert bins == level(tokens, work, cap, count, packed=packed, start=start)


@settings(max_examples=200, deadline=None)
@given(levellings())
def test_level_is_never_above_the_greedy_pass(case: tuple[np.ndarray, np.ndarray, int, int, np.ndarray]) -> None:
    tokens, work, cap, count, start = case
    greedy = _greedy(tokens, work, cap, start)
    if greedy is not None:
        assert bin_sums(level(tokens, work, cap, count, start=start), work, start).max() <= (
            bin_sums(greedy, work, start).max()
        )


def lowest_maximum(tokens: np.ndarray, work: np.ndarray, cap: int, count: int) -> int:
    """The smallest maximum of work over every way to share the items out."""
    best = None
    for places in itertools.product(range(count), repeat=len(tokens) - 1):
        at = np.array((0, *places))
        if np.bincount(at, tokens, count).max() <= cap:
            highest = int(np.bincount(at, work, count).max())
            best = highest if best is None else min(best, highest)
    assert best is not None
    return best


@pytest.mark.parametrize("seed", range(12))
def test_level_is_near_the_smallest_maximum_on_small_cases(seed: int) -> None:
    draw = np.random.default_rng(seed)
    tokens = draw.integers(5, 40, 8).astype(np.int64)
    work, cap = tokens * tokens, 70
    count = max(3, len(pack(tokens, cap)))
    highest = bin_sums(level(tokens, work, cap, count), work).max()
    assert highest <= lowest_maximum(tokens, work, cap, count) * 1.07


def test_level_is_within_a_thousandth_of_the_mean_with_many_small_items() -> None:
    tokens = np.random.default_rng(0).integers(50, 800, 2000).astype(np.int64)
    work = tokens * tokens + 24576 * tokens
    loads = bin_sums(level(tokens, work, 40_000, 25), work)
    assert loads.max() <= loads.mean() * 1.001


def test_start_raises_a_bin_so_that_it_gets_less() -> None:
    tokens = np.full(40, 10, np.int64)
    bins = level(tokens, tokens, 1000, 4, start=np.array([0, 0, 0, 60], np.int64))
    assert sorted(map(len, bins)) == [5, 11, 12, 12]
    assert len(bins[3]) == 5


def test_work_in_quanta_keeps_order_equality_and_the_sum_below_2_to_the_50() -> None:
    work = np.array([1e18, 3e18, 3e18, 1.0])
    quanta, extra, quantum = quantise(work, extra=1e18)
    assert quanta[1] == quanta[2] > quanta[0] > quanta[3] >= 0
    assert extra == quanta[0]
    assert int(quanta.sum()) + extra < 2**50
    assert quanta * quantum == pytest.approx(work, rel=1e-9, abs=1e4)
    assert quantise(np.zeros(3))[0].tolist() == [0, 0, 0]


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 6), st.integers(1, 8), st.data())
def test_deal_gives_every_rank_equally_many_of_each_kind(ranks: int, each: int, data: st.DataObject) -> None:
    size = ranks * each
    work = np.array(data.draw(st.lists(st.integers(0, 1000), min_size=size, max_size=size)), np.int64)
    kinds = np.repeat(np.arange(each), ranks) if data.draw(st.booleans()) else np.zeros(size, np.int64)
    hands = deal(work, ranks, kinds)
    assert sorted(index for hand in hands for index in hand) == list(range(size))
    shares = {tuple(sorted(kinds[hand].tolist())) for hand in hands}
    assert len(shares) == 1
    assert hands == deal(work, ranks, kinds)


def test_deal_evens_the_ranks_out() -> None:
    work = np.random.default_rng(0).integers(100, 1000, 64).astype(np.int64)
    sums = bin_sums(deal(work, 4), work)
    assert sums.max() <= sums.mean() * 1.001


@pytest.mark.parametrize("seed", range(30))
def test_the_best_swap_between_two_hands_is_found(seed: int) -> None:
    draw = np.random.default_rng(seed)
    kinds, each, most = int(draw.integers(1, 4)), int(draw.integers(1, 6)), 2 ** int(draw.integers(3, 50))
    kind = np.repeat(np.arange(kinds), 2 * each)
    work = draw.integers(0, most, len(kind))
    hands = [[at for at in range(len(kind)) if at % 2 == side] for side in (0, 1)]
    sums = bin_sums(hands, work)
    top, other = int(np.argmax(sums)), int(np.argmin(sums))
    swaps = [
        max(sums[top] - (work[mine] - work[theirs]), sums[other] + (work[mine] - work[theirs]))
        for mine in hands[top]
        for theirs in hands[other]
        if kind[mine] == kind[theirs] and work[mine] > work[theirs]
    ]
    lowest = min([int(sums[top]), *map(int, swaps)])
    assert _best_swap(hands, sums, work, kind, _keys(work, kind), top, other)[0] == lowest
