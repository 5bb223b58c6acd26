"""Pipeline bubbles in reports: table, pictures, trace files and sentence from the records of cells."""

from __future__ import annotations

import json

from bench.bubbles import timelines
from bench.record import read_records
from bench.summary import Summary
from bench.tests.made_up import SIZES, bubble_series
from bench.tests.pages import markdown
from suites.matrix import Cell, Layout


def cells():
    common = {"suite": "bubbles", "workload": "rl-code-16k-cap", "model": SIZES, "rows": 24, "micro_batch_size": 4}
    return [Cell(**common, layout=layout) for layout in (Layout(pp=2), Layout(pp=2, vpp=2))]


def test_bubbles_have_a_table_pictures_trace_files_and_a_sentence(add_suite, weigh) -> None:
    add_suite("bubbles", lambda cell, device: bubble_series(cell))
    folder = weigh(*cells())
    page = markdown(folder)
    rows = [line for line in page.splitlines() if line.startswith("| rl-code-16k-cap<br>pp2")]
    assert len(rows) == 2
    texts = [text.strip() for text in rows[0].strip("| ").split("|")]
    assert texts[0] == "rl-code-16k-cap<br>pp2, 24 rows, paced"
    assert texts[1].startswith("6 / ")
    assert texts[6] == "2.0 / 2.0"
    for picture in ("bubble_counts.png", "gantt_vpp1.png", "gantt_vpp2.png"):
        assert (folder / picture).stat().st_size > 10_000
        assert picture in page
    assert "(paced), its predicted time off by 2.0% in the median and 2.0% at worst" in page.splitlines()[0]
    for name in ("pp2", "pp2-vpp2"):
        file = f"traces/bubbles_rl-code-16k-cap_{name}_24-rows.json"
        assert f"[{file}]({file})" in page
        events = json.loads((folder / file).read_text())["traceEvents"]
        processes = [event["args"]["name"] for event in events if event["name"] == "process_name"]
        assert processes == [
            f"{side}, {source}: stage {stage}"
            for side in ("naive", "optimised")
            for source in ("paced", "predicted")
            for stage in range(2)
        ]
    assert "Other metrics" not in page


def test_the_timelines_in_the_records_are_those_of_the_fastest_step(add_suite, weigh) -> None:
    add_suite("bubbles", lambda cell, device: bubble_series(cell))
    folder = weigh(cells()[0])
    (cell, row), *_ = Summary.of(read_records(folder).lines).bubbles
    for side, error in zip(("naive", "optimised"), row.error, strict=True):
        fastest = min(cell.find("makespan", side).values)
        assert abs(max(span.end for span in timelines(cell)[side, "paced"]) - fastest) < 1e-5
        assert abs(fastest / cell.find("predicted_makespan", side).values[0] - 1 - error) < 1e-9


def test_a_prediction_that_is_far_off_fails_its_cell(add_suite, weigh) -> None:
    add_suite("bubbles", lambda cell, device: bubble_series(cell, slower=1.2))
    (cell, _), *_ = Summary.of(read_records(weigh(cells()[0])).lines).bubbles
    assert cell.status == "failed"
    assert "prediction_error" in cell.reason


def test_a_bubbles_cell_without_samples_is_shown(add_suite, weigh) -> None:
    add_suite("bubbles", lambda cell, device: [])
    folder = weigh(cells()[0])
    page = markdown(folder)
    assert "| rl-code-16k-cap<br>pp2, 24 rows, paced | - / - | - / - | - | - / - |" in page
    assert not (folder / "bubble_counts.png").exists()
    assert not (folder / "traces").exists()
