"""Moves that lower the predicted makespan of a step, one after the other, within a budget of simulated passes.

A move exchanges something of one micro-batch (an item, its lightest few, or all of it) for something of another, or for
nothing; both are on the slowest rank, or one is on a fast rank. It keeps the cap, the count, and that no micro-batch is
emptied. A move is made if it lowers the time of the slowest rank and lifts no other rank above that.

The makespan is the greatest of the sums of durations along all paths through the schedule: a convex function of the
sizes of the micro-batches. Each critical path that was met is a *cut*, a plane below that function everywhere, on every
rank. The cuts say of thousands of moves what they can bring at most; the few that they do not rule out are simulated.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from steelyard.balance.bins import Bins
from steelyard.balance.partition import bin_sums
from steelyard.pipeline.graph import program
from steelyard.pipeline.schedule import Pipeline
from steelyard.pipeline.simulate import Runs, makespans, run_many

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

WIDTH = 48  # moves simulated side by side
ROUND = 500  # simulated passes of one move that take as long as its choice
LOOKED_AT = 512  # moves that are held against the cuts at once
PARTS = 128  # sets of items of a rank that are looked at in one round
PLACES = 64  # micro-batches of a rank that they are taken from
PARTNERS = 4  # fast ranks that are asked in turn to take work of the slowest
TRIES = 3  # samples of moves before a rank counts as settled
CUTS = 16  # cuts that are remembered
BUNDLES = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 7 / 8)  # shares of the items of a micro-batch that move together
GAIN = 1e-5  # share of the makespan below which a move is not worth a round


@dataclass(frozen=True)
class Items:
    """What the moves need to know of items: [items] work and tokens, the cap, and the cost of one more micro-batch."""

    work: Ints
    tokens: Ints
    cap: int
    fixed: int


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


Sets = tuple[list[int], list[int], Bins]  # work, tokens and items of sets of items


@dataclass(frozen=True)
class Parts:
    """What can be moved at once: [parts] sets of items, each of one micro-batch, some of them empty."""

    place: Ints
    work: Ints
    tokens: Ints
    items: Bins

    @classmethod
    def of(cls, places: list[int], sets: list[Sets], turn: int) -> Parts:
        """About ``PARTS`` of the sets of these places, others each turn."""
        work, tokens, items = (list(itertools.chain.from_iterable(several)) for several in zip(*sets, strict=True))
        place = np.repeat(places, [len(one[0]) for one in sets])
        stride = -(-len(items) // PARTS)
        some = slice(turn % stride, None, stride)
        return cls(place[some], np.array(work[some], np.int64), np.array(tokens[some], np.int64), items[some])


@dataclass(frozen=True)
class Moves:
    """[moves] parts of rank ``top`` (positions in ``gives``) for parts of rank ``other`` (positions in ``gets``)."""

    top: int
    other: int
    gives: Parts
    gets: Parts
    give: Ints
    get: Ints

    @property
    def source(self) -> Ints:
        return self.gives.place[self.give]

    @property
    def target(self) -> Ints:
        return self.gets.place[self.get]

    @property
    def work(self) -> Floats:
        """What ``source`` loses and ``target`` gains on balance."""
        return (self.gives.work[self.give] - self.gets.work[self.get]).astype(np.float64)

    def some(self, chosen: Ints | slice | NDArray[np.bool_]) -> Moves:
        return replace(self, give=self.give[chosen], get=self.get[chosen])

    def __len__(self) -> int:
        return len(self.give)


class Cuts:
    """Planes below the makespan as a function of the sizes: ``offset + slope @ sizes``."""

    def __init__(self, count: int) -> None:
        self.slopes, self.offsets = np.zeros((0, count)), np.zeros(0)

    def add(self, sizes: Floats, time: float, slope: Floats) -> None:
        self.slopes = np.concatenate((self.slopes, slope[None]))[-CUTS:]
        self.offsets = np.append(self.offsets, time - (slope * sizes).sum())[-CUTS:]

    def at(self, sizes: Floats) -> Floats:
        """[cuts] height of each plane; not by matrix product, whose rounding depends on the machine."""
        return self.offsets + (self.slopes * sizes).sum(axis=1)

    def steepest(self, sizes: Floats) -> Floats:
        """[M] slope of the highest plane."""
        return self.slopes[int(np.argmax(self.at(sizes)))]


def improve(step: Step, items: Items, pipeline: Pipeline, budget: int) -> int:
    """Make moves until none looked at helps or ``budget`` simulated passes are spent; returns what is left of it."""
    search = _Search(step, items, pipeline, budget)
    search.run()
    return search.budget


class _Search:
    """The state of ``improve``."""

    def __init__(self, step: Step, items: Items, pipeline: Pipeline, budget: int) -> None:
        self.step, self.items, self.pipeline, self.budget = step, items, pipeline, budget
        self.count = step.work.shape[1]
        graph = program(self.count, pipeline)
        self.passes = graph.size if graph.second is None else 3 * graph.size // 2  # they take as long as so many
        self.cuts = Cuts(self.count)
        self.sets: dict[tuple[int, int], Sets] = {}  # by rank and place, as long as they are true
        self.turn = 0

    def run(self) -> None:
        times = self.step.times
        sizes = self.step.work[[int(np.argmax(times))]].astype(np.float64)
        self._learn(run_many(sizes, self.pipeline), sizes, 0)
        while self.budget >= WIDTH * (self.passes + ROUND):  # a smaller sample finds next to nothing
            self.turn += 1
            top = int(np.argmax(times))
            fast = np.argsort(times, kind="stable")[:PARTNERS].tolist()
            if not any(self._moved(top, other) for other in (top, *(one for one in fast if one != top))):
                break

    def _learn(self, runs: Runs, sizes: Floats, at: int) -> None:
        self.cuts.add(sizes[at], float(runs.times[at]), runs.slope(at))

    def _moved(self, top: int, other: int) -> bool:
        """Make the best of a few samples of moves between ``top`` and ``other``, if it helps."""
        times = self.step.times
        goal = float(times[top]) * (1 - GAIN)
        moves = self._moves(top, other, goal)
        stride = max(1, -(-len(moves) // LOOKED_AT))
        for shift in range(min(TRIES, stride)):
            if self.budget <= 0:
                break
            self.budget -= WIDTH * ROUND
            some = self._not_ruled_out(moves.some(slice((self.turn + shift * 7) % stride, None, stride)), goal)
            if not len(some):
                continue
            sizes = self._sizes(some)
            runs = run_many(sizes, self.pipeline)
            self.budget -= len(sizes) * self.passes
            both = runs.times.reshape(-1, len(some))  # of top and other, or of top alone
            best = int(np.argmin(both.max(axis=0)))
            slower = int(np.argmax(both[:, best]))
            self._learn(runs, sizes, slower * len(some) + best)
            if both[slower, best] < goal:
                self._make(some, best)
                times[top], times[other] = both[0, best], both[-1, best]
                return True
        return False

    def _moves(self, top: int, other: int, goal: float) -> Moves:
        """Moves of work from ``top`` that do not stay above ``goal`` by the highest cut alone."""
        gives = self._parts(top)
        gets = gives if top == other else self._parts(other)
        slope = self.cuts.steepest(self.step.work[top].astype(np.float64))
        work = gives.work[:, None] - gets.work
        change = work * ((slope[gets.place] if top == other else 0.0) - slope[gives.place][:, None])
        useful = np.flatnonzero((work > 0) & (change < goal - self.step.times[top]))
        return Moves(top, other, gives, gets, *np.divmod(useful, len(gets.items)))

    def _not_ruled_out(self, moves: Moves, goal: float) -> Moves:
        """Up to ``WIDTH`` of the moves: those that keep the cap, empty nothing, and are least by the cuts."""
        step, cap = self.step, self.items.cap
        out, back = moves.gives.tokens[moves.give], moves.gets.tokens[moves.get]
        mine, theirs = step.tokens[moves.top][moves.source], step.tokens[moves.other][moves.target]
        good = (theirs + out - back <= cap) & (mine - out + back <= cap) & ((out < mine) | (back > 0))
        if moves.top == moves.other:
            good &= moves.source != moves.target
        moves = moves.some(good)
        least = self._least(moves)
        chosen = np.argsort(least, kind="stable")[:WIDTH]
        return moves.some(chosen[least[chosen] < goal])

    def _least(self, moves: Moves) -> Floats:
        """[moves] time that the slower of the two ranks takes at least, by the cuts."""
        work, slopes = moves.work, self.cuts.slopes
        lost, gained = work * slopes[:, moves.source], work * slopes[:, moves.target]
        mine, theirs = (
            self.cuts.at(self.step.work[rank].astype(np.float64))[:, None] for rank in (moves.top, moves.other)
        )
        if moves.top == moves.other:
            return (mine + (gained - lost)).max(axis=0)
        return np.maximum((mine - lost).max(axis=0), (theirs + gained).max(axis=0))

    def _sizes(self, moves: Moves) -> Floats:
        """[moves, M] sizes on ``top`` after each move, followed by those on ``other`` where it is another rank."""
        ranks = [moves.top] if moves.top == moves.other else [moves.top, moves.other]
        sizes = np.repeat(self.step.work[ranks].astype(np.float64)[:, None], len(moves), axis=1)
        each = np.arange(len(moves))
        sizes[0, each, moves.source] -= moves.work
        sizes[-1, each, moves.target] += moves.work
        return sizes.reshape(-1, self.count)

    def _parts(self, rank: int) -> Parts:
        """What can be moved from or to a rank."""
        stride = -(-self.count // PLACES)
        places = list(range(self.turn % stride, self.count, stride))
        return Parts.of(places, [self._sets(rank, place) for place in places], self.turn)

    def _sets(self, rank: int, place: int) -> Sets:
        """Nothing of a micro-batch, each distinct item, its lightest few, and all of it."""
        key = (rank, place)
        if key not in self.sets:
            light = lightest(self.step.hands[rank][place], self.items)
            work, tokens = self.items.work[light].tolist(), self.items.tokens[light].tolist()
            first = [
                at for at in range(len(light)) if not at or (work[at], tokens[at]) != (work[at - 1], tokens[at - 1])
            ]
            sizes = sorted(({int(len(light) * share) for share in BUNDLES} | {len(light)}) - {0, 1})
            works, counts = list(itertools.accumulate(work)), list(itertools.accumulate(tokens))
            self.sets[key] = (
                [0, *(work[at] for at in first), *(works[size - 1] for size in sizes)],
                [0, *(tokens[at] for at in first), *(counts[size - 1] for size in sizes)],
                [[], *([light[at]] for at in first), *(light[:size] for size in sizes)],
            )
        return self.sets[key]

    def _make(self, moves: Moves, chosen: int) -> None:
        """Carry out one move; the times are the caller's to update."""
        step, items = self.step, self.items
        out, back = moves.gives.items[int(moves.give[chosen])], moves.gets.items[int(moves.get[chosen])]
        for rank, place, leave, come in (
            (moves.top, int(moves.source[chosen]), set(out), back),
            (moves.other, int(moves.target[chosen]), set(back), out),
        ):
            kept = [item for item in step.hands[rank][place] if item not in leave] + come
            step.hands[rank][place] = kept
            step.work[rank, place] = items.fixed + int(items.work[kept].sum())
            step.tokens[rank, place] = int(items.tokens[kept].sum())
            self.sets.pop((rank, place), None)


def lightest(one: list[int], items: Items) -> list[int]:
    """Items of a micro-batch, lightest first; ties by position."""
    ordered = sorted(one)
    return [ordered[at] for at in np.argsort(items.work[ordered], kind="stable").tolist()]
