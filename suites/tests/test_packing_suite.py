"""The packing suite: N6 and N7 are right, wait for the device as often as they say, and are weighed in pairs."""

import numpy as np
import pytest
import torch

from steelyard.host_reads import count_host_reads
from steelyard.lengths import LengthSample
from steelyard.packing import PackedLayout, next_token_labels, pack, unpack_gathered
from suites import SUITES, matrix, packing
from suites.baselines import packing_syncs
from suites.matrix import Cell, Layout, Sizes

SIZES = Sizes(layers=2, hidden=32, ffn=48, heads=4, kv_heads=4, head_dim=8, vocab=96)
# Some fill their padded rows and some do not, and all of them reach every chunk.
LENGTHS = [8, 12, 10, 11, 14, 15, 13, 14]


def task(lengths, tp=1, cp=1):
    totals = np.array(lengths)
    prompts = np.maximum(totals // 3, 1)
    sample = LengthSample(prompts, totals - prompts, "test", "test")
    width = int(prompts.max() + sample.responses.max())
    columns, first = np.arange(width), (prompts.max() - prompts)[:, None]
    mask = torch.from_numpy((columns >= first) & (columns < first + totals[:, None]))
    ids = torch.arange(1, mask.numel() + 1).view(mask.shape) * mask
    return packing.Task(sample, ids, mask, ids.float() / 7, tp, cp)


def pack_reads(lengths, cp):
    """Scalar reads of N6 on rank 0 for the ids, boolean masks apart."""
    if cp == 1:
        return 2 + 2 * len(lengths)
    count = 2
    for length in lengths:
        padded = -(-length // (2 * cp)) * 2 * cp
        second = length > padded - padded // (2 * cp)
        # The end of what is there is a tensor only where nothing is cut off.
        count += 6 + (3 + (length == padded)) * second
    return count


def unpack_reads(lengths, cp):
    return len(lengths) * (3 if cp == 1 else 2 + 8 * cp)


@pytest.mark.parametrize(("cp", "packed", "unpacked"), [(1, 2 + 2 * 8, 3 * 8), (2, 76, 144)])
def test_n6_reads_as_often_as_verl_did(cp, packed, unpacked):
    case = task(LENGTHS, cp=cp)
    assert (pack_reads(LENGTHS, cp), unpack_reads(LENGTHS, cp)) == (packed, unpacked)
    with count_host_reads() as before:
        _, offsets = packing_syncs.pack(case.ids, case.mask, cp=cp)
    parts = case.gathered.chunk(cp)
    with count_host_reads() as after:
        packing_syncs.unpack(parts, offsets, case.mask)
    assert (before.total, after.total) == (packed + 8, unpacked + 8), "and each row waits for its boolean mask"


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("cp", [1, 2, 4])
def test_n6_gives_every_rank_what_steelyard_gives_it(tp, cp):
    lengths = [40, 33, 47, 36, 64]
    case = task(lengths, tp, cp)
    for rank in range(cp):
        layout = case.layout(rank)
        sizes = {"tp": tp, "cp": cp, "cp_rank": rank}
        packed, offsets = packing_syncs.pack(case.ids, case.mask, **sizes)
        labels, _ = packing_syncs.pack(packing_syncs.padded_labels(case.ids), case.mask, **sizes)
        assert torch.equal(packed, pack(case.ids, layout))
        assert torch.equal(labels, next_token_labels(case.ids, layout))
        assert offsets.tolist() == layout.cu_seqlens_padded.tolist()
    restored = packing_syncs.unpack(case.gathered.chunk(cp), offsets, case.mask)
    assert torch.equal(restored, case.field)
    assert torch.equal(unpack_gathered(case.gathered, layout, case.width), case.field)


def test_n6_fails_on_the_ranks_that_a_short_row_does_not_reach():
    case = task([1, 9])
    packing_syncs.pack(case.ids, case.mask, cp=2, cp_rank=0)
    with pytest.raises(RuntimeError, match="size"):
        packing_syncs.pack(case.ids, case.mask, cp=2, cp_rank=1)
    assert pack(case.ids, PackedLayout.of([1, 9], cp=2, cp_rank=1)).numel() == 2 + 6


@pytest.mark.parametrize("cp", [1, 2])
def test_n7_scores_response_tokens_as_steelyard_does(cp):
    case = task(LENGTHS, cp=cp)
    case = packing.Task(case.sample, case.ids % 5 * case.mask, case.mask, case.field, 1, cp)
    logits = torch.randn((case.layout().total, 5), generator=torch.Generator().manual_seed(0))
    _, offsets = packing_syncs.pack(case.ids, case.mask, cp=cp)
    plain = packing.naive_log_probs(case, logits, offsets)
    ours = packing.optimised_log_probs(case, logits)
    assert plain.shape == ours.shape == (8, case.response_width)
    scored = ours != 0
    assert torch.allclose(plain[scored], ours[scored], rtol=1e-6, atol=1e-6)
    if cp == 1:
        assert torch.equal(scored, case.mask[:, -case.response_width :])


@pytest.mark.parametrize("workload", ["rl-code-16k-cap", "deepseek-r1-reasoning"])
@pytest.mark.parametrize("cp", [1, 2, 4])
def test_cells_weigh_both_sides_in_pairs(workload, cp):
    cell = Cell(
        suite="packing", workload=workload, layout=Layout(cp=cp), model=SIZES, rows=6, scale=40.0, pairs=3, seed=2
    )
    series = packing.measure(cell, device="cpu")
    found = {(one.metric, one.side): one for one in series}
    assert len(found) == len(series)
    lengths = cell.draw().totals.tolist()
    for metric in ("packing_ms", "pack_ms", "labels_ms", "unpack_ms", "log_probs_ms"):
        for side in packing.SIDES:
            assert len(found[metric, side].values) == 3
            assert min(found[metric, side].values) > 0
    assert found["packing_difference", "both"].values == [0.0]
    assert found["log_probs_difference", "both"].values[0] < packing.LOG_PROBS_LIMIT
    assert found["host_reads", "optimised"].values == [0]
    scalars = 2 * pack_reads(lengths, cp) + unpack_reads(lengths, cp)
    assert found["host_reads", "naive"].values == [scalars + 3 * 6]
    assert found["host_reads", "naive"].notes["item"] == scalars
    for metric in ("staging_bytes", "logits_gib"):
        assert found[metric, "optimised"].values[0] < found[metric, "naive"].values[0]
    assert found["packed_padding", "both"].values[0] < found["padded_padding", "both"].values[0]


def test_the_matrix_covers_rows_workloads_and_context_parallel_sizes():
    cells = matrix.load("packing", list(SUITES)).cells()
    assert {(cell.workload, cell.rows, cell.layout.cp) for cell in cells} == {
        (workload, rows, cp)
        for workload in ("rl-code-16k-cap", "deepseek-r1-reasoning")
        for rows in (8, 64, 256, 1024)
        for cp in (1, 2, 4)
    }
    assert cells[0].id == "packing/rl-code-16k-cap/1/8-rows"
