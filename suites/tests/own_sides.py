"""Sides as a user would write them: one of each kind, and some that are wrong."""

from __future__ import annotations

from functools import partial
from typing import Any

from suites import packing as packing_suite
from suites.baselines import fixed_split
from suites.baselines.planners import RefusedError, first_fit_decreasing
from suites.sides import StepSetup, packing, planner, step


@planner
def plan(lengths: list[int], max_tokens: int, ranks: int, pipeline: Any, clock: Any) -> list[list[list[int]]]:
    return first_fit_decreasing(lengths, max_tokens, ranks, pipeline, clock)


@planner
def plan_that_refuses(lengths: list[int], max_tokens: int, ranks: int, pipeline: Any, clock: Any) -> list:
    raise RefusedError("of a test")


@planner
def plan_that_loses_a_row(lengths: list[int], max_tokens: int, ranks: int, pipeline: Any, clock: Any) -> list:
    first, *others = first_fit_decreasing(lengths, max_tokens, ranks, pipeline, clock)
    return [[one[1:] if at == 0 else one for at, one in enumerate(first)], *others]


@packing
def pack(task: packing_suite.Task, timed: Any) -> tuple:
    return packing_suite.naive(task, timed)


@packing
def pack_wrongly(task: packing_suite.Task, timed: Any) -> tuple:
    ids, labels, rows = packing_suite.naive(task, timed)
    return ids, labels, rows + 1


@step
def fixed(setup: StepSetup) -> Any:
    rows, role = setup.batch, setup.cell.role
    return partial(fixed_split.step, rows, role, setup.models, setup.optimizer, setup.cell.micro_batch_size)
