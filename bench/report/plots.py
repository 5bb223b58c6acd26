"""The pictures of a report; ``frame.py`` says what their marks mean."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from bench.parity import error_text
from bench.report.bubble_plots import count_plot as bubble_count_plot
from bench.report.bubble_plots import gantt_plots
from bench.report.forest import forest_plot
from bench.report.frame import (
    LIMIT,
    NAIVE,
    NEUTRAL,
    OPTIMISED,
    PLATE,
    Plot,
    bar,
    label_rows,
    legend,
    marker,
    most,
    save,
    source_handles,
)
from bench.report.handover_plots import handover_plot
from bench.report.load_plots import cap_plot, work_plot
from bench.report.oom_plots import oom_plot
from bench.report.packing_plots import packing_plot
from bench.report.parity_heat import parity_heat
from bench.report.planning_plots import count_plot, milliseconds_plot, time_plot
from bench.report.waterfall import waterfall_plot
from bench.summary import Summary

OPAQUE = {"facecolor": PLATE, "edgecolor": "none", "pad": 1}
SMALLEST_ERROR, LARGEST_ERROR = 1e-30, 1e9  # the scale on which errors are drawn


def ratio_plot(summary: Summary, folder: Path) -> Plot | None:
    """Forest of the throughput ratios, with the padding ratio that each could be expected to reach."""
    rows = [(cell, row) for cell, row in summary.throughput if row.ratio and math.isfinite(row.ratio.value)]
    rows, title = most(rows, "How many times as fast the optimised step is")

    def draw(axes: Axes) -> None:
        axes.axvline(1.0, color=NEUTRAL, linewidth=1)
        for y, (_, row) in enumerate(rows):
            ratio = row.ratio
            if ratio.low is not None:
                axes.plot([ratio.low, ratio.high], [y, y], "|-", color=OPTIMISED, linewidth=1.5, markersize=10)
            axes.plot(ratio.value, y, markersize=7, zorder=3, **marker("optimised", row.source))
            word, right = f"{ratio.value:.2f}", ratio.high or ratio.value
            if row.padding_ratio is not None:
                axes.plot(row.padding_ratio, y, "|", color=NAIVE, markersize=18, markeredgewidth=3, zorder=2)
                word, right = f"{word} (padding {row.padding_ratio:.2f})", max(right, row.padding_ratio)
            axes.annotate(word, (right, y), xytext=(8, 0), textcoords="offset points", va="center", fontsize=9)
        axes.margins(x=0.25)
        axes.set_xlim(left=0)
        axes.set_xlabel("optimised tokens/s over naive tokens/s (1 = equally fast)")
        label_rows(axes, [cell for cell, _ in rows])
        handles = [Line2D([], [], color=OPTIMISED, marker="o", linewidth=1.5, label="ratio of medians, 95 % interval")]
        handles += source_handles(row.source for _, row in rows)
        handles.append(
            Line2D([], [], color=NAIVE, marker="|", markersize=14, markeredgewidth=3, linestyle="none",
                   label="padding ratio: tokens the naive side computes / real tokens")
        )  # fmt: skip
        handles.append(Line2D([], [], color=NEUTRAL, linewidth=1, label="equally fast"))
        legend(axes, handles)

    alt = "; ".join(f"{' '.join(cell.label)}: {row.ratio.value:.2f}" for cell, row in rows)
    return save(folder, "ratio.png", title, alt, len(rows), draw)


def tokens_plot(summary: Summary, folder: Path) -> Plot | None:
    """Bars of the tokens each side computed, with the real tokens marked."""
    rows = [(cell, row) for cell, row in summary.throughput if row.naive_computed and row.optimised_computed]
    rows, title = most(rows, "Tokens that each side computes")
    height = 0.36

    def draw(axes: Axes) -> None:
        for y, (_, row) in enumerate(rows):
            bars = (
                (y - height / 2, row.naive_computed, "naive"),
                (y + height / 2, row.optimised_computed, "optimised"),
            )
            for at, tokens, side in bars:
                axes.barh(at, tokens, height, **bar(side, row.source))
                axes.annotate(
                    f"{tokens:,.0f}", (tokens, at), xytext=(5, 0), textcoords="offset points", va="center", fontsize=9
                )
            if row.real:
                axes.plot([row.real] * 2, [y - height - 0.06, y + height + 0.06], color=NEUTRAL, linestyle="--", lw=1.5)
        axes.margins(x=0.14)
        axes.set_xlim(left=0)
        axes.set_xlabel("tokens computed in one step, padding included")
        axes.xaxis.set_major_formatter("{x:,.0f}")
        label_rows(axes, [cell for cell, _ in rows])
        handles = [
            Patch(**bar("naive"), label="naive"),
            Patch(**bar("optimised"), label="optimised"),
            Line2D([], [], color=NEUTRAL, linestyle="--", label="real tokens of the batch"),
        ]
        handles += source_handles((row.source for _, row in rows), bars=True)
        legend(axes, handles)

    alt = "; ".join(
        f"{' '.join(cell.label)}: naive {row.naive_computed:,.0f}, optimised {row.optimised_computed:,.0f}"
        for cell, row in rows
    )
    return save(folder, "tokens.png", title, alt, 1.4 * len(rows), draw)


def parity_plot(summary: Summary, folder: Path) -> Plot | None:
    """Worst error of each cell on a logarithmic axis, against its limit."""
    rows = [(cell, row) for cell, row in summary.parity if row.error is not None]
    rows, title = most(rows, "Parity with the judge", lambda one: one[1].share)
    values = [value for _, row in rows for value in (row.error, row.limit) if value is not None]
    # Zero and not-a-number have no place on a logarithmic axis: they stand near its ends, with a word.
    shown = [value for value in values if SMALLEST_ERROR < value < LARGEST_ERROR]
    low, high = (min(shown), max(shown)) if shown else (1e-8, 1e-4)
    # The words beside the points need a seventh of the width on either side.
    margin = 10 * (high / low) ** 0.15
    low, high = low / margin, high * margin

    def draw(axes: Axes) -> None:
        axes.set_xscale("log")
        axes.set_xlim(low, high)
        for y, (_, row) in enumerate(rows):
            x = row.error
            if x not in shown:
                x = low * 2 if x <= SMALLEST_ERROR else high / 2
            word = "0 (exact)" if row.error == 0 else error_text(row.error)
            colour = OPTIMISED if row.keeps_limit else LIMIT
            style = {**marker("optimised", row.source, colour), **({} if row.keeps_limit else {"marker": "X"})}
            axes.plot(x, y, markersize=8, **style)
            # On the side away from the limit, but inside the picture.
            left = x > low * 2 if row.keeps_limit else x >= high / 2
            axes.annotate(word, (x, y), xytext=(-8 if left else 8, 0), textcoords="offset points", fontsize=9,
                          va="center", ha="right" if left else "left", bbox=OPAQUE)  # fmt: skip
            if row.limit:
                axes.plot([row.limit] * 2, [y - 0.5, y + 0.5], color=LIMIT, linewidth=2, zorder=1)
        axes.set_xlabel("worst relative error against the float64 judge (left is better)")
        label_rows(axes, [cell for cell, _ in rows])
        handles = [Line2D([], [], label="within the limit", linestyle="none", **marker("optimised"))]
        if not all(row.keeps_limit for _, row in rows):
            above = {**marker("optimised", colour=LIMIT), "marker": "X"}
            handles.append(Line2D([], [], label="above the limit", linestyle="none", markersize=8, **above))
        handles += source_handles(row.source for _, row in rows)
        handles.append(Line2D([], [], color=LIMIT, linewidth=2, label="limit"))
        legend(axes, handles)

    alt = "; ".join(f"{' '.join(cell.label)}: {row.error:.1e}" for cell, row in rows)
    return save(folder, "parity.png", title, alt, len(rows), draw)


# By kind of cell; what all kinds have in common has an empty name.
PICTURES: dict[str, tuple[Callable[[Summary, Path], Plot | None], ...]] = {
    "": (forest_plot, work_plot),
    "throughput": (ratio_plot, tokens_plot, cap_plot),
    "parity": (parity_plot, parity_heat),
    "planning": (count_plot, time_plot, milliseconds_plot),
    "packing": (packing_plot,),
    "bubbles": (bubble_count_plot,),
    "handover": (handover_plot,),
    "oom": (oom_plot, waterfall_plot),
}


def draw_all(summary: Summary, folder: Path) -> dict[str, list[Plot]]:
    """Draw every picture that has data into ``folder``; they are named as in ``PICTURES``."""
    drawn = {kind: [plot for draw in draws if (plot := draw(summary, folder))] for kind, draws in PICTURES.items()}
    drawn["bubbles"] += gantt_plots(summary, folder)
    return drawn
