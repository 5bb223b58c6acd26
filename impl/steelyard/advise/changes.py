"""What to change in settings that do not fit, and whether more nodes would do.

Each change is a single one: what it frees and what it costs is its own.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from steelyard.advise.job import Job
from steelyard.advise.memory import Fit, check, questions, row_tokens
from steelyard.advise.predictions import Predictions
from steelyard.advise.rank import Advice, ranked
from steelyard.advise.setting import Setting
from steelyard.advise.speed import Clock, Speed, speed
from steelyard.errors import InputError, LayoutError

# What frees less is not shown.
WORTH_GIB = 0.1


@dataclass(frozen=True)
class Change:
    """One change of a setting.

    Attributes:
        what: in words.
        job, setting: after it; the job differs only in its number of GPUs.
        fit: after it.
        freed_gib: how much lower the highest stage is; negative when it is higher.
        slower: GPU-seconds of a step over those before, less 1; None where a schedule refuses either.
    """

    what: str
    job: Job
    setting: Setting
    fit: Fit
    freed_gib: float
    slower: float | None


def changes(job: Job, setting: Setting, predictions: Predictions, clock: Clock) -> list[Change]:
    """Single changes that free memory: first those that make it fit, by loss of speed; then by what they free."""
    before, time = check(job, setting, predictions), _speed(job, setting, clock)
    tried = list(single_changes(job, setting))
    predictions.answers(itertools.chain.from_iterable(questions(one, changed) for _, one, changed in tried))
    found = []
    for what, one, changed in tried:
        fit, after = check(one, changed, predictions), _speed(one, changed, clock)
        slower = None if time is None or after is None else after.middle * one.gpus / time.middle / job.gpus - 1
        freed = max(before.peak_gib.values()) - max(fit.peak_gib.values())
        if freed >= WORTH_GIB:
            found.append(Change(what, one, changed, fit, freed, slower))
    return sorted(found, key=lambda change: (not change.fit.fits, _order(change)))


def _order(change: Change) -> float:
    if not change.fit.fits:
        return -change.freed_gib
    return float("inf") if change.slower is None else change.slower


def _speed(job: Job, setting: Setting, clock: Clock) -> Speed | None:
    with contextlib.suppress(InputError):
        return speed(job, setting, clock)
    return None


def single_changes(job: Job, setting: Setting) -> Iterator[tuple[str, Job, Setting]]:
    """What can be changed, and is legal: in words, with the job and the setting after it."""
    layout = setting.layout
    for what, changed in _without_moving(job, setting):
        yield what, job, changed
    if layout.tp > 1 and not layout.sp:
        yield "sequence parallelism", job, replace(setting, layout=replace(layout, sp=True))
    if layout.cp > 1 and layout.cp_kind == "all_gather":
        yield from _legal("Ulysses instead of all-gather", job, setting, {"cp_kind": "all_to_all"})
    if layout.vpp > 1:
        yield from _legal("no virtual stages", job, setting, {"vpp": 1})
    yield from _on_more_ranks(job, setting)
    if job.shape.experts:
        yield from _legal(f"ep {layout.ep * 2}", job, setting, {"ep": layout.ep * 2})
    more = replace(job, gpus=2 * job.gpus)
    yield from _legal(f"{more.gpus} GPUs, dp {2 * layout.dp}", more, setting, {"dp": 2 * layout.dp})


def _on_more_ranks(job: Job, setting: Setting) -> Iterator[tuple[str, Job, Setting]]:
    """One kind of parallelism doubled: with half the data-parallel ranks, or on twice the GPUs where that is odd."""
    layout = setting.layout
    if layout.dp % 2 == 0:
        one, dp, words = job, layout.dp // 2, ""
    else:
        one, dp, words = replace(job, gpus=2 * job.gpus), layout.dp, f"{2 * job.gpus} GPUs, "
    etp = None if layout.etp == layout.tp else layout.etp
    changed: list[tuple[str, dict[str, object]]] = [
        (f"cp {2 * layout.cp}", {"cp": 2 * layout.cp}),
        (f"pp {2 * layout.pp}", {"pp": 2 * layout.pp, "group": None}),
    ]
    if layout.cp == 1:
        changed.append(("cp 2, Ulysses", {"cp": 2, "cp_kind": "all_to_all"}))
    if 2 * layout.tp <= job.gpus_per_node:
        changed.append((f"tp {2 * layout.tp}", {"tp": 2 * layout.tp, "sp": True, "etp": etp}))
    for what, sizes in changed:
        yield from _legal(words + what, one, setting, {**sizes, "dp": dp})


def _without_moving(job: Job, setting: Setting) -> Iterator[tuple[str, Setting]]:
    """Changes on the same ranks."""
    row = row_tokens(setting.layout, job.longest)
    if setting.recompute == "none":
        yield "selective recomputation", replace(setting, recompute="selective")
    if setting.recompute != "full":
        yield "full recomputation", replace(setting, recompute="full")
    if not setting.offload and job.shared:
        yield "offloading", replace(setting, offload=True)
    if not setting.optimizer_on_host:
        yield "optimizer on the host", replace(setting, optimizer_on_host=True)
    if not setting.chunked_logits:
        yield "chunked logits", replace(setting, chunked_logits=True)
    if setting.micro_batch_size is not None:
        yield f"dynamic micro-batches of {row} tokens", replace(setting, micro_batch_size=None, max_tokens=row)
        if setting.micro_batch_size > 1:
            yield "micro-batches of 1 row", replace(setting, micro_batch_size=1)
    elif setting.max_tokens > row:
        yield f"budget of {row} tokens", replace(setting, max_tokens=row)


def _legal(what: str, job: Job, setting: Setting, sizes: dict[str, object]) -> Iterator[tuple[str, Job, Setting]]:
    """The change, where Megatron can build it; a budget of one longest row stays one."""
    with contextlib.suppress(LayoutError):
        layout = replace(setting.layout, **sizes)  # type: ignore[arg-type]
        layout.check(job.shape)
        layout.check_world(job.gpus)
        budget = setting.max_tokens * setting.layout.cp / layout.cp
        row = row_tokens(layout, job.longest)
        yield what, job, replace(setting, layout=layout, max_tokens=max(row, int(budget)))


@dataclass(frozen=True)
class Nodes:
    """What so many GPUs would give.

    Attributes:
        gpus: their number.
        best: the fastest setting that fits them, or None.
    """

    gpus: int
    best: Advice | None


def with_more_nodes(job: Job, up_to: int, predictions: Predictions, clock: Clock) -> list[Nodes]:
    """The fastest setting for the job's GPUs, twice as many, and so on up to ``up_to`` nodes."""
    found = []
    gpus = job.gpus
    while gpus <= max(job.gpus, up_to * job.gpus_per_node):
        found.append(Nodes(gpus, next(ranked(replace(job, gpus=gpus), predictions, clock), None)))
        gpus *= 2
    return found


def whether_nodes_help(job: Job, nodes: list[Nodes]) -> str:
    """The answer in words."""
    first = nodes[0]
    fitting = [each for each in nodes if each.best is not None]
    if not fitting:
        return f"no: nothing fits on {nodes[-1].gpus} GPUs either"
    least = fitting[0]
    assert least.best is not None
    if first.best is None:
        return f"yes: nothing fits on {first.gpus} GPUs, {least.best.setting.layout} does on {least.gpus}"
    last = fitting[-1]
    assert last.best is not None
    times = first.best.speed.middle / last.best.speed.middle
    return (
        f"not to fit: {first.best.setting.layout} does on {first.gpus} GPUs; {last.gpus} GPUs make a step {times:.1f} "
        f"times as fast with {last.best.setting.layout}"
    )


def whether_ranks_help(job: Job, setting: Setting, predictions: Predictions) -> str:
    """Why more data-parallel ranks do or do not make a setting fit.

    They divide nothing but the optimizer's state: the limit is a peak without any.
    """
    fit = check(job, setting, predictions)
    many = replace(setting.layout, dp=setting.layout.dp * 4096)
    limit = check(replace(job, gpus=many.world), replace(setting, layout=many), predictions)
    peak = max(limit.peak_gib.values())
    if fit.fits:
        return "it fits as it is"
    if limit.fits:
        dp = setting.layout.dp
        while True:
            dp *= 2
            layout = replace(setting.layout, dp=dp)
            if check(replace(job, gpus=layout.world), replace(setting, layout=layout), predictions).fits:
                return f"yes: with dp {dp} on {layout.world} GPUs it fits"
    return (
        f"no: more data-parallel ranks divide only the optimizer's state, and without any of it {peak:.1f} of "
        f"{limit.available_gib:.1f} GiB are needed; give the additional GPUs to tp, cp or pp, or recompute"
    )
