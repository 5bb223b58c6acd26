"""Heat map of parity: each cell's worst error of every kind, as a share of its limit."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from bench.report.frame import NEUTRAL, ON_DARK, ON_PALE, Plot, label_rows, most, save
from bench.summary import Summary

KINDS = ("loss_error", "gradient_error", "metrics_error", "output_error")
# Colours run from a ten-thousandth of the limit to ten times the limit, where it breaks.
LOWEST, HIGHEST = -4.0, 1.0


def parity_heat(summary: Summary, folder: Path) -> Plot | None:
    """One row per cell, one column per kind of error; the number is the error, the colour its share of the limit."""
    rows = [(cell, row) for cell, row in summary.parity if row.error is not None]
    rows, title = most(rows, "Parity by kind of error", lambda one: one[1].share)
    cells = [cell for cell, _ in rows]
    found = [[cell.find(kind) for kind in KINDS] for cell in cells]
    errors = [[max(series.values) if series else None for series in row] for row in found]

    def share(row: int, column: int) -> float:
        series, error = found[row][column], errors[row][column]
        if series is None or error is None or not series.limit:
            return math.nan
        return float(np.clip(math.log10(max(error / series.limit, 1e-9)), LOWEST, HIGHEST))

    def draw(axes: Axes) -> None:
        label_rows(axes, cells)
        axes.grid(visible=False)
        shares = [[share(row, column) for column in range(len(KINDS))] for row in range(len(cells))]
        image = axes.imshow(shares, cmap="cividis", vmin=LOWEST, vmax=HIGHEST, aspect="auto")
        axes.set_ylim(len(cells) - 0.5, -0.5)
        axes.set_xticks(range(len(KINDS)), [kind.removesuffix("_error") for kind in KINDS])
        for row, column in np.ndindex(len(cells), len(KINDS)):
            error = errors[row][column]
            text = "-" if error is None else f"{error:.1e}"
            axes.text(column, row, text, ha="center", va="center", fontsize=9,
                      color=_ink(shares[row][column]))  # fmt: skip
        bar = axes.figure.colorbar(image, ax=axes, ticks=range(int(LOWEST), int(HIGHEST) + 1))
        bar.set_label("error over its limit (powers of ten; above 0 it breaks)")

    alt = f"{len(cells)} cells by kinds of error, each number in the table of all metrics"
    return save(folder, "parity_heat.png", title, alt, len(cells), draw)


def _ink(share: float) -> str:
    if math.isnan(share):  # no fill at all
        return NEUTRAL
    return ON_PALE if share > -1.5 else ON_DARK
