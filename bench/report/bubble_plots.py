"""The pictures of pipeline bubbles: who ran what when, and the overhead against the number of micro-batches.

Predicted passes are hollow as everywhere, traced ones are filled: a backward pass is darker than a forward pass. Passes
carry the number of their micro-batch, so the naive ones are not hatched; every panel names its side and its source.
"""

from __future__ import annotations

import math
from pathlib import Path

import matplotlib.colors as colours
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator, PercentFormatter

from bench.bubbles import SIDES, Bubbles, timelines
from bench.report.frame import (
    LIMIT,
    NEUTRAL,
    ON_DARK,
    ON_PALE,
    PLATE,
    SIDE_COLOURS,
    WIDTH_INCHES,
    Plot,
    keep,
    legend,
    marker,
    pale,
    plain,
    source_handles,
)  # fmt: skip
from bench.summary import CellRecords, Summary
from steelyard.pipeline.simulate import Span

STAGE_INCHES, PANEL_INCHES = 0.2, 0.45  # height of a stage, and of what stands above and below the stages of a panel
COLUMNS = 3  # of the panels in the picture of counts
LETTER_SHARE = 0.008  # a pass narrower than this share of the width has no room for its micro-batch's number


def gantt_plots(summary: Summary, folder: Path) -> list[Plot]:
    """A Gantt chart of both sides for one cell of each number of chunks: the one with the largest gain."""
    best: dict[int, tuple[CellRecords, Bubbles]] = {}
    for cell, row in summary.bubbles:
        if row.ratio and timelines(cell):
            before = best.get(row.virtual)
            if before is None or row.ratio.value > before[1].ratio.value:
                best[row.virtual] = (cell, row)
    return [_gantt(cell, row, folder) for _, (cell, row) in sorted(best.items())]


def _gantt(cell: CellRecords, row: Bubbles, folder: Path) -> Plot:
    found = timelines(cell)
    end = max(span.end for spans in found.values() for span in spans)
    height = len(found) * (row.stages * STAGE_INCHES + PANEL_INCHES) + 1.3
    figure, panels = plt.subplots(
        len(found), 1, sharex=True, squeeze=False, figsize=(WIDTH_INCHES * 1.25, height), layout="constrained"
    )
    for axes, ((side, source), spans) in zip(panels[:, 0], found.items(), strict=True):
        _panel(axes, spans, side, source == "predicted", row.stages, end)
        makespan = max(span.end for span in spans)
        axes.set_title(f"{side}, {source}: {makespan:.3g} s", loc="left", fontsize=9)
        axes.axvline(makespan, color=NEUTRAL, linewidth=1, linestyle="--")
    chunks = "; a, b: first, second chunk of the stage" if row.virtual > 1 else ""
    panels[-1, 0].set_xlabel(f"seconds since the first forward pass (number: micro-batch{chunks})")
    title = f"Passes of {', '.join(cell.label)}"
    figure.suptitle(title, x=0.01, ha="left", fontsize=12)
    handles = [
        Patch(facecolor=_shade(side, direction), label=f"{side}, {word}")
        for side in SIDES
        for direction, word in (("F", "forward"), ("B", "backward"))
    ]
    handles += source_handles(["predicted"], bars=True)
    handles.append(Line2D([], [], color=NEUTRAL, linewidth=1, linestyle="--", label="end of the step"))
    legend(panels[0, 0], handles, columns=3)
    file = f"gantt_vpp{row.virtual}.png"
    alt = "; ".join(
        f"{side}, {source}: {max(span.end for span in spans):.3g} s" for (side, source), spans in found.items()
    )
    return keep(figure, folder, file, title, alt)


def _panel(axes: Axes, spans: list[Span], side: str, hollow: bool, stages: int, end: float) -> None:
    chunks = 1 + max(span.chunk for span in spans)
    for span in spans:
        shade, width = _shade(side, span.direction), span.end - span.start
        axes.barh(span.stage, width, 0.86, span.start, facecolor=PLATE if hollow else shade,
                  edgecolor=shade if hollow else PLATE, linewidth=0.9 if hollow else 0.4)  # fmt: skip
        word = f"{span.micro_batch}{'abcdefghijkl'[span.chunk] if chunks > 1 else ''}"
        if width > LETTER_SHARE * end * len(word):
            ink = NEUTRAL if hollow else ON_DARK if span.direction == "B" else ON_PALE
            axes.text(span.start + width / 2, span.stage, word, ha="center", va="center", fontsize=6,
                      color=ink)  # fmt: skip
    axes.set_ylim(stages - 0.4, -0.6)
    axes.set_xlim(0, end * 1.01)
    axes.set_yticks(range(stages), [f"stage {stage}" for stage in range(stages)], fontsize=7)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _shade(side: str, direction: str) -> str:
    """The side's colour, lighter for a forward pass and darker for a backward pass."""
    colour = SIDE_COLOURS[side]
    return pale(colour) if direction == "F" else colours.to_hex([0.85 * part for part in colours.to_rgb(colour)])


def count_plot(summary: Summary, folder: Path) -> Plot | None:
    """Overhead against the count, a panel for the first cell of every pipeline; refused counts are crossed out."""
    panels: dict[tuple[int, int, int | None], tuple[CellRecords, Bubbles]] = {}
    for cell, row in summary.bubbles:
        if cell.find("overhead_by_count"):
            panels.setdefault((row.stages, row.virtual, cell.first.case["layout"]["group"]), (cell, row))
    chosen = list(panels.values())
    if not chosen:
        return None
    columns = min(COLUMNS, len(chosen))
    lines = math.ceil(len(chosen) / columns)
    figure, grid = plt.subplots(
        lines, columns, squeeze=False, figsize=(WIDTH_INCHES * 1.25, 2.6 * lines + 1.0), layout="constrained"
    )
    for axes in grid.flat[len(chosen) :]:
        axes.set_visible(False)
    for axes, (cell, row) in zip(grid.flat, chosen, strict=False):
        _counts(axes, cell, row)
    for axes in grid[:, 0]:
        axes.set_ylabel("overhead")
    title = "Pipeline overhead against the number of micro-batches"
    figure.suptitle(title, x=0.01, ha="left", fontsize=12)
    legend(grid[0, 0], _count_handles(), columns=4)
    alt = "; ".join(f"{' '.join(cell.label)}: {_two_percent(row.overhead)}" for cell, row in chosen)
    return keep(figure, folder, "bubble_counts.png", title, alt)


def _counts(axes: Axes, cell: CellRecords, row: Bubbles) -> None:
    curve = cell.find("overhead_by_count")
    counts, refused = curve.notes["counts"], curve.notes["refused"]
    axes.plot(counts, curve.values, color=NEUTRAL, markersize=5, linewidth=1, **marker("both", "predicted", NEUTRAL))
    axes.plot(refused, [0.04] * len(refused), "x", color=LIMIT, markersize=5, transform=axes.get_xaxis_transform())
    for side, traced, count in zip(SIDES, row.overhead, row.micro_batches, strict=True):
        if traced is not None and count is not None:
            axes.plot(count, traced, markersize=8, zorder=3, **marker(side, row.source))
    # A few micro-batches leave most stages idle: that end of the curve may leave the picture.
    shown = [one for one in row.overhead if one is not None]
    axes.set_ylim(0, 1.3 * max(*shown, 2 * min(curve.values)) if shown else None)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    workload, layout, _ = cell.label
    group = cell.first.case["layout"]["group"]
    axes.set_title(f"{layout}{f' group {group}' if group else ''}\n{workload}", loc="left", fontsize=9)
    axes.set_xlabel("micro-batches", fontsize=9)
    plain(axes)


def _count_handles() -> list[Line2D]:
    no_cap = {"color": NEUTRAL, "linewidth": 1, "label": "balanced, no token cap: predicted"}
    return [
        Line2D([], [], **no_cap, **marker("both", "predicted", NEUTRAL)),
        *(
            Line2D([], [], linestyle="none", markersize=8, label=f"{side}, paced", **marker(side, "paced"))
            for side in SIDES
        ),
        Line2D([], [], color=LIMIT, marker="x", linestyle="none", label="refused by the schedule"),
    ]


def _two_percent(pair: tuple[float | None, float | None]) -> str:
    return " / ".join("-" if one is None else f"{one:.0%}" for one in pair)
