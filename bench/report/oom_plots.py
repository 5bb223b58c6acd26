"""The picture of peaks against the length of a response, with the capacity: where a curve meets it, memory is out."""

from __future__ import annotations

import math
from pathlib import Path

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from bench.oom import NAMES, WAYS, Oom
from bench.report.frame import DPI, LIMIT, NAIVE, NEUTRAL, OPTIMISED, WIDTH_INCHES, Plot, legend
from bench.summary import CellRecords, Summary

COLUMNS = 3
COLOURS = {"naive": NAIVE, "optimised": OPTIMISED}
STYLES = {"N1 + N5": "-", "N14": ":", "optimised": "-"}


def oom_plot(summary: Summary, folder: Path) -> Plot | None:
    """A small picture for each cell that has a curve, all on the same scale of capacity."""
    cells = [(cell, row) for cell, row in summary.oom if row.curves and row.capacity]
    if not cells:
        return None
    lines = math.ceil(len(cells) / COLUMNS)
    figure, grid = plt.subplots(
        lines, COLUMNS, squeeze=False, sharex=True, figsize=(WIDTH_INCHES * 1.25, 1.2 + 2.9 * lines),
        layout="constrained",
    )  # fmt: skip
    for axes, (cell, row) in zip(grid.flat, cells, strict=False):
        _curves(axes, cell, row)
    for axes in grid.flat[len(cells) :]:
        axes.set_visible(False)
    title = "Peak memory against the longest response, predicted"
    figure.suptitle(title, x=0.01, ha="left", fontsize=12)
    figure.supxlabel("tokens of the longest row, prompt and response (thousands)", fontsize=9)
    figure.supylabel("GiB on the stage that breaks first", fontsize=9)
    shown = {name for _, row in cells for name in row.curves}
    handles = [
        Line2D([], [], color=COLOURS[side], linestyle=STYLES[name], label=name)
        for (side, _), name in zip(WAYS, NAMES, strict=True)
        if name in shown
    ]
    handles += [
        Line2D([], [], color=LIMIT, linewidth=1.5, label="capacity"),
        Line2D([], [], color=NEUTRAL, linewidth=1, linestyle="--", label="capacity less the reserve"),
        Line2D([], [], color=NEUTRAL, marker="o", markerfacecolor="white", linestyle="none",
               label="hollow: predicted threshold"),
        Line2D([], [], color=NEUTRAL, marker="o", linestyle="none", label="failed for real beyond"),
    ]  # fmt: skip
    legend(grid[-1][0], handles, columns=3)
    figure.savefig(folder / "oom.png", dpi=DPI)
    plt.close(figure)
    alt = "; ".join(
        f"{' '.join(cell.label)}: "
        + ", ".join(f"{n} {t:,.0f}" for n, t in zip(NAMES, row.thresholds, strict=True) if t is not None)
        for cell, row in cells
    )
    return Plot("oom.png", title, alt)


def _curves(axes: Axes, cell: CellRecords, row: Oom) -> None:
    for (side, _), name, threshold in zip(WAYS, NAMES, row.thresholds, strict=True):
        curve = row.curves.get(name)
        if curve is None:
            continue
        axes.plot([tokens / 1024 for tokens in curve], list(curve.values()), color=COLOURS[side],
                  linestyle=STYLES[name], linewidth=1.5)  # fmt: skip
        if threshold and row.capacity is not None:
            axes.plot(threshold / 1024, row.capacity - (row.reserve or 0), "o", markersize=6, zorder=3,
                      markerfacecolor="white", markeredgecolor=COLOURS[side], markeredgewidth=1.5)  # fmt: skip
    if row.capacity is not None:
        axes.axhline(row.capacity, color=LIMIT, linewidth=1.5)
        if row.reserve:
            axes.axhline(row.capacity - row.reserve, color=NEUTRAL, linewidth=1, linestyle="--")
        axes.set_ylim(0, 2 * row.capacity)
        for side, real in row.real.items():
            axes.plot(real.tokens / 1024, row.capacity, "o", markersize=6, zorder=4, color=COLOURS[side])
    axes.set_xscale("log", base=2)
    axes.set_xticks([8, 16, 32, 64, 128], ["8", "16", "32", "64", "128"])
    axes.minorticks_off()
    axes.set_title("\n".join((row.model, *cell.label[1:])), fontsize=8, loc="left")
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.8)
    axes.set_axisbelow(True)
