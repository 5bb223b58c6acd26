"""What a caller asks a plan for, checked once: lengths, limits and choices, and the items that must stay in one
piece.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

import numpy as np
from numpy.typing import NDArray

from steelyard.balance.partition import quantise
from steelyard.errors import GroupTooLong, PlanError, SequenceTooLong
from steelyard.pipeline.schedule import Pipeline

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Cost = Callable[[Any], Any]
Oversize = Literal["error", "alone"]
Fill = Literal["split", "error"]
Order = Literal["auto", "largest_first", "as_given", "both_ends"]

LARGEST = 2**40  # tokens in one sequence
MOST = 2**60  # tokens in all of them, so that no sum leaves 64 bits


def default_cost(lengths: Any) -> Floats:
    """Relative forward work of a sequence of ``s`` tokens in a dense model of about 7B parameters: ``24576 * s + s *
    s``.
    """
    tokens = np.asarray(lengths, np.float64)
    return 24576.0 * tokens + tokens * tokens


@dataclass(frozen=True)
class Settings:
    """How to plan; every rank that plans together must hold the same (``cost`` cannot be compared)."""

    max_tokens: int
    multiple_of: int = 1
    min_count: int = 1
    pipeline: Pipeline | None = None
    oversize: Oversize = "error"
    fill: Fill = "split"
    order: Order = "auto"

    def __post_init__(self) -> None:
        for name in ("max_tokens", "multiple_of", "min_count"):
            object.__setattr__(self, name, _whole(name, getattr(self, name)))
        for name, choices in (("oversize", Oversize), ("fill", Fill), ("order", Order)):
            if getattr(self, name) not in get_args(choices):
                raise PlanError(f"{name}={getattr(self, name)!r} is unknown: use one of {', '.join(get_args(choices))}")
        if self.pipeline is not None and not isinstance(self.pipeline, Pipeline):
            raise PlanError(f"pipeline={self.pipeline!r} must be a steelyard.pipeline.Pipeline or None")

    @property
    def cap(self) -> int:
        """``max_tokens``, cut where no batch reaches and 64 bits still hold it."""
        return min(self.max_tokens, 2 * MOST)


def _whole(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise PlanError(f"{name}={value!r} must be a whole number of at least 1")
    if value < 1:
        raise PlanError(f"{name}={value} must be at least 1")
    return int(value)


@dataclass(frozen=True)
class Batch:
    """Sequences to be planned, and the items they form.

    Attributes:
        lengths: [rows] tokens.
        items: rows of each item, ascending; items in the order of their first row.
        tokens: [items].
        work: [items] forward work in quanta.
        row_work: [rows] forward work in the unit of ``cost``.
        fixed: work of one more micro-batch, in the same quanta.
        quantum: work of one quantum, in the unit of ``cost``.
        cost: what the caller gave, or the default.
    """

    lengths: Ints
    items: list[list[int]]
    tokens: Ints
    work: Ints
    fixed: int
    quantum: float
    row_work: Floats
    cost: Cost

    def micro_batch_works(self, bins: list[list[int]]) -> list[float]:
        """Work of micro-batches of these rows in the unit of ``cost``; a filler costs the fixed part."""
        whole = getattr(self.cost, "micro_batch", None)
        if whole is not None:
            return [float(whole(self.lengths[rows])) if rows else self.fixed * self.quantum for rows in bins]
        work = self.row_work.tolist()
        return [math.fsum([work[row] for row in rows]) for rows in bins]


def read_batch(
    lengths: Any, settings: Settings, cost: Cost | None, groups: Sequence[Hashable] | None, *, rank: int | None = None
) -> Batch:
    """Check ``lengths`` against ``settings`` and gather items.

    Raises:
        PlanError: with position, value and limit; ``SequenceTooLong`` and ``GroupTooLong`` for what exceeds the cap.
    """
    tokens = read_lengths(lengths)
    cost = default_cost if cost is None else cost
    items = _gather(len(tokens), groups)
    item_tokens = np.array([int(tokens[rows].sum()) for rows in items] if groups is not None else tokens, np.int64)
    if settings.oversize == "error":
        _refuse_oversize(tokens, items, item_tokens, settings.max_tokens, rank)
    row_work = _read_work(cost, tokens)
    item_work = np.array([row_work[rows].sum() for rows in items], np.float64) if groups is not None else row_work
    work, fixed, quantum = quantise(item_work, fixed_cost(cost, tokens))
    return Batch(tokens, items, item_tokens, work, fixed, quantum, row_work, cost)


def read_lengths(lengths: Any) -> Ints:
    """[rows] int64 from a list, an array or a host tensor of whole numbers between 1 and 2**40."""
    device = getattr(lengths, "device", None)
    if device is not None and getattr(device, "type", device) != "cpu":
        raise PlanError(f"lengths live on {device}: planning is host work, pass whole numbers of the host")
    values = list(lengths) if not hasattr(lengths, "dtype") else lengths
    array = np.asarray(values) if hasattr(values, "dtype") else _from_list(values)
    if array.ndim != 1:
        raise PlanError(f"lengths have shape {array.shape}: give one number per sequence")
    if array.dtype.kind not in "iu" and array.size:
        raise PlanError(f"lengths[0]={array[0]} is of type {array.dtype}: lengths must be whole numbers")
    bad = np.flatnonzero((array < 1) | (array > LARGEST)) if array.size else array
    if len(bad):
        at = int(bad[0])
        raise PlanError(f"lengths[{at}]={array[at]} must be at least 1 and at most {LARGEST} tokens")
    tokens = array.astype(np.int64)
    if float(tokens.sum(dtype=np.float64)) > MOST:
        raise PlanError(f"lengths add up to more than {MOST} tokens: these are not lengths of sequences")
    return tokens


def _from_list(values: list[Any]) -> NDArray[Any]:
    for at, value in enumerate(values):
        if type(value) is not int and (isinstance(value, bool) or not isinstance(value, int | np.integer)):
            raise PlanError(f"lengths[{at}]={value!r} must be a whole number of at least 1")
        if not 1 <= value <= LARGEST:
            raise PlanError(f"lengths[{at}]={value} must be at least 1 and at most {LARGEST} tokens")
    return np.array(values, np.int64)


def _gather(rows: int, groups: Sequence[Hashable] | None) -> list[list[int]]:
    if groups is None:
        return [[row] for row in range(rows)]
    names = cast(list[Hashable], groups.tolist() if hasattr(groups, "tolist") else list(groups))
    if len(names) != rows:
        raise PlanError(f"groups has {len(names)} entries but there are {rows} sequences: give one group per sequence")
    members: dict[Hashable, list[int]] = {}
    for row, name in enumerate(names):
        members.setdefault(name, []).append(row)
    return list(members.values())


def _refuse_oversize(lengths: Ints, items: list[list[int]], tokens: Ints, max_tokens: int, rank: int | None) -> None:
    over = np.flatnonzero(tokens > max_tokens)
    if not len(over):
        return
    rows = items[int(over[0])]
    for row in rows:
        if lengths[row] > max_tokens:
            raise SequenceTooLong(row, int(lengths[row]), max_tokens, rank)
    raise GroupTooLong(rows[0], len(rows), int(tokens[over[0]]), max_tokens, rank)


def _read_work(cost: Cost, lengths: Ints) -> Floats:
    if not len(lengths):
        return np.zeros(0)
    work = np.asarray(cost(lengths), np.float64)
    if work.shape != lengths.shape:
        raise PlanError(
            f"cost returned shape {work.shape} for {len(lengths)} lengths: it must give one number per sequence"
        )
    bad = np.flatnonzero(~(np.isfinite(work) & (work >= 0)))
    if len(bad):
        at = int(bad[0])
        raise PlanError(f"cost of sequence {at} ({lengths[at]} tokens) is {work[at]}: it must be finite and at least 0")
    return work


def fixed_cost(cost: Cost, lengths: Ints) -> float:
    """What one more micro-batch costs whatever it holds: ``cost.fixed``, or ``cost.micro_batch`` above its sequence."""
    whole = getattr(cost, "micro_batch", None)
    if whole is None:
        return 0.0
    fixed = getattr(cost, "fixed", None)
    if fixed is None:
        one = lengths[:1] if len(lengths) else np.ones(1, np.int64)
        fixed = float(whole(one)) - float(np.sum(cost(one)))
    if not math.isfinite(fixed):
        raise PlanError(f"cost of one more micro-batch is {fixed}: it must be finite")
    return max(0.0, float(fixed))
