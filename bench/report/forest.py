"""Forests: how many times better the optimised side is in every cell, and the candidate against the reference."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator

from bench.compare import Report, Verdict
from bench.report.frame import (
    LIMIT,
    NEUTRAL,
    OPTIMISED,
    PLATE,
    Plot,
    keep,
    legend,
    marker,
    most,
    set_rows,
    source_handles,
)
from bench.stats import Ratio
from bench.summary import Summary
from bench.weighed import headlines
from suites.measure import Source

ROW_INCHES = 0.27


def forest_plot(summary: Summary, folder: Path) -> Plot | None:
    """The first ratio of every cell that both sides have, but those of ``throughput``, which have a picture."""
    rows = [row for row in headlines(summary) if row.cell.kind != "throughput" and math.isfinite(row.better.value)]
    rows, title = most(rows, "How many times better the optimised side is")
    if not rows:
        return None
    labels = [f"{row.cell.kind} {' '.join(row.cell.label)}" for row in rows]
    figure, axes = _rows(labels, [(row.better, row.first.source) for row in rows])
    axes.set_xlabel("times better than the naive side (right of the line is better)")
    handles = [Line2D([], [], linewidth=1.5, color=OPTIMISED, label="95 % interval")]
    legend(axes, [*handles, *source_handles(row.first.source for row in rows), _equal("as good as the naive side")], 4)
    axes.set_title(title, loc="left", fontsize=12)
    return keep(figure, folder, "forest.png", title, _alt(labels, [row.better for row in rows]))


def verdict_forest(report: Report, summary: Summary, folder: Path) -> Plot | None:
    """Candidate over reference, of everything that was timed; what changed is crossed."""
    rows = [one for one in report.comparisons if one.ratio and math.isfinite(one.ratio.value)]
    # What changed is left out last.
    title = "Candidate against reference, what was timed"
    rows, title = most(rows, title, lambda one: one.verdict != Verdict.neutral)
    if not rows:
        return None
    labels = [
        " ".join(filter(None, (one.cell, one.metric, one.variant))) + (f", {one.basis}" if one.basis else "")
        for one in rows
    ]
    known = {(cell.id, one.metric, one.side, one.variant): one.source for cell in summary.cells for one in cell.series}
    sources = [known.get((one.cell, one.metric, one.side, one.variant), "measured") for one in rows]
    figure, axes = _rows(labels, [(one.ratio, source) for one, source in zip(rows, sources, strict=True)])
    for y, one in enumerate(rows):
        if one.verdict == Verdict.regressed:
            axes.plot(one.ratio.value, y, "X", color=LIMIT, markersize=10, zorder=4)
    axes.set_xlabel("candidate over reference (1 = as before)")
    handles = [
        Line2D([], [], linewidth=1.5, label="ratio of medians, 95 % interval", color=OPTIMISED, **marker("optimised")),
        Line2D([], [], linestyle="none", marker="X", color=LIMIT, markersize=9, label="regressed"),
        _equal("as before"),
    ]
    legend(axes, [*handles, *source_handles(sources)], 3)
    axes.set_title(title, loc="left", fontsize=12)
    return keep(figure, folder, "verdicts.png", title, _alt(labels, [one.ratio for one in rows]))


def _rows(labels: list[str], ratios: Sequence[tuple[Ratio, Source]]) -> tuple[plt.Figure, Axes]:
    figure, axes = plt.subplots(figsize=(10, 1.5 + ROW_INCHES * len(labels)), layout="constrained")
    set_rows(axes, labels)
    axes.tick_params(axis="y", labelsize=8)
    axes.set_xscale("log")
    axes.axvline(1.0, color=NEUTRAL, linewidth=1)
    for y, (ratio, source) in enumerate(ratios):
        if ratio.low is not None:
            axes.plot([ratio.low, ratio.high], [y, y], "|-", color=OPTIMISED, linewidth=1.5, markersize=7)
        axes.plot(ratio.value, y, markersize=6.5, zorder=3, **marker("optimised", source))
        right = max(ratio.value, ratio.high or 0)
        axes.annotate(f"{ratio.value:.2f}", (right, y), xytext=(7, 0), textcoords="offset points", va="center",
                      fontsize=8, bbox={"facecolor": PLATE, "edgecolor": "none", "pad": 0.5})  # fmt: skip
    axes.margins(x=0.12)
    low, high = axes.get_xlim()
    axes.xaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axes.set_xlim(low, high)
    axes.minorticks_off()
    return figure, axes


def _equal(label: str) -> Line2D:
    return Line2D([], [], color=NEUTRAL, linewidth=1, label=label)


def _alt(labels: list[str], ratios: Sequence[Ratio]) -> str:
    return "; ".join(f"{label}: {ratio.value:.2f}" for label, ratio in zip(labels, ratios, strict=True))
