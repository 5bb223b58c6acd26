"""The table of a comparison, for the terminal and for pages."""

from __future__ import annotations

from bench.compare import Comparison, Report, Verdict
from bench.table import NONE, Row, Table, number, ratio_text


def verdict_table(report: Report) -> Table:
    """What was timed or is not neutral; exact figures that did not change are only counted."""
    shown = [one for one in report.comparisons if one.ratio is not None or one.verdict != Verdict.neutral]
    unchanged = len(report.comparisons) - len(shown)
    return Table(
        title="Verdicts: candidate against reference",
        caption=(
            "ratio: candidate over reference with its 95 % bootstrap interval. p: chance of such a difference without "
            f"a cause, corrected for the number of metrics. {unchanged} exact or limited metrics did not change."
        ),
        columns=("cell", "metric", "judged", "reference", "candidate", "ratio", "p", "verdict"),
        left=3,
        rows=tuple(_row(one) for one in shown),
    )


def _row(one: Comparison) -> Row:
    side = "" if one.side == "both" else f" ({one.variant or one.side})"
    texts = (
        one.cell,
        f"{one.metric}{side}",
        one.basis or NONE,
        number(one.reference),
        number(one.candidate),
        ratio_text(one.ratio),
        NONE if one.p is None else f"{one.p:.2g}",
        one.verdict + (f"\n{one.reason}" if one.reason else ""),
    )
    return Row(texts, (0, 0), bad=one.verdict not in (Verdict.neutral, Verdict.improved))
