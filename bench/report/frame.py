"""What the pictures of a report share: what their marks mean, rows of cells, the legend, and how a picture is kept.

The same marks everywhere. A side has a colour, a hatch and a shape: naive orange, hatched and square, optimised blue,
plain and round. A source has a filling: measured is full, paced is half full (bars: pale with an edge), predicted is
hollow. So both can be told apart without colour too. The colours are those of Okabe and Ito, which colour-blind readers
can tell apart.

Every picture is kept twice: as a PNG file on white for Markdown, and as SVG for pages, where ``NEUTRAL``, ``PLATE``,
``GRID`` and ``OPTIMISED`` follow the colours of the page, so that it can be read in dark mode. What is written on a
fill that does not follow is ``ON_PALE`` or ``ON_DARK``.
"""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import matplotlib

matplotlib.use("Agg")
import matplotlib.colors as colours
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from bench.summary import CellRecords
from suites.measure import Source

NAIVE, OPTIMISED, LIMIT = "#E69F00", "#0072B2", "#D55E00"
NEUTRAL, PLATE, GRID = "#000000", "#FFFFFF", "#DDDDDD"
ON_PALE, ON_DARK = "#111111", "#FEFEFE"
NAIVE_HATCH = "///"
T = TypeVar("T")
SIDE_COLOURS = {"naive": NAIVE, "optimised": OPTIMISED, "both": OPTIMISED}
SIDE_MARKS = {"naive": "s", "optimised": "o", "both": "o"}
FILLINGS = {"measured": "full", "paced": "half full", "predicted": "hollow"}
WIDTH_INCHES, DPI = 8.0, 150
MOST_ROWS = 60  # of a picture: more cannot be read, and the tables have them all
PALE = 0.45  # share of the colour in the fill of what is paced

# What the page sets for the colours that follow it.
_VARIABLES = {NEUTRAL: "var(--ink)", PLATE: "var(--plate)", GRID: "var(--grid)", OPTIMISED: "var(--optimised)"}
_SVG_SETTINGS = {"svg.fonttype": "path", "svg.hashsalt": "steelyard"}


@dataclass(frozen=True)
class Plot:
    """``file``: the PNG in the run folder; ``alt``: what it shows, for who cannot see it; ``svg``: for pages."""

    file: str
    title: str
    alt: str
    svg: str = field(repr=False)


def marker(side: str, source: Source = "measured", colour: str | None = None) -> dict[str, Any]:
    """The style of a point, for ``Axes.plot``; ``colour`` in the place of the side's."""
    colour = colour or SIDE_COLOURS[side]
    hollow = source == "predicted"
    return {
        "marker": SIDE_MARKS[side],
        "fillstyle": "bottom" if source == "paced" else "full",
        "markerfacecolor": PLATE if hollow else colour,
        "markerfacecoloralt": PLATE,
        "markeredgecolor": colour,
        "markeredgewidth": 1.6,
    }


def bar(side: str, source: Source = "measured") -> dict[str, Any]:
    """The style of a bar, for ``Axes.barh`` and ``Patch``."""
    colour = SIDE_COLOURS[side]
    hatch = NAIVE_HATCH if side == "naive" else ""
    if source == "measured":
        return {"facecolor": colour, "edgecolor": PLATE, "linewidth": 0.0, "hatch": hatch}
    face = PLATE if source == "predicted" else pale(colour)
    return {"facecolor": face, "edgecolor": colour, "linewidth": 1.4, "hatch": hatch}


def pale(colour: str, share: float = PALE) -> str:
    return colours.to_hex([share * part + 1 - share for part in colours.to_rgb(colour)])


def source_handles(sources: Iterable[Source], *, bars: bool = False) -> list[Line2D | Patch]:
    """What the fillings in a picture mean, where it has others than measured."""
    there = set(sources)
    shown = [source for source in FILLINGS if source in there]
    if shown in ([], ["measured"]):
        return []
    if bars:
        styles = [{**bar("optimised", source), "facecolor": face} for source, face in
                  (("measured", NEUTRAL), ("paced", pale(NEUTRAL)), ("predicted", PLATE))]  # fmt: skip
        by_source = dict(zip(FILLINGS, styles, strict=True))
        words = {"measured": "full", "paced": "pale", "predicted": "hollow"}
        return [
            Patch(**{**by_source[one], "edgecolor": NEUTRAL, "linewidth": 1.0}, label=f"{words[one]}: {one}")
            for one in shown
        ]
    return [
        Line2D([], [], linestyle="none", markersize=8, label=f"{FILLINGS[one]}: {one}", **marker("both", one, NEUTRAL))
        for one in shown
    ]


def most(rows: Sequence[T], title: str, badness: Callable[[T], float] | None = None) -> tuple[list[T], str]:
    """As many rows as a picture can have, the worst of them where there are more, and the title that says so."""
    if len(rows) <= MOST_ROWS:
        return list(rows), title
    order = sorted(range(len(rows)), key=lambda at: -badness(rows[at])) if badness else range(len(rows))
    return [rows[at] for at in sorted(order[:MOST_ROWS])], (
        f"{title} ({'the worst' if badness else 'the first'} {MOST_ROWS} of {len(rows)})"
    )


def label_rows(axes: Axes, cells: list[CellRecords]) -> None:
    set_rows(axes, ["{}\n{}, {}".format(*cell.label) for cell in cells])


def set_rows(axes: Axes, labels: list[str]) -> None:
    axes.set_yticks(range(len(labels)), labels)
    # Room above and below the outer rows; the first row on top, as in the tables.
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)


def plain(axes: Axes) -> None:
    """Two spines and a quiet grid, for pictures whose both axes are numbers."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)


def legend(axes: Axes, handles: list[Line2D | Patch], columns: int = 2) -> None:
    # Under the plot: no point of a later run can end up behind it.
    axes.figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)


def save(folder: Path, file: str, title: str, alt: str, rows: float, draw: Callable[[Axes], None]) -> Plot | None:
    """Draw one picture with room for ``rows`` rows; nothing to draw makes no picture."""
    if not rows:
        return None
    figure, axes = plt.subplots(figsize=(WIDTH_INCHES, 1.6 + 0.5 * rows), layout="constrained")
    try:
        axes.set_title(title, loc="left", fontsize=12)
        draw(axes)
        return keep(figure, folder, file, title, alt)
    finally:
        plt.close(figure)


def keep(figure: Figure, folder: Path, file: str, title: str, alt: str) -> Plot:
    """Write the PNG of a figure into ``folder``, and close the figure."""
    figure.savefig(folder / file, dpi=DPI)
    # Everything has its place by now; finding it takes most of the time.
    figure.set_layout_engine("none")
    buffer = io.StringIO()
    with matplotlib.rc_context(_SVG_SETTINGS):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    plt.close(figure)
    return Plot(file, title, alt, _for_page(buffer.getvalue(), file))


def _for_page(svg: str, file: str) -> str:
    """The ``svg`` element alone: its size is the page's, its ids are its own, its neutral colours follow the page."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    # On a phone it scrolls in its box: letters must not shrink with it.
    svg = re.sub(
        r'(<svg\b[^>]*?) width="([\d.]+)pt"',
        lambda m: f'{m[1]} style="min-width: {float(m[2]) * 1.1:.0f}px"',
        svg,
        count=1,
    )
    svg = re.sub(r'(<svg\b[^>]*?) height="[^"]*"', r'\1 aria-hidden="true"', svg, count=1)
    prefix = hashlib.sha256(file.encode()).hexdigest()[:6]
    svg = re.sub(r'\bid="', f'id="{prefix}-', svg)
    svg = re.sub(r'(href="|url\()#', rf"\g<1>#{prefix}-", svg)
    # Hundredths of a point are enough for paths; transforms of glyphs need all their digits.
    svg = re.sub(r'(?<= d=")[^"]*', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0]), svg)
    # What has no colour of its own is black in SVG, text too.
    for colour, variable in _VARIABLES.items():
        svg = re.sub(rf"{colour}\b", variable, svg, flags=re.IGNORECASE)
    # A variable is no attribute's value everywhere, but always a style's.
    return re.sub(r'fill="(var\([^"]*\))"', r'style="fill: \1"', svg).strip()
