"""Packing against the plainest possible loops over rows."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from steelyard.errors import BatchError
from steelyard.packing import PackedLayout, next_token_labels, pack, unpack


@st.composite
def padded_batches(draw):
    """(rows [B, S, 2], lengths, starts, tp): rows of any length, zero included, anywhere in the width."""
    count = draw(st.integers(1, 6))
    lengths = draw(st.lists(st.integers(0, 9), min_size=count, max_size=count))
    width = max(lengths) + draw(st.integers(0, 3))
    starts = [draw(st.integers(0, width - length)) for length in lengths]
    rows = torch.arange(1, count * width * 2 + 1, dtype=torch.float64).view(count, width, 2)
    return rows, lengths, starts, draw(st.sampled_from([1, 2, 4]))


def loop_pack(rows, lengths, starts, tp):
    """Each row's tokens, then zeros up to the next multiple of tp."""
    parts = []
    for row, length, start in zip(rows, lengths, starts, strict=True):
        parts.append(row[start : start + length])
        parts.append(row.new_zeros((-length % tp, *row.shape[1:])))
    return torch.cat(parts)


@given(padded_batches())
def test_pack_lays_rows_one_after_the_other(case):
    rows, lengths, starts, tp = case
    layout = PackedLayout.of(lengths, starts=starts, tp=tp)
    assert torch.equal(pack(rows, layout), loop_pack(*case))
    assert layout.total == len(loop_pack(*case))
    assert layout.total % tp == 0


@given(padded_batches())
def test_unpack_brings_every_token_back_and_nothing_else(case):
    rows, lengths, starts, tp = case
    layout = PackedLayout.of(lengths, starts=starts, tp=tp)
    restored = unpack(pack(rows, layout), layout, rows.size(1))
    columns = torch.arange(rows.size(1))
    first, end = torch.tensor(starts)[:, None], torch.tensor(starts)[:, None] + torch.tensor(lengths)[:, None]
    real = (columns >= first) & (columns < end)
    assert torch.equal(restored, rows * real.unsqueeze(-1))


@given(padded_batches())
def test_gradients_reach_real_tokens_alone(case):
    rows, lengths, starts, tp = case
    layout = PackedLayout.of(lengths, starts=starts, tp=tp)
    leaf = rows.clone().requires_grad_()
    weight = torch.randn(layout.total, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    (pack(leaf, layout) * weight).sum().backward()
    assert torch.equal(leaf.grad, unpack(weight, layout, rows.size(1)))


@given(padded_batches())
def test_labels_are_the_next_token_of_the_same_row(case):
    rows, lengths, starts, tp = case
    ids = rows[..., 0].long()
    layout = PackedLayout.of(lengths, starts=starts, tp=tp)
    expected = []
    for row, length, start in zip(ids, lengths, starts, strict=True):
        expected += row[start + 1 : start + length].tolist() + [0] * (1 if length else 0) + [0] * (-length % tp)
    assert next_token_labels(ids, layout).tolist() == expected


def test_labels_do_not_cross_into_the_next_row():
    ids = torch.tensor([[10, 11, 12], [20, 21, 0]])
    labels = next_token_labels(ids, PackedLayout.of([3, 2]))
    assert labels.tolist() == [11, 12, 0, 21, 0]


def test_positions_restart_at_every_row_and_run_through_its_padding():
    layout = PackedLayout.of([3, 1], tp=4)
    assert layout.slot_positions.tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    assert layout.padding == pytest.approx(0.5)


def test_megatron_gets_real_and_padded_offsets():
    params = PackedLayout.of([3, 5], tp=4).packed_seq_params("cpu")
    assert params.qkv_format == "thd"
    assert params.cu_seqlens_q.tolist() == [0, 3, 8]
    assert params.cu_seqlens_kv_padded.tolist() == [0, 4, 12]
    assert params.max_seqlen_q == 8, "the longest row, not the total: RoPE would not restart positions"
    assert params.cu_seqlens_q.dtype == torch.int32


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: PackedLayout.of([]), "at least one"),
        (lambda: PackedLayout.of([3, -1]), "row 1 has the negative length -1"),
        (lambda: PackedLayout.of([3], starts=[-2]), "row 0 has the negative start -2"),
        (lambda: PackedLayout.of([3, 4], starts=[0]), "1 starts do not match 2 lengths"),
        (lambda: pack(torch.zeros(2, 3), PackedLayout.of([3])), "2 rows, its layout 1"),
        (
            lambda: pack(torch.zeros(1, 3), PackedLayout.of([3], starts=[1])),
            "ends at column 4, beyond .* width of 3",
        ),
        (lambda: unpack(torch.zeros(4), PackedLayout.of([3]), 3), "4 slots, its layout 3"),
    ],
)
def test_what_does_not_belong_together_is_refused(call, text):
    with pytest.raises(BatchError, match=text):
        call()


def test_offsets_do_not_overflow_32_bits_on_the_host():
    layout = PackedLayout(np.array([2**31, 5]), np.array([0, 0]))
    assert layout.total == 2**31 + 5
