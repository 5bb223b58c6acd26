"""Count, contents and order of micro-batches for a pipeline, chosen together by predicted makespan.

Four steps, each within a budget that counts evaluations:

1. for every count worth a look, the time in which the ranks could get all work done is found: in a given time each
   rank takes the profile of ``pipeline.profile`` with most work in it that leaves room for the rank's heaviest item. So
   a rank with a long row gets less of the rest, and its other micro-batches the sizes that go with that row;
2. for the most promising counts the items are levelled onto these sizes (``partition.level`` with a start for every
   place);
3. beside them stand level work in its best order, on the least count and, where items are few, on the greatest; and the
   packing as it is, small at both ends;
4. all are simulated, and the best is improved by moves (``improve.py``) as far as the budget goes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from steelyard.balance import partition
from steelyard.balance.bins import Bins, first_fit_decreasing
from steelyard.balance.improve import Items, Step, improve
from steelyard.balance.request import Batch, Settings
from steelyard.pipeline.order import best_order, both_ends
from steelyard.pipeline.profile import profiles
from steelyard.pipeline.schedule import Pipeline, legal_count
from steelyard.pipeline.simulate import makespans

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

MORE = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32)  # micro-batches beyond the least count that are looked at
TRIED = 4  # counts whose sizes are levelled and simulated, in batches of up to ``ROWS``; fewer beyond
ROWS = 1_024
MANY = 256  # micro-batches of a rank beyond which fewer starts are tried
FEW = 2  # items per micro-batch below which sizes are what the items are, and more micro-batches worth a start
HALVINGS = 12  # of the interval that the time of a count is searched in
DOUBLINGS = 64  # of the first guess of that time, before a count is given up
PAIRS = 400_000  # pairs of items offered to levelling
BUDGET = 600_000  # simulated passes that moves may cost a step of up to ``RANKS`` ranks; more for more
RANKS = 4


def arrange(batch: Batch, settings: Settings, ranks: int, least: int, packed: Bins, *, exact: bool) -> list[Bins]:
    """The micro-batches of every rank, in execution order, as items.

    Args:
        batch, settings: the request; ``settings.pipeline`` is set.
        ranks: data-parallel ranks.
        least: least legal count per rank that packing reached.
        packed: a packing of the items that are not above the cap.
        exact: keep to ``least`` micro-batches.
    """
    assert settings.pipeline is not None
    pipeline = replace(settings.pipeline, p2p=settings.pipeline.p2p / batch.quantum)
    items = Items(batch.work, batch.tokens, settings.cap, batch.fixed)
    counts = [least] if exact else _counts(settings, least, len(batch.items) // ranks)
    if len(batch.items) <= least * ranks:
        starts = [_flat(batch, settings, pipeline, ranks, least, packed)]
    else:
        starts = _starts(batch, settings, pipeline, ranks, counts, packed)
    tried = [Step.of(hands, items, pipeline) for hands in starts]
    tried.sort(key=lambda one: float(one.times.max()))
    budget = BUDGET * max(RANKS, ranks) // RANKS
    for one in tried:
        if budget > 0:  # the most promising first; what it leaves goes to the next
            budget = improve(one, items, pipeline, budget)
    return min(tried, key=lambda one: float(one.times.max())).hands


def _few(most: int, count: int) -> int:
    """Up to ``most``, and less where a rank has so many micro-batches that there is little overhead left to save."""
    return max(1, min(most, most * MANY // count))


def _starts(
    batch: Batch, settings: Settings, pipeline: Pipeline, ranks: int, counts: list[int], packed: Bins
) -> list[list[Bins]]:
    totals = Totals.of(batch, settings.cap, ranks, batch.quantum)
    tries = min(TRIED, max(1, TRIED * ROWS // len(batch.items)))
    promising = _promising(totals, ranks, pipeline, counts, _few(tries, counts[0]))
    few = len(batch.items) < min(ROWS, FEW * ranks * counts[-1])
    flat = [counts[0], counts[-1]] if few and len(counts) > 1 else [counts[0]]
    return [
        *(_flat(batch, settings, pipeline, ranks, count, packed) for count in flat),
        *(_shaped(batch, settings, sizes, packed) for sizes in promising),
        *(
            _as_packed(batch, settings, pipeline, ranks, counts[0], one)
            for one in _packings(batch, settings, packed, ranks * counts[0])
        ),
    ]


def _packings(batch: Batch, settings: Settings, packed: Bins, most: int) -> list[Bins]:
    """The packing of few bins; and where items are few, one whose last bins are often small, which suits the ends."""
    fits = batch.tokens <= settings.cap
    if len(fits) > ROWS:
        return [packed]
    plain = first_fit_decreasing(batch.tokens[fits], settings.cap)
    return [packed, plain] if len(plain) + int((~fits).sum()) <= most and plain != packed else [packed]


@dataclass(frozen=True)
class Totals:
    """What can be told of a rank's work without its items; in one unit, and small enough to be sent.

    Attributes:
        work: forward work of the rank, without fixed costs.
        heaviest: work of the heaviest item of each rank, heaviest first.
        fixed: cost of one more micro-batch.
        largest: work of a micro-batch that is filled to the cap with tokens of the average work.
        items: items of the rank.
    """

    work: float
    heaviest: tuple[float, ...]
    fixed: float
    largest: float
    items: int

    @classmethod
    def of(cls, batch: Batch, max_tokens: int, ranks: int = 1, unit: float = 1.0) -> Totals:
        """Of one of ``ranks`` equal shares of a batch, in multiples of ``unit``."""
        work, tokens = int(batch.work.sum()), int(batch.tokens.sum())
        scale = batch.quantum / unit
        return cls(
            work=scale * work / ranks,
            heaviest=tuple(scale * one for one in np.sort(batch.work)[::-1][:ranks].tolist()),
            fixed=scale * batch.fixed,
            largest=scale * max_tokens * work / max(tokens, 1),
            items=len(batch.items) // ranks,
        )


def agreed_count(totals: list[Totals], settings: Settings, least: int) -> int:
    """Count of at least ``least`` that takes ranks with these ``totals`` least time, as far as can be told without
    items.
    """
    assert settings.pipeline is not None
    pipeline = settings.pipeline
    counts = _counts(settings, least, min(one.items for one in totals))
    slowest = [max(_targets(one, 1, pipeline, count)[0] for one in totals) for count in counts]
    best = int(np.argmin(slowest))
    return counts[best] if np.isfinite(slowest[best]) else least


def _counts(settings: Settings, least: int, most: int) -> list[int]:
    """Legal counts worth a look: the least, and more by up to two micro-batches per virtual stage."""
    pipeline = settings.pipeline
    assert pipeline is not None
    extra = [more for more in MORE if more <= 2 * pipeline.stages * pipeline.virtual]
    counts = {legal_count(least + more, pipeline, multiple_of=settings.multiple_of) for more in extra}
    return sorted(count for count in counts if count == least or count <= most)


def _targets(totals: Totals, ranks: int, pipeline: Pipeline, count: int) -> tuple[float, Floats]:
    """Time that ``count`` micro-batches per rank could take, and the sizes [ranks, count] that would do it, in the unit
    of ``totals``; infinite where no profile holds the work. Where a heaviest item decides the time, there is room to
    spare in the sizes.

    A profile must have room for the rank's heaviest item in its largest micro-batch, not more in it than the cap of
    tokens lets in, and room for the fixed cost in its smallest.
    """
    fixed, work = totals.fixed, totals.work * ranks
    one = profiles(count, pipeline, (totals.work + count * fixed) / count)
    heaviest = np.array([*totals.heaviest, *[0.0] * (ranks - len(totals.heaviest))])
    least, most = heaviest[:, None] + fixed, max(float(heaviest[0]), totals.largest) + fixed
    smallest = one.sizes.min(axis=1)

    def done(time: float) -> tuple[Floats, Floats]:
        """[ranks, profiles] work that is done in ``time``, and [profiles] work of the largest micro-batch."""
        unit = np.minimum(time / one.times, most)
        fits = (unit >= least) & (unit * smallest >= fixed)
        return np.where(fits, unit * one.totals - count * fixed, -np.inf), unit

    def enough(time: float) -> bool:
        return bool(done(time)[0].max(axis=1).sum() >= work)

    low = high = (totals.work + count * fixed) * float((one.times / one.totals).min())
    for _ in range(DOUBLINGS):
        if enough(high):
            break
        low, high = high, 2 * high
    else:
        return np.inf, np.zeros((ranks, count))
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    amounts, unit = done(high)
    best = np.argmax(amounts, axis=1)
    return high, one.sizes[best] * unit[best][:, None]


def _promising(totals: Totals, ranks: int, pipeline: Pipeline, counts: list[int], tries: int) -> list[Floats]:
    """[ranks, M] sizes of the micro-batches, fixed cost included, for the counts that promise the least time."""
    if not totals.work > 0:
        return []
    found = [_targets(totals, ranks, pipeline, count) for count in counts]
    return [sizes for time, sizes in sorted(found, key=lambda one: one[0])[:tries] if np.isfinite(time)]


def _flat(batch: Batch, settings: Settings, pipeline: Pipeline, ranks: int, count: int, packed: Bins) -> list[Bins]:
    """Level work on ``count`` micro-batches. The best order for the heaviest rank serves all of them, as their
    micro-batches are much alike; a rank that it does not serve well gets the one that is small at both ends.
    """
    bins = level_items(batch, settings, count * ranks, packed)
    work = (partition.bin_sums(bins, batch.work) + batch.fixed).astype(np.float64)
    hands = np.array(partition.deal(partition.bin_sums(bins, batch.work), ranks))
    hands = np.take_along_axis(hands, np.argsort(work[hands], axis=1, kind="stable"), axis=1)  # lightest first
    heaviest = work[hands[int(np.argmax(work[hands].sum(axis=1)))]]
    orders = np.array([best_order(heaviest, pipeline, budget=0), both_ends(np.arange(count))])
    times = makespans(work[hands[:, orders]].reshape(-1, count), pipeline).reshape(ranks, 2)
    return [[bins[at] for at in hand[orders[int(np.argmin(time))]]] for hand, time in zip(hands, times, strict=True)]


def _as_packed(
    batch: Batch, settings: Settings, pipeline: Pipeline, ranks: int, count: int, packed: Bins
) -> list[Bins]:
    """What packing made, the heaviest split, each rank's in its best order. Where some items are far heavier than the
    mean micro-batch, work cannot be level; full micro-batches of light items between them are better than level ones.
    """
    alone = np.flatnonzero(batch.tokens > settings.cap).tolist()
    rest = np.flatnonzero(batch.tokens <= settings.cap).tolist()
    whole = [[item] for item in alone] + [[rest[item] for item in one] for one in packed]
    bins = partition.spread(whole, batch.work, np.zeros(count * ranks, np.int64))
    work = partition.bin_sums(bins, batch.work)
    loads = (work + batch.fixed).astype(np.float64)
    hands = partition.deal(work, ranks)
    return [[bins[hand[at]] for at in best_order(loads[hand], pipeline, budget=0)] for hand in hands]


def _shaped(batch: Batch, settings: Settings, sizes: Floats, packed: Bins) -> list[Bins]:
    """Items levelled onto [ranks, M] sizes in quanta, fixed cost included; roughly, as the moves level better."""
    ranks, count = sizes.shape
    start = np.rint(sizes.max() - sizes).astype(np.int64).T.ravel()  # place by place
    bins = level_items(batch, settings, start.size, packed, start=start, budget=0)
    if (sizes != sizes[0]).any():
        return [bins[rank::ranks] for rank in range(ranks)]
    kinds = np.repeat(np.arange(count), ranks)
    hands = partition.deal(partition.bin_sums(bins, batch.work), ranks, kinds)
    return [[bins[at] for at in sorted(hand)] for hand in hands]


def level_items(
    batch: Batch, settings: Settings, count: int, packed: Bins, *, start: Ints | None = None, budget: int = PAIRS
) -> Bins:
    """``count`` bins of items in the order of ``start``; items above the cap get the lowest places to themselves."""
    alone = np.flatnonzero(batch.tokens > settings.cap)
    rest = np.flatnonzero(batch.tokens <= settings.cap)
    slots = np.arange(count) if start is None else np.argsort(start, kind="stable")
    bins: Bins = [[] for _ in range(count)]
    for slot, item in zip(slots.tolist(), alone.tolist(), strict=False):
        bins[slot] = [item]
    shared = np.sort(slots[len(alone) :])
    if len(shared):
        tokens, work = batch.tokens[rest], batch.work[rest]
        base = None if start is None else start[shared]
        levelled = partition.level(tokens, work, settings.cap, len(shared), packed=packed, start=base, budget=budget)
        names = rest.tolist()
        for slot, one in zip(shared.tolist(), levelled, strict=True):
            bins[slot] = [names[item] for item in one] if len(alone) else one
    return bins
