"""The mirror of verl's seqlen_balancing against the real one: the same promises on the same batches."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.balance.request import default_cost
from steelyard.compat.verl.utils import seqlen_balancing as ours
from steelyard.errors import BatchError, InputError, PlanError
from steelyard.lengths import workload

verl = pytest.importorskip("verl.utils.seqlen_balancing", reason="the differential tests compare with verl")
tensordict_utils = pytest.importorskip("verl.utils.tensordict_utils")
protocol = pytest.importorskip("verl.protocol")

KINDS = ("dense", "dict", "nested")
MakeBatch = Callable[..., Any]


def top(parts: list[list[int]], values: Any) -> Any:
    return max(sum(values[row] for row in part) for part in parts)


def is_partition(parts: list[list[int]], rows: int) -> bool:
    return sorted(chain.from_iterable(parts)) == list(range(rows))


# --- the surface ---


def test_names_arguments_and_defaults_are_verls() -> None:
    functions = {
        name: one
        for name, one in vars(verl).items()
        if isinstance(one, types.FunctionType) and one.__module__ == verl.__name__
    }
    assert set(ours.__all__) == set(functions)
    for name, function in functions.items():
        theirs, mine = (inspect.signature(one).parameters.values() for one in (function, getattr(ours, name)))
        assert [(one.name, one.kind, one.default) for one in mine] == [
            (one.name, one.kind, one.default) for one in theirs
        ], name


# --- functions that must agree exactly ---


@given(st.integers(-(10**12), 10**12), st.integers(1, 10**6))
def test_rounding_is_verls(a: int, b: int) -> None:
    assert ours.ceildiv(a, b) == verl.ceildiv(a, b)
    assert ours.roundup_divisible(a, b) == verl.roundup_divisible(a, b)


@given(st.lists(st.integers(0, 1_000_000), min_size=1))
def test_workload_is_verls_and_the_planners(lengths: list[int]) -> None:
    for dtype in (torch.int64, torch.float32, torch.float64):  # verl's supervised trainer passes float32
        mine, theirs = (one.calculate_workload(torch.tensor(lengths, dtype=dtype)) for one in (ours, verl))
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine, theirs)
    assert ours.calculate_workload(torch.tensor(lengths)).tolist() == default_cost(lengths).tolist()
    assert ours.calculate_workload(lengths[0]) == verl.calculate_workload(lengths[0])


@given(st.integers(0, 40).flatmap(lambda rows: st.permutations(range(rows))))
def test_reverse_index_is_verls(order: list[int]) -> None:
    assert ours.get_reverse_idx(order) == verl.get_reverse_idx(order)
    given_tensor, given_array = torch.tensor(order, dtype=torch.long), np.array(order, np.int32)
    assert torch.equal(ours.get_reverse_idx(given_tensor), verl.get_reverse_idx(given_tensor))
    mine, theirs = ours.get_reverse_idx(given_array), verl.get_reverse_idx(given_array)
    assert mine.dtype == theirs.dtype
    assert np.array_equal(mine, theirs)
    assert given_array.tolist() == list(order), "the caller's index is not changed"


@given(st.data(), st.lists(st.integers(1, 100), min_size=1, max_size=40))
def test_imbalance_metrics_are_verls(data: st.DataObject, lengths: list[int]) -> None:
    count = data.draw(st.integers(1, len(lengths)))
    parts = ours.get_seqlen_balanced_partitions(lengths, count, False)
    assert ours.log_seqlen_unbalance(lengths, parts, "x") == verl.log_seqlen_unbalance(lengths, parts, "x")


# --- partitions ---


@st.composite
def values_and_count(draw: st.DrawFn) -> tuple[list[int], int, bool]:
    count, equal = draw(st.integers(1, 10)), draw(st.booleans())
    rows = count * draw(st.integers(1, 6)) if equal else draw(st.integers(count, 50))
    largest = draw(st.sampled_from([5, 20_000, 10**12]))
    return draw(st.lists(st.integers(0, largest), min_size=rows, max_size=rows)), count, equal


@settings(max_examples=300, deadline=None)
@given(values_and_count())
def test_partitions_are_valid_and_no_worse_than_verls(case: tuple[list[int], int, bool]) -> None:
    values, count, equal = case
    parts = ours.get_seqlen_balanced_partitions(values, count, equal)
    theirs = verl.get_seqlen_balanced_partitions(values, count, equal)
    assert is_partition(parts, len(values))
    assert len(parts) == count
    assert all(part == sorted(part) and part for part in parts)
    assert not equal or {len(part) for part in parts} == {len(values) // count}
    # Levelling stops one part in 16,384 above what cannot be beaten, and two heuristics break ties in two ways.
    assert top(parts, values) <= top(theirs, values) * (1 + 1e-3) + 1
    sums = [sum(values[row] for row in part) for part in parts]
    assert sums == sorted(sums, reverse=True), "verl too hands out the heaviest part first"
    for name in ("karmarkar_karp", "greedy_partition"):
        plain = getattr(ours, name)(values, count, equal)
        assert sorted(map(sorted, plain)) == sorted(parts)
        assert top(plain, values) <= top(getattr(verl, name)(values, count, equal), values) * (1 + 1e-3) + 1


@pytest.mark.parametrize("equal", [False, True])
@pytest.mark.parametrize("name", ["rl-code-16k-cap", "rl-math-long-mixture"])
def test_partitions_of_real_lengths_are_never_worse_and_mostly_better(name: str, equal: bool) -> None:
    better = 0
    for seed in range(20):
        work = verl.calculate_workload(torch.tensor(workload(name).draw(64, seed).totals.tolist()))
        mine, theirs = (top(one.get_seqlen_balanced_partitions(work, 8, equal), work.tolist()) for one in (ours, verl))
        assert mine <= theirs
        better += mine < theirs
    assert better > 10


def test_partitions_take_tensors_arrays_and_fractions() -> None:
    values = [5, 1, 4, 2, 3, 3]
    expected = ours.get_seqlen_balanced_partitions(values, 3, True)
    assert top(expected, values) == 6
    for given_values in (torch.tensor(values), np.array(values), torch.tensor(values) / 8, list(torch.tensor(values))):
        assert ours.get_seqlen_balanced_partitions(given_values, 3, True) == expected


@pytest.mark.parametrize(
    ("values", "count", "equal", "text"),
    [
        ([1, 2], 3, False, "2 sequences make no 3 partitions"),
        ([1, 2, 3], 2, True, "3 values make no 2 partitions of equal size"),
        ([1, -2, 3], 2, False, "seqlen_list[1]=-2 must be finite and at least 0"),
        ([1, float("nan")], 2, False, "seqlen_list[1]=nan"),
        ([1, "two"], 2, False, "no number"),
        ([[1, 2], [3, 4]], 2, False, "shape (2, 2)"),
        ([1, 2], 0, False, "k_partitions=0"),
    ],
)
def test_what_makes_no_partition_is_refused(values: list[Any], count: int, equal: bool, text: str) -> None:
    with pytest.raises(PlanError) as caught:
        ours.get_seqlen_balanced_partitions(values, count, equal)
    assert text in str(caught.value)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_groups_of_a_uid_stay_together(data: st.DataObject) -> None:
    count, each = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    uids = [f"prompt {at}" for at in range(count * data.draw(st.integers(1, 4))) for _ in range(each)]
    lengths = data.draw(st.lists(st.integers(1, 5000), min_size=len(uids), max_size=len(uids)))
    mine, theirs = (one.get_group_balanced_partitions(lengths, uids, count) for one in (ours, verl))
    work = verl.calculate_workload(torch.tensor(lengths)).tolist()
    assert top(mine, work) <= top(theirs, work) * (1 + 1e-3) + 1
    shuffled = data.draw(st.permutations(range(len(uids))))
    parts = ours.get_group_balanced_partitions([lengths[at] for at in shuffled], [uids[at] for at in shuffled], count)
    for found, names in ((mine, uids), (parts, [uids[at] for at in shuffled])):
        assert is_partition(found, len(uids))
        held = [{names[row] for row in part} for part in found]
        assert {len(one) for one in held} == {len(set(uids)) // count}
        assert sum(map(len, held)) == len(set(uids)), "no uid is in two parts"


# --- micro-batches ---


@st.composite
def requests(draw: st.DrawFn) -> tuple[list[int], int, dict[str, Any]]:
    size = draw(st.sampled_from([1, 1, 2, 3]))
    rows = size * draw(st.integers(1, 20))
    lengths = draw(st.lists(st.integers(1, 60), min_size=rows, max_size=rows))
    longest = max(sum(lengths[at : at + size]) for at in range(0, rows, size))
    arguments = {
        "num_batches_divided_by": draw(st.sampled_from([None, 1, 2, 3])),
        "min_num_micro_batch": draw(st.sampled_from([None, 0, 1, 4])),
        "use_dynamic_bsz_balance": draw(st.booleans()),
        "force_group_size": size,
    }
    return lengths, draw(st.integers(max(longest, max(lengths)), 3 * longest)), arguments


@settings(max_examples=150, deadline=None)
@given(requests(), st.sampled_from(KINDS))
def test_micro_batches_keep_verls_promises(
    make_batch: MakeBatch, request_: tuple[list[int], int, dict[str, Any]], kind: str
) -> None:
    lengths, cap, arguments = request_
    batch = make_batch(lengths, kind)
    try:
        _, theirs = verl.rearrange_micro_batches(batch, cap, **arguments)
    except ValueError:
        theirs = None  # no count that verl tries fits: then there may be a plan or none
    try:
        micro_batches, indices = ours.rearrange_micro_batches(batch, cap, **arguments)
    except PlanError:
        assert theirs is None
        return
    assert is_partition(indices, len(lengths))
    assert all(part and part == sorted(part) for part in indices)
    assert max(sum(lengths[row] for row in part) for part in indices) <= cap
    assert len(indices) % (arguments["num_batches_divided_by"] or 1) == 0
    assert len(indices) >= (arguments["min_num_micro_batch"] or 1)
    assert theirs is None or len(indices) <= len(theirs)
    size = arguments["force_group_size"]
    assert all(len({row // size for row in part}) * size == len(part) for part in indices)
    work = verl.calculate_workload(torch.tensor(lengths)).tolist()
    for found in filter(None, (indices, theirs)):
        sums = [sum(work[row] for row in part) for part in found]
        peak = sums.index(max(sums))
        if not arguments["use_dynamic_bsz_balance"]:
            assert sums == sorted(sums, reverse=True)
            continue
        assert sums[: peak + 1] == sorted(sums[: peak + 1])
        assert sums[peak:] == sorted(sums[peak:], reverse=True)
        assert len(sums) < 2 or sorted((sums[0], sums[-1])) == sorted(sums)[:2], "the two smallest are the ends"
    _check_fields(batch, micro_batches, indices)


def _check_fields(batch: Any, micro_batches: list[Any], indices: list[list[int]]) -> None:
    for micro_batch, rows in zip(micro_batches, indices, strict=True):
        expected = tensordict_utils.index_select_tensor_dict(batch, rows)
        assert type(micro_batch) is type(expected)
        assert micro_batch.batch_size == expected.batch_size
        assert list(micro_batch.keys()) == list(expected.keys())
        for name, value in expected.items():
            found = micro_batch.get(name)
            assert type(found) is type(value), name
            if not isinstance(value, torch.Tensor):
                assert micro_batch[name] == expected[name]
                continue
            assert found.dtype == value.dtype
            pieces = zip(*(one.unbind() for one in (found, value)), strict=True)
            assert all(torch.equal(one, other) for one, other in pieces), name
            assert getattr(found, "_ragged_idx", None) == getattr(value, "_ragged_idx", None)
    for name in ("scores", "input_ids"):
        pieces = [row for one in micro_batches for row in one[name].unbind()]
        nested = name == "input_ids" and micro_batches[0][name].is_nested
        joined = torch.nested.as_nested_tensor(pieces, layout=torch.jagged) if nested else torch.stack(pieces)
        for restored in (one.restore_dynamic_batch(joined, indices) for one in (ours, verl)):
            assert restored.is_nested == nested
            rows_of = zip(restored.unbind(), batch[name].unbind(), strict=True)
            assert all(torch.equal(one, other) for one, other in rows_of)


def test_restoring_carries_gradients() -> None:
    indices = [[2], [0, 1]]
    for nested in (False, True):
        leaves = [torch.full((2 + nested * at,), float(at), requires_grad=True) for at in range(3)]
        data = torch.nested.as_nested_tensor(leaves, layout=torch.jagged) if nested else torch.stack(leaves)
        restored = ours.restore_dynamic_batch(data, indices)
        sum((at + 1) * row.sum() for at, row in enumerate(restored.unbind())).backward()
        assert [leaf.grad[0].item() for leaf in leaves] == [3.0, 1.0, 2.0]


def test_a_data_proto_is_split_like_verl_splits_it() -> None:
    lengths = [9, 3, 7, 5, 1, 6]
    mask = (torch.arange(9) < torch.tensor(lengths)[:, None]).long()
    data = protocol.DataProto.from_dict(
        {"input_ids": torch.arange(54).view(6, 9), "attention_mask": mask},
        {"uid": np.array([f"uid {row}" for row in range(6)], dtype=object)},
        {"temperature": [0.7]},
    )
    micro_batches, indices = ours.prepare_dynamic_batch(data, 12, num_batches_divided_by=3)
    assert is_partition(indices, 6)
    assert len(indices) == 3
    for micro_batch, rows in zip(micro_batches, indices, strict=True):
        assert type(micro_batch) is protocol.DataProto
        assert torch.equal(micro_batch.batch["input_ids"], data.batch["input_ids"][rows])
        assert micro_batch.non_tensor_batch["uid"].tolist() == [f"uid {row}" for row in rows]
        assert micro_batch.meta_info == data.meta_info
        assert micro_batch.meta_info["temperature"] is not data.meta_info["temperature"]
    joined = torch.cat([one.batch["input_ids"] for one in micro_batches])
    assert torch.equal(ours.restore_dynamic_batch(joined, indices), data.batch["input_ids"])


def test_a_cap_in_a_tensor_and_rows_without_tokens_are_planned(make_batch: MakeBatch) -> None:
    _, indices = ours.rearrange_micro_batches(make_batch([4, 4, 4, 4]), torch.tensor(8))
    assert len(indices) == 2
    _, indices = ours.rearrange_micro_batches(make_batch([4, 0, 4, 0]), 5)
    assert sorted(map(len, indices)) == [2, 2]


@pytest.mark.parametrize(
    ("change", "arguments", "text"),
    [
        (lambda batch: batch.pop("attention_mask"), {}, "the batch has no 'attention_mask'"),
        (lambda batch: batch.pop("input_ids"), {}, "the batch has no 'input_ids'"),
        (lambda batch: batch.update(extra=torch.zeros(3)), {}, "field 'extra' has 3 rows but input_ids has 4"),
        (lambda batch: batch.update(extra=["a"] * 4), {}, "field 'extra' is a list"),
        (lambda batch: None, {"force_group_size": 3}, "4 rows make no groups of force_group_size=3"),
        (lambda batch: None, {"force_group_size": 0}, "force_group_size=0"),
        (lambda batch: None, {"num_batches_divided_by": 0}, "multiple_of=0 must be at least 1"),
        (lambda batch: None, {"min_num_micro_batch": 5}, "5 micro-batches are required"),
        (lambda batch: None, {"max_token_len": 8.5}, "max_tokens=8.5"),
    ],
)
def test_bad_input_is_told(
    make_batch: MakeBatch, change: Callable[[Any], Any], arguments: dict[str, Any], text: str
) -> None:
    batch = make_batch([4, 4, 4, 4], "dict")
    change(batch)
    with pytest.raises(InputError) as caught:
        ours.rearrange_micro_batches(batch, **{"max_token_len": 8, **arguments})
    assert text in str(caught.value)


def test_index_lists_that_do_not_fit_are_refused() -> None:
    with pytest.raises(BatchError, match="data has 3 rows but the index lists hold 2"):
        ours.restore_dynamic_batch(torch.zeros(3), [[0], [1]])
    with pytest.raises(PlanError, match="it has no inverse"):
        ours.restore_dynamic_batch(torch.zeros(3), [[0], [1, 1]])
    with pytest.raises(PlanError, match="nothing to compare"):
        ours.log_seqlen_unbalance([], [], "x")
    with pytest.raises(PlanError, match="uid_list has 1 entries"):
        ours.get_group_balanced_partitions([1, 2], ["a"], 1)
    with pytest.raises(PlanError, match="1 uids make no 2 partitions"):
        ours.get_group_balanced_partitions([1, 2], ["a", "a"], 2)
