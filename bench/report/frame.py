"""What the pictures of a report share: colours, rows of cells, the legend, and how a picture gets into its folder.

The same marks everywhere: naive orange and hatched, optimised blue and plain; measured and paced filled, predicted
hollow, and what is paced says so. So sides and sources can be told apart without colour too. The colours are those of
Okabe and Ito, which colour-blind readers can tell apart.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from bench.summary import CellRecords

NAIVE, OPTIMISED, NEUTRAL, LIMIT = "#E69F00", "#0072B2", "#000000", "#D55E00"
NAIVE_HATCH = "///"
WIDTH_INCHES, DPI = 8.0, 150


@dataclass(frozen=True)
class Plot:
    """``file``: name of the PNG in the run folder; ``alt``: what it shows, for who cannot see it."""

    file: str
    title: str
    alt: str


def label_rows(axes: Axes, cells: list[CellRecords]) -> None:
    axes.set_yticks(range(len(cells)), ["{}\n{}, {}".format(*cell.label) for cell in cells])
    # Room above and below the outer rows; the first row on top, as in the tables.
    axes.set_ylim(len(cells) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.grid(axis="x", color="#DDDDDD", linewidth=0.8)
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
        figure.savefig(folder / file, dpi=DPI)
    finally:
        plt.close(figure)
    return Plot(file, title, alt)
