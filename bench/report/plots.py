"""The pictures of a report; ``frame.py`` says what their marks mean."""

from __future__ import annotations

import math
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from bench.report.bubble_plots import count_plot as bubble_count_plot
from bench.report.bubble_plots import gantt_plots
from bench.report.frame import LIMIT, NAIVE, NAIVE_HATCH, NEUTRAL, OPTIMISED, Plot, label_rows, legend, save
from bench.report.handover_plots import handover_plot
from bench.report.oom_plots import oom_plot
from bench.report.packing_plots import packing_plot
from bench.report.parity_heat import parity_heat
from bench.report.planning_plots import count_plot, milliseconds_plot, time_plot
from bench.summary import Summary, error_text
from suites.measure import Source

OPAQUE = {"facecolor": "white", "edgecolor": "none", "pad": 1}
SMALLEST_ERROR, LARGEST_ERROR = 1e-30, 1e9  # the scale on which errors are drawn


def draw_all(summary: Summary, folder: Path) -> list[Plot]:
    """Draw every picture that has data into ``folder``."""
    pictures = (
        ratio_plot,
        tokens_plot,
        parity_plot,
        parity_heat,
        count_plot,
        time_plot,
        milliseconds_plot,
        packing_plot,
        bubble_count_plot,
        handover_plot,
        oom_plot,
    )
    return [plot for draw in pictures if (plot := draw(summary, folder))] + gantt_plots(summary, folder)


def ratio_plot(summary: Summary, folder: Path) -> Plot | None:
    """Forest of the throughput ratios, with the padding ratio that each could be expected to reach."""
    rows = [(cell, row) for cell, row in summary.throughput if row.ratio and math.isfinite(row.ratio.value)]

    def draw(axes: Axes) -> None:
        axes.axvline(1.0, color=NEUTRAL, linewidth=1)
        for y, (_, row) in enumerate(rows):
            ratio = row.ratio
            if ratio.low is not None:
                axes.plot([ratio.low, ratio.high], [y, y], "|-", color=OPTIMISED, linewidth=1.5, markersize=10)
            axes.plot(ratio.value, y, "o", markersize=7, zorder=3, **_marker(OPTIMISED, row.source))
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
        if any(row.source == "predicted" for _, row in rows):
            handles.append(_handle(OPTIMISED, "predicted"))
        handles.append(
            Line2D([], [], color=NAIVE, marker="|", markersize=14, markeredgewidth=3, linestyle="none",
                   label="padding ratio: tokens the naive side computes / real tokens")
        )  # fmt: skip
        handles.append(Line2D([], [], color=NEUTRAL, linewidth=1, label="equally fast"))
        legend(axes, handles)

    alt = "; ".join(f"{' '.join(cell.label)}: {row.ratio.value:.2f}" for cell, row in rows)
    return save(folder, "ratio.png", "How many times as fast the optimised step is", alt, len(rows), draw)


def tokens_plot(summary: Summary, folder: Path) -> Plot | None:
    """Bars of the tokens each side computed, with the real tokens marked."""
    rows = [(cell, row) for cell, row in summary.throughput if row.naive_computed and row.optimised_computed]
    height = 0.36

    def draw(axes: Axes) -> None:
        for y, (_, row) in enumerate(rows):
            hollow = row.source == "predicted"
            bars = (
                (y - height / 2, row.naive_computed, NAIVE, NAIVE_HATCH),
                (y + height / 2, row.optimised_computed, OPTIMISED, ""),
            )
            for at, tokens, colour, hatch in bars:
                axes.barh(at, tokens, height, facecolor="white" if hollow else colour, hatch=hatch,
                          edgecolor=colour if hollow else "white", linewidth=1.5 if hollow else 0)  # fmt: skip
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
            Patch(facecolor=NAIVE, edgecolor="white", hatch=NAIVE_HATCH, label="naive"),
            Patch(facecolor=OPTIMISED, label="optimised"),
            Line2D([], [], color=NEUTRAL, linestyle="--", label="real tokens of the batch"),
        ]
        if any(row.source == "predicted" for _, row in rows):
            handles.append(Patch(facecolor="white", edgecolor=NEUTRAL, label="hollow: predicted"))
        legend(axes, handles)

    alt = "; ".join(
        f"{' '.join(cell.label)}: naive {row.naive_computed:,.0f}, optimised {row.optimised_computed:,.0f}"
        for cell, row in rows
    )
    return save(folder, "tokens.png", "Tokens that each side computes", alt, 1.4 * len(rows), draw)


def parity_plot(summary: Summary, folder: Path) -> Plot | None:
    """Worst error of each cell on a logarithmic axis, against its limit."""
    rows = [(cell, row) for cell, row in summary.parity if row.error is not None]
    values = [value for _, row in rows for value in (row.error, row.limit) if value is not None]
    # Zero and not-a-number have no place on a logarithmic axis: they stand near its ends, with a word.
    shown = [value for value in values if SMALLEST_ERROR < value < LARGEST_ERROR]
    least, most = (min(shown), max(shown)) if shown else (1e-8, 1e-4)
    # The words beside the points need a seventh of the width on either side.
    margin = 10 * (most / least) ** 0.15
    least, most = least / margin, most * margin

    def draw(axes: Axes) -> None:
        axes.set_xscale("log")
        axes.set_xlim(least, most)
        for y, (_, row) in enumerate(rows):
            x = row.error
            if x not in shown:
                x = least * 2 if x <= SMALLEST_ERROR else most / 2
            word = "0 (exact)" if row.error == 0 else error_text(row.error)
            colour = OPTIMISED if row.keeps_limit else LIMIT
            axes.plot(x, y, "o" if row.keeps_limit else "X", markersize=8, **_marker(colour, row.source))
            # On the side away from the limit, but inside the picture.
            left = x > least * 2 if row.keeps_limit else x >= most / 2
            axes.annotate(word, (x, y), xytext=(-8 if left else 8, 0), textcoords="offset points", fontsize=9,
                          va="center", ha="right" if left else "left", bbox=OPAQUE)  # fmt: skip
            if row.limit:
                axes.plot([row.limit] * 2, [y - 0.5, y + 0.5], color=LIMIT, linewidth=2, zorder=1)
        axes.set_xlabel("worst relative error against the float64 judge (left is better)")
        label_rows(axes, [cell for cell, _ in rows])
        handles = [Line2D([], [], label="within the limit", marker="o", linestyle="none", **_marker(OPTIMISED))]
        if not all(row.keeps_limit for _, row in rows):
            handles.append(
                Line2D([], [], label="above the limit", marker="X", linestyle="none", markersize=8, **_marker(LIMIT))
            )
        if any(row.source == "predicted" for _, row in rows):
            handles.append(_handle(OPTIMISED, "predicted"))
        handles.append(Line2D([], [], color=LIMIT, linewidth=2, label="limit"))
        legend(axes, handles)

    alt = "; ".join(f"{' '.join(cell.label)}: {row.error:.1e}" for cell, row in rows)
    return save(folder, "parity.png", "Parity with the judge", alt, len(rows), draw)


def _marker(colour: str, source: Source = "measured") -> dict[str, object]:
    return {
        "markerfacecolor": "white" if source == "predicted" else colour,
        "markeredgecolor": colour,
        "markeredgewidth": 2,
    }


def _handle(colour: str, source: Source) -> Line2D:
    return Line2D(
        [], [], marker="o", linestyle="none", markersize=8, label=f"hollow: {source}", **_marker(colour, source)
    )
