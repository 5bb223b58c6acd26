"""Overrides in reports: one row for each case over all layouts, and what was lost or not caught stands in it."""

from __future__ import annotations

from bench.record import read_records
from bench.summary import Summary
from bench.tests.made_up import make_cell
from bench.tests.pages import markdown
from suites.matrix import Layout
from suites.measure import Series


def override_series(lost: str = "", caught: bool = True) -> list[Series]:
    """One case through two builders and N12; ``lost`` names the builder on whose way it was lost."""
    series = []
    for builder in ("megatron", "mbridge", "N12"):
        naive = builder == "N12"
        arrives = float(not caught) if naive else float(builder != lost)
        notes = {"builder": builder, "case": 0, "field": "bucket_size", "asked": "bucket_size=9, overlap=True"}
        notes |= {"observed": f"buckets of {builder}", "others": []}
        side, direction, limit = ("naive", "lower", 0.0) if naive else ("optimised", "higher", 1.0)
        series.append(
            Series(
                "override_arrives", side, "1", direction, [arrives], limit=limit, variant=f"{builder} 0", notes=notes
            )
        )
    return series


def test_a_case_over_two_layouts_is_one_row(add_suite, weigh) -> None:
    add_suite("overrides", lambda cell, device: override_series("mbridge" if cell.layout.dp == 2 else ""))
    folder = weigh(make_cell("overrides"), make_cell("overrides", layout=Layout(dp=2)))
    page = markdown(folder)
    (row,) = [line for line in page.splitlines() if line.startswith("| bucket_size |")]
    texts = [text.strip() for text in row.strip("| ").split("|")]
    assert texts[1] == "bucket_size=9<br>overlap=True"
    assert texts[2:6] == ["buckets of megatron", "buckets of mbridge<br>LOST ON dp2", "buckets of N12", "2"]
    assert "3 of 4 overrides arrive" in page.splitlines()[0]
    assert "Other metrics" not in page


def test_an_override_that_was_lost_and_not_caught_fails_its_cell(add_suite, weigh) -> None:
    add_suite("overrides", lambda cell, device: override_series(caught=False))
    folder = weigh(make_cell("overrides"))
    summary = Summary.of(read_records(folder).lines)
    assert [cell.status for cell in summary.cells] == ["failed"]
    (row,) = summary.overrides
    assert not row.passed
    assert "NOT CAUGHT ON 1 rank" in markdown(folder)
