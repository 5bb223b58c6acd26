"""The ratios of cells over commits: from the reference results in git's history, and from the runs of a page."""

from __future__ import annotations

import math
import subprocess
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from matplotlib import pyplot as plt
from pydantic import ValidationError

from bench.environment import ROOT
from bench.gate import REFERENCE, Reference, reference_file
from bench.report.frame import NEUTRAL, WIDTH_INCHES, Plot, keep, legend, marker, plain, source_handles
from bench.report.runs import Runs
from bench.summary import Summary
from bench.weighed import headlines
from steelyard.errors import InputError
from suites.measure import Source

MOST_COMMITS, MOST_CELLS = 12, 8
LINES = ("-", "--", ":", "-.")


@dataclass(frozen=True)
class Point:
    """What one commit reached: how many times better the optimised side was, by cell, and how that is known."""

    commit: str
    time: datetime
    better: dict[str, tuple[float, Source]]


def history(runs: Runs) -> list[Point]:
    """A point for every commit, the oldest first; of a commit with several runs, the last one's figures."""
    points = [point for source in runs.sources for point in _recorded(reference_of(source))]
    for source in runs.sources:
        first = source.records.lines[0]
        # What was measured with changes belongs to no commit.
        commit = f"{(first.environment.commit or 'none')[:7]}{'+' if first.environment.dirty else ''}"
        points.append(Point(commit, first.time, _better(Summary.of(source.records.lines))))
    by_commit: dict[str, Point] = {}
    for point in sorted(points, key=lambda one: one.time):
        before = by_commit.get(point.commit)
        by_commit[point.commit] = Point(
            point.commit, before.time if before else point.time, {**(before.better if before else {}), **point.better}
        )
    return list(by_commit.values())[-MOST_COMMITS:]


def reference_of(source: object) -> Path | None:
    try:
        return reference_file(source.records, REFERENCE)
    except InputError:  # the run was made by no matrix
        return None


def _better(summary: Summary) -> dict[str, tuple[float, Source]]:
    return {row.cell.id: (row.better.value, row.first.source) for row in headlines(summary)}


def _recorded(file: Path | None) -> list[Point]:
    """The reference results of a file in each commit that changed it."""
    if file is None or not file.is_relative_to(ROOT):
        return []
    name = file.relative_to(ROOT).as_posix()
    points = []
    for line in _git("log", f"-{MOST_COMMITS}", "--format=%H %cI", "--", name).splitlines():
        commit, _, time = line.partition(" ")
        try:
            reference = Reference.model_validate_json(_git("show", f"{commit}:{name}"))
        except ValidationError:  # removed by this commit, or of another version
            continue
        better = _better(Summary.of(reference.records().lines))
        points.append(Point(reference.commit[:7], datetime.fromisoformat(time), better))
    return points


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def history_text(points: list[Point]) -> str:
    """What the pages say beside the picture, or in its place."""
    if len(points) == 1:
        return f"One commit so far ({points[0].commit}): there is no history to show."
    tracked = _tracked(points)
    if not tracked:
        return f"{len(points)} commits, but no cell was weighed at two of them: there is no history to show."
    return "A + behind a commit: with changes that no commit has."


def _tracked(points: list[Point]) -> list[str]:
    """Cells with the most points, from two on."""
    cells = {cell: sum(cell in point.better for point in points) for point in points for cell in point.better}
    return [cell for cell, count in sorted(cells.items(), key=lambda one: -one[1]) if count > 1][:MOST_CELLS]


def history_plot(points: list[Point], folder: Path) -> Plot | None:
    """A line for each cell that was weighed at two commits or more."""
    cells = _tracked(points)
    if not cells:
        return None
    figure, axes = plt.subplots(figsize=(WIDTH_INCHES, 4.4 + 0.22 * len(cells)), layout="constrained")
    axes.axhline(1.0, color=NEUTRAL, linewidth=1)
    handles = []
    for at, cell in enumerate(cells):
        found = [(x, *point.better[cell]) for x, point in enumerate(points) if cell in point.better]
        style = {**marker("optimised", found[-1][2]), "marker": "osD^v<>P"[at % 8], "linestyle": LINES[at % len(LINES)]}
        (line,) = axes.plot([x for x, *_ in found], [value for _, value, _ in found], linewidth=1.2, markersize=7,
                            color=style["markeredgecolor"], label=cell, **style)  # fmt: skip
        handles.append(line)
    axes.set_xticks(range(len(points)), [f"{point.commit}\n{point.time:%Y-%m-%d}" for point in points], fontsize=8)
    axes.set_ylabel("times better than the naive side")
    plain(axes)
    axes.set_ylim(bottom=0)
    axes.set_title("History over commits", loc="left", fontsize=12)
    sources = {source for point in points for _, source in point.better.values()}
    legend(axes, [*handles, *source_handles(sources)], columns=2 if max(map(len, cells)) < 48 else 1)
    alt = "; ".join(
        f"{cell}: " + ", ".join(f"{point.better[cell][0]:.2f}" for point in points if cell in point.better)
        for cell in cells
        if not math.isnan(points[-1].better.get(cell, (0.0,))[0])
    )
    return keep(figure, folder, "history.png", "History over commits", alt)
