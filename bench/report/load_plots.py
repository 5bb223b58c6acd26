"""The pictures of loads: tokens of every micro-batch against the cap, and the work of every rank."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from bench.bubbles import SIDES, timelines
from bench.report.frame import (
    LIMIT,
    WIDTH_INCHES,
    Plot,
    bar,
    keep,
    legend,
    plain,
    set_rows,
    source_handles,
)  # fmt: skip
from bench.summary import CellRecords, Summary
from suites.measure import Source

COLUMNS = 2
MOST_CELLS = 8  # with the most to tell: a picture of them all could not be read


def cap_plot(summary: Summary, folder: Path) -> Plot | None:
    """Bars of the tokens that each micro-batch put into the model, in the order they ran, with the cap."""
    cells = [cell for cell, _ in summary.throughput if all(_load(cell, side) for side in SIDES)][:MOST_CELLS]
    if not cells:
        return None
    lines = math.ceil(len(cells) / COLUMNS)
    figure, grid = plt.subplots(
        lines, COLUMNS, squeeze=False, figsize=(WIDTH_INCHES * 1.25, 2.5 * lines + 0.9), layout="constrained"
    )
    for axes in grid.flat[len(cells) :]:
        axes.set_visible(False)
    for axes, cell in zip(grid.flat, cells, strict=False):
        _loads(axes, cell)
    title = "Tokens of every micro-batch against the cap"
    figure.suptitle(title, x=0.01, ha="left", fontsize=12)
    handles = [Patch(**bar(side), label=side) for side in SIDES]
    handles.append(Line2D([], [], color=LIMIT, linewidth=1.5, label="cap: the most tokens of a micro-batch"))
    legend(grid[0, 0], handles, columns=3)
    alt = "; ".join(
        f"{' '.join(cell.label)}: "
        + ", ".join(f"{side} at most {_most(cell, side):,} of {_load(cell, side)['cap']:,}" for side in SIDES)
        for cell in cells
    )
    return keep(figure, folder, "cap.png", title, alt)


def _load(cell: CellRecords, side: str) -> Mapping | None:
    series = cell.find("micro_batches", side)
    return series.notes if series and "tokens" in series.notes else None


def _most(cell: CellRecords, side: str) -> int:
    return max(map(max, _load(cell, side)["tokens"]))


def _loads(axes: Axes, cell: CellRecords) -> None:
    at = 0
    ticks: list[tuple[float, str]] = []
    for side in SIDES:
        for rank, tokens in enumerate(_load(cell, side)["tokens"]):
            places = np.arange(at, at + len(tokens))
            axes.bar(places, tokens, 0.85, **bar(side))
            ticks.append((places.mean(), f"rank {rank}"))
            at += len(tokens) + 1
        at += 1
    axes.axhline(_load(cell, "optimised")["cap"], color=LIMIT, linewidth=1.5)
    axes.set_xticks([place for place, _ in ticks], [word for _, word in ticks], fontsize=8)
    axes.tick_params(axis="x", length=0)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set_title("\n".join((cell.label[0], ", ".join(cell.label[1:]))), loc="left", fontsize=9)
    plain(axes)
    axes.grid(visible=False, axis="x")


def work_plot(summary: Summary, folder: Path) -> Plot | None:
    """Busy seconds of every rank in a step: processor time where it was measured, passes where they were traced."""
    found = [(cell, work, source) for cell in summary.cells for work, source in [_work(cell)] if work]
    # Measured ones first; of the others there is most to see where the naive ranks differ most.
    found = sorted(found, key=lambda one: (one[2] != "measured", -_spread(one[1]["naive"])))[:MOST_CELLS]
    if not found:
        return None
    figure, axes = plt.subplots(figsize=(WIDTH_INCHES, 1.7 + 0.62 * len(found)), layout="constrained")
    height = 0.36
    for y, (_, work, source) in enumerate(found):
        mean = max(np.mean(work[side]) for side in SIDES)
        for at, side in zip((y - height / 2, y + height / 2), SIDES, strict=True):
            shares = np.array(work[side]) / mean
            width = height * 0.92 / len(shares)
            places = at + (np.arange(len(shares)) - (len(shares) - 1) / 2) * width
            axes.barh(places, shares, width * 0.86, **bar(side, source))
            word = f"slowest {max(work[side]):.2g} s: {_spread(work[side]):.2f} of the mean"
            axes.annotate(word, (shares.max(), at), xytext=(6, 0), textcoords="offset points", va="center", fontsize=8)
    set_rows(axes, ["{} {}\n{}, {}".format(cell.kind, *cell.label) for cell, *_ in found])
    axes.set_xlim(0, 1.65 * max(_spread(work[side]) for _, work, _ in found for side in SIDES))
    axes.set_xlabel("busy time of each rank (a bar each) over the slower side's mean")
    title = "Work of every rank"
    axes.set_title(title, loc="left", fontsize=12)
    handles = [Patch(**bar(side), label=side) for side in SIDES]
    legend(axes, [*handles, *source_handles((source for *_, source in found), bars=True)], 4)
    alt = "; ".join(
        f"{' '.join(cell.label)}: " + ", ".join(f"{side} slowest {max(work[side]):.2g} s" for side in SIDES)
        for cell, work, _ in found
    )
    return keep(figure, folder, "work.png", title, alt)


def _work(cell: CellRecords) -> tuple[dict[str, list[float]], Source]:
    """Seconds by side and rank, and how they are known; nothing where there is one rank, or no such samples."""
    spans = {side: spans for (side, source), spans in timelines(cell).items() if source != "predicted"}
    if len(spans) == len(SIDES):
        ranks = range(1 + max(span.stage for found in spans.values() for span in found))
        return {
            side: [sum(span.end - span.start for span in spans[side] if span.stage == rank) for rank in ranks]
            for side in SIDES
        }, "paced"
    series = {side: cell.find("step_processor_seconds", side) for side in SIDES}
    of_ranks = {side: one.notes.get("of_ranks", ()) for side, one in series.items() if one}
    if len(of_ranks) < len(SIDES) or any(len(one) < 2 for one in of_ranks.values()):
        return {}, "measured"
    return {side: [float(np.median(samples)) for samples in one] for side, one in of_ranks.items()}, "measured"


def _spread(work: list[float]) -> float:
    return max(work) / float(np.mean(work))
