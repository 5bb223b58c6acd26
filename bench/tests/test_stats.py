"""Statistics on numbers whose answer is known."""

from __future__ import annotations

import math

import numpy as np
import pytest

from bench.stats import median, ratio_of_medians


def test_ratio_is_that_of_the_medians() -> None:
    ratio = ratio_of_medians([30.0, 10.0, 20.0], [5.0, 4.0, 100.0])
    assert ratio.value == 4.0
    assert ratio.pairs == 3


def test_a_constant_ratio_has_an_interval_without_width() -> None:
    ratio = ratio_of_medians([6.0] * 5, [2.0] * 5)
    assert (ratio.value, ratio.low, ratio.high) == (3.0, 3.0, 3.0)


def test_fewer_than_three_pairs_have_no_interval() -> None:
    for pairs in (1, 2):
        ratio = ratio_of_medians([2.0] * pairs, [1.0] * pairs)
        assert (ratio.value, ratio.low, ratio.high, ratio.pairs) == (2.0, None, None, pairs)


def test_a_load_that_slows_both_samples_of_a_pair_does_not_widen_the_interval() -> None:
    load = np.array([1.0, 3.0, 2.0, 5.0, 4.0, 1.5, 2.5])
    ratio = ratio_of_medians(2 * load, load)
    assert ratio.low == pytest.approx(2)
    assert ratio.high == pytest.approx(2)


def test_the_interval_covers_the_true_ratio_about_as_often_as_it_says() -> None:
    random = np.random.default_rng(1)
    covered = 0
    for trial in range(100):
        a, b = random.normal(20, 1, 25), random.normal(10, 0.5, 25)
        ratio = ratio_of_medians(a, b, seed=trial)
        covered += ratio.low <= 2.0 <= ratio.high
    assert covered >= 88


def test_equal_input_gives_equal_intervals() -> None:
    a, b = [3.0, 3.2, 2.9, 3.4], [1.0, 1.1, 0.9, 1.2]
    assert ratio_of_medians(a, b) == ratio_of_medians(a, b)


def test_samples_that_are_not_pairs_are_refused() -> None:
    with pytest.raises(ValueError, match="3 samples against 2"):
        ratio_of_medians([1.0, 2.0, 3.0], [1.0, 2.0])


def test_a_ratio_without_a_number_has_no_interval() -> None:
    ratio = ratio_of_medians([math.nan] * 3, [1.0] * 3)
    assert math.isnan(ratio.value)
    assert ratio.low is None


def test_median_of_nothing_is_not_a_number() -> None:
    assert math.isnan(median([]))
