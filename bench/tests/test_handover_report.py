"""Hand-overs in reports: table, picture and sentence from the records of cells."""

from __future__ import annotations

from bench.handover import WAYS
from bench.record import read_records
from bench.summary import Summary
from bench.tests.made_up import make_cell
from bench.tests.pages import markdown
from suites.measure import Series

NOTES = {"capacity_gib": 80.0, "stage": "last", "held_gib": {"params": 3.5, "grads": 7.0, "optimizer": 10.5}}


def handover_series(on_cuda: bool) -> list[Series]:
    notes = {} if on_cuda else {"copies": "from host memory to host memory"}
    series = [
        Series("step_reserved_gib", "both", "GiB", "none", [70.0], "predicted"),
        Series("loss_difference", "both", "1", "lower", [0.0], limit=0.0),
    ]
    for at, (side, variant) in enumerate(WAYS):
        series += [
            Series("engine_gib", side, "GiB", "higher", [50.0 + 10 * at], "predicted", None, variant, NOTES),
            Series("out_ms", side, "ms", "lower", [at + 1.0, at + 1.2, at + 1.1], variant=variant, notes=notes),
            Series("back_ms", side, "ms", "lower", [10.0 * (at + 1)], variant=variant, notes=notes),
        ]
        if on_cuda:
            series.append(Series("device_free_gib", side, "GiB", "higher", [49.0 + 11 * at], variant=variant))
    if on_cuda:
        series += [
            Series("step_ms", "naive", "ms", "lower", [150.0]),
            Series("step_ms", "optimised", "ms", "lower", [120.0]),
        ]
    return series


def table_row(page: str) -> list[str]:
    row = next(line for line in page.splitlines() if line.startswith("| rl-code-16k-cap<br>1 rank, actor"))
    return [text.strip() for text in row.strip("| ").split("|")]


def test_a_hand_over_has_a_table_a_picture_and_a_sentence(add_suite, weigh) -> None:
    add_suite("handover", lambda cell, device: handover_series(on_cuda=True))
    folder = weigh(make_cell("handover"))
    page = markdown(folder)
    assert table_row(page)[1:10] == [
        "80",
        "3.50<br>7.00<br>10.50",
        "50.00 / 60.00<br>70.00 / 80.00",
        "20.00<br>22.00 measured",
        "49.00 / 60.00<br>71.00 / 82.00",
        "1.1 / 2.1<br>3.1 / 4.1",
        "10 / 20<br>30 / 40",
        "150 / 120",
        "0",
    ]
    assert (folder / "handover.png").stat().st_size > 10_000
    assert "handover.png" in page
    assert "leaves the rollout engine 20.00 GiB more (predicted), 22.00 GiB more (measured)" in page.splitlines()[0]
    assert "Other metrics" not in page


def test_host_copies_say_so_and_predictions_are_not_called_measured(add_suite, weigh) -> None:
    add_suite("handover", lambda cell, device: handover_series(on_cuda=False))
    folder = weigh(make_cell("handover"))
    page = markdown(folder)
    texts = table_row(page)
    assert texts[4:6] == ["20.00", "-"]
    assert texts[6].endswith("host")
    assert texts[7].endswith("host")
    assert "GiB more (measured)" not in page


def test_a_cell_without_samples_is_shown(add_suite, weigh) -> None:
    add_suite("handover", lambda cell, device: [])
    folder = weigh(make_cell("handover"))
    (_, row), *_ = Summary.of(read_records(folder).lines).handover
    assert row.gain is None
    assert table_row(markdown(folder))[1:4] == ["-", "-", "-"]
