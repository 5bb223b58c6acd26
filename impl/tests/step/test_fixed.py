"""Fixed micro-batches: which sizes Megatron accepts, and what they cost."""

from __future__ import annotations

import numpy as np
import pytest

from steelyard.cost import ModelShape, SequenceCost
from steelyard.pipeline import Pipeline, is_legal_count
from steelyard.step.fixed import legal_sizes, split_rows, time_over_ideal


def test_rows_are_split_in_the_order_of_the_batch() -> None:
    assert split_rows(5, 2) == [[0, 1], [2, 3], [4]]
    assert split_rows(2, 9) == [[0, 1]]


def test_legal_sizes_are_the_nearest_on_both_sides() -> None:
    pipeline = Pipeline(4, 2)
    for rows in range(1, 40):
        for size in range(1, rows + 1):
            found = legal_sizes(rows, size, pipeline)
            legal = [one for one in range(1, rows + 1) if is_legal_count(len(split_rows(rows, one)), pipeline)]
            above, below = [one for one in legal if one > size], [one for one in legal if one < size]
            assert found == [*above[:1], *below[-1:]]
    assert legal_sizes(3, 1, pipeline) == []


def test_time_is_that_of_the_formula_and_counts_padding_and_fixed_cost() -> None:
    pipeline, equal = Pipeline(4), np.full(8, 100)
    split = split_rows(8, 1)
    assert time_over_ideal(split, equal, pipeline, None, packed=True) == pytest.approx(1 + 3 / 8)
    ragged = np.array([100, 300] * 4)
    pairs = split_rows(8, 2)
    assert time_over_ideal(pairs, ragged, pipeline, np.float64, packed=True) == pytest.approx(1 + 3 / 4)
    assert time_over_ideal(pairs, ragged, pipeline, np.float64, packed=False) == pytest.approx(1.5 * (1 + 3 / 4))
    cost = SequenceCost(ModelShape.preset("qwen2.5-0.5b"))
    dear = SequenceCost(ModelShape.preset("qwen2.5-0.5b"), fixed=float(cost([100])[0]))
    assert time_over_ideal(split, equal, pipeline, dear, packed=True) == pytest.approx(2 * (1 + 3 / 8))
