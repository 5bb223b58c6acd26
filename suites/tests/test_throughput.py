"""The throughput suite on real ranks: what is counted, on which side, and that the naive side is what it says."""

import pytest

from suites import throughput
from suites.launch.local import run_ranks
from suites.matrix import Cell, Layout, Sizes

SIZES = Sizes(layers=2, hidden=32, ffn=48, heads=4, kv_heads=2, head_dim=8, vocab=96)


def cell(layout=None, **settings):
    values = {"rows": 8, "scale": 200.0, "seed": 3, "pairs": 2, "warmup": 1, "micro_batch_size": 2, "time_limit": 120.0}
    return Cell(
        suite="throughput",
        workload="rl-code-16k-cap",
        layout=Layout(**(layout or {})),
        model=SIZES,
        **{**values, **settings},
    )


@pytest.mark.parametrize(
    ("layout", "role"), [({}, "actor"), ({}, "critic"), ({"tp": 2}, "actor"), ({"dp": 2, "pp": 2}, "actor")]
)
def test_both_sides_are_timed_and_counted(layout, role):
    case = cell(layout, role=role)
    series = {(one.metric, one.side): one for one in throughput.measure(case, device="cpu")}
    found = {key: one.values for key, one in series.items()}
    lengths = case.draw().totals
    multiple = layout.get("tp", 1)
    assert found["real_tokens", "both"] == [lengths.sum()]
    # The naive side computes every row at the width of the longest of its two.
    padded = -(-lengths.reshape(-1, 2).max(1) // multiple) * multiple
    assert found["computed_tokens", "naive"] == [2 * padded.sum()]
    assert found["computed_tokens", "optimised"] == [(-(-lengths // multiple) * multiple).sum()]
    assert found["micro_batches", "naive"] == [8 / 2 / layout.get("dp", 1)]
    for side in ("naive", "optimised"):
        load = series["micro_batches", side].notes
        assert len(load["tokens"]) == layout.get("dp", 1)
        assert sum(map(sum, load["tokens"])) == found["computed_tokens", side][0]
        assert max(map(max, load["tokens"])) <= load["cap"] + multiple * 2
        of_ranks = series["step_processor_seconds", side].notes["of_ranks"]
        assert len(of_ranks) == case.layout.parallel().world
        seconds, rates = found["step_seconds", side], found["tokens_per_second", side]
        assert len(seconds) == len(rates) == len(found["loss", side]) == case.pairs
        assert all(second > 0 for second in seconds)
        assert rates == pytest.approx([lengths.sum() / second for second in seconds])
        assert (("pipeline_overhead", side) in found) == ("pp" in layout)
        assert all(one > 0 for one in found.get(("pipeline_overhead", side), ()))


@pytest.mark.parametrize("kind", ["all_gather", "all_to_all"])
def test_with_context_parallelism_the_optimised_side_is_weighed_alone(kind):
    case = cell({"cp": 2, "cp_kind": kind}, pairs=1)
    found = {(one.metric, one.side): one.values for one in throughput.measure(case, device="cpu")}
    assert {side for _, side in found} == {"optimised", "both"}
    assert found["step_seconds", "optimised"][0] > 0
    assert 0 <= found["computed_tokens", "optimised"][0] - case.draw().totals.sum() <= 8 * 4


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_the_naive_side_is_right_in_one_micro_batch_and_a_mean_of_means_in_several(role):
    found = run_ranks("suites.tests.naive_side:against_the_judge", 1, cell(role=role).model_dump(), time_limit=120)
    assert found["whole"]["gradient"] < 1e-5, "one micro-batch: mean over its tokens is the mean over all"
    assert found["whole"]["loss"] == pytest.approx(found["judge"], rel=1e-5)
    assert found["split"]["loss"] == pytest.approx(found["mean of means"], rel=1e-5)
    assert found["split"]["gradient"] > 1e-2, "several micro-batches: not the gradient of the mean over tokens"
