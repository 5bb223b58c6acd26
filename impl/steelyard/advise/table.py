"""What the command prints: tables of settings, changes and nodes, and the same as plain data for JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.table import Table

from steelyard.advise.changes import Change, Nodes
from steelyard.advise.job import Job
from steelyard.advise.memory import Fit
from steelyard.advise.rank import Advice
from steelyard.advise.setting import Setting
from steelyard.advise.speed import EFFICIENCY, LINKS, Clock, Speed

NOT_VERIFIED = "predicted, not verified on a GPU"


def assumptions(job: Job, clock: Clock) -> list[str]:
    """What every figure rests on, one line each."""
    return [
        "GiB: fake runs of the real step with 2 and 3 layers per chunk, continued (~) to all layers and to the tokens "
        f"of a micro-batch; {job.available_gib:g} of {job.gpu.gib:g} GiB are available.",
        f"Seconds: kernels at {clock.source}, links at {LINKS[0]:.0%} to {LINKS[1]:.0%} of their rate (assumed).",
        "Longest response: while the budget is one such row, or with the fixed micro-batches asked for.",
        f"Micro-batches, overhead, imbalance: those of the plan for {job.lengths_in_words}.",
    ]


def settings_table(advices: Sequence[Advice]) -> Table:
    """Settings that fit, fastest first."""
    table = _table()
    table.add_column("layout", no_wrap=True)
    table.add_column("re-\ncompute")
    for name in (
        "tokens\nper GPU",
        "GiB by\nstage",
        "micro-\nbatches",
        "over-\nhead",
        "imba-\nlance",
        "longest\nresponse",
    ):
        table.add_column(name, justify="right")
    table.add_column("tokens/s\nper GPU", justify="right", no_wrap=True)
    for advice in advices:
        fit, speed, setting = advice.fit, advice.speed, advice.setting
        table.add_row(
            str(setting.layout),
            f"{setting.recompute}\noffload" if setting.offload else setting.recompute,
            str(fit.tokens),
            _stages(fit),
            str(speed.micro_batches),
            f"{speed.overhead:.1%}" if setting.layout.pp > 1 else "",
            f"{speed.imbalance:.3f}",
            str(fit.largest_response),
            _between(speed),
        )
    return table


def changes_table(found: Sequence[Change]) -> Table:
    """Single changes and what they do."""
    table = _table()
    table.add_column("change")
    table.add_column("then")
    for name in ("GiB freed", "longest response", "GPU-seconds of a step"):
        table.add_column(name, justify="right")
    for change in found:
        table.add_row(
            change.what,
            "fits" if change.fit.fits else f"{change.fit.short_gib:.1f} GiB short",
            f"{change.freed_gib:.1f}",
            str(change.fit.largest_response),
            "cannot be planned" if change.slower is None else f"{100 * change.slower:+.1f} %",
        )
    return table


def nodes_table(nodes: Sequence[Nodes]) -> Table:
    """The fastest setting for each number of GPUs."""
    table = _table()
    for name in ("GPUs", "fastest layout that fits", "re-\ncompute"):
        table.add_column(name)
    for name in ("GiB by\nstage", "longest\nresponse", "seconds\nof a step", "tokens/s\nper GPU"):
        table.add_column(name, justify="right")
    for each in nodes:
        if each.best is None:
            table.add_row(str(each.gpus), "nothing fits")
            continue
        best = each.best
        table.add_row(
            str(each.gpus),
            str(best.setting.layout),
            best.setting.recompute,
            _stages(best.fit),
            str(best.fit.largest_response),
            "-".join(f"{time:.1f}" for time in best.speed.seconds),
            _between(best.speed),
        )
    return table


def _table() -> Table:
    """Narrow enough for all columns on 100 characters."""
    return Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)


def verdict(job: Job, setting: Setting, fit: Fit, speed: Speed | None) -> str:
    """Whether one's own settings fit, in a few lines."""
    lines = [
        f"{in_words(job)} on {setting.layout}: {'fits' if fit.fits else 'does not fit'} ({NOT_VERIFIED})",
        f"  {fit.why}",
        f"  GiB by stage {_stages(fit)}; longest response {fit.largest_response}",
    ]
    if speed is not None:
        lines.append(
            f"  {speed.micro_batches} micro-batches, pipeline overhead {speed.overhead:.1%}, imbalance "
            f"{speed.imbalance:.3f}, {_between(speed)} tokens/s per GPU"
        )
    return "\n".join(lines)


def in_words(job: Job) -> str:
    """What was asked, in one line."""
    return (
        f"{job.shape.name}, {job.gpus} GPUs ({job.gpu.name}, {job.gpu.gib:g} GiB), {job.max_prompt} + "
        f"{job.max_response} tokens, {', '.join(job.roles)}"
    )


def _stages(fit: Fit) -> str:
    """Peaks from the first stage to the last; ``~`` where layers were continued."""
    return ("~" if fit.extrapolated else "") + "/".join(f"{peak:.1f}" for peak in fit.peak_gib.values())


def _between(speed: Speed) -> str:
    return "-".join(f"{round(each):,}" for each in speed.tokens_per_gpu)


def setting_data(fit: Fit, speed: Speed | None) -> dict[str, Any]:
    """A setting and what is predicted for it, as JSON."""
    setting, layout = fit.setting, fit.setting.layout
    names = ("tp", "sp", "pp", "vpp", "cp", "cp_kind", "dp", "ep", "etp")
    data: dict[str, Any] = {
        "layout": {name: getattr(layout, name) for name in names},
        "max_tokens": setting.max_tokens if setting.micro_batch_size is None else None,
        "micro_batch_size": setting.micro_batch_size,
        "recompute": setting.recompute,
        "offload": setting.offload,
        "chunked_logits": setting.chunked_logits,
        "optimizer_on_host": setting.optimizer_on_host,
        "fits": fit.fits,
        "peak_gib": fit.peak_gib,
        "available_gib": fit.available_gib,
        "short_gib": fit.short_gib,
        "largest_response": fit.largest_response,
        "stage": fit.stage,
        "phase": fit.phase,
        "parts_gib": fit.parts_gib,
        "tokens": fit.tokens,
        "extrapolated": fit.extrapolated,
    }
    if speed is not None:
        data |= {
            "seconds": list(speed.seconds),
            "tokens_per_second_per_gpu": list(speed.tokens_per_gpu),
            "micro_batches": speed.micro_batches,
            "pipeline_overhead": speed.overhead,
            "imbalance": speed.imbalance,
            "link_seconds": speed.links,
        }
    return data


def job_data(job: Job, clock: Clock) -> dict[str, Any]:
    """What was asked, as JSON."""
    return {
        "kind": "predicted",
        "verified_on_gpu": False,
        "model": job.shape.name,
        "gpus": job.gpus,
        "gpu": vars(job.gpu),
        "max_prompt": job.max_prompt,
        "max_response": job.max_response,
        "roles": list(job.roles),
        "lengths": job.lengths_in_words,
        "efficiency": clock.source,
        "efficiency_range": list(EFFICIENCY),
        "link_range": list(LINKS),
    }


def change_data(change: Change) -> dict[str, Any]:
    """A change, as JSON."""
    return {
        "change": change.what,
        "gpus": change.job.gpus,
        "freed_gib": change.freed_gib,
        "slower": change.slower,
        **setting_data(change.fit, None),
    }
