"""Thresholds in reports: table, picture and sentence from the records of cells."""

from __future__ import annotations

from bench.record import read_records
from bench.report.markdown import write_report
from bench.summary import Summary
from bench.tests.made_up import make_cell
from suites.measure import Series

LENGTHS = (8192, 16384, 32768, 65536, 131072)


def threshold(side: str, tokens: int, variant: str = "", **notes: object) -> Series:
    if tokens and not notes:
        notes = {
            "capacity_gib": 80.0,
            "reserve_gib": 4.0,
            "breaks_first": "logits and loss of the only stage in the phase 'backward'",
            "peak_gib": {str(length): 40.0 + 36.0 * length / tokens for length in LENGTHS},
            "parts_gib": {"activations": 10.0, "temporary": 2.0, "logits and loss": 7.0, "parameters": 20.0},
            "batch_gib": 0.01,
            "ran_at": [8192, tokens],
            "extrapolated": True,
        }
    return Series("threshold_tokens", side, "tokens", "higher", [tokens], "predicted", None, variant, notes)


def oom_series() -> list[Series]:
    peaks = {("naive", 2): 30.0, ("naive", 8): 90.0, ("optimised", 2): 18.0, ("optimised", 8): 18.04}
    return [
        threshold("optimised", 24000),
        threshold("optimised", 12000, "fixed micro-batches", computed="24000 tokens over the rows"),
        threshold("naive", 10000),
        threshold("naive", 8000, "outputs with graph"),
        *(
            Series("log_prob_peak_gib", side, "GiB", "lower", [peak], "predicted", None, f"{count} micro-batches")
            for (side, count), peak in peaks.items()
        ),
        Series("real_threshold_tokens", "naive", "tokens", "higher", [9800],
               notes={"failure": "out of memory at 9,900 tokens"}),
        Series("threshold_error", "naive", "1", "lower", [0.02], limit=0.05),
    ]  # fmt: skip


def table_row(page: str) -> list[str]:
    row = next(line for line in page.splitlines() if line.startswith("| 4 layers of 64<br>1 rank, actor"))
    return [text.strip() for text in row.strip("| ").split("|")]


def test_thresholds_have_a_table_a_picture_and_a_sentence(add_suite, weigh) -> None:
    add_suite("oom", lambda cell, device: oom_series())
    folder = weigh(make_cell("oom"))
    page = write_report(folder, read_records(folder)).read_text()
    assert table_row(page)[:8] == [
        "4 layers of 64<br>1 rank, actor, ext.",
        "80",
        "10,000 / 8,000",
        "12,000 / 24,000",
        "2.40",
        "0.01 / 12.00 / 7.00",
        "30.0 -> 90.0<br>18.0 -> 18.0",
        "9,800 (2.0%)<br>out of memory at 9,900 tokens",
    ]
    assert (folder / "oom.png").stat().st_size > 10_000
    assert "oom.png" in page
    sentence = page.splitlines()[0]
    assert "responses 2.4 times as long fit (predicted); real failures at worst 2.0% from their prediction" in sentence
    assert "Other metrics" not in page


def test_a_layout_that_nothing_fits_is_shown_with_its_reason(add_suite, weigh) -> None:
    refused = {"capacity_gib": 80.0, "reserve_gib": 4.0, "does_not_fit": "capacity=80 GiB is too small"}
    add_suite("oom", lambda cell, device: [threshold("optimised", 0, **refused), threshold("naive", 0, **refused)])
    folder = weigh(make_cell("oom"))
    texts = table_row(write_report(folder, read_records(folder)).read_text())
    assert texts[2:5] == ["0 / -", "- / 0", "-"]
    assert "too small" in texts[8]
    assert not (folder / "oom.png").exists()


def test_a_cell_without_samples_is_shown(add_suite, weigh) -> None:
    add_suite("oom", lambda cell, device: [])
    folder = weigh(make_cell("oom"))
    ((_, row),) = Summary.of(read_records(folder).lines).oom
    assert row.gain is None
    assert table_row(write_report(folder, read_records(folder)).read_text())[1:5] == ["-", "- / -", "- / -", "-"]
