"""The picture of hand-overs: what is left to the rollout engine (predicted), beside what each way costs (measured)."""

from __future__ import annotations

from pathlib import Path

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from bench.handover import NAMES, WAYS, Handover
from bench.report.frame import (
    GRID,
    NEUTRAL,
    PLATE,
    SIDE_COLOURS,
    WIDTH_INCHES,
    Plot,
    bar,
    keep,
    legend,
    pale,
    source_handles,
)
from bench.summary import CellRecords, Summary

HEIGHT = 0.19  # of a bar; four stand in a row of one cell
# The lesser way of each side is paler.
STRENGTH = (0.6, 1.0, 0.6, 1.0)


def handover_plot(summary: Summary, folder: Path) -> Plot | None:
    """Bars of every way: GiB on the left, hollow; milliseconds out and back on the right, filled."""
    rows = [(cell, row) for cell, row in summary.handover if None not in row.predicted]
    if not rows:
        return None
    figure, (left, right) = plt.subplots(
        1, 2, sharey=True, figsize=(WIDTH_INCHES * 1.25, 1.9 + 1.0 * len(rows)), layout="constrained"
    )
    for y, (_, row) in enumerate(rows):
        _bytes(left, y, row)
        _times(right, y, row)
    left.set_xlabel("GiB left to the engine, predicted")
    right.set_xlabel("ms, out and back together, measured")
    left.set_yticks(range(len(rows)), [_name(cell) for cell, _ in rows], fontsize=9)
    left.set_ylim(len(rows) - 0.45, -0.55)
    for axes in (left, right):
        axes.tick_params(axis="y", length=0)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.grid(axis="x", color=GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.margins(x=0.16)
        axes.set_xlim(left=0)
    title = "What a rollout engine can get after a training step, and what it costs"
    figure.suptitle(title, x=0.01, ha="left", fontsize=12)
    handles: list[Line2D | Patch] = [
        Patch(**{**bar(side), "facecolor": pale(SIDE_COLOURS[side], strength)}, label=name)
        for (side, _), name, strength in zip(WAYS, NAMES, STRENGTH, strict=True)
    ]
    handles += source_handles(["predicted"], bars=True)
    handles.append(Line2D([], [], color=NEUTRAL, linewidth=1, linestyle="--", label="capacity of the GPU"))
    legend(left, handles, columns=3)
    alt = "; ".join(
        f"{' '.join(cell.label)}: " + ", ".join(f"{n} {v:.1f} GiB" for n, v in zip(NAMES, row.predicted, strict=True))
        for cell, row in rows
    )
    return keep(figure, folder, "handover.png", title, alt)


def _name(cell: CellRecords) -> str:
    model = cell.first.case["model"]
    return "{}\n{}, {}\n".format(*cell.label) + f"{model['layers']} layers of {model['hidden']:,}"


def _bytes(axes: Axes, y: int, row: Handover) -> None:
    for at, ((side, _), value) in enumerate(zip(WAYS, row.predicted, strict=True)):
        place, colour = _place(y, at), pale(SIDE_COLOURS[side], STRENGTH[at])
        axes.barh(place, value, 0.8 * HEIGHT, **{**bar(side, "predicted"), "edgecolor": colour})
        axes.annotate(f"{value:.1f}", (value, place), xytext=(-4, 0), textcoords="offset points", va="center",
                      ha="right", fontsize=7, bbox={"facecolor": PLATE, "edgecolor": "none", "pad": 0.5})  # fmt: skip
    if row.capacity is not None:
        axes.plot([row.capacity] * 2, [y - 0.45, y + 0.45], color=NEUTRAL, linewidth=1, linestyle="--")


def _times(axes: Axes, y: int, row: Handover) -> None:
    if None in row.out or None in row.back:
        axes.annotate("not measured", (0, y), xytext=(5, 0), textcoords="offset points", va="center", fontsize=9)
        return
    for at, ((side, _), out, back) in enumerate(zip(WAYS, row.out, row.back, strict=True)):
        place, value = _place(y, at), out + back
        colour = pale(SIDE_COLOURS[side], STRENGTH[at])
        axes.barh(place, value, 0.8 * HEIGHT, **{**bar(side), "facecolor": colour})
        word = f"{value:,.0f}" if value >= 10 else f"{value:.2g}"
        if at == 3 and not row.on_cuda:
            word += " (host copies)"
        axes.annotate(word, (value, place), xytext=(4, 0), textcoords="offset points", va="center", fontsize=7)


def _place(y: int, at: int) -> float:
    return y + (at - 1.5) * HEIGHT
