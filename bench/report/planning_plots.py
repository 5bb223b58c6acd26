"""The pictures of the planning scoreboard: one mark per planner, the same in all of them.

Steelyard is a blue circle. Others are orange where they keep the cap in all draws, and grey where they do not. As
everywhere, what was measured is filled and what is predicted is hollow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from bench.report.frame import NAIVE, NEUTRAL, OPTIMISED, Plot, label_rows, legend, most, plain, save
from bench.scoreboard import PlannerScore, Scoreboard
from bench.summary import CellRecords, Summary

MARKS = "sDv^<>PXph*d"
BREAKS = "#999999"
TIMES = (1, 1.2, 1.5, 2, 3, 5, 8)
APART = 1.12  # how far cells with and without a pipeline stand to the sides of their number of rows
Rows = list[tuple[CellRecords, Scoreboard]]
Figure = Callable[[PlannerScore], float | None]


def count_plot(summary: Summary, folder: Path) -> Plot | None:
    """Micro-batches over the proven bound, per cell without a pipeline: with one, more of them can be faster."""
    rows = [(cell, board) for cell, board in summary.planning if board.stages == 1 and board.ours and board.ours.bound]
    rows, title = most(rows, "Micro-batches against the proven bound, without a pipeline")

    def draw(axes: Axes) -> None:
        axes.axvline(1.0, color=NEUTRAL, linewidth=1)
        _dots(axes, rows, _count_over_bound)
        axes.set_xlabel("micro-batches over the bound; below 1 only by breaking the cap")
        legend(axes, _handles(rows), columns=4)

    return save(folder, "planning_count.png", title, _alt(rows, _count_over_bound), len(rows), draw)


def _count_over_bound(one: PlannerScore) -> float | None:
    return one.count / one.bound if one.count and one.bound else None


def time_plot(summary: Summary, folder: Path) -> Plot | None:
    """Predicted time over ideal, per cell with a pipeline."""
    rows = [(cell, board) for cell, board in summary.planning if board.stages > 1 and board.ours]
    rows, title = most(rows, "Predicted time of the step on the pipeline", lambda one: one[1].time_ratio or 0.0)

    def draw(axes: Axes) -> None:
        _dots(axes, rows, _time, predicted=True)
        axes.set_xscale("log")
        axes.set_xticks(TIMES, [f"{tick:g}" for tick in TIMES], minor=False)
        axes.set_xticks([], minor=True)
        axes.set_xlabel("predicted time of the slowest rank over ideal, logarithmic (left is better)")
        legend(axes, _handles(rows, predicted=True), columns=4)

    return save(folder, "planning_time.png", title, _alt(rows, _time), len(rows), draw)


def _time(one: PlannerScore) -> float | None:
    return one.time


def milliseconds_plot(summary: Summary, folder: Path) -> Plot | None:
    """Median planning time against the number of rows, every cell a mark."""
    rows = [(cell, board) for cell, board in summary.planning if board.ours]

    def draw(axes: Axes) -> None:
        for _, board in rows:
            at = board.rows * (APART if board.stages > 1 else 1 / APART)
            for one, mark in _marked(board, _marks(rows)):
                if one.milliseconds:
                    axes.plot(at, one.milliseconds, mark, **_style(one))
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.yaxis.set_major_formatter("{x:,g}")
        axes.set_xlabel("rows of the step; left of the line without a pipeline, right of it with one")
        axes.set_ylabel("planning time on one core in ms")
        sizes = sorted({board.rows for _, board in rows})
        axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
        plain(axes)
        legend(axes, _handles(rows), columns=4)

    return save(folder, "planning_ms.png", "Planning time", _alt(rows, _ms), 9 if rows else 0, draw)


def _ms(one: PlannerScore) -> float | None:
    return one.milliseconds


def _dots(axes: Axes, rows: Rows, figure: Figure, *, predicted: bool = False) -> None:
    """One line per cell, with a mark for every planner."""
    for y, (_, board) in enumerate(rows):
        for one, mark in _marked(board, _marks(rows)):
            value = figure(one)
            if value is not None:
                axes.plot(value, y, mark, **_style(one, predicted))
    label_rows(axes, [cell for cell, _ in rows])


def _alt(rows: Rows, figure: Figure) -> str:
    """Steelyard's figure in each cell, and the best of the others that keep the cap."""
    texts = []
    for cell, board in rows:
        others = [one for one in board.planners if not one.ours and one.keeps_cap and figure(one) is not None]
        shown = [one for one in (board.ours, min(others, key=figure, default=None)) if one and figure(one) is not None]
        texts.append(f"{' '.join(cell.label)}: " + ", ".join(f"{one.planner} {figure(one):.4g}" for one in shown))
    return "; ".join(texts)


def _marks(rows: Rows) -> dict[str, str]:
    """A mark for every planner but ours, in the order in which they come."""
    names = dict.fromkeys(one.planner for _, board in rows for one in board.planners if not one.ours)
    return {name: MARKS[at % len(MARKS)] for at, name in enumerate(names)}


def _marked(board: Scoreboard, marks: dict[str, str]) -> Iterator[tuple[PlannerScore, str]]:
    """Ours last, so that it is on top."""
    for one in sorted(board.planners, key=lambda one: one.ours):
        yield one, "o" if one.ours else marks[one.planner]


def _style(one: PlannerScore, predicted: bool = False) -> dict[str, object]:
    colour = OPTIMISED if one.ours else BREAKS if one.over_cap else NAIVE
    return {
        "markersize": 9 if one.ours else 7,
        "markerfacecolor": "none" if predicted else colour,
        "markeredgecolor": colour,
        "markeredgewidth": 1.5,
        "linestyle": "none",
        "zorder": 3 if one.ours else 2,
    }


def _handles(rows: Rows, predicted: bool = False) -> list[Line2D]:
    """Ours first; a planner that breaks the cap in some cell is grey here."""
    marks, shown = _marks(rows), {}
    for _, board in rows:
        for one in board.planners:
            if one.planner not in shown or one.over_cap:
                shown[one.planner] = one
    ordered = sorted(shown.values(), key=lambda one: not one.ours)
    handles = [
        Line2D([], [], marker=marks.get(one.planner, "o"), label=one.planner, **_style(one, predicted))
        for one in ordered
    ]
    return [*handles, Line2D([], [], marker="None", linestyle="none", label="grey: breaks the cap")]
