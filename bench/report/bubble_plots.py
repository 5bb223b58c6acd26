"""The pictures of pipeline bubbles: who ran what when, and the overhead against the number of micro-batches.

Paced times are filled, predicted ones hollow, as everywhere; a backward pass is darker than a forward pass. Passes
carry the number of their micro-batch, so the naive ones are not hatched; every panel names its side.
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

from bench.bubbles import Bubbles, timelines
from bench.report.frame import DPI, LIMIT, NAIVE, NEUTRAL, OPTIMISED, WIDTH_INCHES, Plot, legend
from bench.summary import CellRecords, Summary
from steelyard.pipeline.simulate import Span

SIDE_COLOURS = {"naive": NAIVE, "optimised": OPTIMISED}
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
        _panel(axes, spans, SIDE_COLOURS[side], source == "predicted", row.stages, end)
        makespan = max(span.end for span in spans)
        axes.set_title(f"{side}, {source}: {makespan:.3g} s", loc="left", fontsize=9)
        axes.axvline(makespan, color=NEUTRAL, linewidth=1, linestyle="--")
    chunks = "; a, b: first, second chunk of the stage" if row.virtual > 1 else ""
    panels[-1, 0].set_xlabel(f"seconds since the first forward pass (number: micro-batch{chunks})")
    title = f"Passes of {', '.join(cell.label)}"
    figure.suptitle(title, x=0.01, ha="left", fontsize=12)
    handles = [
        Patch(facecolor=_shade(colour, direction), label=f"{side}, {word}")
        for side, colour in SIDE_COLOURS.items()
        for direction, word in (("F", "forward"), ("B", "backward"))
    ]
    handles.append(Patch(facecolor="white", edgecolor=NEUTRAL, label="hollow: predicted"))
    handles.append(Line2D([], [], color=NEUTRAL, linewidth=1, linestyle="--", label="end of the step"))
    legend(panels[0, 0], handles, columns=3)
    file = f"gantt_vpp{row.virtual}.png"
    figure.savefig(folder / file, dpi=DPI)
    plt.close(figure)
    alt = "; ".join(
        f"{side}, {source}: {max(span.end for span in spans):.3g} s" for (side, source), spans in found.items()
    )
    return Plot(file, title, alt)


def _panel(axes: Axes, spans: list[Span], colour: str, hollow: bool, stages: int, end: float) -> None:
    chunks = 1 + max(span.chunk for span in spans)
    for span in spans:
        shade, width = _shade(colour, span.direction), span.end - span.start
        axes.barh(span.stage, width, 0.86, span.start, facecolor="white" if hollow else shade,
                  edgecolor=shade if hollow else "white", linewidth=0.9 if hollow else 0.4)  # fmt: skip
        word = f"{span.micro_batch}{'abcdefghijkl'[span.chunk] if chunks > 1 else ''}"
        if width > LETTER_SHARE * end * len(word):
            dark = not hollow and span.direction == "B"
            axes.text(span.start + width / 2, span.stage, word, ha="center", va="center", fontsize=6,
                      color="white" if dark else "black")  # fmt: skip
    axes.set_ylim(stages - 0.4, -0.6)
    axes.set_xlim(0, end * 1.01)
    axes.set_yticks(range(stages), [f"stage {stage}" for stage in range(stages)], fontsize=7)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _shade(colour: str, direction: str) -> tuple[float, ...]:
    """The side's colour, lighter for a forward pass and darker for a backward pass."""
    rgb = colours.to_rgb(colour)
    return tuple(0.45 * part + 0.55 for part in rgb) if direction == "F" else tuple(0.85 * part for part in rgb)


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
    figure.savefig(folder / "bubble_counts.png", dpi=DPI)
    plt.close(figure)
    alt = "; ".join(f"{' '.join(cell.label)}: {_two_percent(row.overhead)}" for cell, row in chosen)
    return Plot("bubble_counts.png", title, alt)


def _counts(axes: Axes, cell: CellRecords, row: Bubbles) -> None:
    curve = cell.find("overhead_by_count")
    counts, refused = curve.notes["counts"], curve.notes["refused"]
    axes.plot(counts, curve.values, "o-", color=NEUTRAL, markerfacecolor="white", markersize=5, linewidth=1)
    axes.plot(refused, [0.04] * len(refused), "x", color=LIMIT, markersize=5, transform=axes.get_xaxis_transform())
    for side, colour, mark, traced, count in zip(
        SIDE_COLOURS, SIDE_COLOURS.values(), "sD", row.overhead, row.micro_batches, strict=True
    ):
        if traced is not None and count is not None:
            axes.plot(count, traced, mark, color=colour, markersize=7, zorder=3, label=side)
    # A few micro-batches leave most stages idle: that end of the curve may leave the picture.
    shown = [one for one in row.overhead if one is not None]
    axes.set_ylim(0, 1.3 * max(*shown, 2 * min(curve.values)) if shown else None)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    workload, layout, _ = cell.label
    group = cell.first.case["layout"]["group"]
    axes.set_title(f"{layout}{f' group {group}' if group else ''}\n{workload}", loc="left", fontsize=9)
    axes.set_xlabel("micro-batches", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#DDDDDD", linewidth=0.8)
    axes.set_axisbelow(True)


def _count_handles() -> list[Line2D]:
    return [
        Line2D(
            [],
            [],
            color=NEUTRAL,
            marker="o",
            markerfacecolor="white",
            linewidth=1,
            label="balanced, no token cap: predicted",
        ),
        Line2D([], [], color=NAIVE, marker="s", linestyle="none", markersize=7, label="naive, paced"),
        Line2D([], [], color=OPTIMISED, marker="D", linestyle="none", markersize=7, label="optimised, paced"),
        Line2D([], [], color=LIMIT, marker="x", linestyle="none", label="refused by the schedule"),
    ]


def _two_percent(pair: tuple[float | None, float | None]) -> str:
    return " / ".join("-" if one is None else f"{one:.0%}" for one in pair)
