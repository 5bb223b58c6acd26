"""Verdicts on runs that differ in one known thing."""

from __future__ import annotations

import numpy as np
import pytest

from bench.compare import ALPHA, Comparison, Report, Verdict, compare
from bench.record import Records, SeriesRecord
from bench.stats import holm, least_p_value, p_values
from bench.tests.judged_runs import PAIRS, made_run, steps
from bench.tests.made_up import parity_series, planning_series
from suites.measure import Series


def only(report: Report, **facts: object) -> Comparison:
    found = [one for one in report.comparisons if all(getattr(one, name) == fact for name, fact in facts.items())]
    assert len(found) == 1, report.comparisons
    return found[0]


@pytest.mark.parametrize(
    ("factor", "verdict", "exit_code"), [(1.05, "regressed", 1), (0.95, "improved", 0), (1.0, "neutral", 0)]
)
def test_five_per_cent_in_interleaved_runs_is_seen_both_ways(factor: float, verdict: str, exit_code: int) -> None:
    report = compare(made_run(*steps()), made_run(*steps(factor, seed=1)))
    assert (report.verdict, report.exit_code) == (verdict, exit_code)
    one = only(report)
    assert (one.metric, one.side, one.basis) == ("tokens_per_second", "optimised", "interleaved")
    assert one.ratio.low <= one.ratio.value <= one.ratio.high


def test_a_certain_difference_below_the_threshold_is_of_no_interest() -> None:
    one = only(compare(made_run(*steps()), made_run(*steps(1.02))))
    assert one.p < ALPHA
    assert one.verdict == Verdict.neutral


def test_a_large_difference_that_may_be_chance_is_no_verdict() -> None:
    values = [1.0, 9.0] * 10
    series = [Series("step_seconds", "optimised", "s", "lower", one) for one in (values, [*values[1:], 0.5])]
    one = only(compare(made_run(series[0]), made_run(series[1])))
    assert one.verdict == Verdict.neutral


def test_few_samples_cannot_be_certain() -> None:
    report = compare(made_run(*steps(pairs=5)), made_run(*steps(2.0, pairs=5)))
    assert (only(report).verdict, report.exit_code) == (Verdict.too_few, 3)


def test_a_run_against_itself_is_neutral_however_few_samples_it_has() -> None:
    run = made_run(*steps(pairs=2))
    assert compare(run, run).verdict == Verdict.neutral


def test_a_slower_machine_between_runs_is_not_taken_for_a_slower_step() -> None:
    report = compare(made_run(*steps()), made_run(*steps(seed=1, machine=1.3), run="other"))
    assert only(report, basis="apart").verdict == Verdict.neutral
    assert only(report, basis="alone").verdict == Verdict.neutral


def test_between_runs_the_ratio_to_the_naive_side_finds_a_slower_step() -> None:
    report = compare(made_run(*steps()), made_run(*steps(1.3, seed=1, machine=0.7), run="other"))
    assert only(report, basis="apart").verdict == Verdict.regressed
    assert report.exit_code == 1


def test_between_runs_samples_of_equal_draws_are_pairs() -> None:
    draws = np.linspace(1.0, 50.0, PAIRS)
    runs = [Series("planning_ms", "optimised", "ms", "lower", list(factor * draws)) for factor in (1.0, 1.4)]
    assert only(compare(made_run(runs[0]), made_run(runs[1], run="other"))).verdict == Verdict.regressed


@pytest.mark.parametrize(
    ("facts", "word"),
    [
        ({"device_name": "another"}, "device_name"),
        ({"torch": "2.99"}, "torch"),
        ({"megatron_core": "0.99"}, "megatron_core"),
        ({"cores": 64}, "cores"),
        ({"case": {"rows": 8}}, "rows"),
        ({"case": {"scale": 1.0}}, "scale"),
    ],
)
def test_another_machine_library_or_case_is_not_comparable(facts: dict, word: str) -> None:
    report = compare(made_run(*steps()), made_run(*steps(), **facts))
    assert (report.verdict, report.exit_code) == (Verdict.not_comparable, 3)
    assert word in only(report).reason


def test_another_number_of_pairs_is_comparable() -> None:
    report = compare(made_run(*steps()), made_run(*steps(pairs=30), case={"pairs": 30}))
    assert report.verdict == Verdict.neutral


def count(value: float, **facts: object) -> Series:
    return Series("micro_batches", "optimised", "micro-batches", **{"direction": "lower", "values": [value], **facts})


@pytest.mark.parametrize(("value", "verdict"), [(21, "regressed"), (19, "improved"), (20, "neutral")])
def test_one_sample_of_a_count_is_enough(value: float, verdict: str) -> None:
    assert only(compare(made_run(count(20)), made_run(count(value)))).verdict == verdict


def test_a_count_without_a_better_way_must_not_change_at_all() -> None:
    facts = {"direction": "none"}
    assert compare(made_run(count(20, **facts)), made_run(count(19, **facts))).exit_code == 1


def test_one_byte_more_is_a_regression_where_bytes_are_predicted() -> None:
    runs = [
        made_run(Series("peak_bytes", "optimised", "B", "lower", [size], "predicted")) for size in (2**36, 2**36 + 1)
    ]
    one = only(compare(*runs))
    assert (one.basis, one.verdict) == ("exact", Verdict.regressed)


def test_a_prediction_that_rests_on_measured_costs_is_not_exact() -> None:
    for suite, judged in (("bubbles", 0), ("planning", 1)):
        series = [Series("predicted_overhead", "optimised", "1", "lower", [one], "predicted") for one in (0.1, 0.2)]
        runs = [made_run(one, case={"suite": suite}) for one in series]
        assert len(compare(*runs).comparisons) == judged


def test_exact_metrics_are_judged_between_machines() -> None:
    runs = [made_run(count(value), *steps(), **facts) for value, facts in ((20, {}), (21, {"device_name": "other"}))]
    report = compare(*runs)
    assert only(report, metric="micro_batches").verdict == Verdict.regressed
    assert report.exit_code == 1
    assert len(compare(*runs, exact_only=True).comparisons) == 1


def test_every_draw_that_both_have_counts() -> None:
    before, after = count(0, values=[20, 21, 22]), count(0, values=[20, 22])
    one = only(compare(made_run(before), made_run(after)))
    assert one.verdict == Verdict.regressed
    assert "from 21 to 22" in one.reason


@pytest.mark.parametrize(("error", "verdict"), [(9e-6, "neutral"), (2e-5, "regressed")])
def test_a_metric_with_a_limit_is_judged_by_it(error: float, verdict: str) -> None:
    report = compare(made_run(*parity_series(1e-7)), made_run(*parity_series(error)))
    assert only(report, metric="parity_max_error").verdict == verdict


def test_a_metric_that_one_run_lacks_is_missing() -> None:
    for runs in ((steps(), steps()[:1]), (steps()[:1], steps())):
        report = compare(*(made_run(*series) for series in runs))
        assert (report.verdict, report.exit_code) == (Verdict.missing, 3)


def test_a_cell_that_failed_in_both_runs_is_missing_not_unchanged() -> None:
    report = compare(made_run(status="failed"), made_run(status="failed"))
    assert (report.verdict, report.exit_code) == (Verdict.missing, 3)
    assert "a rank died" in only(report).reason


def test_a_regression_outweighs_all_else() -> None:
    slow = [*steps(1.2, seed=1), count(20)]
    assert compare(made_run(*steps()), made_run(*slow)).exit_code == 1


def test_other_planners_times_are_not_judged_but_their_counts_are() -> None:
    report = compare(made_run(*planning_series()), made_run(*planning_series()))
    judged = {(one.metric, one.variant) for one in report.comparisons}
    assert ("micro_batches", "N4") in judged
    assert ("planning_ms", "N4") not in judged


def test_more_metrics_need_more_certainty() -> None:
    # Each of 20 metrics alone would be called certain at 2 %; a report on equal runs must not be.
    assert (holm(np.full(20, 0.02)) > ALPHA).all()
    assert holm(np.array([0.001, 0.04, 0.03])) == pytest.approx([0.003, 0.06, 0.06])


def test_the_least_p_value_is_the_one_of_complete_separation() -> None:
    low, high = np.arange(1.0, 9.0), np.arange(11.0, 20.0)
    assert p_values(high, low, paired=False) == pytest.approx(least_p_value(9, 8, paired=False))
    assert p_values(low + np.arange(8) + 1, low, paired=True) == pytest.approx(least_p_value(8, 8, paired=True))


def slower(*, reversed_pairs: int, pairs: int = 12) -> Records:
    """Ten cells; in the first the optimised side is 5 % slower in all pairs but some."""
    ratios = [1.05 + 0.001 * at for at in range(pairs - reversed_pairs)] + [0.999] * reversed_pairs
    lines = []
    for at in range(10):
        values = ratios if at == 0 else [1.0 + 0.001 * (-1) ** one for one in range(pairs)]
        series = Series("step_seconds", "optimised", "s", "lower", values)
        lines += [one.model_copy(update={"cell": f"cell {at}"}) for one in made_run(series).lines]
    return Records(tuple(lines))


def first_cells(records: Records, count: int) -> Records:
    return Records(records.lines[: 2 * count])


def test_what_is_certain_for_one_metric_may_be_chance_among_ten() -> None:
    level = made_run(Series("step_seconds", "optimised", "s", "lower", [1.0] * 12))
    level = Records(tuple(one.model_copy(update={"cell": f"cell {at}"}) for at in range(10) for one in level.lines))
    almost = slower(reversed_pairs=1)
    assert compare(first_cells(level, 1), first_cells(almost, 1)).verdict == Verdict.regressed
    assert only(compare(level, almost), cell="cell 0").verdict == Verdict.neutral
    assert only(compare(level, slower(reversed_pairs=0)), cell="cell 0").verdict == Verdict.regressed


def test_samples_enough_for_one_metric_may_be_too_few_among_ten() -> None:
    ten = slower(reversed_pairs=0, pairs=10)
    level = Records(
        tuple(
            one.model_copy(update={"values": (1.0,) * 10} if isinstance(one, SeriesRecord) else {}) for one in ten.lines
        )
    )
    assert compare(first_cells(level, 1), first_cells(ten, 1)).verdict == Verdict.regressed
    assert only(compare(level, ten), cell="cell 0").verdict == Verdict.too_few
