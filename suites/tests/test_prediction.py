"""The naive side in predictions: counted on real ranks, whole logits, and outputs that keep their graphs."""

import dataclasses

import pytest
import torch

from steelyard.cost import ModelShape
from steelyard.memory.predict import predict_peak
from steelyard.parallel import ParallelLayout
from steelyard.step import RolloutBatch
from suites.baselines import graph_outputs
from suites.launch.local import run_ranks
from suites.tests.counted_naive import naive_step

SHAPE = ModelShape(layers=4, hidden=64, ffn=160, heads=8, kv_heads=4, head_dim=8, vocab=512, qkv_bias=True)
LENGTHS = [700, 412, 300, 1500, 256, 1100, 900, 128]
SIZE = 2


@pytest.mark.parametrize(
    ("name", "sizes"),
    [("fixed", {}), ("fixed", {"tp": 2}), ("fixed", {"pp": 2}), ("whole logits", {}), ("whole logits", {"tp": 2})],
)
def test_a_naive_step_is_predicted_within_two_percent(name, sizes):
    layout = ParallelLayout(**sizes)
    payload = {"layout": sizes, "shape": dataclasses.asdict(SHAPE), "lengths": LENGTHS, "size": SIZE, "step": name}
    counted = run_ranks("suites.tests.counted_naive:peaks", layout.world, payload, time_limit=120, device="cpu")
    for rank in range(0, layout.world, layout.tp):
        predicted = predict_peak(
            SHAPE,
            layout,
            [[length] for length in LENGTHS],
            step=naive_step(name, layout, SIZE),
            rank=rank,
            dtype=torch.float32,
            kernels="cpu",
        )
        assert predicted.peak_bytes == pytest.approx(counted[rank], rel=0.02)


def test_whole_logits_hold_three_more_of_them_in_float32():
    wide = dataclasses.replace(SHAPE, layers=2, vocab=65536)
    naive = naive_step("whole logits", ParallelLayout(), 1)
    theirs, ours = (predict_peak(wide, ParallelLayout(), [[2048]] * 2, step=step) for step in (naive, None))
    logits = 4 * 2048 * wide.vocab
    assert theirs.peak_bytes - ours.peak_bytes > 2.5 * logits


def test_outputs_with_graphs_grow_with_the_micro_batches_and_the_engines_do_not():
    def naive(batch, models, optimizer):
        rollouts = RolloutBatch.of(batch)
        graph_outputs.compute_log_prob(rollouts, models, [[row] for row in range(rollouts.rows)])

    def peak(count, step):
        found = predict_peak(SHAPE, ParallelLayout(), [[1024]] * count, step=step, forward_only=True)
        return found.peak_bytes

    two, four, eight = (peak(count, naive) for count in (2, 4, 8))
    each = (eight - four) / 4
    assert each == pytest.approx((four - two) / 2, rel=0.02)
    assert each > 0.2 * two
    few, many = (peak(count, None) for count in (2, 8))
    # One row of log-probabilities is kept of each.
    assert many - few <= 6 * 8 * 1024
    assert few < two
