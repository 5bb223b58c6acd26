"""Packing against the plainest possible loops over rows."""

import math
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from steelyard.errors import BatchError, InputError
from steelyard.packing import PackedLayout, compact, expand, next_token_labels, pack, segments, unpack, unpack_gathered
from steelyard.packing.layout import FP8_MULTIPLES
from steelyard.packing.params import HostPackedSeqParams, layout_of


@st.composite
def cases(draw):
    """(rows [B, S, 2], mask [B, S], tp, cp): rows of any length, zero included, with or without holes."""
    count, width = draw(st.integers(1, 5)), draw(st.integers(1, 11))
    if draw(st.booleans()):
        mask = np.array([draw(st.lists(st.booleans(), min_size=width, max_size=width)) for _ in range(count)])
    else:
        lengths = [draw(st.integers(0, width)) for _ in range(count)]
        starts = [draw(st.integers(0, width - length)) for length in lengths]
        columns = np.arange(width)
        mask = np.array([(columns >= a) & (columns < a + n) for a, n in zip(starts, lengths, strict=True)])
    rows = torch.arange(1, count * width * 2 + 1, dtype=torch.float64).view(count, width, 2)
    return rows, mask, draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2, 4]))


def layouts(mask, tp, cp, **more):
    return [PackedLayout.of(mask=mask, tp=tp, cp=cp, cp_rank=rank, **more) for rank in range(cp)]


def loop_pack(rows, mask, tp, cp, rank):
    """Each row's tokens, then zeros up to a multiple; of that, chunks rank and 2·cp-1-rank."""
    parts = []
    for row, real in zip(rows, mask, strict=True):
        tokens = row[torch.from_numpy(real)]
        multiple = tp * (2 * cp if cp > 1 else 1)
        padded = torch.cat((tokens, tokens.new_zeros((-len(tokens) % multiple, *tokens.shape[1:]))))
        if cp == 1:
            parts.append(padded)
        else:
            chunks = padded.chunk(2 * cp) if len(padded) else [padded] * 2 * cp
            parts += [chunks[rank], chunks[2 * cp - 1 - rank]]
    return torch.cat(parts)


@given(cases())
def test_pack_lays_rows_one_after_the_other_in_the_ranks_chunks(case):
    rows, mask, tp, cp = case
    for rank, layout in enumerate(layouts(mask, tp, cp)):
        packed = pack(rows, layout)
        assert torch.equal(packed, loop_pack(rows, mask, tp, cp, rank))
        assert len(packed) == layout.local_total == layout.total // cp
        assert layout.local_total % tp == 0, "sequence parallelism splits the tokens of every rank"


@given(cases())
def test_unpack_brings_every_token_back_and_nothing_else(case):
    rows, mask, tp, cp = case
    parts = [unpack(pack(rows, layout), layout, rows.size(1)) for layout in layouts(mask, tp, cp)]
    assert torch.equal(sum(parts), rows * torch.from_numpy(mask).unsqueeze(-1))


@given(cases())
def test_gradients_reach_real_tokens_alone(case):
    rows, mask, tp, cp = case
    leaf = rows.clone().requires_grad_()
    expected = torch.zeros_like(rows)
    for layout in layouts(mask, tp, cp):
        weight = torch.randn(layout.local_total, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        (pack(leaf, layout) * weight).sum().backward()
        expected += unpack(weight, layout, rows.size(1))
        packed = torch.randn(layout.local_total, 2, dtype=torch.float64, requires_grad=True)
        (unpack(packed, layout, rows.size(1)) * rows).sum().backward()
        assert torch.equal(packed.grad, pack(rows, layout))
    assert torch.allclose(leaf.grad, expected, rtol=0, atol=1e-12)


@given(cases())
def test_labels_are_the_next_token_of_the_same_row_across_chunk_ends(case):
    rows, mask, tp, cp = case
    ids = rows[..., 0].long()
    following = torch.zeros_like(ids)
    for row, real in enumerate(mask):
        columns = np.flatnonzero(real)
        following[row, columns[:-1]] = ids[row, columns[1:]]
    for rank, layout in enumerate(layouts(mask, tp, cp)):
        assert torch.equal(next_token_labels(ids, layout), loop_pack(following, mask, tp, cp, rank))


@given(cases())
def test_nested_rows_and_mappings_are_packed_like_padded_ones(case):
    rows, mask, tp, cp = case
    parts = [row[torch.from_numpy(real)] for row, real in zip(rows, mask, strict=True)]
    nested = torch.nested.nested_tensor(parts, layout=torch.jagged)
    ids = torch.nested.nested_tensor([part[:, 0].long() for part in parts], layout=torch.jagged)
    for layout in layouts(mask, tp, cp):
        both = pack({"nested": nested, "dense": rows, "first": rows[..., 0]}, layout)
        assert torch.equal(both["nested"], both["dense"])
        assert torch.equal(both["first"], pack(rows, layout)[:, 0])
        assert torch.equal(next_token_labels(ids, layout), next_token_labels(rows[..., 0].long(), layout))


@given(cases())
def test_compact_moves_rows_to_the_left_edge_and_expand_brings_them_back(case):
    rows, mask, _, _ = case
    layout = PackedLayout.of(mask=mask)
    left = compact(rows, layout, layout.max_seqlen)
    for row, real, moved in zip(rows, mask, left, strict=True):
        tokens = row[torch.from_numpy(real)]
        assert torch.equal(moved[: len(tokens)], tokens)
        assert not moved[len(tokens) :].any()
    assert torch.equal(expand(left, layout, rows.size(1)), rows * torch.from_numpy(mask).unsqueeze(-1))


@pytest.mark.parametrize("cp", [1, 2, 4, 8])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_every_length_from_one_to_four_times_the_alignment(tp, cp):
    alignment = tp * (2 * cp if cp > 1 else 1)
    for length in range(1, 4 * alignment + 1):
        rows = torch.arange(1, length + 4).unsqueeze(0)
        parts, slots, positions = [], [], []
        for rank in range(cp):
            layout = PackedLayout.of([length], starts=[2], tp=tp, cp=cp, cp_rank=rank)
            parts.append(unpack(pack(rows, layout), layout, length + 3))
            slots += layout.local_slots.tolist()
            positions += layout.local_positions.tolist()
            assert layout.local_total % tp == 0
            assert layout.to_local(layout.local_slots).tolist() == list(range(layout.local_total))
        assert sorted(slots) == list(range(layout.total)), "every slot is on one rank"
        assert positions == slots, "one row: a slot is its own position"
        assert sum(parts).squeeze(0).tolist() == [0, 0, *range(3, length + 3), 0]
        assert layout.total - length < alignment


@given(cases())
def test_long_stretches_move_like_single_tokens(case):
    rows, mask, tp, cp = case
    flat = torch.cat([pack(rows, layout) for layout in layouts(mask, tp, cp)])

    def everything(layout):
        leaf = rows.clone().requires_grad_()
        part = flat.chunk(cp)[layout.cp_rank].clone().requires_grad_()
        results = [
            pack(leaf, layout),
            next_token_labels(rows[..., 0].long(), layout),
            compact(leaf, layout, layout.max_seqlen),
            unpack(part, layout, rows.size(1)),
            unpack_gathered(flat, layout, rows.size(1)),
        ]
        weights = [torch.arange(one.numel(), dtype=torch.float64).view(one.shape) for one in results]
        sum((one * weight).sum() for one, weight in zip(results, weights, strict=True)).backward()
        return [*results, leaf.grad, part.grad]

    for layout in layouts(mask, tp, cp):
        with mock.patch.object(segments, "LEAST_MEAN_TOKENS", 0), mock.patch.object(segments, "ZERO_ELEMENTS", 4):
            stretches = everything(layout)
        with mock.patch.object(segments, "LEAST_MEAN_TOKENS", 10**9):
            tokens = everything(layout)
        assert all(torch.equal(one, other) for one, other in zip(stretches, tokens, strict=True))
        assert torch.equal(tokens[4], rows * torch.from_numpy(mask).unsqueeze(-1)), "the parts of all ranks"


@given(cases(), st.sampled_from(sorted(FP8_MULTIPLES)))
def test_fp8_padding_is_bounded_and_gives_every_rank_whole_multiples(case, recipe):
    _, mask, tp, cp = case
    plain, padded = (
        PackedLayout.of(mask=mask, tp=tp, cp=cp),
        PackedLayout.of(mask=mask, tp=tp, cp=cp, fp8_recipe=recipe),
    )
    assert padded.total % (FP8_MULTIPLES[recipe] * tp * cp) == 0
    assert 0 <= padded.total - plain.total < math.lcm(FP8_MULTIPLES[recipe], 2) * tp * cp
    assert (padded.padded_lengths >= plain.padded_lengths).all()


def test_a_short_batch_is_not_blown_up_by_fp8():
    # Padding the last row of 25 tokens to 128 times the alignment made 1,024 slots of them at tp2 cp2.
    layout = PackedLayout.of([20, 5], tp=2, cp=2, fp8_recipe="delayed")
    assert layout.total == 64
    assert layout.padding == pytest.approx(1 - 25 / 64)


def test_labels_do_not_cross_into_the_next_row():
    ids = torch.tensor([[10, 11, 12], [20, 21, 0]])
    labels = next_token_labels(ids, PackedLayout.of([3, 2]))
    assert labels.tolist() == [11, 12, 0, 21, 0]


def test_positions_restart_at_every_row_and_run_through_its_padding():
    layout = PackedLayout.of([3, 0, 1], tp=4)
    assert layout.local_positions.tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    assert layout.padding == pytest.approx(0.5)
    halves = [PackedLayout.of([8, 3], cp=2, cp_rank=rank).local_positions.tolist() for rank in (0, 1)]
    assert halves == [[0, 1, 6, 7, 0, 3], [2, 3, 4, 5, 1, 2]]


def test_megatron_gets_real_and_padded_offsets():
    params = PackedLayout.of([3, 5], tp=4).packed_seq_params("cpu")
    assert isinstance(params, HostPackedSeqParams)
    assert params.qkv_format == "thd"
    assert params.cu_seqlens_q.tolist() == [0, 3, 8]
    assert params.cu_seqlens_kv_padded.tolist() == [0, 4, 12]
    assert params.max_seqlen_q == 8, "the longest row, not the total: RoPE would not restart positions"
    assert params.cu_seqlens_q.dtype == torch.int32


def test_parameters_that_others_made_have_the_same_layout():
    from megatron.core.packed_seq_params import PackedSeqParams

    ours = PackedLayout.of([3, 5], tp=2, cp=2, cp_rank=1)
    theirs = PackedSeqParams(qkv_format="thd", cu_seqlens_q=torch.tensor([0, 8, 16], dtype=torch.int32))
    found = layout_of(theirs, 2, 1)
    assert found.local_slots.tolist() == ours.local_slots.tolist()
    assert found.local_positions.tolist() == ours.local_positions.tolist()
    assert layout_of(ours.packed_seq_params("cpu"), 2, 1) is ours


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: PackedLayout.of([]), BatchError, "at least one"),
        (lambda: PackedLayout.of(), BatchError, "at least one"),
        (lambda: PackedLayout.of([3, -1]), BatchError, "row 1 has the negative length -1"),
        (lambda: PackedLayout.of([3], starts=[-2]), BatchError, "row 0 has the negative start -2"),
        (lambda: PackedLayout.of([3, 4], starts=[0]), BatchError, "1 starts do not match 2 lengths"),
        (lambda: PackedLayout.of([3], mask=np.ones((1, 3))), BatchError, "either a mask, or lengths"),
        (lambda: PackedLayout.of(mask=np.ones(3)), BatchError, "the mask has shape"),
        (lambda: PackedLayout.of([3], cp=2, cp_rank=2), InputError, "0 <= cp_rank < cp"),
        (lambda: PackedLayout.of([3], fp8_recipe="fp4"), InputError, "'fp4' is unknown: use one of delayed"),
        (lambda: pack(torch.zeros(2, 3), PackedLayout.of([3])), BatchError, "2 rows, its layout 1"),
        (
            lambda: pack(torch.zeros(1, 3), PackedLayout.of([3], starts=[1])),
            BatchError,
            "column 3, beyond the width of 3",
        ),
        (lambda: unpack(torch.zeros(4), PackedLayout.of([3]), 3), BatchError, "4 slots, its layout 3"),
        (lambda: unpack(torch.zeros(3), PackedLayout.of([3]), 2), BatchError, "column 2, beyond the width of 2"),
        (lambda: compact(torch.zeros(1, 3), PackedLayout.of([3]), 2), BatchError, "row 0 has 3 tokens"),
    ],
)
def test_what_does_not_belong_together_is_refused(call, error, text):
    with pytest.raises(error, match=text):
        call()


@pytest.mark.parametrize("rows", [[0], [0, 0], [5], [0, 7, 0]])
def test_rows_without_tokens_and_single_rows_are_defined(rows):
    layout = PackedLayout.of(rows, tp=2, cp=2)
    batch = torch.ones(len(rows), 7)
    assert pack(batch, layout).sum() <= sum(rows)
    assert unpack(pack(batch, layout), layout, 7).shape == batch.shape
    assert next_token_labels(batch.long(), layout).shape == (layout.local_total,)
    assert layout.packed_seq_params("cpu").cu_seqlens_q.numel() == len(rows) + 1


def test_offsets_do_not_overflow_32_bits_on_the_host():
    layout = PackedLayout.of([2**31, 5], tp=8)
    assert layout.total == 2**31 + 8
    assert layout.cu_seqlens[-1] == 2**31 + 5
