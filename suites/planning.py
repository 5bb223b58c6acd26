"""A scoreboard of planners: the same lengths to Steelyard's and to those that others run.

Nothing is launched: a plan is host work, so any layout can be weighed on any machine. For every draw of lengths and
every planner:

- ``micro_batches``: count per data-parallel rank; ``micro_batch_bound`` is what no plan that keeps the cap goes below;
- ``share_over_cap``: share of the micro-batches above the token cap;
- ``rank_imbalance``: work of the rank with the most over the mean rank's;
- ``time_over_ideal``: predicted time of the slowest rank on the cell's pipeline over the busy time of the mean stage,
  which counts the rows alone, so that more micro-batches are not for free where they cost something; the overhead is
  what that is above 1. Virtual stages exchange shapes (``steelyard.pipeline.exchange``), unless the cell says that they
  do not;
- ``time_over_bound``: the same time over what no order of the planner's own micro-batches goes below;
- ``planning_ms``: time of planning on one core, taken turn by turn: processor time, which other work on the machine
  disturbs least. Garbage of the planner before is collected first; the collections that a planner causes itself are
  part of its time, as in a trainer. Where ranks plan at the same time only the slowest counts; Steelyard's planner
  plans the whole step on every rank, so all of its time counts.

A planner that stops with an error (``RefusedError``) or plans a count that Megatron refuses has an infinite time.
Steelyard's must keep the cap; without a pipeline its count must not be above that of any other planner that keeps the
cap, with one its predicted time not by more than half a percent. Work is ``24576 * s + s * s`` for all, plus the linear
work of ``fixed_tokens`` tokens for each micro-batch, or of as many as ``suites.calibrate`` finds on this machine;
predicted series name the number.
"""

from __future__ import annotations

import contextlib
import gc
import math
import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from steelyard.balance import plan_step
from steelyard.errors import InputError
from steelyard.hints import did_you_mean
from steelyard.pipeline import Pipeline, is_legal_count, makespan_lower_bound, simulate
from suites.baselines.planners import PLANNERS, Clock, Hands, Plan, RefusedError, workload
from suites.calibrate import fixed_cost
from suites.matrix import Cell
from suites.measure import Direction, Series, Source
from suites.sides import sides_of
from suites.turns import wait_for_turn

OURS = "Steelyard"
ROUNDED_TO = 256  # where a cell names no cap, it is the longest row rounded up to a multiple of this
ROUNDING = 1e-9  # of two equal predicted times
# Where ranks have dozens of micro-batches all good plans are near the bound, and which is the best is chance.
NEARLY_EQUAL = 0.005
METRICS: tuple[tuple[str, str, Direction, Source], ...] = (
    ("micro_batches", "micro-batches", "lower", "measured"),
    ("share_over_cap", "1", "lower", "measured"),
    ("rank_imbalance", "1", "lower", "measured"),
    ("time_over_ideal", "1", "lower", "predicted"),
    ("time_over_bound", "1", "lower", "predicted"),
    ("planning_ms", "ms", "lower", "measured"),
)


@dataclass(frozen=True)
class Task:
    """What every planner is asked, once per draw; ``pipeline`` is None for a single stage, ``fixed`` is the work of a
    micro-batch beside its rows.
    """

    lengths: np.ndarray
    max_tokens: int
    ranks: int
    pipeline: Pipeline | None
    fixed: float

    @classmethod
    def of(cls, cell: Cell, draw: int = 0) -> Task:
        """Draw number ``draw`` of the cell, with its ``fixed_tokens``."""
        lengths = cell.model_copy(update={"seed": cell.seed + draw}).draw().totals
        layout = cell.layout
        return cls(
            lengths,
            cell.max_tokens or -(-int(lengths.max()) // ROUNDED_TO) * ROUNDED_TO,
            layout.dp,
            Pipeline(layout.pp, layout.vpp, exchange=cell.exchange and layout.vpp > 1) if layout.pp > 1 else None,
            24576.0 * cell.fixed_tokens,
        )


class Cost:
    """The work of sequences, and what one more micro-batch costs."""

    def __init__(self, fixed: float) -> None:
        self.fixed = fixed

    def __call__(self, lengths: np.ndarray) -> np.ndarray:
        return workload(np.asarray(lengths, np.float64))

    def micro_batch(self, lengths: np.ndarray) -> float:
        return float(self(lengths).sum()) + self.fixed


@dataclass(frozen=True)
class Score:
    """One planner on one draw; the fields are the metrics."""

    micro_batches: float
    share_over_cap: float
    rank_imbalance: float
    time_over_ideal: float
    time_over_bound: float
    planning_ms: float

    @property
    def keeps_cap(self) -> bool:
        """Whether there is a plan and it is within the cap."""
        return self.share_over_cap == 0


def measure(cell: Cell, device: str | None = None) -> list[Series]:
    """Score every planner on ``cell.pairs`` draws.

    Raises:
        InputError: the cell names a planner that does not exist.
        RanksFailed: the calibration of the fixed cost did not end.
    """
    planners = _chosen(cell)
    notes: dict[str, Any] = {"fixed_tokens": cell.fixed_tokens}
    if cell.fixed_cost == "calibrated":
        fixed = fixed_cost()
        cell = cell.model_copy(update={"fixed_tokens": fixed.tokens})
        notes = {"fixed_tokens": fixed.tokens, "calibration": fixed.text}
    names = [OURS, *planners]
    first_ms = {name: _ask(planners.get(name), Task.of(cell))[1] for name in names for _ in range(min(cell.warmup, 1))}
    scores: dict[str, list[Score]] = {name: [] for name in names}
    bounds = []
    for draw in range(cell.pairs):
        task = Task.of(cell, draw)
        for name in names[draw % len(names) :] + names[: draw % len(names)]:
            hands, milliseconds, bound = _ask(planners.get(name), task)
            scores[name].append(_score(hands, milliseconds, task))
            bounds += [bound] if name == OURS else []
    series = [Series("micro_batch_bound", "both", "micro-batches", "none", bounds)]
    for name, taken in scores.items():
        series += _series(name, taken, first_ms.get(name))
    series += _against_the_best(scores, Task.of(cell).pipeline)
    return [replace(one, notes={**one.notes, **notes}) if one.source == "predicted" else one for one in series]


def _chosen(cell: Cell) -> dict[str, Plan]:
    """The planners that take part beside Steelyard's, a user's own among them."""
    for name in cell.planners:
        if name not in PLANNERS:
            raise InputError(
                f"planner {name!r} does not exist{did_you_mean(name, PLANNERS)}: choose of {', '.join(PLANNERS)}"
            )
    chosen, own = {name: PLANNERS[name] for name in cell.planners or PLANNERS}, sides_of(cell)
    for name in own:
        if name in (OURS, *PLANNERS):
            raise InputError(f"side {name}: a planner has that name already: give it another")
    return {**chosen, **own}


def _ask(planner: Plan | None, task: Task) -> tuple[Hands | None, float, int]:
    """The plan (None if refused), milliseconds, and the bound that Steelyard's planner proves (0 from others).

    Args:
        planner: None for Steelyard's.
    """
    wait_for_turn()
    gc.collect()
    return _ask_ours(task) if planner is None else _ask_other(planner, task)


def _ask_ours(task: Task) -> tuple[Hands | None, float, int]:
    cost = Cost(task.fixed) if task.fixed else None
    start = time.process_time()
    plans = plan_step(task.lengths, task.max_tokens, task.ranks, pipeline=task.pipeline, cost=cost)
    seconds = time.process_time() - start
    return [plan.indices for plan in plans], 1000 * seconds, plans[0].lower_bound


def _ask_other(planner: Plan, task: Task) -> tuple[Hands | None, float, int]:
    lengths, clock = task.lengths.tolist(), Clock()
    hands: Hands | None = None
    start = time.process_time()
    with contextlib.suppress(RefusedError):
        hands = planner(lengths, task.max_tokens, task.ranks, task.pipeline, clock)
    seconds = time.process_time() - start
    return hands, 1000 * (seconds - clock.saved), 0


def _score(hands: Hands | None, milliseconds: float, task: Task) -> Score:
    if hands is None:
        return Score(math.nan, math.nan, math.nan, math.inf, math.inf, milliseconds)
    work = workload(task.lengths.astype(np.float64))
    loads = [[float(work[one].sum()) + task.fixed for one in hand] for hand in hands]
    tokens = [int(task.lengths[one].sum()) for hand in hands for one in hand if one]
    of_ranks = [sum(load) for load in loads]
    pipeline = task.pipeline or Pipeline(1)
    ideal = float(work.sum()) / len(hands) / pipeline.stages * (1 + pipeline.backward)
    legal = all(is_legal_count(len(load), pipeline) for load in loads)
    slowest = max(simulate(load, pipeline).makespan for load in loads) if legal else math.inf
    bound = max(makespan_lower_bound(load, pipeline) for load in loads) if legal else 1.0
    return Score(
        micro_batches=max(len(hand) for hand in hands),
        share_over_cap=sum(one > task.max_tokens for one in tokens) / len(tokens),
        rank_imbalance=max(of_ranks) * len(of_ranks) / sum(of_ranks),
        time_over_ideal=slowest / ideal,
        time_over_bound=slowest / bound,
        planning_ms=milliseconds,
    )


def _series(name: str, scores: list[Score], first_ms: float | None) -> list[Series]:
    series = []
    for metric, unit, direction, source in METRICS:
        values = [getattr(score, metric) for score in scores]
        limit = 0.0 if name == OURS and metric == "share_over_cap" else None
        # The first call fills caches (the profiles of a pipeline, say); a trainer meets it once.
        notes = {"first_ms": first_ms} if metric == "planning_ms" and first_ms is not None else {}
        side = "optimised" if name == OURS else "naive"
        series.append(Series(metric, side, unit, direction, values, source, limit, name, notes))
    return series


def _against_the_best(scores: dict[str, list[Score]], pipeline: Pipeline | None) -> list[Series]:
    """Steelyard's plan against the best of the others that keep the cap, draw by draw."""
    counts, times = [], []
    for at, mine in enumerate(scores[OURS]):
        others = [taken[at] for name, taken in scores.items() if name != OURS and taken[at].keeps_cap]
        if others:
            counts.append(mine.micro_batches - min(one.micro_batches for one in others))
            least = min(one.time_over_ideal for one in others)
            times += [(mine.time_over_ideal, least)] if math.isfinite(least) else []
    if pipeline is None:
        return [Series("count_above_best_other", "both", "micro-batches", "lower", counts, limit=0.0)] if counts else []
    if not times:
        return []
    ratios = [mine / least for mine, least in times]
    series = [Series("time_over_best_other", "both", "1", "lower", ratios, "predicted", 1 + NEARLY_EQUAL)]
    if all(least > 1 + ROUNDING for _, least in times):
        overheads = np.array(times) - 1
        notes = {"ratio_of_means": float(overheads[:, 0].mean() / overheads[:, 1].mean())}
        ratios = (overheads[:, 0] / overheads[:, 1]).tolist()
        series.append(Series("overhead_over_best_other", "both", "1", "lower", ratios, "predicted", notes=notes))
    return series
