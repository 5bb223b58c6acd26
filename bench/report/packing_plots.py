"""The picture of packing: how many times as fast it is as N6, against the number of rows."""

from __future__ import annotations

import math
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from bench.packing import Packing
from bench.report.frame import NEUTRAL, OPTIMISED, Plot, legend, plain, save
from bench.summary import CellRecords, Summary

LINES = ("-", "--", ":", "-.")
MARKS = "osD^v<>"
COLOURS = (OPTIMISED, "#009E73", "#CC79A7", "#56B4E9")
SHIFT = 1.04  # cells with equally many rows stand beside each other, so that no interval hides another
Group = tuple[str, int]


def packing_plot(summary: Summary, folder: Path) -> Plot | None:
    """Ratio of the times of pack, labels and unpack, one line per workload and context-parallel size."""
    rows = [(cell, row) for cell, row in summary.packing if row.ratio and math.isfinite(row.ratio.value)]
    groups: dict[Group, list[Packing]] = {}
    for cell, row in rows:
        groups.setdefault(_group(cell, row), []).append(row)

    def draw(axes: Axes) -> None:
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.axhline(1.0, color=NEUTRAL, linewidth=1)
        for at, (group, points) in enumerate(groups.items()):
            shift = SHIFT ** (at - (len(groups) - 1) / 2)
            points = sorted(points, key=lambda one: one.rows)
            places = [one.rows * shift for one in points]
            axes.plot(places, [one.ratio.value for one in points], markersize=7, linewidth=1.5, **_style(groups, group))
            for place, one in zip(places, points, strict=True):
                if one.ratio.low is not None:
                    axes.plot([place] * 2, [one.ratio.low, one.ratio.high], color=_style(groups, group)["color"], lw=1)
        counts = sorted({row.rows for _, row in rows})
        axes.set_xticks(counts, [f"{count:,}" for count in counts])
        axes.set_xticks([], minor=True)
        ticks = [
            tick for tick in (0.5, 1, 2, 5, 10, 20, 50, 100, 200) if axes.get_ylim()[0] <= tick <= axes.get_ylim()[1]
        ]
        axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.set_yticks([], minor=True)
        axes.set_xlabel("rows of the micro-batch")
        axes.set_ylabel("time of N6 over time of Steelyard")
        plain(axes)
        handles = [
            Line2D([], [], markersize=7, linewidth=1.5, label=f"{group[0]}, cp {group[1]}", **_style(groups, group))
            for group in groups
        ]
        handles.append(Line2D([], [], color=NEUTRAL, linewidth=1, label="equally fast"))
        legend(axes, handles, columns=3)

    alt = "; ".join(f"{' '.join(cell.label)}: {row.ratio.value:.1f}" for cell, row in rows)
    title = "How many times as fast as with host reads (N6): pack, labels and unpack"
    return save(folder, "packing.png", title, alt, 8 if rows else 0, draw)


def _group(cell: CellRecords, row: Packing) -> Group:
    return cell.label[0], row.cp


def _style(groups: dict[Group, list[Packing]], group: Group) -> dict[str, object]:
    """A colour and a line for each workload, a mark for each context-parallel size."""
    workload = list(dict.fromkeys(name for name, _ in groups)).index(group[0])
    size = sorted({cp for _, cp in groups}).index(group[1])
    return {
        "color": COLOURS[workload % len(COLOURS)],
        "linestyle": LINES[workload % len(LINES)],
        "marker": MARKS[size % len(MARKS)],
    }
