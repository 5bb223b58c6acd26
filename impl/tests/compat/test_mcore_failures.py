"""Where packing differs from verl's (REFERENCE cases 16 to 19), and what is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from impl.tests.compat.mcore_cases import Case, assert_same_params, assert_same_rows, cases, row_masks
from steelyard.compat.verl.models.mcore import util as ours
from steelyard.errors import BatchError, InputError

verl = pytest.importorskip("verl.models.mcore.util", reason="the cases show what verl does")


@pytest.mark.parametrize("cp", [1, 2, 4])
@pytest.mark.parametrize("tp", [1, 2])
def test_case_16_short_rows(tp: int, cp: int) -> None:
    for length in range(4 * tp * cp + 2):
        for rank in range(cp):
            case = Case(row_masks([1, 3], [length, 2])[:, 1:], tp, cp, rank)
            with case.parallel():
                here, there = (module.preprocess_packed_seqs(case.ids, case.mask)[0] for module in (ours, verl))
                assert_same_rows(here, there)
                here, there = (module.preprocess_thd_engine(case.nested(case.ids))[0] for module in (ours, verl))
                assert_same_rows(here, there)


def test_case_17_a_label_from_another_row() -> None:
    case = Case(row_masks([1, 1], [2, 1]))
    rows = torch.nested.as_nested_tensor([torch.tensor([10, 11, 12]), torch.tensor([20, 21])], layout=torch.jagged)
    with case.parallel():
        assert verl.preprocess_thd_engine(rows, need_roll=True)[0].tolist() == [[11, 12, 20, 21, 10]]
        assert ours.preprocess_thd_engine(rows, need_roll=True)[0].tolist() == [[11, 12, 0, 21, 0]]


@settings(max_examples=80, deadline=None)
@given(cases())
def test_fp8_gives_every_rank_whole_blocks_in_no_more_slots_than_verls(case: Case) -> None:
    count, width = case.mask.shape
    with case.parallel():
        both = (
            [module.preprocess_packed_seqs(case.ids, case.mask, use_fp8_padding=True) for module in (ours, verl)],
            [module.preprocess_thd_engine(case.nested(case.ids), use_fp8_padding=True) for module in (ours, verl)],
        )
        for (here, *_), (there, *_) in both:
            assert here.size(1) % (128 * case.tp) == 0
            assert here.size(1) <= there.size(1)
        if case.cp == 1:
            here = ours.postprocess_packed_seqs(*both[0][0], case.mask, count, width)
            assert torch.equal(here, verl.postprocess_packed_seqs(*both[0][1], case.mask, count, width))


def test_case_18_the_tail_of_25_tokens() -> None:
    case = Case(row_masks([5, 5], [10, 5]), tp=2, cp=2)
    with case.parallel():
        params = [m.preprocess_packed_seqs(case.ids, case.mask, use_fp8_padding=True)[1] for m in (ours, verl)]
    assert [int(one.cu_seqlens_q_padded[-1]) for one in params] == [512, 1024]
    assert params[0].layout.padding == pytest.approx(1 - 25 / 512)


@settings(max_examples=80, deadline=None)
@given(cases(), st.sampled_from([None, 1, 5, 8, 24]), st.sampled_from([None, 1, 6, 16]))
def test_totals_are_verls_where_ranks_can_split_them(case: Case, least: int | None, bucket: int | None) -> None:
    rows, settings = case.nested(case.ids), {"min_local_rows": least, "pad_to_length_bucket": bucket}
    alignment = case.tp * case.cp * (2 if case.cp > 1 else 1)
    with case.parallel():
        packed, params, _ = ours.preprocess_thd_engine(rows, **settings)
        total = params.layout.total
        assert packed.size(1) == total // case.cp >= (least or 0)
        assert total % alignment == 0
        assert total % (bucket or 1) == 0
        theirs, their_params, _ = verl.preprocess_thd_engine(rows, **settings)
        their_total = int(their_params.cu_seqlens_q[-1])
        if their_total % alignment == 0:
            assert_same_params(params, their_params)
            assert_same_rows(packed, theirs)
        else:
            assert their_total < total


def test_case_19_a_total_that_chunks_and_sequence_parallel_ranks_cannot_split() -> None:
    case = Case(row_masks([1], [3]), tp=1, cp=2)
    found = []
    for rank in range(2):
        with Case(case.mask, 1, 2, rank).parallel():
            found.append([m.preprocess_thd_engine(case.nested(case.ids), min_local_rows=3)[0] for m in (ours, verl)])
    here, there = (sorted(torch.cat([one[side] for one in found], dim=1).flatten().tolist()) for side in (0, 1))
    assert [one for one in here if one] == case.ids.flatten().tolist()
    assert [one for one in there if one] != case.ids.flatten().tolist(), "verl loses a token"


def test_rows_without_a_token_are_defined() -> None:
    case = Case(torch.zeros(2, 4, dtype=torch.bool), tp=2)
    with case.parallel():
        packed, params = ours.preprocess_packed_seqs(case.ids, case.mask)
        assert packed.shape == (1, 0)
        assert not ours.postprocess_packed_seqs(packed, params, case.mask, 2, 4).any()
        assert [one.shape for one in ours.preprocess_bshd(case.ids, case.mask, case.ids)] == [(2, 0)] * 3
        rows = case.nested(case.ids)
        packed, params, _ = ours.preprocess_thd_engine(rows)
        assert_same_rows(ours.postprocess_thd_engine(packed, params, rows, 2), rows)
        left, mask, _ = ours.preprocess_bshd_engine(rows)
        assert_same_rows(ours.postprocess_bshd_engine(left, mask), rows)


ROWS = Case(row_masks([3, 1, 4], [6, 2, 5]))


def test_what_does_not_fit_together_is_told() -> None:
    mask, ids, nested = ROWS.mask, ROWS.ids, ROWS.nested(ROWS.ids)
    with ROWS.parallel():
        packed, params = ours.preprocess_packed_seqs(ids, mask)
        thd, thd_params, _ = ours.preprocess_thd_engine(nested)
        with pytest.raises(BatchError, match="batch_size=2 but 3 rows were packed"):
            ours.postprocess_packed_seqs(packed, params, mask, 2, mask.size(1))
        with pytest.raises(BatchError, match="slots for 3 rows, which do not hold the 2 rows given"):
            ours.postprocess_packed_seqs(packed, params, mask[:2], 2, mask.size(1))
        with pytest.raises(BatchError, match="do not hold the 3 rows given"):
            ours.postprocess_packed_seqs(packed, params, torch.ones_like(mask), 3, mask.size(1))
        with pytest.raises(BatchError, match="the output has 4 slots on each of 1 ranks, its layout 21"):
            ours.postprocess_thd_engine(thd[:, :4], thd_params, nested, 3)
        with pytest.raises(BatchError, match="lengths must be a list"):
            ours.preprocess_packed_seqs(ids, mask, starts=[0, 0, 0])
        with pytest.raises(BatchError, match="row 0 has 9 tokens, which do not fit into a width of 8"):
            ours.preprocess_bshd_engine(nested, forced_max_seqlen=8)
        with pytest.raises(BatchError, match="do not hold the same number of tokens"):
            ours.postprocess_bshd(ids, mask, mask.roll(1, dims=0), mask.size(1))
        with pytest.raises(BatchError, match="position_ids has 3 dimensions"):
            ours.preprocess_bshd(ids, mask, ROWS.rows)
        with pytest.raises(BatchError, match="its mask 3 x 9"):
            ours.postprocess_bshd_engine(ids[:, :8], mask[:, :9])
        with pytest.raises(InputError, match="pad_to_length_bucket=0"):
            ours.preprocess_thd_engine(nested, pad_to_length_bucket=0)
        with pytest.raises(InputError, match="cp_layout='spiral' is unknown"):
            ours.preprocess_thd_engine(nested, cp_layout="spiral")
        with pytest.raises(InputError, match="local_cp_size=2 needs a megatron-core"):
            ours.preprocess_thd_engine(nested, local_cp_size=2)
    with Case(mask, cp=2).parallel():
        with pytest.raises(InputError, match="context parallel size 2 needs packed input"):
            ours.preprocess_bshd(ids, mask, ids)
        with pytest.raises(InputError, match="cp_partition_mode"):
            ours.preprocess_thd_engine(nested, cp_layout="contiguous")
