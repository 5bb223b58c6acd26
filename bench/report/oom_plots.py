"""The picture of peaks against the length of a response, with the capacity: where a curve meets it, memory is out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from bench.oom import NAMES, WAYS, Oom
from bench.report.frame import (
    GRID,
    LIMIT,
    NEUTRAL,
    PLATE,
    SIDE_COLOURS,
    WIDTH_INCHES,
    Plot,
    keep,
    legend,
    marker,
    source_handles,
)
from bench.summary import CellRecords, Summary

COLUMNS = 3
LENGTHS = (2, 4, 8, 16, 32, 64, 128)  # thousands of tokens
# Fixed micro-batches on the optimised side are the same curve at another length: the table has them.
STYLES = {"N1 + N5": "-", "N7": "--", "N14": ":", "optimised": "-"}
WORDS = {"N1 + N5": ": fixed and padded", "N7": ": whole logits", "N14": ": graphs kept", "optimised": ""}
WIDTH, THIN = 2.0, 0.8


def oom_plot(summary: Summary, folder: Path) -> Plot | None:
    """A small picture for each cell that has a curve; each scale ends at twice its capacity."""
    cells = [(cell, row) for cell, row in summary.oom if row.curves and row.capacity]
    if not cells:
        return None
    lines = math.ceil(len(cells) / COLUMNS)
    figure, grid = plt.subplots(
        lines, COLUMNS, squeeze=False, sharex=True, figsize=(WIDTH_INCHES * 1.25, 1.6 + 2.6 * lines),
        layout="constrained",
    )  # fmt: skip
    for axes, (cell, row) in zip(grid.flat, cells, strict=False):
        _curves(axes, cell, row)
    for axes in grid.flat[len(cells) :]:
        axes.set_visible(False)
    for column in grid.T:
        # Where the last row is not full, the picture above an empty place tells the lengths.
        for axes in [one for one in column if one.get_visible()][-1:]:
            axes.tick_params(labelbottom=True)
            axes.set_xlabel("thousand tokens of the longest row", fontsize=9)
    title = "Peak memory against the longest response, predicted"
    figure.suptitle(title, x=0.01, ha="left", fontsize=12)
    figure.supylabel("GiB on the stage that breaks first", fontsize=9)
    shown = {name for _, row in cells for name in row.curves}
    handles = [
        Line2D([], [], color=SIDE_COLOURS[side], linestyle=STYLES[name], linewidth=WIDTH, label=name + WORDS[name])
        for (side, _), name in zip(WAYS, NAMES, strict=True)
        if name in shown and name in STYLES
    ]
    handles.append(Line2D([], [], color=NEUTRAL, marker="x", linewidth=THIN, label="thin, crossed: out of memory"))
    handles.append(Line2D([], [], color=NEUTRAL, linewidth=1, linestyle="--", label="capacity less the reserve"))
    handles += source_handles(["predicted", *(["measured"] if any(row.real for _, row in cells) else [])])
    legend(grid[-1][0], handles, columns=3)
    alt = "; ".join(
        f"{' '.join(cell.label)}: "
        + ", ".join(f"{n} {t:,.0f}" for n, t in zip(NAMES, row.thresholds, strict=True) if t is not None)
        for cell, row in cells
    )
    return keep(figure, folder, "oom.png", title, alt)


def _curves(axes: Axes, cell: CellRecords, row: Oom) -> None:
    room = row.capacity - (row.reserve or 0)
    for (side, _), name, threshold in zip(WAYS, NAMES, row.thresholds, strict=True):
        if name in STYLES and name in row.curves:
            _curve(axes, row.curves[name], threshold or 0, color=SIDE_COLOURS[side], linestyle=STYLES[name])
            if threshold:
                axes.plot(threshold / 1024, room, markersize=6, zorder=3, **marker(side, "predicted"))
    for side, real in row.real.items():
        axes.plot(real.tokens / 1024, room, markersize=6, zorder=4, **marker(side))
    axes.axhline(row.capacity, color=LIMIT, linewidth=1.5)
    # On the left, where most curves are still far below.
    axes.annotate(f"capacity {row.capacity:g} GiB", (0.02, row.capacity), xycoords=("axes fraction", "data"),
                  xytext=(0, 3), textcoords="offset points", fontsize=7, va="bottom", zorder=5,
                  bbox={"facecolor": PLATE, "edgecolor": "none", "pad": 0.5})  # fmt: skip
    if row.reserve:
        axes.axhline(room, color=NEUTRAL, linewidth=1, linestyle="--")
    axes.set_ylim(0, 2 * row.capacity)
    axes.set_xscale("log", base=2)
    axes.set_xlim(LENGTHS[0] / 1.1, LENGTHS[-1] * 1.1)
    axes.set_xticks(LENGTHS, map(str, LENGTHS))
    axes.minorticks_off()
    axes.set_title("\n".join((row.model, ", ".join(cell.label[1:]))), fontsize=8, loc="left")
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)


def _curve(axes: Axes, peaks: Mapping[int, float], threshold: float, **style: str) -> None:
    """Straight between lengths (bent on this scale): thick up to the threshold, thin and crossed beyond it."""
    known, heights = list(peaks), list(peaks.values())
    for start, end, width in ((known[0], threshold, WIDTH), (max(threshold, known[0]), known[-1], THIN)):
        if start < end:
            tokens = np.geomspace(start, end, 100)
            axes.plot(tokens / 1024, np.interp(tokens, known, heights), linewidth=width, **style)
    beyond = [tokens for tokens in known if tokens > threshold and tokens / 1024 in LENGTHS]
    axes.plot([tokens / 1024 for tokens in beyond], [peaks[tokens] for tokens in beyond], "x", markersize=5,
              color=style["color"])  # fmt: skip
