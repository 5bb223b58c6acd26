"""Tables of sides against each other, and of a candidate against reference results, a table for each kind of cell."""

from __future__ import annotations

from collections.abc import Mapping

from bench.compare import Comparison, Report, Verdict
from bench.judging import judging
from bench.record import SeriesRecord
from bench.stats import median
from bench.summary import KINDS, CellRecords, Summary
from bench.table import NONE, Row, Table, number, ratio_text
from bench.weighed import Weighed, weigh_cell

Key = tuple[str, str, str, str]


def weigh_table(summary: Summary, kind: str) -> Table:
    """The metrics by which a kind of cell is compared, side against side, and whatever broke its limit."""
    rows = [
        row
        for cell in summary.cells
        if cell.kind == kind
        for row in weigh_cell(cell)
        if row.metric in KINDS[kind].compared or not _keeps(row)
    ]
    return Table(
        title=f"Naive against optimised: {kind}",
        caption=(
            "Medians. times better: how many times better the optimised side is, whichever way is better, with its "
            "95 % bootstrap interval (from three pairs on). n: samples of the optimised side. limit: what every sample "
            "must keep."
        ),
        columns=("cell", "metric", "source", "keeps\nlimit", "naive", "optimised", "times better", "n", "limit"),
        left=4,
        rows=tuple(map(_weighed_row, rows)),
    )


def _keeps(row: Weighed) -> bool:
    return all(one.keeps_limit for one in (row.naive, row.optimised) if one)


def _weighed_row(row: Weighed) -> Row:
    series = row.first
    naive, ours = (one.line if one else 0 for one in (row.naive, row.optimised))
    keeps = _keeps(row)
    limited = any(one and one.limit is not None for one in (row.naive, row.optimised))
    texts = (
        ", ".join(row.cell.label),
        _metric(series),
        series.source,
        NONE if not limited else "yes" if keeps else "NO",
        NONE if row.naive is None else number(median(row.naive.values)),
        NONE if row.optimised is None else number(median(row.optimised.values)),
        ratio_text(row.better),
        str(len(series.values)),
        NONE if series.limit is None else number(series.limit),
    )
    numbers = [one for one in (naive, ours) if one]
    first = numbers[-1]
    return Row(
        texts, (min(numbers), max(numbers)), bad=not keeps, records=(0, 0, 0, 0, naive, ours, first, first, first)
    )


def _metric(series: SeriesRecord) -> str:
    return f"{series.metric}{f' ({series.variant})' if series.variant else ''}" + (
        "" if series.unit == "1" else f" in {series.unit}"
    )


def verdict_tables(report: Report, summary: Summary, reference: Mapping[Key, int]) -> dict[str, Table]:
    """A table of verdicts for each kind of cell.

    Args:
        reference: the numbers of the reference's records.
    """
    cells = {cell.id: cell for cell in summary.cells}
    tables: dict[str, list[Comparison]] = {}
    for one in report.comparisons:
        kind = cells[one.cell].kind if one.cell in cells else ""
        tables.setdefault(kind or "other", []).append(one)
    return {kind: _verdicts(kind, found, cells, reference) for kind, found in tables.items()}


def verdict_table(report: Report) -> Table:
    """All verdicts in one table, for a terminal."""
    return _verdicts("all", list(report.comparisons), {}, {})


def _verdicts(
    kind: str, comparisons: list[Comparison], cells: Mapping[str, CellRecords], reference: Mapping[Key, int]
) -> Table:
    compared = KINDS[kind].compared if kind in KINDS else ()
    shown = [
        one
        for one in comparisons
        if one.ratio is not None or one.verdict != Verdict.neutral or (one.metric in compared and one.side != "naive")
    ]
    return Table(
        title=f"Candidate against reference: {kind}",
        caption=(
            "Medians. ratio: candidate over reference with its 95 % bootstrap interval. n: samples of the candidate. "
            "threshold: how far the ratio must move; none where any change is one. p: chance of such a difference "
            "without a cause, corrected for the number of metrics. "
            f"{len(comparisons) - len(shown)} exact or limited metrics did not change."
        ),
        columns=("cell", "verdict", "metric", "judged", "reference", "candidate", "ratio", "n", "threshold", "p"),
        left=4,
        rows=tuple(_verdict_row(one, cells.get(one.cell), reference) for one in shown),
    )


def _verdict_row(one: Comparison, cell: CellRecords | None, reference: Mapping[Key, int]) -> Row:
    series = cell and next(
        (s for s in cell.series if (s.metric, s.side, s.variant) == (one.metric, one.side, one.variant)), None
    )
    before, after = reference.get((one.cell, one.metric, one.side, one.variant), 0), series.line if series else 0
    side = "" if one.side in ("both", "optimised") else f" ({one.side})"
    texts = (
        ", ".join(cell.label) if cell else one.cell,
        one.verdict + (f"\n{one.reason}" if one.reason else ""),
        f"{one.metric}{side}" + (f" ({one.variant})" if one.variant else ""),
        one.basis or NONE,
        number(one.reference),
        number(one.candidate),
        ratio_text(one.ratio, 3),
        str(len(series.values)) if series else str(one.ratio.pairs) if one.ratio else NONE,
        _threshold(one),
        NONE if one.p is None else f"{one.p:.2g}",
    )
    bad = one.verdict not in (Verdict.neutral, Verdict.improved)
    return Row(texts, (after, after), bad=bad, records=(0, 0, 0, 0, -before, *[after] * 5))


def _threshold(one: Comparison) -> str:
    if one.basis in ("interleaved", "apart", "alone"):
        return f"{getattr(judging().threshold(one.metric), one.basis):.0%}"
    return "any change" if one.basis == "exact" else NONE
