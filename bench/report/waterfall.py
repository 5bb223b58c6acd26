"""The waterfall of the peak: what the bytes are held for, piece by piece, up to the capacity."""

from __future__ import annotations

from pathlib import Path

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from bench.oom import Oom
from bench.report.frame import (
    GRID,
    LIMIT,
    NEUTRAL,
    PLATE,
    WIDTH_INCHES,
    Plot,
    bar,
    keep,
    legend,
    source_handles,
)  # fmt: skip
from bench.summary import CellRecords, Summary

MOST_CELLS = 4
SMALL = 0.01  # share of the peak below which a piece has no bar of its own


def waterfall_plot(summary: Summary, folder: Path) -> Plot | None:
    """A panel for the first cell of each model, of the optimised side at 16k tokens."""
    chosen: dict[str, tuple[CellRecords, Oom]] = {}
    for cell, row in summary.oom:
        if row.parts and row.capacity and not row.real:
            chosen.setdefault(row.model, (cell, row))
    cells = list(chosen.values())[:MOST_CELLS]
    if not cells:
        return None
    pieces = [_pieces(row.parts) for _, row in cells]
    heights = [0.5 + 0.24 * len(one) for one in pieces]
    figure, grid = plt.subplots(
        len(cells), 1, squeeze=False, figsize=(WIDTH_INCHES, 1.3 + sum(heights)), height_ratios=heights,
        layout="constrained",
    )  # fmt: skip
    for axes, (cell, row), parts in zip(grid[:, 0], cells, pieces, strict=True):
        _waterfall(axes, cell, row, parts)
    title = "What the peak is made of, optimised, one row of 16k tokens"
    figure.suptitle(title, x=0.01, ha="left", fontsize=12)
    grid[-1, 0].set_xlabel("GiB on the stage that breaks first")
    handles = [
        *source_handles(["predicted"], bars=True),
        Line2D([], [], color=LIMIT, linewidth=1.5, label="capacity"),
        Line2D([], [], color=NEUTRAL, linewidth=1, linestyle="--", label="capacity less what is left free"),
    ]
    legend(grid[0, 0], handles, columns=3)
    alt = "; ".join(
        f"{row.model}: " + ", ".join(f"{name} {size:.1f} GiB" for name, size in parts.items())
        for (_, row), parts in zip(cells, pieces, strict=True)
    )
    return keep(figure, folder, "waterfall.png", title, alt)


def _pieces(parts: dict[str, float]) -> dict[str, float]:
    """The pieces from the largest to the smallest, the small ones together."""
    whole = sum(parts.values())
    large = {name: size for name, size in sorted(parts.items(), key=lambda one: -one[1]) if size >= SMALL * whole}
    rest = whole - sum(large.values())
    return {**large, "the rest": rest} if rest > 0 else large


def _waterfall(axes: Axes, cell: CellRecords, row: Oom, parts: dict[str, float]) -> None:
    end = 0.0
    for y, size in enumerate(parts.values()):
        axes.barh(y, size, 0.7, end, **bar("optimised", "predicted"))
        if y:
            axes.plot([end, end], [y - 1, y], color=NEUTRAL, linewidth=0.7)
        end += size
        axes.annotate(f"{size:.2f}", (end, y), xytext=(5, 0), textcoords="offset points", va="center", fontsize=8)
    # The whole is what is predicted: full of ink would look as if it were measured.
    axes.barh(len(parts), end, 0.7, facecolor=PLATE, edgecolor=NEUTRAL, linewidth=1.4)
    axes.annotate(f"{end:.2f}", (end, len(parts)), xytext=(5, 0), textcoords="offset points", va="center", fontsize=8)
    axes.axvline(row.capacity, color=LIMIT, linewidth=1.5)
    if row.reserve:
        axes.axvline(row.capacity - row.reserve, color=NEUTRAL, linewidth=1, linestyle="--")
    names = [*parts, "peak"]
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlim(0, 1.08 * max(end, row.capacity))
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_title(f"{row.model}, {', '.join(cell.label[1:])}", loc="left", fontsize=9)
