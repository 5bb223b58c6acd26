"""Moves that lower the predicted makespan of a step, one after the other, within a budget of simulated passes.

A move shifts work between two micro-batches, both of the slowest rank or one of a fast one: an item or several change
place, two items or two whole micro-batches are exchanged. It keeps the cap, the
count, and that no micro-batch is emptied. A move is made if it lowers the time of the slowest rank and lifts no other
rank above that.

The makespan is a convex function of the sizes of the micro-batches. So where its subgradient, the passes of each
micro-batch on a critical path, promises nothing, nothing is to be had, and the move is not simulated.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from steelyard.balance.bins import Bins
from steelyard.balance.partition import bin_sums
from steelyard.pipeline.schedule import Pipeline
from steelyard.pipeline.simulate import makespans, program, slopes

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

WIDTH = 96  # moves simulated side by side
ITEMS = 128  # items of a rank looked at in one round
PARTNERS = 4  # fast ranks that are asked in turn to take work of the slowest
TRIES = 3  # samples of moves before a rank counts as settled
BUNDLES = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 7 / 8)  # shares of the items of a micro-batch that move together
GAIN = 1e-5  # share of the makespan below which a move is not worth a round


@dataclass
class Step:
    """Micro-batches of all ranks in execution order; changed in place by moves.

    Attributes:
        hands: [ranks][M] items of each micro-batch.
        work: [ranks, M] work with the fixed cost, in quanta.
        tokens: [ranks, M].
        times: [ranks] predicted makespans.
    """

    hands: list[Bins]
    work: Ints
    tokens: Ints
    times: Floats

    @classmethod
    def of(cls, hands: list[Bins], items: Items, pipeline: Pipeline) -> Step:
        """Weigh and simulate micro-batches of items."""
        work = np.array([bin_sums(hand, items.work) for hand in hands]) + items.fixed
        tokens = np.array([bin_sums(hand, items.tokens) for hand in hands])
        return cls(hands, work, tokens, makespans(work.astype(np.float64), pipeline))


@dataclass(frozen=True)
class Items:
    """What the moves need to know of items: [items] work and tokens, the cap, and the cost of one more micro-batch."""

    work: Ints
    tokens: Ints
    cap: int
    fixed: int

    @staticmethod
    def sum(values: Ints, one: list[int]) -> int:
        return int(values[one].sum()) if one else 0


@dataclass(frozen=True)
class Moves:
    """Candidates, one per entry: something of the micro-batch at ``source`` is exchanged for something of that at
    ``target``.

    ``gives`` is an item, or ``ALL`` (the two places are exchanged), or ``FEW`` (the ``gets`` lightest items of
    ``source``, for nothing in return). ``gets`` is an item in return, or ``NONE``. ``amount`` is the work that leaves
    ``source`` on balance.
    """

    source: Ints
    target: Ints
    gives: Ints
    gets: Ints
    amount: Ints

    def take(self, chosen: Ints) -> Moves:
        return Moves(*(getattr(self, name)[chosen] for name in FIELDS))

    @classmethod
    def joined(cls, several: list[Moves]) -> Moves:
        return cls(*(np.concatenate([getattr(one, name) for one in several]) for name in FIELDS))

    def __len__(self) -> int:
        return len(self.source)


FIELDS = ("source", "target", "gives", "gets", "amount")
NONE, ALL, FEW = -1, -1, -2


def improve(step: Step, items: Items, pipeline: Pipeline, budget: int) -> int:
    """Make moves until none looked at helps or ``budget`` simulated passes are spent; returns what is left of it."""
    turn, each = 0, program(step.work.shape[1], pipeline).size
    while budget >= WIDTH * each:  # a smaller sample finds next to nothing
        turn += 1
        top = int(np.argmax(step.times))
        slope = slopes(step.work[top].astype(np.float64), pipeline)
        moved, spent = _within(step, items, pipeline, top, slope, turn)
        budget -= spent * each
        for other in np.argsort(step.times, kind="stable")[:PARTNERS].tolist():
            if moved or other == top or budget <= 0:
                break
            moved, spent = _across(step, items, pipeline, top, other, slope, turn)
            budget -= spent * each
        if not moved:
            break
    return budget


def _within(step: Step, items: Items, pipeline: Pipeline, top: int, slope: Floats, turn: int) -> tuple[bool, int]:
    """The best of a sample of moves inside the slowest rank."""
    moves = _moves(step, items, top, top, turn)
    promised = moves.amount * (slope[moves.target] - slope[moves.source])
    spent = 0
    for sample in _samples(promised, -GAIN * step.times[top], turn):
        some = moves.take(sample)
        sizes = np.repeat(step.work[top][None].astype(np.float64), len(some), axis=0)
        rows = np.arange(len(some))
        sizes[rows, some.source] -= some.amount
        sizes[rows, some.target] += some.amount
        times = makespans(sizes, pipeline)
        spent += len(some)
        best = int(np.argmin(times))
        if times[best] < step.times[top] * (1 - GAIN):
            _make(step, items, some, best, top, top)
            step.times[top] = times[best]
            return True, spent
    return False, spent


def _across(
    step: Step, items: Items, pipeline: Pipeline, top: int, other: int, slope: Floats, turn: int
) -> tuple[bool, int]:
    """The best of a sample of moves between the slowest rank and another."""
    moves = _moves(step, items, top, other, turn)
    promised = -moves.amount * slope[moves.source]
    spent = 0
    for sample in _samples(promised, -GAIN * step.times[top], turn):
        some = moves.take(sample)
        rows = np.arange(len(some))
        mine = np.repeat(step.work[top][None].astype(np.float64), len(some), axis=0)
        theirs = np.repeat(step.work[other][None].astype(np.float64), len(some), axis=0)
        mine[rows, some.source] -= some.amount
        theirs[rows, some.target] += some.amount
        both = makespans(np.concatenate((mine, theirs)), pipeline).reshape(2, -1)
        spent += 2 * len(some)
        worse = both.max(axis=0)
        best = int(np.argmin(worse))
        if worse[best] < step.times[top] * (1 - GAIN):
            _make(step, items, some, best, top, other)
            step.times[top], step.times[other] = both[:, best]
            return True, spent
    return False, spent


def _samples(promised: Floats, least: float, turn: int) -> list[Ints]:
    """Up to ``TRIES`` samples of the moves that promise at least ``least``, spread evenly over how much they
    promise.
    """
    useful = np.flatnonzero(promised < least)
    if not len(useful):
        return []
    useful = useful[np.argsort(promised[useful], kind="stable")]
    if len(useful) <= WIDTH:
        return [useful]
    stride = -(-len(useful) // WIDTH)
    return [useful[(turn + shift * 7) % stride :: stride] for shift in range(min(TRIES, stride))]


def _moves(step: Step, items: Items, top: int, other: int, turn: int) -> Moves:
    """Moves from rank ``top`` to rank ``other`` that keep the cap and empty nothing."""
    places = np.arange(step.work.shape[1])
    first, second = (one.ravel() for one in np.meshgrid(places, places, indexing="ij"))
    if top == other:
        first, second = first[first < second], second[first < second]
    whole = np.full(len(first), ALL)
    exchanges = Moves(first, second, whole, whole, step.work[top][first] - step.work[other][second])
    return Moves.joined([exchanges, _of_items(step, items, top, other, turn), _of_bundles(step, items, top, other)])


def _of_items(step: Step, items: Items, top: int, other: int, turn: int) -> Moves:
    """One item for another or for nothing; items beyond ``ITEMS`` by turns."""
    mine, mine_at = _listed(step.hands[top], turn)
    theirs, theirs_at = _listed(step.hands[other], turn)
    places = np.arange(step.work.shape[1])
    back, back_at = np.concatenate((theirs, np.full(len(places), NONE))), np.concatenate((theirs_at, places))
    nothing = back == NONE
    amount = items.work[mine][:, None] - np.where(nothing, 0, items.work[back])
    tokens = items.tokens[mine][:, None] - np.where(nothing, 0, items.tokens[back])
    good = (step.tokens[other][back_at] + tokens <= items.cap) & (
        step.tokens[top][mine_at][:, None] - tokens <= items.cap
    )
    sole = np.array([len(one) < 2 for one in step.hands[top]])[mine_at]
    good &= ~(sole[:, None] & nothing)
    if top == other:
        good &= mine_at[:, None] != back_at
    row, column = np.nonzero(good)
    return Moves(mine_at[row], back_at[column], mine[row], back[column], amount[row, column])


def _of_bundles(step: Step, items: Items, top: int, other: int) -> Moves:
    """The lightest items of one micro-batch to another: what single items are too small to do in time."""
    taken: list[tuple[int, int, int, int]] = []  # place, items, work, tokens
    for place, one in enumerate(step.hands[top]):
        if len(one) < 3:
            continue
        light = lightest(one, items)
        work, tokens = np.cumsum(items.work[light]).tolist(), np.cumsum(items.tokens[light]).tolist()
        for size in sorted({int(len(one) * share) for share in BUNDLES} - {0, 1}):
            taken.append((place, size, work[size - 1], tokens[size - 1]))
    if not taken:
        return Moves(*(np.zeros(0, np.int64) for _ in FIELDS))
    place, size, amount, tokens_in = np.array(taken, np.int64).T
    good = step.tokens[other] + tokens_in[:, None] <= items.cap
    if top == other:
        good &= place[:, None] != np.arange(good.shape[1])
    row, target = np.nonzero(good)
    return Moves(place[row], target, np.full(len(row), FEW), size[row], amount[row])


def lightest(one: list[int], items: Items) -> list[int]:
    """Items of a micro-batch, lightest first; ties by position."""
    ordered = sorted(one)
    return [ordered[at] for at in np.argsort(items.work[ordered], kind="stable").tolist()]


def _listed(hand: Bins, turn: int) -> tuple[Ints, Ints]:
    """Items of a rank and the places they are in, thinned to about ``ITEMS``."""
    names = np.array([item for one in hand for item in one], np.int64)
    places = np.repeat(np.arange(len(hand)), [len(one) for one in hand])
    stride = -(-len(names) // ITEMS)
    return (names[turn % stride :: stride], places[turn % stride :: stride]) if stride > 1 else (names, places)


def _make(step: Step, items: Items, moves: Moves, chosen: int, top: int, other: int) -> None:
    """Carry out one move; the times are the caller's to update."""
    source, target = int(moves.source[chosen]), int(moves.target[chosen])
    gives, gets = int(moves.gives[chosen]), int(moves.gets[chosen])
    mine, theirs = step.hands[top], step.hands[other]
    if gives == ALL:
        mine[source], theirs[target] = theirs[target], mine[source]
    elif gives == FEW:
        ordered = lightest(mine[source], items)
        mine[source] = ordered[gets:]
        theirs[target] = theirs[target] + ordered[:gets]
    else:
        mine[source].remove(gives)
        theirs[target].append(gives)
        if gets != NONE:
            theirs[target].remove(gets)
            mine[source].append(gets)
    for rank, place in ((top, source), (other, target)):
        one = step.hands[rank][place]
        step.work[rank, place] = items.fixed + items.sum(items.work, one)
        step.tokens[rank, place] = items.sum(items.tokens, one)
