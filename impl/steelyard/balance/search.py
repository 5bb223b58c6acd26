"""Count, contents and order of micro-batches for a pipeline, chosen together by predicted makespan.

Four steps, each within a budget that counts evaluations:

1. for every count worth a look, the profiles of ``pipeline.profile`` are scaled to the work at hand, and the most
   promising pairs of count and profile are kept;
2. for each of those the items are levelled onto the profile (``partition.level`` with a start for every place) and
   dealt to the ranks place by place;
3. beside them stand level work in its best order, on the least count and on the most promising ones, and the packing
   as it is, on every count: where a few items are heavy, no profile can be had;
4. all are simulated and improved by moves (``improve.py``), the best first, as far as the budget goes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from steelyard.balance import partition
from steelyard.balance.bins import Bins
from steelyard.balance.improve import Items, Step, improve
from steelyard.balance.request import Batch, Settings
from steelyard.pipeline.order import best_order, both_ends
from steelyard.pipeline.profile import profiles
from steelyard.pipeline.schedule import Pipeline, legal_count
from steelyard.pipeline.simulate import makespans

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

MORE = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32)  # micro-batches beyond the least count that are looked at
TRIED = 4  # pairs of count and profile that are levelled and simulated, in batches of up to ``ROWS``; fewer beyond
ROWS = 4_096
MANY = 256  # micro-batches of a rank beyond which fewer starts are tried
FLAT = 3  # counts that are levelled without a profile
PAIRS = 400_000  # pairs of items offered to levelling
PASSES = 500_000  # simulated passes that moves may cost a step


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
        starts += [_as_packed(batch, settings, ranks, count, packed) for count in counts[: _few(len(counts), least)]]
    tried = [Step.of(hands, items, pipeline) for hands in starts]
    tried.sort(key=lambda one: float(one.times.max()))
    budget = PASSES
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
    """Level work on the least count and on the most promising other ones, and the most promising profiles."""
    totals = Totals.of(batch, settings.cap, ranks, batch.quantum)
    tries = min(TRIED, TRIED * ROWS // len(batch.items))
    promising = _promising(totals, pipeline, counts, _few(tries, counts[0]))
    flat = list(dict.fromkeys([counts[0], *map(len, promising)]))[: _few(FLAT, counts[0])]
    return [
        *(_flat(batch, settings, pipeline, ranks, count, packed) for count in flat),
        *(_shaped(batch, settings, ranks, sizes, packed) for sizes in promising),
    ]


@dataclass(frozen=True)
class Totals:
    """What can be told of a rank's work without its items; in one unit, and small enough to be sent.

    Attributes:
        work: forward work of the rank, without fixed costs.
        heaviest: work of its heaviest item.
        fixed: cost of one more micro-batch.
        largest: work of a micro-batch that is filled to the cap with tokens of the average work.
        items: items of the rank.
    """

    work: float
    heaviest: float
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
            heaviest=scale * int(batch.work.max(initial=0)),
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
    slowest = [max(float(_times(one, pipeline, count)[0].min()) for one in totals) for count in counts]
    best = int(np.argmin(slowest))
    return counts[best] if np.isfinite(slowest[best]) else least


def _counts(settings: Settings, least: int, most: int) -> list[int]:
    """Legal counts worth a look: the least, and more by up to two micro-batches per virtual stage."""
    pipeline = settings.pipeline
    assert pipeline is not None
    extra = [more for more in MORE if more <= 2 * pipeline.stages * pipeline.virtual]
    counts = {legal_count(least + more, pipeline, multiple_of=settings.multiple_of) for more in extra}
    return sorted(count for count in counts if count == least or count <= most)


def _times(totals: Totals, pipeline: Pipeline, count: int) -> tuple[Floats, Floats]:
    """Predicted time under every profile of ``count`` micro-batches, and the size of its largest; infinite where unfit.

    A profile must leave room for the tokens and for the fixed cost of its smallest micro-batch; and no profile does
    without a micro-batch for the heaviest item.
    """
    total = totals.work + count * totals.fixed
    if total <= 0:
        return np.zeros(1), np.zeros(1)
    one = profiles(count, pipeline, _mean(totals, count))
    unit = total / one.totals
    fits = (unit - totals.fixed <= totals.largest) & (one.sizes.min(axis=1) * unit >= totals.fixed)
    return np.where(fits, one.times * np.maximum(unit, totals.heaviest + totals.fixed), np.inf), unit


def _promising(totals: Totals, pipeline: Pipeline, counts: list[int], tries: int) -> list[Floats]:
    """Sizes of the micro-batches, fixed cost included, in up to ``tries`` profiles that promise the least time."""
    found = []
    for count in counts if totals.work > 0 else ():
        times, unit = _times(totals, pipeline, count)
        for at in np.argsort(times, kind="stable")[: max(1, tries // len(counts))].tolist():
            if np.isfinite(times[at]):
                found.append((float(times[at]), count, at, float(unit[at])))
    found.sort()
    return [profiles(count, pipeline, _mean(totals, count)).sizes[at] * unit for _, count, at, unit in found[:tries]]


def _mean(totals: Totals, count: int) -> float:
    return (totals.work + count * totals.fixed) / count


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


def _as_packed(batch: Batch, settings: Settings, ranks: int, count: int, packed: Bins) -> list[Bins]:
    """What packing made, the heaviest split, small at both ends. Where some items are far heavier than the mean
    micro-batch, work cannot be level; full micro-batches of light items between them are better than level ones.
    """
    alone = np.flatnonzero(batch.tokens > settings.cap).tolist()
    rest = np.flatnonzero(batch.tokens <= settings.cap).tolist()
    whole = [[item] for item in alone] + [[rest[item] for item in one] for one in packed]
    bins = partition.spread(whole, batch.work, np.zeros(count * ranks, np.int64))
    work = partition.bin_sums(bins, batch.work)
    return [[bins[hand[at]] for at in both_ends(work[hand])] for hand in partition.deal(work, ranks)]


def _shaped(batch: Batch, settings: Settings, ranks: int, sizes: Floats, packed: Bins) -> list[Bins]:
    """Items levelled onto a profile: [M] sizes in quanta, fixed cost included."""
    start = np.repeat(np.rint(sizes.max() - sizes).astype(np.int64), ranks)
    bins = level_items(batch, settings, len(start), packed, start=start, budget=PAIRS // TRIED)
    work = partition.bin_sums(bins, batch.work)
    smallest_first = np.argsort(sizes, kind="stable").tolist()
    hands = []
    for hand in partition.deal(work, ranks, np.repeat(np.arange(len(sizes)), ranks)):
        ordered: Bins = [[] for _ in hand]
        for place, at in zip(smallest_first, sorted(hand, key=lambda at: (int(work[at]), at)), strict=True):
            ordered[place] = bins[at]
        hands.append(ordered)
    return hands


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
