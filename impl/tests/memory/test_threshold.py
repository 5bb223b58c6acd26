"""The longest response that fits: confirmed by predictions on both sides of it."""

import dataclasses

import pytest

from steelyard.cost import ModelShape
from steelyard.errors import InputError
from steelyard.memory.predict import GIB, predict_peak, stage_ranks
from steelyard.memory.threshold import largest_response, usual_micro_batches
from steelyard.parallel import ParallelLayout

SHAPE = ModelShape(
    layers=2, hidden=64, ffn=160, heads=8, kv_heads=4, head_dim=8, vocab=512, max_positions=200_000, name="small"
)


def highest(layout, tokens, **settings):
    return max(
        predict_peak(SHAPE, layout, usual_micro_batches(layout, tokens), rank=rank, **settings).peak_bytes
        for rank in stage_ranks(layout).values()
    )


def found_peak(layout, tokens, stage, **settings):
    rank = stage_ranks(layout)[stage]
    return predict_peak(SHAPE, layout, usual_micro_batches(layout, tokens), rank=rank, **settings).peak_bytes


@pytest.mark.parametrize(("sizes", "settings"), [({"pp": 2}, {}), ({"tp": 2, "cp": 2}, {"recompute": "full"})])
def test_the_threshold_fits_and_a_little_more_does_not(sizes, settings):
    layout = ParallelLayout(**sizes)
    found = largest_response(SHAPE, layout, 0.3, reserve_gib=0.1, **settings)
    assert found.limit == "memory"
    assert found.available_bytes == int(0.2 * GIB)
    assert found.prediction.longest == found.tokens
    assert found.prediction.peak_bytes <= found.available_bytes
    assert highest(layout, found.tokens, **settings) == found.prediction.peak_bytes
    more = found.tokens + max(8, found.tokens // 200 // 8 * 8 + 8)
    assert highest(layout, more, **settings) > found.available_bytes
    assert found.runs <= 2 * len(stage_ranks(layout)) + 6
    assert found.breaks_first.startswith(("activations of the", "logits and loss of the"))
    # Lines between lengths that were run come near a run; with so few words a chunk of logits grows to 65,536 tokens.
    between = found.tokens // 2 // 8 * 8
    assert found.peak_at(between).bytes == pytest.approx(found_peak(layout, between, found.stage, **settings), rel=0.02)
    assert found.peak_at(found.tokens).bytes == found.prediction.peak_bytes
    assert found.peak_at(2 * found.tokens).bytes > found.available_bytes


def test_the_search_follows_a_bend():
    def two_rows_when_long(tokens):
        return [[tokens] * (1 if tokens < 8000 else 2)] * 2

    found = largest_response(SHAPE, ParallelLayout(), 0.3, reserve_gib=0.1, micro_batches=two_rows_when_long)
    assert found.tokens > 8000
    assert found.prediction.peak_bytes <= found.available_bytes
    more = found.tokens + found.tokens // 200 + 1
    assert predict_peak(SHAPE, ParallelLayout(), two_rows_when_long(more)).peak_bytes > found.available_bytes


def test_positions_can_be_what_stops():
    found = largest_response(dataclasses.replace(SHAPE, max_positions=6000), ParallelLayout(), 80)
    assert (found.tokens, found.limit) == (6000, "positions")
    assert found.breaks_first == "the model's 6000 positions"


def test_micro_batches_of_your_own():
    found = largest_response(
        SHAPE, ParallelLayout(), 0.3, reserve_gib=0.1, micro_batches=lambda tokens: [[tokens] * 4] * 2
    )
    together = highest(ParallelLayout(), 4 * found.tokens)
    assert found.prediction.peak_bytes == pytest.approx(together, rel=0.01)


def test_a_capacity_that_is_too_small_is_refused():
    with pytest.raises(
        InputError, match=r"too small for small on dp2: parameters, gradients and optimizer alone .* use at least 5 GiB"
    ):
        largest_response(SHAPE, ParallelLayout(dp=2), 4.001)
    with pytest.raises(InputError, match=r"does not hold rows of 2048 tokens: the only stage needs .* use at least"):
        largest_response(SHAPE, ParallelLayout(), 4.02)
