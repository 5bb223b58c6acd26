"""A user's own side: a function of theirs, weighed beside the naive side and Steelyard's, without a fork.

``python -m bench run --side NAME=MODULE:FUNCTION`` (repeat it for more) adds the function to every chosen cell that
weighs its kind; records, tables and reports show it as the variant NAME. One of three decorators says what it is:

``@planner`` (suite ``planning``): ``plan(lengths, max_tokens, ranks, pipeline, clock)``.
    lengths: tokens of every row, a list. max_tokens: the cap of a micro-batch. ranks: data-parallel ranks. pipeline: a
    ``steelyard.pipeline.Pipeline``, or None for one stage. clock: ``clock.on_ranks(work, hands)`` calls ``work`` for
    every rank's rows and lets only the slowest count, since ranks plan at the same time. Returns for every rank its
    micro-batches in execution order, each a list of positions in ``lengths``; every position once. Raises
    ``RefusedError`` where it has no plan.

``@packing`` (suite ``packing``): ``round(task, timed)``.
    task: a ``suites.packing.Task``, a padded micro-batch on the device. Does the work of three stages, each in
    ``with timed("pack")``, ``timed("labels")`` and ``timed("unpack")``, and returns what they made: packed ids and
    next-token labels [T] of context-parallel rank 0, and ``task.field`` [B, S] unpacked again from ``task.gathered`` or
    from a packed form of its own; that one must be exact.

``@step`` (suite ``throughput``): ``make(setup)``, called on every rank with a ``StepSetup``.
    Returns a function without arguments that takes one whole training step on ``setup.models`` (forward, backward,
    gradient reduction, optimizer) over all rows of ``setup.batch``, each data-parallel rank its share, and returns the
    loss over all of them; stages that do not know it return 0.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from steelyard.errors import InputError
from steelyard.hints import did_you_mean
from steelyard.lengths import LengthSample
from suites.matrix import Cell

Function = TypeVar("Function", bound=Callable[..., Any])
# The suite that weighs each kind.
KINDS = {"planner": "planning", "packing": "packing", "step": "throughput"}
_MARK = "steelyard_side"


def planner(function: Function) -> Function:
    """Mark a function that plans micro-batches."""
    return _marked(function, "planner")


def packing(function: Function) -> Function:
    """Mark a function that packs, makes labels and unpacks."""
    return _marked(function, "packing")


def step(function: Function) -> Function:
    """Mark a function that makes a training step."""
    return _marked(function, "step")


def _marked(function: Function, kind: str) -> Function:
    setattr(function, _MARK, kind)
    return function


@dataclass(frozen=True)
class StepSetup:
    """What a step gets: a Megatron model of its own, with the same weights as those of the other sides.

    Attributes:
        cell: the whole case.
        models, optimizer: model chunks of this rank wrapped in DDP, and their optimizer.
        batch: every row of the step over all data-parallel ranks, as ``suites.workloads.make_batch`` returns it.
        sample: lengths of those rows.
    """

    cell: Cell
    models: list[Any]
    optimizer: Any
    batch: dict[str, Any]
    sample: LengthSample


def load_side(name: str, target: str) -> tuple[str, Callable[..., Any]]:
    """Kind and function of a side.

    Raises:
        InputError: it cannot be imported, or no decorator says what it is.
    """
    what = f"--side {name}={target}"
    module_name, _, function_name = target.partition(":")
    if not module_name or not function_name:
        raise InputError(f"{what}: write it as NAME=MODULE:FUNCTION")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever the user's module raises
        raise InputError(
            f"{what}: module {module_name} cannot be imported ({type(error).__name__}: {error}): run from the folder "
            f"that holds it, or add that to PYTHONPATH"
        ) from error
    function = getattr(module, function_name, None)
    if function is None:
        names = [name for name in vars(module) if not name.startswith("_")]
        raise InputError(f"{what}: {module_name} has no {function_name}{did_you_mean(function_name, names)}")
    kind = getattr(function, _MARK, None)
    if kind is None:
        raise InputError(
            f"{what}: nothing says what kind of side it is: put @planner, @packing or @step of suites.sides above it"
        )
    return kind, function


def attach_sides(cells: Sequence[Cell], sides: Sequence[str]) -> list[Cell]:
    """The cells, with each of ``sides`` (``NAME=MODULE:FUNCTION``) in those that weigh its kind.

    Raises:
        InputError: a side cannot be loaded, has the name of another, or no cell weighs its kind.
    """
    cells = list(cells)
    for text in sides:
        name, _, target = text.partition("=")
        kind, _ = load_side(name, target)
        suite = KINDS[kind]
        if not any(cell.suite == suite for cell in cells):
            raise InputError(
                f"--side {text}: a {kind} is weighed by suite {suite}, and no chosen cell is of that suite: choose a "
                f"matrix that has some, e.g. --matrix {suite if suite != 'throughput' else 'smoke'}"
            )
        for at, cell in enumerate(cells):
            if cell.suite == suite:
                if name in cell.sides:
                    raise InputError(f"--side {text}: there is another side with the name {name}")
                cells[at] = cell.model_copy(update={"sides": {**cell.sides, name: target}})
    return cells


def sides_of(cell: Cell) -> dict[str, Callable[..., Any]]:
    """The functions of a cell's sides, by name.

    Raises:
        InputError: one cannot be loaded, or is not of the kind that the cell's suite weighs.
    """
    found = {}
    for name, target in cell.sides.items():
        kind, function = load_side(name, target)
        if KINDS[kind] != cell.suite:
            raise InputError(f"side {name}={target}: is a {kind}, which suite {KINDS[kind]} weighs, not {cell.suite}")
        found[name] = _checked_planner(name, function) if kind == "planner" else function
    return found


def _checked_planner(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The planner, with its plans checked; the check is not part of its time."""

    def plan(lengths: list[int], max_tokens: int, ranks: int, pipeline: Any, clock: Any) -> list[list[list[int]]]:
        hands = function(lengths, max_tokens, ranks, pipeline, clock)
        start = time.process_time()
        if len(hands) != ranks:
            raise InputError(f"side {name}: planned for {len(hands)} ranks, not for {ranks}: return a list for each")
        planned = sorted(row for hand in hands for one in hand for row in one)
        if planned != list(range(len(lengths))):
            raise InputError(
                f"side {name}: its micro-batches hold {len(planned)} rows, {len(set(planned))} of them different, of "
                f"{len(lengths)}: every position in lengths must be there once"
            )
        clock.saved += time.process_time() - start
        return hands

    return plan
