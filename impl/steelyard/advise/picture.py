"""A picture of memory against the length of responses: one line for each setting, and what a GPU has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from steelyard.advise.job import Job
from steelyard.advise.memory import check, row_tokens
from steelyard.advise.predictions import Predictions
from steelyard.advise.setting import Setting
from steelyard.picture_file import new_figure, write_figure

POINTS = 24
MOST = 8
# Told apart without colour: by dashes, by marks, and by names at the ends.
DASHES = ("-", "--", "-.", ":")
MARKS = "osD^vPX*"


def peaks(job: Job, setting: Setting, predictions: Predictions) -> list[tuple[int, float]]:
    """Longest responses up to the model's positions, and the peak in GiB of a step whose budget is one such row, or
    whose fixed micro-batches are that wide.
    """
    most = job.shape.max_positions - job.max_prompt
    found = []
    for number in range(1, POINTS + 1):
        one = replace(job, max_response=max(1, most * number // POINTS))
        budget = row_tokens(setting.layout, one.longest)
        fit = check(one, replace(setting, max_tokens=budget), predictions)
        found.append((one.max_response, max(fit.peak_gib.values())))
    return found


def draw(job: Job, settings: Sequence[Setting], predictions: Predictions, path: Path) -> None:
    """Write the picture of at most ``MOST`` settings, in the format that the file's ending names.

    Raises:
        InputError: matplotlib is not installed, or it cannot write such a file there.
    """
    figure = new_figure(figsize=(9.0, 5.2), layout="constrained")
    axis = figure.subplots()
    for number, setting in enumerate(settings[:MOST]):
        responses, gib = zip(*peaks(job, setting, predictions), strict=True)
        axis.plot(
            responses,
            gib,
            linestyle=DASHES[number % len(DASHES)],
            marker=MARKS[number % len(MARKS)],
            markevery=(number, MOST),
            label=name_of(setting),
        )
    axis.axhline(job.gpu.gib, color="0.2", linewidth=1.5)
    axis.annotate(f"{job.gpu.gib:g} GiB", (0, job.gpu.gib), va="bottom", fontsize=8)
    axis.axhline(job.available_gib, color="0.2", linewidth=1, linestyle=(0, (1, 3)))
    axis.annotate("available", (0, job.available_gib), va="top", fontsize=8)
    axis.axvline(job.max_response, color="0.6", linewidth=1)
    axis.annotate("asked for", (job.max_response, 0), rotation=90, va="bottom", ha="right", fontsize=8)
    axis.set_xlabel("longest response, tokens")
    axis.set_ylabel("GiB at the peak of the fullest stage")
    axis.set_xlim(left=0)
    axis.set_ylim(0, 1.6 * job.gpu.gib)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    axis.set_title(f"{job.shape.name}, {job.gpus} GPUs: predicted, not verified on a GPU", fontsize=10)
    write_figure(figure, path)


def name_of(setting: Setting) -> str:
    """Layout and what else makes a difference."""
    more = [f"recompute {setting.recompute}"] if setting.recompute != "none" else []
    more += [f"{setting.micro_batch_size} rows"] if setting.micro_batch_size else []
    more += [
        word for word, there in (("offload", setting.offload), ("whole logits", not setting.chunked_logits)) if there
    ]
    return ", ".join([str(setting.layout), *more])
