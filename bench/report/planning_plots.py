"""The pictures of the planning scoreboard: one mark per planner, the same in all of them.

Steelyard is a blue circle. Others are orange where they keep the cap in all draws, and grey where they do not. As
everywhere, what was measured is filled and what is predicted is hollow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from bench.report.frame import NAIVE, NEUTRAL, OPTIMISED, Plot, label_rows, legend, save
from bench.scoreboard import PlannerScore, Scoreboard
from bench.summary import CellRecords, Summary

MARKS = "sDv^<>PXph*d"
BREAKS = "#999999"
Rows = list[tuple[CellRecords, Scoreboard]]


def count_plot(summary: Summary, folder: Path) -> Plot | None:
    """Micro-batches over the proven bound, per cell."""
    rows = [(cell, board) for cell, board in summary.planning if board.ours and board.ours.bound]
    title = "Micro-batches against the proven bound"
    label = "micro-batches over what no plan within the cap goes below (below 1: the cap is broken)"
    return _dots(rows, folder, "planning_count.png", title, label, _count_over_bound)


def _count_over_bound(one: PlannerScore) -> float | None:
    return one.count / one.bound if one.count and one.bound else None


def time_plot(summary: Summary, folder: Path) -> Plot | None:
    """Predicted time over ideal, per cell with a pipeline."""
    rows = [(cell, board) for cell, board in summary.planning if board.stages > 1 and board.ours]
    title = "Predicted time of the step on the pipeline"
    label = "predicted time of the slowest rank over ideal, logarithmic (left is better)"
    return _dots(rows, folder, "planning_time.png", title, label, lambda one: one.time, predicted=True)


def _dots(
    rows: Rows,
    folder: Path,
    file: str,
    title: str,
    label: str,
    figure: Callable[[PlannerScore], float | None],
    predicted: bool = False,
) -> Plot | None:
    """One line per cell, with a mark for every planner."""

    def draw(axes: Axes) -> None:
        for y, (_, board) in enumerate(rows):
            for one, mark in _marked(board, _marks(rows)):
                value = figure(one)
                if value is not None:
                    axes.plot(value, y, mark, **_style(one, predicted))
        if predicted:  # ratios from 1 to 10, most of them near 1
            axes.set_xscale("log")
            ticks = [1, 1.1, 1.2, 1.5, 2, 3, 5, 8]
            axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks], minor=False)
            axes.set_xticks([], minor=True)
        else:
            axes.axvline(1.0, color=NEUTRAL, linewidth=1)
        axes.set_xlabel(label)
        label_rows(axes, [cell for cell, _ in rows])
        legend(axes, _handles(rows, predicted), columns=4)

    alt = "; ".join(
        f"{' '.join(cell.label)}: " + ", ".join(f"{one.planner} {figure(one):.3f}" for one in board.planners
                                                if figure(one) is not None)
        for cell, board in rows
    )  # fmt: skip
    return save(folder, file, title, alt, len(rows), draw)


def milliseconds_plot(summary: Summary, folder: Path) -> Plot | None:
    """Median planning time against the number of rows, every cell a mark."""
    rows = [(cell, board) for cell, board in summary.planning if board.ours]

    def draw(axes: Axes) -> None:
        for _, board in rows:
            for one, mark in _marked(board, _marks(rows)):
                if one.milliseconds:
                    axes.plot(board.rows, one.milliseconds, mark, **_style(one))
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.set_xlabel("rows of the step, over all data-parallel ranks")
        axes.set_ylabel("planning time in ms, median of the draws")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#DDDDDD", linewidth=0.8)
        axes.set_axisbelow(True)
        legend(axes, _handles(rows), columns=4)

    alt = "; ".join(
        f"{' '.join(cell.label)}: " + ", ".join(f"{one.planner} {one.milliseconds:.3g} ms" for one in board.planners
                                                if one.milliseconds is not None)
        for cell, board in rows
    )  # fmt: skip
    return save(folder, "planning_ms.png", "Planning time", alt, 9 if rows else 0, draw)


def _marks(rows: Rows) -> dict[str, str]:
    """A mark for every planner but ours, in the order in which they come."""
    names = dict.fromkeys(one.planner for _, board in rows for one in board.planners if not one.ours)
    return {name: MARKS[at % len(MARKS)] for at, name in enumerate(names)}


def _marked(board: Scoreboard, marks: dict[str, str]) -> Iterator[tuple[PlannerScore, str]]:
    """Ours last, so that it is on top."""
    for one in sorted(board.planners, key=lambda one: one.ours):
        yield one, "o" if one.ours else marks[one.planner]


def _style(one: PlannerScore, predicted: bool = False) -> dict[str, object]:
    colour = OPTIMISED if one.ours else NAIVE if one.keeps_cap else BREAKS
    return {
        "markersize": 9 if one.ours else 7,
        "markerfacecolor": "none" if predicted else colour,
        "markeredgecolor": colour,
        "markeredgewidth": 1.5,
        "linestyle": "none",
        "zorder": 3 if one.ours else 2,
    }


def _handles(rows: Rows, predicted: bool = False) -> list[Line2D]:
    """Ours first; a planner is shown in the colour of its worst cell."""
    marks, worst = _marks(rows), {}
    for _, board in rows:
        for one in board.planners:
            if one.planner not in worst or not one.keeps_cap:
                worst[one.planner] = one
    ordered = sorted(worst.values(), key=lambda one: not one.ours)
    handles = [
        Line2D([], [], marker=marks.get(one.planner, "o"), label=one.planner, **_style(one, predicted))
        for one in ordered
    ]
    return [*handles, Line2D([], [], marker="s", linestyle="none", color=BREAKS, label="grey: breaks the cap")]
