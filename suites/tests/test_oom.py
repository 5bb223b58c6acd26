"""The longest response: predictions of every way, and a real threshold that they stand within 5 % of."""

import pytest
import torch

from steelyard.errors import InputError
from suites import SUITES, matrix, memory_limit, oom
from suites.matrix import Cell, Layout, Sizes
from suites.oom import FIXED, GRAPHS, GROWTH, WHOLE, Case, Way

SIZES = Sizes(layers=4, hidden=64, ffn=128, heads=4, kv_heads=2, head_dim=16, vocab=4096)
SMALL = Sizes(layers=2, hidden=64, ffn=128, heads=4, kv_heads=2, head_dim=16, vocab=4096)
CPU = torch.device("cpu")


def make_cell(**settings):
    given = {"rows": 8, "micro_batch_size": 2, "dtype": "bfloat16", "capacity_gib": 5.0, "model": SIZES, **settings}
    return Cell(suite="oom", workload="rl-code-16k-cap", **given)


def by_way(series):
    return {(one.side, one.variant): one for one in series if one.metric == "threshold_tokens"}


@pytest.fixture(scope="module")
def on_two_ranks():
    return oom.measure(make_cell(layout=Layout(dp=2)), device="cpu")


def test_a_cell_predicts_every_way_and_says_what_is_extrapolated(on_two_ranks):
    found = by_way(on_two_ranks)
    tokens = {way: one.values[0] for way, one in found.items()}
    best = tokens["optimised", ""]
    assert tokens["naive", ""] < best, "two rows to a micro-batch"
    assert tokens["naive", GRAPHS] < best
    assert tokens["naive", WHOLE] < best, "float32 logits of whole rows"
    assert tokens["optimised", FIXED] == best // 2
    assert found["optimised", FIXED].notes["computed"]
    for way in (("optimised", ""), ("naive", ""), ("naive", WHOLE), ("naive", GRAPHS)):
        notes = found[way].notes
        assert notes["extrapolated"] is True
        assert notes["breaks_first"]
        # The line passes through the threshold: shorter rows fit, and the first that is longer does not.
        for length, peak in notes["peak_gib"].items():
            assert (peak <= 1.0) == (int(length) <= found[way].values[0])
    assert {one.source for one in on_two_ranks} == {"predicted"}


def test_more_micro_batches_cost_only_the_naive_side(on_two_ranks):
    found = {(one.side, one.variant): one for one in on_two_ranks if one.metric == "peak_growth"}
    assert set(found) == {("naive", "log-probs"), ("optimised", "log-probs"), ("optimised", "training")}
    assert found["naive", "log-probs"].values[0] > 2
    assert found["naive", "log-probs"].limit is None
    for what in ("log-probs", "training"):
        one = found["optimised", what]
        assert 0 <= one.values[0] < one.limit == GROWTH
        few, many = one.notes["micro_batches"]
        assert many == 4 * few


def test_packed_rows_hold_what_one_row_of_as_many_tokens_does():
    case = Case(make_cell(layout=Layout(dp=2)), CPU)

    def peak(parts):
        return oom.predict_peak(case.shape, case.layout, parts, **case.settings).peak_bytes

    assert peak([[2048, 2048]] * 2) == pytest.approx(peak([[4096]] * 2), rel=0.002)


def test_a_budget_fills_shorter_rows_up_to_it():
    cell = make_cell(layout=Layout(cp=2), max_tokens=8192)
    (one, _) = oom.thresholds(Case(cell, CPU), Case(cell, CPU).ways()[0])
    peak = one.notes["peak_gib"]
    assert peak["8192"] == peak["16384"] < peak["32768"]


def test_a_budget_that_does_not_fit_lets_no_row_fit():
    cell = make_cell(layout=Layout(dp=2), max_tokens=65536)
    one, fixed = oom.thresholds(Case(cell, CPU), Case(cell, CPU).ways()[0])
    assert one.values == [0]
    assert "filled to 65536 tokens" in one.notes["breaks_first"]
    assert fixed.values[0] > 0


def test_what_does_not_fit_is_a_threshold_of_zero_and_other_bad_input_is_not():
    cell = make_cell(layout=Layout(dp=2), capacity_gib=4.001)
    (one,) = oom.thresholds(Case(cell, CPU), Case(cell, CPU).ways()[0])
    assert one.values == [0]
    assert "use at least 5 GiB" in one.notes["does_not_fit"]
    bad = Way("naive", "", lambda tokens: [])
    with pytest.raises(InputError, match="rows of more than"):
        oom.thresholds(Case(cell, CPU), bad)


def test_context_parallel_layouts_have_no_naive_side():
    cell = make_cell(layout=Layout(cp=2, cp_kind="all_to_all"))
    assert [(way.side, way.variant) for way in Case(cell, CPU).ways()] == [("optimised", "")]


def test_a_real_step_fails_where_it_is_predicted_to():
    cell = make_cell(model=SMALL, dtype="float32", capacity_gib=0.4, time_limit=120.0)
    series = oom.measure(cell, device="cpu")
    for side in ("naive", "optimised"):
        real, error = (
            next(one for one in series if (one.metric, one.side) == (metric, side))
            for metric in ("real_threshold_tokens", "threshold_error")
        )
        assert real.source == "measured"
        at = int(real.notes["failure"].removeprefix("out of memory at ").removesuffix(" tokens"))
        assert real.values[0] < at <= 1.02 * real.values[0]
        assert "can't allocate memory" in real.notes["message"]
        assert error.values[0] <= error.limit == 0.05
        assert by_way(series)[side, ""].notes["extrapolated"] is False


@pytest.mark.parametrize(("most", "start"), [(3, 1000), (700, 2), (5000, 100_000)])
def test_the_search_ends_between_what_runs_and_what_fails(most, start):
    def step(tokens):
        if tokens > most:
            raise MemoryError("can't allocate memory")

    found = memory_limit.until_it_fails(step, start)
    assert found.passed <= most < found.failed
    assert found.failed - found.passed <= max(1, 0.01 * found.failed)


def test_another_failure_is_not_taken_for_memory():
    def step(tokens):
        raise RuntimeError("shape mismatch")

    with pytest.raises(RuntimeError, match="shape mismatch"):
        memory_limit.until_it_fails(step, 64)


def test_the_matrix_asks_the_users_questions():
    cells = matrix.load("oom", list(SUITES)).cells()
    layouts = {(cell.model.layers, str(cell.layout.parallel()), cell.recompute) for cell in cells}
    for layout in (
        "dp8",
        "dp64",
        "dp256",
        "tp2+sp dp4",
        "tp2 dp4",
        "tp2+sp cp2(a2a) dp2",
        "tp2+sp cp2 dp2",
        "tp2+sp pp2 dp2",
    ):
        assert (28, layout, "none") in layouts
    assert {cell.layout.parallel().world for cell in cells} == {1, 8, 64, 256}
    assert {cell.model.layers for cell in cells} >= {28, 64}
    one_more = {(cell.recompute, cell.max_tokens) for cell in cells if str(cell.layout.parallel()) == "tp2+sp dp4"}
    assert one_more == {("none", None), ("selective", None), ("full", None), ("none", 32768)}


def test_the_inputs_that_are_told_are_those_of_a_batch_moved_before_the_split():
    cell = make_cell(layout=Layout(dp=2), rows=6)
    case = Case(cell, CPU)
    names = ("ref_log_prob", "rollout_log_probs")

    def moved(batch, models, optimizer):
        # Predictions make the fields that a role reads; trainers hand over two more.
        whole = batch | {name: batch["values"].clone() for name in names}
        there = {name: value.to(torch.cuda.current_device()) for name, value in whole.items()}
        assert there

    found = oom.predict_peak(case.shape, case.layout, [[512]] * 3, step=moved, **case.settings)
    assert found.phases["forward"].parts["inputs"] == pytest.approx(oom.batch_bytes(cell, 512), rel=0.02)
