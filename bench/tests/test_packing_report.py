"""Packing in reports: table, picture and sentence from the records of a cell."""

from __future__ import annotations

from bench.record import read_records
from bench.summary import Summary
from bench.tests.made_up import make_cell
from bench.tests.pages import markdown
from suites.measure import Series


def packing_series() -> list[Series]:
    series = [
        Series("packed_padding", "both", "1", "none", [0.0004]),
        Series("padded_padding", "both", "1", "none", [0.5]),
    ]
    for side, scale in (("naive", 10.0), ("optimised", 1.0)):
        for metric in ("packing_ms", "pack_ms", "labels_ms", "unpack_ms", "log_probs_ms"):
            series.append(Series(metric, side, "ms", "lower", [scale * x for x in (1.0, 1.1, 0.9)]))
        series.append(Series("host_reads", side, "reads", "lower", [2564 if side == "naive" else 0]))
        series.append(Series("index_bytes", side, "B", "lower", [0]))
        series.append(Series("staging_bytes", side, "B", "lower", [scale * 2**20]))
        series.append(Series("logits_gib", side, "GiB", "lower", [1234.5 * scale]))
    return series


def test_packing_has_a_table_a_picture_and_a_sentence(add_suite, weigh) -> None:
    add_suite("packing", lambda cell, device: packing_series())
    folder = weigh(make_cell("packing"))
    page = markdown(folder)
    row = next(line for line in page.splitlines() if line.startswith("| rl-code-16k-cap<br>1 rank, 4 rows"))
    texts = [text.strip() for text in row.strip("| ").split("|")]
    assert texts[1] == "10 / 1"
    assert texts[2].startswith("10.00 [10.00, 10.00]<br>10.0, 10.0, 10.0")
    assert texts[3:8] == ["2,564 / 0", "10 / 1", "50 / 0.04", "10.0", "12,345 / 1,234"]
    assert (folder / "packing.png").exists()
    assert "packing.png" in page
    assert "packing is 10.0 times as fast as with host reads" in page.splitlines()[0]
    assert "Other metrics" not in page


def test_a_packing_cell_without_samples_is_shown(add_suite, weigh) -> None:
    add_suite("packing", lambda cell, device: [])
    folder = weigh(make_cell("packing"))
    (_, row), *_ = Summary.of(read_records(folder).lines).packing
    assert row.ratio is None
    assert "| rl-code-16k-cap<br>1 rank, 4 rows | - / - | -<br>-, -, - |" in markdown(folder)
