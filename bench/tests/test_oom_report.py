"""Thresholds in reports: tables, picture and sentence from the records of cells."""

from __future__ import annotations

from bench.oom_tables import answer_table, oom_table
from bench.record import read_records
from bench.report.oom_plots import oom_plot
from bench.summary import Summary
from bench.tests.made_up import make_cell
from suites.matrix import Layout
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
    peaks = {
        ("naive", "log-probs"): (30.0, 90.0),
        ("optimised", "log-probs"): (18.0, 18.04),
        ("optimised", "training"): (40.0, 40.1),
    }
    return [
        threshold("optimised", 24000),
        threshold("optimised", 12000, "fixed micro-batches", computed="24000 tokens over the rows",
                  peak_gib={str(length): 40.0 + 72.0 * length / 24000 for length in LENGTHS}),
        threshold("naive", 10000),
        threshold("naive", 20000, "whole logits"),
        threshold("naive", 8000, "outputs with graph"),
        *(
            Series("peak_growth", side, "1", "lower", [many / few - 1], "predicted",
                   0.01 if side == "optimised" else None, what, {"micro_batches": [2, 8], "peak_gib": [few, many]})
            for (side, what), (few, many) in peaks.items()
        ),
        Series("real_threshold_tokens", "naive", "tokens", "higher", [9800],
               notes={"failure": "out of memory at 9,900 tokens"}),
        Series("threshold_error", "naive", "1", "lower", [0.02], limit=0.05),
    ]  # fmt: skip


def summary_of(folder) -> Summary:
    return Summary.of(read_records(folder).lines)


def test_thresholds_have_a_table_a_picture_and_a_sentence(add_suite, weigh) -> None:
    add_suite("oom", lambda cell, device: oom_series())
    folder = weigh(make_cell("oom"))
    summary = summary_of(folder)
    (row,) = oom_table(summary).rows
    assert row.texts[:9] == (
        "4 layers of 64\n1 rank, actor, ext.",
        "80",
        "10,000 / 20,000 / 8,000",
        "12,000 / 24,000",
        "2.40",
        "10",
        "12.00 / 7.00",
        "N14 log-probs 2 -> 8:\n30.00 -> 90.00\nlog-probs 2 -> 8:\n18.00 -> 18.04\ntraining 2 -> 8:\n40.00 -> 40.10",
        "9,800 (2.0%)\nout of memory at 9,900 tokens",
    )
    assert oom_plot(summary, folder).file == "oom.png"
    assert (folder / "oom.png").stat().st_size > 10_000
    assert (
        "responses 2.4 times as long fit (predicted); more micro-batches raise the optimised peak by at most 0.2% "
        "(predicted); real failures at worst 2.0% from their prediction" in summary.sentence
    )


def test_a_layout_that_nothing_fits_is_shown_with_its_reason(add_suite, weigh) -> None:
    refused = {"capacity_gib": 80.0, "reserve_gib": 4.0, "does_not_fit": "capacity=80 GiB is too small"}
    add_suite("oom", lambda cell, device: [threshold("optimised", 0, **refused), threshold("naive", 0, **refused)])
    folder = weigh(make_cell("oom"))
    summary = summary_of(folder)
    (row,) = oom_table(summary).rows
    assert row.texts[2:5] == ("0 / - / -", "- / 0", "-")
    assert "too small" in row.texts[9]
    assert oom_plot(summary, folder) is None


def test_a_cell_without_samples_is_shown(add_suite, weigh) -> None:
    add_suite("oom", lambda cell, device: [])
    summary = summary_of(weigh(make_cell("oom")))
    ((_, row),) = summary.oom
    assert row.gain is None
    assert oom_table(summary).rows[0].texts[1:5] == ("-", "- / - / -", "- / -", "-")
    assert not answer_table(summary).rows


LAYOUTS = {
    "dp8": {"dp": 8},
    "dp64": {"dp": 64},
    "tp2 dp4": {"tp": 2, "sp": False, "dp": 4},
    "tp2+sp dp4": {"tp": 2, "dp": 4},
    "tp2+sp cp2 dp2": {"tp": 2, "cp": 2, "dp": 2},
    "tp2+sp cp2(a2a) dp2": {"tp": 2, "cp": 2, "cp_kind": "all_to_all", "dp": 2},
    "tp2+sp pp2 dp2": {"tp": 2, "pp": 2, "dp": 2},
}


def predicted(cell, device) -> list[Series]:
    tokens = 10_000 * cell.layout.tp * cell.layout.cp
    budget = {"peak_gib": dict.fromkeys(map(str, LENGTHS), 60.0)} if cell.max_tokens else {}
    best, fixed = threshold("optimised", tokens), threshold("optimised", tokens // 2, "fixed micro-batches")
    best.notes.update(budget)
    if cell.layout.cp > 1:
        return [best, fixed]
    return [best, fixed, threshold("naive", tokens // 3), threshold("naive", tokens // 2, "whole logits")]


def test_pairs_of_cells_answer_what_one_change_does(add_suite, weigh, monkeypatch) -> None:
    # Their figures are made up: nobody needs so many ranks.
    add_suite("oom", predicted)
    cells = [make_cell("oom", layout=Layout(**sizes)) for sizes in LAYOUTS.values()]
    one = make_cell("oom", layout=Layout(tp=2, dp=4))
    cells += [
        one.model_copy(update={"recompute": "full", "axis": "recompute-full"}),
        one.model_copy(update={"max_tokens": 32768, "axis": "max_tokens-32768"}),
    ]
    table = answer_table(summary_of(weigh(*cells)))
    found = [(row.texts[0].split("\n")[0], *row.texts[1:3]) for row in table.rows]
    assert found[3:] == [
        ("Does tensor parallelism help?", "dp8", "tp2+sp dp4"),
        ("Does sequence parallelism help?", "tp2 dp4", "tp2+sp dp4"),
        ("Does context parallelism help?", "tp2+sp dp4", "tp2+sp cp2 dp2"),
        ("Does Ulysses help?", "tp2+sp dp4", "tp2+sp cp2(a2a) dp2"),
        ("Do pipeline stages help?", "tp2+sp dp4", "tp2+sp pp2 dp2"),
        ("Does recomputing help?", "tp2+sp dp4", "tp2+sp dp4\nrecompute full"),
        ("What does a larger budget cost?", "tp2+sp dp4", "tp2+sp dp4\nmax_tokens 32768"),
        ("Do more nodes help?", "dp8", "dp64"),
    ]
    assert [name for name, *_ in found[:3]] == [
        "What does the naive step cost?", "What do whole logits cost?", "What do dynamic batches change?"
    ]  # fmt: skip
    ulysses = table.rows[6].texts
    assert ulysses[3:] == (
        "fixed\ndynamic",
        "99.0 -> 69.5\n69.5 -> 54.7",
        "10,000 -> 20,000\n20,000 -> 40,000",
        "2.00\n2.00",
    )
