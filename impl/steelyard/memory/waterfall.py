"""A picture of what fills a GPU at the peak: one cascade of parts for each pipeline stage."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from steelyard.memory.predict import GIB, MemoryPrediction
from steelyard.memory.record import PARTS
from steelyard.picture_file import new_figure, write_figure


def draw(stages: Mapping[str, MemoryPrediction], path: Path, title: str, capacity_gib: float | None = None) -> None:
    """Write the picture, in the format that the file's ending names.

    Raises:
        InputError: matplotlib is not installed, or it cannot write such a file there.
    """
    figure = new_figure(figsize=(max(6.4, 4.6 * len(stages)), 4.8), layout="constrained")
    axes = figure.subplots(1, len(stages), sharey=True, squeeze=False)[0]
    shown = [part for part in PARTS if any(one.parts.get(part, 0) >= GIB / 100 for one in stages.values())]
    for axis, (name, one) in zip(axes, stages.items(), strict=True):
        bottom = 0.0
        for place, part in enumerate(shown):
            height = one.parts.get(part, 0) / GIB
            axis.bar(place, height, bottom=bottom, color=f"C{PARTS.index(part)}")
            bottom += height
            if part in one.parts:
                axis.annotate(f"{height:.1f}", (place, bottom), ha="center", va="bottom", fontsize=8)
        axis.bar(len(shown), one.peak_gib, color="0.35")
        axis.annotate(f"{one.peak_gib:.1f}", (len(shown), one.peak_gib), ha="center", va="bottom", fontsize=8)
        axis.set_xticks(range(len(shown) + 1), [*shown, "peak"], rotation=40, ha="right")
        axis.set_title(f"{name} stage, peak in {one.phase}", fontsize=10)
        if capacity_gib is not None:
            axis.axhline(capacity_gib, color="0.2", linestyle="--", linewidth=1)
            axis.annotate("capacity", (-0.5, capacity_gib), va="bottom", fontsize=8)
        axis.margins(y=0.08)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("GiB allocated")
    figure.suptitle(title, fontsize=10)
    write_figure(figure, path)
