"""Reports: every picture and table is there, failed cells do no harm, and every number leads to its record."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from matplotlib import image

from bench.record import FILE_NAME, read_records
from bench.summary import Summary
from bench.tests.made_up import make_cell, parity_series, planning_series, throughput_series
from bench.tests.pages import markdown
from suites.launch.local import RanksFailed
from suites.matrix import Cell, Layout
from suites.measure import Series


def fail_on_pipelines(series: Callable[[], list[Series]]) -> Callable[[Cell, str | None], list[Series]]:
    def measure(cell: Cell, device: str | None = None) -> list[Series]:
        if cell.layout.pp > 1:
            raise RanksFailed("rank 1 was ended by signal SIGKILL", "--- rank 1 ---\nthe | detail")
        return series()

    return measure


@pytest.fixture
def mixed_run(add_suite, weigh) -> Path:
    """Two suites, each with a cell that passed and one that failed."""
    add_suite("throughput", fail_on_pipelines(throughput_series))
    add_suite("parity", fail_on_pipelines(parity_series))
    return weigh(*(make_cell(suite, layout=Layout(pp=pp)) for suite in ("throughput", "parity") for pp in (1, 2)))


def report(folder: Path) -> str:
    return markdown(folder)


def test_verdict_comes_first(mixed_run: Path) -> None:
    first = report(mixed_run).splitlines()[0]
    assert first.startswith("**Failed: 2 of 4 cells passed, 2 failed; the optimised step is 2.01 times as fast")
    assert "worst parity error 3.0e-07 (limit 1e-05)" in first


def test_pictures_are_there_and_linked_by_relative_path(mixed_run: Path) -> None:
    linked = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", report(mixed_run))
    assert linked == ["ratio.png", "tokens.png", "cap.png", "parity.png", "parity_heat.png"]
    for name in linked:
        assert image.imread(mixed_run / name).std() > 0.01


def test_tables_show_the_figures_of_each_side(mixed_run: Path) -> None:
    row = next(line for line in report(mixed_run).splitlines() if line.startswith("| rl-code-16k-cap<br>1 rank, actor"))
    texts = [text.strip() for text in row.strip("| ").split("|")]
    assert texts[1:3] == ["100.5", "202"]
    assert re.fullmatch(r"2\.01 \[\d\.\d\d, \d\.\d\d\]", texts[3])
    assert texts[4:10] == ["2.50", "4,000", "1,616", "99.3%", "4 / 3", "1.0e-06"]


def test_rows_link_to_their_lines(mixed_run: Path) -> None:
    lines = read_records(mixed_run).lines
    links = re.findall(rf"\({FILE_NAME}#L(\d+)(?:-L(\d+))?\)", report(mixed_run))
    assert links
    for first, last in links:
        assert lines[int(first) - 1].cell == lines[int(last or first) - 1].cell


def test_a_failed_cell_shows_its_reason_and_traceback(mixed_run: Path) -> None:
    page = report(mixed_run)
    assert "| throughput/rl-code-16k-cap/pp2/actor | failed | rank 1 was ended by signal SIGKILL |" in page
    assert "the | detail" in page


def test_metrics_without_a_table_of_their_own_are_listed(add_suite, weigh) -> None:
    add_suite("new", lambda cell, device: [Series("bubble_share", "both", "1", "lower", [0.1, 0.3], "predicted")])
    page = report(weigh(make_cell("new")))
    assert "| new/rl-code-16k-cap/1/actor | bubble_share | both | predicted | 1 | 0.2 | 0.1 | 0.3 | 2 |" in page
    assert "![" not in page


@pytest.mark.parametrize("error", [0.0, 1e-300, 1e-12, math.nan, math.inf, 1e300])
def test_extreme_errors_are_drawn(add_suite, weigh, error: float) -> None:
    add_suite("parity", lambda cell, device: parity_series(error=error))
    folder = weigh(make_cell("parity"), make_cell("parity", role="critic"))
    assert "parity.png" in report(folder)
    assert (folder / "parity.png").exists()


def test_predicted_and_measured_are_told_apart(add_suite, weigh) -> None:
    add_suite("throughput", lambda cell, device: throughput_series(source="predicted"))
    assert "1 rank, actor, predicted" in report(weigh(make_cell("throughput")))


def test_a_run_that_was_cut_off_is_incomplete_and_says_so(mixed_run: Path) -> None:
    path = mixed_run / FILE_NAME
    path.write_bytes(path.read_bytes()[:-5])
    page = report(mixed_run)
    assert "half a record" in page
    assert Summary.of(read_records(mixed_run).lines).counts == {"passed": 2, "failed": 1, "lost": 0, "not_run": 0}
    # Without its outcome a cell did not run to its end, whatever samples it left.
    whole = [line for line in path.read_bytes().splitlines(keepends=True) if b'"pp":1' in line]
    path.write_bytes(b"".join(whole[:-1]))
    assert report(mixed_run).startswith("**Incomplete: 1 of 2 cells passed, 1 did not run")


def test_planners_have_a_scoreboard_and_those_that_break_the_cap_are_not_the_best(add_suite, weigh) -> None:
    add_suite("planning", lambda cell, device: planning_series())
    folder = weigh(*(make_cell("planning", layout=Layout(pp=pp)) for pp in (1, 4)))
    page = report(folder)
    assert page.startswith("**Passed: 2 of 2 cells passed; predicted time of the plans at worst 0.950 of the best")
    assert "| 20.0 | 20.0 | 21.0 FFD+KK | 1.150 | 1.250 FFD+KK | 0.950 | 0.600<br>[0.600] | 3.0% | 3 [3] | 90 |" in page
    rows = [line for line in page.splitlines() if line.startswith("| rl-code-16k-cap pp4 4 rows |")]
    assert [line.split(" | ")[1:4] for line in rows] == [
        ["Steelyard", "yes", "20.0"],
        ["FFD+KK", "yes", "21.0"],
        ["N4", "NO", "18.0"],
    ]
    linked = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", page)
    assert linked == ["planning_count.png", "planning_time.png", "planning_ms.png"]
    for name in linked:
        assert image.imread(folder / name).std() > 0.01


def test_a_planner_that_others_beat_fails_its_cell(add_suite, weigh) -> None:
    add_suite("planning", lambda cell, device: planning_series(ratio=1.02))
    page = report(weigh(make_cell("planning", layout=Layout(pp=4))))
    assert page.startswith("**Failed")
    assert "time_over_best_other is 1.02, above its limit 1" in page


def test_a_planner_without_any_plan_is_shown_as_refusing(add_suite, weigh) -> None:
    def refuses(cell: Cell, device: str | None) -> list[Series]:
        lower = {"side": "naive", "direction": "lower", "variant": "N3"}
        return [
            *planning_series(),
            Series("micro_batches", unit="micro-batches", values=[math.nan] * 2, **lower),
            Series("share_over_cap", unit="1", values=[math.nan] * 2, **lower),
            Series("rank_imbalance", unit="1", values=[math.nan] * 2, **lower),
            Series("time_over_ideal", unit="1", values=[math.inf] * 2, source="predicted", **lower),
            Series("planning_ms", unit="ms", values=[0.1] * 2, **lower),
        ]

    add_suite("planning", refuses)
    page = report(weigh(make_cell("planning", layout=Layout(pp=4))))
    assert "| N3 | - | - | 20.0 | - | - | - | - | 0.1 | 0.1 | 2 of 2 |" in page
