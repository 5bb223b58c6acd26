"""Input that cannot be planned: one error each, with position, value and limit in its text."""

from __future__ import annotations

import pickle
import re
from typing import Any

import numpy as np
import pytest
import torch

from steelyard.balance import plan_micro_batches, plan_step
from steelyard.errors import GroupTooLong, PlanError, SequenceTooLong


@pytest.mark.parametrize(
    ("lengths", "text"),
    [
        ([], "lengths is empty"),
        ([5, 0, 3], "lengths[1]=0 must be at least 1"),
        ([5, 3, -2], "lengths[2]=-2 must be at least 1"),
        ([5, float("nan")], "lengths[1]=nan must be a whole number"),
        ([5, 2.5], "lengths[1]=2.5 must be a whole number"),
        ([5, True], "lengths[1]=True must be a whole number"),
        ([5, "7"], "lengths[1]='7' must be a whole number"),
        ([5, None], "lengths[1]=None must be a whole number"),
        ([2**41], f"at most {2**40} tokens"),
        ([10**30], f"at most {2**40} tokens"),
        (np.array([5.0, 2.0]), "lengths[0]=5.0 is of type float64"),
        (np.array([5, 0]), "lengths[1]=0 must be at least 1"),
        (np.array([True]), "of type bool"),
        (np.array([[5, 3]]), "shape (1, 2)"),
        (torch.tensor([5, -1]), "lengths[1]=-1 must be at least 1"),
        (torch.tensor([5.0]), "is of type float"),
        (torch.ones(3, dtype=torch.int64, device="meta"), "lengths live on meta"),
    ],
)
def test_lengths_that_cannot_be_name_position_value_and_limit(lengths: Any, text: str) -> None:
    for plan in (lambda: plan_micro_batches(lengths, 10), lambda: plan_step(lengths, 10, 2)):
        with pytest.raises(PlanError, match=re.escape(text)):
            plan()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"max_tokens": 0}, "max_tokens=0 must be at least 1"),
        ({"max_tokens": -3}, "max_tokens=-3 must be at least 1"),
        ({"max_tokens": 10.5}, "max_tokens=10.5 must be a whole number"),
        ({"max_tokens": None}, "max_tokens=None must be a whole number"),
        ({"multiple_of": 0}, "multiple_of=0 must be at least 1"),
        ({"multiple_of": 1.0}, "multiple_of=1.0 must be a whole number"),
        ({"min_count": 0}, "min_count=0 must be at least 1"),
        ({"oversize": "drop"}, "oversize='drop' is unknown: use one of error, alone"),
        ({"fill": "pad"}, "fill='pad' is unknown: use one of split, error"),
        ({"order": "random"}, "order='random' is unknown"),
        ({"pipeline": 4}, "pipeline=4 must be a steelyard.pipeline.Pipeline"),
        ({"groups": [1, 2]}, "groups has 2 entries but there are 3 sequences"),
        ({"cost": lambda lengths: np.ones(2)}, "cost returned shape (2,) for 3 lengths"),
        ({"cost": lambda lengths: np.array([1.0, np.nan, 1.0])}, "cost of sequence 1 (6 tokens) is nan"),
        ({"cost": lambda lengths: -np.ones(3)}, "cost of sequence 0 (5 tokens) is -1.0"),
        ({"fill": "error", "min_count": 4}, "4 micro-batches are required (min_count=4"),
    ],
)
def test_settings_that_cannot_be_name_value_and_limit(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(PlanError, match=re.escape(text)):
        plan_micro_batches([5, 6, 7], **{"max_tokens": 20, **arguments})


@pytest.mark.parametrize("ranks", [0, -1, 2.0, True])
def test_a_number_of_ranks_that_cannot_be(ranks: Any) -> None:
    with pytest.raises(PlanError, match=re.escape(f"ranks={ranks!r}")):
        plan_step([5], 10, ranks)


def test_more_micro_batches_than_sequences_are_fillers_or_an_error() -> None:
    assert plan_micro_batches([5, 6], 20, min_count=5).summary().fillers == 3
    with pytest.raises(PlanError, match="the sequences make only 2"):
        plan_micro_batches([5, 6], 20, min_count=5, fill="error")
    with pytest.raises(PlanError, match="the sequences make only 3"):
        plan_step([5, 6, 7], 20, 4, fill="error")


def test_a_group_above_the_cap_is_named_with_its_rows() -> None:
    with pytest.raises(GroupTooLong) as error:
        plan_micro_batches([5, 6, 7, 8], 12, groups=["a", "b", "b", "a"])
    assert (error.value.position, error.value.rows, error.value.length) == (0, 2, 13)
    assert "max_tokens=12" in str(error.value)
    with pytest.raises(SequenceTooLong, match="sequence 2"):
        plan_micro_batches([5, 6, 17, 8], 16, groups=["a", "b", "b", "a"])
    plan = plan_micro_batches([5, 6, 7, 8], 12, groups=["a", "b", "b", "a"], oversize="alone")
    assert sorted(plan.indices) == [[0, 3], [1, 2]]


def test_groups_may_be_of_unequal_size() -> None:
    plan = plan_micro_batches([4, 4, 4, 1, 1], 8, groups=[0, 1, 1, 0, 2])
    assert sorted(plan.indices) == [[0, 3, 4], [1, 2]]
    assert plan_micro_batches([4, 4], 8, groups=torch.tensor([0, 1])).indices == [[0, 1]]


def test_lengths_may_be_lists_arrays_and_host_tensors() -> None:
    expected = plan_micro_batches([5, 6, 7], 12)
    for lengths in ((5, 6, 7), np.array([5, 6, 7], np.int32), np.array([5, 6, 7], np.uint8), torch.tensor([5, 6, 7])):
        assert plan_micro_batches(lengths, np.int64(12)) == expected


@pytest.mark.parametrize("error", [SequenceTooLong(3, 9, 8, 2), GroupTooLong(3, 2, 9, 8, 2)])
def test_errors_survive_the_way_between_ranks(error: PlanError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)
    assert "data-parallel rank 2" in str(again)
