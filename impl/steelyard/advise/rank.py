"""Settings that fit, fastest first.

A plan costs milliseconds and a prediction of memory seconds, so speed comes first: settings are taken in the order of
what no plan can beat (``least_seconds``), then planned, and memory is predicted only for those that are next by their
planned time. A setting is given out once no other can overtake it, so how many are asked for sets how much is
predicted. What cannot fit by ``least_gib`` is neither planned nor predicted.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from steelyard.advise.job import Job
from steelyard.advise.layouts import layouts
from steelyard.advise.memory import Fit, check, least_gib, questions, row_tokens
from steelyard.advise.predictions import Predictions
from steelyard.advise.setting import Setting
from steelyard.advise.speed import Clock, Speed, least_seconds, speed
from steelyard.parallel import ParallelLayout

# Budgets that are tried, over the tokens of one longest row.
BUDGETS = (1, 2)
# More virtual stages than this are not looked at: their transfers grow faster than the bubble shrinks.
MOST_VIRTUAL = 4


@dataclass(frozen=True)
class Advice:
    """A setting with what is predicted for it."""

    fit: Fit
    speed: Speed

    @property
    def setting(self) -> Setting:
        return self.fit.setting


def candidates(job: Job) -> Iterator[Setting]:
    """Every legal layout of up to ``MOST_VIRTUAL`` virtual stages, with budgets of one and two longest rows, without
    and with full recomputation and, where roles share the GPUs, offloading.

    Selective recomputation is left out: a flash kernel keeps nothing that it would drop but one number per head.
    """
    for layout in layouts(job.shape, job.gpus, job.gpus_per_node):
        if layout.vpp > MOST_VIRTUAL:
            continue
        row = row_tokens(layout, job.longest)
        for factor in BUDGETS:
            for recompute in ("none", "full"):
                for offload in (False, True) if job.shared else (False,):
                    yield Setting(layout, factor * row, recompute=recompute, offload=offload)


@dataclass(order=True)
class _Entry:
    """A candidate in the queue: by its least time until it is planned, then by its planned time."""

    seconds: float
    number: int
    setting: Setting
    speed: Speed | None = None

    @property
    def family(self) -> ParallelLayout:
        """Settings that trade speed for memory on the same ranks; the fastest that fits stands for all of them."""
        return replace(self.setting.layout, sp=False, vpp=1)


def ranked(job: Job, predictions: Predictions, clock: Clock, at_once: int | None = None) -> Iterator[Advice]:
    """Settings that fit, fastest first by the middle of their range; one for each tp, pp, cp, its kind, dp and ep.

    Args:
        job, predictions, clock: what is asked, and where memory and time come from.
        at_once: settings whose memory is predicted side by side; by default as many as there are processes.
    """
    queue = [
        _Entry(least_seconds(job, setting, clock), number, setting)
        for number, setting in enumerate(candidates(job))
        if least_gib(job, setting) <= job.available_gib
    ]
    heapq.heapify(queue)
    found: list[tuple[float, int, Advice]] = []
    done: set[ParallelLayout] = set()
    while queue or found:
        if found and (not queue or found[0][0] <= queue[0].seconds):
            yield heapq.heappop(found)[2]
            continue
        wave = _next(job, queue, done, clock, at_once or predictions.workers)
        predictions.answers(itertools.chain.from_iterable(questions(job, entry.setting) for entry in wave))
        for entry in wave:
            fit = check(job, entry.setting, predictions)
            if fit.fits and entry.speed is not None:
                done.add(entry.family)
                heapq.heappush(found, (entry.seconds, entry.number, Advice(fit, entry.speed)))


def _next(job: Job, queue: list[_Entry], done: set[ParallelLayout], clock: Clock, most: int) -> list[_Entry]:
    """The fastest planned settings, of different families: a slower member's turn comes once a faster failed."""
    wave: dict[ParallelLayout, _Entry] = {}
    later = []
    while queue and len(wave) < most:
        entry = heapq.heappop(queue)
        if entry.family in done:
            continue
        if entry.family in wave:
            later.append(entry)
        elif entry.speed is None:
            planned = speed(job, entry.setting, clock)
            heapq.heappush(queue, _Entry(planned.middle, entry.number, entry.setting, planned))
        else:
            wave[entry.family] = entry
    for entry in later:
        heapq.heappush(queue, entry)
    return list(wave.values())
