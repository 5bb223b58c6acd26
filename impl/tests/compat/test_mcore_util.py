"""Packing under verl's names against the real functions, on imagined ranks (real ones: ``test_mcore_ranks.py``)."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams

from impl.tests.compat.mcore_cases import (
    Case,
    assert_same_params,
    assert_same_rows,
    cases,
    following,
    row_masks,
    with_gradient,
)
from steelyard.compat.verl import packed as shared
from steelyard.compat.verl.models.mcore import util as ours
from steelyard.host_reads import count_host_reads

verl = pytest.importorskip("verl.models.mcore.util", reason="the tests compare with the real package")


def test_names_arguments_and_defaults_are_verls() -> None:
    assert set(ours.__all__) == {name for name in vars(verl) if name.startswith(("preprocess_", "postprocess_"))} - {
        "preprocess_for_mindspeed"
    }
    for name in ours.__all__:
        here, there = (inspect.signature(getattr(module, name)).parameters.values() for module in (ours, verl))
        shared_ = [one for one in here if one.kind is not one.KEYWORD_ONLY]
        assert [(p.name, p.kind, p.default) for p in shared_] == [(p.name, p.kind, p.default) for p in there], name
        assert {p.name: p.default for p in here if p not in shared_}.items() <= {
            "lengths": None,
            "starts": None,
        }.items()


@settings(max_examples=80, deadline=None)
@given(cases(), st.booleans())
def test_padded_rows_are_packed_like_verls(case: Case, pre_process: bool) -> None:
    with case.parallel():
        for rows in (case.ids, case.rows, case.mask):
            here, params = ours.preprocess_packed_seqs(rows, case.mask, pre_process)
            there, their_params = verl.preprocess_packed_seqs(rows, case.mask, pre_process)
            assert_same_params(params, their_params)
            assert_same_rows(here, there)
            assert pre_process or here is rows
        results = [
            with_gradient(lambda x, m=m: m.preprocess_packed_seqs(x, case.mask)[0], case.rows) for m in (ours, verl)
        ]
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@settings(max_examples=80, deadline=None)
@given(cases(cp=(1,)))
def test_padded_rows_come_back_like_verls_whoever_packed_them(case: Case) -> None:
    count, width = case.mask.shape
    with case.parallel():
        packed, params = ours.preprocess_packed_seqs(case.rows, case.mask)
        _, their_params = verl.preprocess_packed_seqs(case.rows, case.mask)
        for output in (packed, packed[..., 0], packed[..., :1].long()):
            there = verl.postprocess_packed_seqs(output, their_params, case.mask, count, width)
            for known in (params, their_params):
                for mask in (case.mask, case.mask.clone(), case.mask.long()):
                    assert_same_rows(ours.postprocess_packed_seqs(output, known, mask, count, width), there)
        assert ours.postprocess_packed_seqs(packed, params, case.mask, count, width, post_process=False) is packed
        results = [
            with_gradient(lambda x, m=m, p=p: m.postprocess_packed_seqs(x, p, case.mask, count, width), packed)
            for m, p in ((ours, params), (verl, their_params))
        ]
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@settings(max_examples=80, deadline=None)
@given(cases(cp=(1,)), st.booleans())
def test_outputs_of_fused_kernels_come_back_like_verls(case: Case, post_process: bool) -> None:
    count, width = case.mask.shape
    with case.parallel():
        packed, params = ours.preprocess_packed_seqs(case.rows, case.mask)
        labels_mask = (packed[..., 0] % 3 > 0) & (packed[..., 0] > 0)
        result = []
        for module in (ours, verl):
            output = SimpleNamespace(entropy=packed[0, :, 0].clone(), log_probs=packed[0, :, 1].clone())
            arguments = (labels_mask, output, params, case.mask, count, width)
            result.append(module.postprocess_packed_seqs_for_dict_output(*arguments, post_process=post_process))
    here, there = result
    assert list(here) == list(there) == ["entropy", "log_probs"]
    for name in here:
        assert_same_rows(here[name], there[name])


@settings(max_examples=80, deadline=None)
@given(cases(cp=(1,)), st.booleans(), st.booleans())
def test_padded_rows_are_compacted_and_expanded_like_verls(case: Case, parallel: bool, pre_process: bool) -> None:
    positions = case.mask.cumsum(1)
    with case.parallel():
        for mask in (case.mask, case.mask.long()) if not pre_process else (case.mask,):
            here, there = (
                module.preprocess_bshd(case.rows, mask.bool(), positions, parallel, pre_process)
                for module in (ours, verl)
            )
            for one, other in zip(here, there, strict=True):
                assert_same_rows(one, other)
        ids, mask, _ = ours.preprocess_bshd(case.rows, case.mask, positions, parallel)
        width = case.mask.size(1)
        results = [
            with_gradient(lambda x, m=m: m.postprocess_bshd(x, mask, case.mask, width), ids) for m in (ours, verl)
        ]
        assert ours.postprocess_bshd(ids, mask, case.mask, width, post_process=False) is ids
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    assert torch.equal(results[0][0], case.rows * case.mask.unsqueeze(-1))


@settings(max_examples=80, deadline=None)
@given(cases(), st.booleans())
def test_nested_rows_are_packed_like_verls(case: Case, pre_process: bool) -> None:
    rows = case.nested(case.rows)
    with case.parallel():
        here, params, positions = ours.preprocess_thd_engine(rows, pre_process)
        there, their_params, their_positions = verl.preprocess_thd_engine(rows, pre_process)
    assert_same_params(params, their_params)
    if not pre_process:
        assert here is rows
        assert positions is None
        return
    assert_same_rows(here, there)
    real = here[0, :, 0] != 0
    assert (positions.dtype, positions.shape) == (their_positions.dtype, their_positions.shape)
    assert torch.equal(positions[0, real], their_positions[0, real])
    assert not positions[0, ~real].any()
    if case.cp == 1:
        assert torch.equal(positions, their_positions)


@settings(max_examples=80, deadline=None)
@given(cases())
def test_labels_are_verls_but_for_the_last_of_a_row(case: Case) -> None:
    # Of context-parallel ranks without a single token verl's function raises an IndexError.
    assume(case.cp == 1 or bool(case.mask.any()))
    labels, positions = following(case)
    with case.parallel():
        here, params, at = ours.preprocess_thd_engine(case.nested(case.ids), need_roll=True)
        there, their_params, _ = verl.preprocess_thd_engine(case.nested(case.ids), need_roll=True)
        expected, _ = verl.preprocess_packed_seqs(torch.stack((labels, positions), dim=-1), case.mask)
        pairs = ours.preprocess_thd_engine(case.nested(case.rows), need_roll=True)[0]
    assert_same_params(params, their_params)
    assert torch.equal(here, expected[..., 0])
    assert torch.equal(at, expected[..., 1])
    assert torch.equal(here[here != 0], there[here != 0])
    assert torch.equal(pairs[..., 0].long(), here), "whatever belongs to a token"


@settings(max_examples=80, deadline=None)
@given(cases(cp=(1,)))
def test_nested_rows_come_back_like_verls_whoever_packed_them(case: Case) -> None:
    rows, count = case.nested(case.rows), len(case.mask)
    with case.parallel():
        packed, params, _ = ours.preprocess_thd_engine(rows)
        _, their_params, _ = verl.preprocess_thd_engine(rows)
        other = torch.nested.nested_tensor_from_jagged(rows.values(), offsets=rows.offsets().clone())
        for output in (packed, packed[..., 0], packed[..., :1].long()):
            there = verl.postprocess_thd_engine(output, their_params, rows, count)
            for known in (params, their_params):
                for source in (rows, other):
                    assert_same_rows(ours.postprocess_thd_engine(output, known, source, count), there)
        assert ours.postprocess_thd_engine(packed, params, rows, count, post_process=False) is packed
        results = [
            with_gradient(lambda x, m=m: m.postprocess_thd_engine(x, params, rows, count), packed) for m in (ours, verl)
        ]
    assert_same_rows(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


@settings(max_examples=80, deadline=None)
@given(cases(), st.booleans(), st.sampled_from([None, 0, 3]))
def test_nested_rows_are_padded_like_verls(case: Case, fp8: bool, more: int | None) -> None:
    rows = case.nested(case.rows)
    settings = {"use_fp8_padding": fp8, "forced_max_seqlen": None if more is None else max(case.lengths) + more}
    with case.parallel():
        here, there = (module.preprocess_bshd_engine(rows, **settings) for module in (ours, verl))
        for one, other in zip(here, there, strict=True):
            assert_same_rows(one, other)
        labels = ours.preprocess_bshd_engine(case.nested(case.ids), need_roll=True, **settings)[0]
        theirs = verl.preprocess_bshd_engine(case.nested(case.ids), need_roll=True, **settings)[0]
        next_rows = case.nested(following(case)[0])
        expected = verl.preprocess_bshd_engine(next_rows, **settings)[0]
    assert torch.equal(labels, expected)
    assert torch.equal(labels[labels != 0], theirs[labels != 0])


@settings(max_examples=80, deadline=None)
@given(cases(cp=(1,)))
def test_padded_nested_rows_come_back_like_verls(case: Case) -> None:
    with case.parallel():
        output, mask, _ = ours.preprocess_bshd_engine(case.nested(case.rows))
        # A mask of any form, as verl takes it.
        for taken in (mask, mask & (torch.arange(mask.size(1)) % 3 > 0)):
            results = [
                with_gradient(lambda x, m=m, t=taken: m.postprocess_bshd_engine(x, t), output) for m in (ours, verl)
            ]
            assert_same_rows(results[0][0], results[1][0])
            assert torch.equal(results[0][1], results[1][1])
        known = ours.postprocess_bshd_engine(output, mask, lengths=case.lengths)
        assert_same_rows(known, verl.postprocess_bshd_engine(output, mask))
        assert ours.postprocess_bshd_engine(output, mask, post_process=False) is output


class PartitionedParams(PackedSeqParams):
    """As a later megatron-core has them."""

    def __init__(self, cp_partition_mode: str = "zigzag", **rest: Any) -> None:
        super().__init__(**rest)
        self.cp_partition_mode = cp_partition_mode


@settings(max_examples=80, deadline=None)
@given(cases(), st.sampled_from([None, 7]))
def test_contiguous_pieces_are_verls(case: Case, least: int | None) -> None:
    rows = case.nested(case.rows)
    with (
        case.parallel(),
        mock.patch.object(verl, "PackedSeqParams", PartitionedParams),
        mock.patch.object(verl, "_PACKED_SEQ_PARAMS_HAS_CP_PARTITION_MODE", True),
        mock.patch.object(shared, "takes_partition_mode", return_value=True),
    ):
        settings = {"cp_layout": "contiguous", "min_local_rows": least and case.tp * least}
        here, params, positions = ours.preprocess_thd_engine(rows, **settings)
        there, their_params, their_positions = verl.preprocess_thd_engine(rows, **settings)
        labels, _, at = ours.preprocess_thd_engine(case.nested(case.ids), need_roll=True, **settings)
        their_labels, _, their_at = verl.preprocess_thd_engine(case.nested(case.ids), need_roll=True, **settings)
    assert_same_params(params, their_params)
    assert params.cp_partition_mode == their_params.cp_partition_mode == "contiguous"
    assert_same_rows(here, there)
    assert_same_rows(positions, their_positions)
    assert params.positions.shape == positions[0].shape
    assert torch.equal(labels[labels != 0], their_labels[labels != 0])
    assert torch.equal(at[labels != 0], their_at[labels != 0])


def test_a_group_of_its_own_for_a_micro_batch() -> None:
    case, group = Case(row_masks([3, 1], [6, 2]), tp=2, cp=4, rank=3), object()
    rows = case.nested(case.ids)
    with (
        case.parallel(),
        mock.patch.object(parallel_state, "get_dynamic_data_context_parallel_groups", return_value=group, create=True),
        mock.patch.object(torch.distributed, "get_rank", side_effect=[1, 1, 0, 0]),
    ):
        here, params, _ = ours.preprocess_thd_engine(rows, local_cp_size=2)
        there, their_params, _ = verl.preprocess_thd_engine(rows, local_cp_size=2)
        assert_same_params(params, their_params)
        assert params.cp_group is group
        assert_same_rows(here, there)
        here, params, _ = ours.preprocess_thd_engine(rows, local_cp_size=1)
        assert_same_rows(ours.postprocess_thd_engine(here, params, rows, 2, local_cp_size=1), rows)


ROWS = Case(row_masks([3, 1, 4], [6, 2, 5]))


def host_reads(call: Callable[[], Any]) -> int:
    with ROWS.parallel(), count_host_reads() as reads:
        call()
    return reads.total


def test_the_device_is_read_once_and_not_at_all_when_the_host_knows() -> None:
    mask, ids, nested = ROWS.mask, ROWS.ids, ROWS.nested(ROWS.ids)
    count, width = mask.shape
    known = {"lengths": ROWS.lengths, "starts": [1, 3, 0]}
    with ROWS.parallel():
        packed, params = ours.preprocess_packed_seqs(ids, mask)
        theirs = verl.preprocess_packed_seqs(ids, mask)[1]
        thd, thd_params, _ = ours.preprocess_thd_engine(nested)
        left, left_mask, _ = ours.preprocess_bshd(ids, mask, ids)
        bshd, bshd_mask, _ = ours.preprocess_bshd_engine(nested)
    only_lengths = {"lengths": ROWS.lengths}
    calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
        ("preprocess_packed_seqs", (ids, mask), known),
        ("preprocess_bshd", (ids, mask, ids), known),
        ("postprocess_bshd", (left, left_mask, mask, width), known),
        ("preprocess_thd_engine", (nested,), only_lengths),
        ("preprocess_bshd_engine", (nested,), only_lengths),
        ("postprocess_bshd_engine", (bshd, bshd_mask), only_lengths),
    ]
    for name, arguments, lengths in calls:
        here, there = getattr(ours, name), getattr(verl, name)
        assert host_reads(lambda: here(*arguments)) == 1, name  # noqa: B023 - called at once
        assert host_reads(lambda: there(*arguments)) > 1, name  # noqa: B023
        assert host_reads(lambda: here(*arguments, **lengths)) == 0, name  # noqa: B023
        with ROWS.parallel():
            read, told = here(*arguments), here(*arguments, **lengths)
        read, told = (one if isinstance(one, tuple) else (one,) for one in (read, told))
        for one, other in zip(read, told, strict=True):
            if isinstance(one, torch.Tensor):
                assert_same_rows(one, other)
            else:
                assert_same_params(one, other)

    back = ours.postprocess_packed_seqs
    assert host_reads(lambda: back(packed, params, mask, count, width)) == 0
    assert host_reads(lambda: back(packed, params, mask.clone(), count, width)) == 1
    assert host_reads(lambda: back(packed, theirs, mask, count, width)) == 1
    assert host_reads(lambda: back(packed, params, mask.clone(), count, width, **known)) == 0
    assert host_reads(lambda: verl.postprocess_packed_seqs(packed, params, mask, count, width)) > 1
    assert host_reads(lambda: ours.postprocess_thd_engine(thd, thd_params, nested, count)) == 0
    assert host_reads(lambda: verl.postprocess_thd_engine(thd, thd_params, nested, count)) > 1


def test_a_mask_with_holes_takes_a_second_read() -> None:
    mask = ROWS.mask.clone()
    mask[0, 4] = False
    assert host_reads(lambda: ours.preprocess_packed_seqs(ROWS.ids, mask)) == 2


def test_a_mask_that_was_written_into_is_read_again() -> None:
    mask = ROWS.mask.clone()
    with ROWS.parallel():
        packed, params = ours.preprocess_packed_seqs(ROWS.ids, mask)
        mask.copy_(mask.roll(-1, dims=1))  # the same tokens one column further left
        there = verl.postprocess_packed_seqs(packed, params, mask, *mask.shape)
        assert_same_rows(ours.postprocess_packed_seqs(packed, params, mask, *mask.shape), there)


def test_inference_tensors_are_taken() -> None:
    with torch.inference_mode(), ROWS.parallel():
        mask = ROWS.mask.clone()
        packed, params = ours.preprocess_packed_seqs(ROWS.ids, mask)
        back = ours.postprocess_packed_seqs(packed, params, mask, *mask.shape)
    assert torch.equal(back, ROWS.ids * mask)


def test_the_layout_on_the_host_is_that_of_the_mask() -> None:
    with ROWS.parallel():
        _, params = ours.preprocess_packed_seqs(ROWS.ids, ROWS.mask)
    assert params.layout.lengths.tolist() == ROWS.lengths
    assert params.positions.tolist() == params.layout.local_positions.tolist()
