"""Batches on which verl's balancing failed or fails, and what happens here: REFERENCE cases 1 to 9 and three more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from steelyard.compat.verl.utils import seqlen_balancing as ours
from steelyard.errors import PlanError, SequenceTooLong

verl = pytest.importorskip("verl.utils.seqlen_balancing", reason="the cases show what verl does")

Outcome = int | type[Exception]


@dataclass(frozen=True)
class Case:
    """Outcomes are a number of micro-batches, none above the cap, or an error."""

    name: str
    lengths: list[int]
    cap: int
    there: Outcome
    here: Outcome
    arguments: dict[str, Any] = field(default_factory=dict)
    width: int | None = None


CASES = [
    Case("1: a first guess of the count puts two rows above the cap (verl retries since 0.9.1)", [7] * 8, 8, 8, 8),
    Case("1: the same at 32k", [30720] * 16, 32768, 16, 16),
    Case("2: two micro-batches fit, differencing does not see it", [8, 7, 6, 5, 4], 15, 3, 2),
    Case("2: and rounding up doubles them", [8, 7, 6, 5, 4], 15, 4, 2, {"num_batches_divided_by": 2}),
    Case(
        "3: refused though a plan exists",
        [7, 6, 11, 12, 4, 3, 3],
        12,
        ValueError,
        4,
        {"num_batches_divided_by": 4},
    ),
    # Fillers would solve it, but verl's engines cannot run one.
    Case("4: fewer rows than stages", [5, 6, 7], 20, ValueError, PlanError, {"num_batches_divided_by": 4}),
    Case("6: a row above the cap", [4500, 100], 4096, AssertionError, SequenceTooLong),
    Case("7: the count is rounded up, not down", [10] * 8, 16, 8, 8, {"num_batches_divided_by": 4}),
    Case("8: the padded width is above the cap, the rows are not", [500] * 20, 8192, AssertionError, 2, width=32768),
    Case("9: the budget of one rank under context parallelism", [6000, 100], 4096, AssertionError, SequenceTooLong),
    Case("9: multiplied by the caller", [6000, 100], 2 * 4096, 1, 1),
    Case("2: in pairs of rows", [4, 4, 4, 3, 3, 3, 3, 2, 2, 2], 15, 3, 2, {"force_group_size": 2}),
]


def _run(module: Any, case: Case, batch: Any) -> Outcome:
    try:
        _, indices = module.rearrange_micro_batches(batch, case.cap, **case.arguments)
    except (ValueError, AssertionError) as error:
        return type(error)
    assert max(sum(case.lengths[row] for row in rows) for rows in indices) <= case.cap
    return len(indices)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_verl_fails_on(case: Case, make_batch: Callable[..., Any]) -> None:
    batch = make_batch(case.lengths, width=case.width)
    assert _run(verl, case, batch) == case.there
    assert _run(ours, case, batch) == case.here


def test_an_error_names_what_is_wrong_and_what_verl_calls_it(make_batch: Callable[..., Any]) -> None:
    with pytest.raises(SequenceTooLong) as caught:
        ours.rearrange_micro_batches(make_batch([100, 4500]), 4096)
    assert (caught.value.position, caught.value.length, caught.value.max_tokens) == (1, 4500, 4096)
    assert "max_tokens is max_token_len" in caught.value.__notes__[0]


def test_rows_of_a_uid_that_are_apart_end_apart_in_verl() -> None:
    lengths, uids = [9, 1, 1, 9], ["a", "b", "b", "a"]
    theirs = verl.get_group_balanced_partitions(lengths, uids, 3)
    assert not any({0, 3} <= set(part) for part in theirs)
    assert sorted(ours.get_group_balanced_partitions(lengths, uids, 2)) == [[0, 3], [1, 2]]


def test_work_in_32_bits_turns_negative_in_verl() -> None:
    lengths = torch.tensor([36_000], dtype=torch.int32)
    assert verl.calculate_workload(lengths).item() < 0
    assert ours.calculate_workload(lengths).item() == 24576 * 36_000 + 36_000**2


def test_an_index_that_is_no_permutation_gets_an_answer_in_verl() -> None:
    assert verl.get_reverse_idx([0, 0, 1]) == [1, 2, 1]
    with pytest.raises(PlanError, match="no inverse"):
        ours.get_reverse_idx([0, 0, 1])
