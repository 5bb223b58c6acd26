"""Which sequences share a micro-batch: bin packing within a token cap, then levelling of the work. Pure functions of numpy.

Words: an *item* is what must stay in one piece (a sequence, or the rows of one prompt); a *bin* is a micro-batch. Items have
tokens, which the cap limits, and work, which is levelled. Work is a whole number here (``quantise``): sums of whole numbers do
not depend on the order of the summands, so peers that plan on their own get the same plan.

Invariants, each with a test of its own:

1. every item is in exactly one bin;
2. no bin holds more than ``cap`` tokens;
3. ``count_lower_bound`` never exceeds the number of bins of any packing that keeps the cap;
4. ``pack`` returns non-empty bins, never more than first-fit-decreasing would need;
5. ``level`` returns exactly ``count`` bins and leaves none empty unless there are fewer items than bins;
6. the highest bin after ``level`` is never above that of the plain greedy pass;
7. all of it depends on the arguments alone: budgets count evaluations, ties go to the lower position.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bins = list[list[int]]  # positions of items

QUANTUM_BITS = 50  # the work of all items together is below 2**50: exact as int64 and as float64


def quantise(work: Floats, extra: float = 0.0) -> tuple[Ints, int]:
    """Work in whole quanta, and ``extra`` (the cost of one more bin) on the same scale.

    The scale is a power of two, so that equal work stays equal and order is kept up to one part in ``2**50 / items``.
    """
    top = float(work.sum()) + extra
    if top <= 0:
        return np.zeros(len(work), np.int64), 0
    exponent = QUANTUM_BITS - int(np.frexp(top)[1])
    return np.rint(np.ldexp(work, exponent)).astype(np.int64), int(np.rint(np.ldexp(extra, exponent)))


def count_lower_bound(tokens: Ints, cap: int) -> int:
    """A proven lower bound of the number of bins.

    The greatest of three bounds: total tokens over the cap; Martello and Toth's L2 (Knapsack Problems, 1990, section 8.3) over
    every threshold; and the dual feasible functions ``u_k`` of Fekete and Schepers (2001), which see items just above
    ``cap / (k + 1)`` that no pair of thresholds sees.

    Args:
        tokens: [items] each between 1 and ``cap``, with a sum below 2**62.
        cap: tokens per bin.
    """
    if len(tokens) == 0:
        return 0
    ascending = np.sort(tokens)
    return max(-(-int(ascending.sum()) // cap), _l2(ascending, cap), _dual_feasible(ascending, cap))


def _l2(ascending: Ints, cap: int) -> int:
    """For a threshold a: items above ``cap - a`` are alone; those above ``cap / 2`` are apart; the rest fill what is left."""
    sums = np.concatenate(([0], np.cumsum(ascending)))
    half = int(np.searchsorted(ascending, cap // 2, side="right"))  # items up to here are at most cap / 2
    thresholds = np.concatenate(([0], np.unique(ascending[:half])))
    low = np.searchsorted(ascending, thresholds, side="left")
    high = np.searchsorted(ascending, cap - thresholds, side="right")
    apart = high - half
    room = apart * cap - (sums[high] - sums[half])  # apart * cap < 2 * their tokens, so this cannot overflow
    spill = np.maximum(0, (sums[half] - sums[low]) - room)
    return len(ascending) - half + int((-(-spill // cap)).max())


def _dual_feasible(ascending: Ints, cap: int, deepest: int = 20) -> int:
    """The best bound of ``u_k``: an item of share x counts x if (k + 1) x is whole, else floor((k + 1) x) / k."""
    best = 0
    for k in range(1, deepest + 1):
        parts = ascending * (k + 1) if int(ascending[-1]) < 2**62 // (k + 1) else None
        if parts is None:
            break
        floors = parts // cap
        exact = floors * cap == parts
        # the sum is exact / cap + rounded / k with exact and rounded whole: round it up without leaving whole numbers
        numerator = int(ascending[exact].sum()) * k + int(floors[~exact].sum()) * cap
        best = max(best, -(-numerator // (cap * k)))
    return best


def pack(tokens: Ints, cap: int) -> Bins:
    """Bins within the cap, as few as best-fit-decreasing needs."""
    return _best_fit_decreasing(tokens, cap)


def _best_fit_decreasing(tokens: Ints, cap: int) -> Bins:
    """Each item, longest first, goes to the fullest bin with room."""
    order = np.argsort(-tokens, kind="stable").tolist()
    sizes = tokens.tolist()
    rooms: list[tuple[int, int]] = []  # (room left, bin), ascending
    bins: Bins = []
    for item in order:
        at = bisect_left(rooms, (sizes[item], -1))
        if at == len(rooms):
            room, chosen = cap, len(bins)
            bins.append([])
        else:
            room, chosen = rooms.pop(at)
        bins[chosen].append(item)
        insort(rooms, (room - sizes[item], chosen))
    return bins


def level(
    tokens: Ints, work: Ints, cap: int, count: int, *, start: Ints | None = None, budget: int = 1_000_000
) -> Bins:
    """Exactly ``count`` bins within the cap, with the smallest maximum of work that the budget finds.

    Args:
        tokens, work: [items].
        cap: tokens per bin; ``count`` bins must be enough for ``pack``.
        count: number of bins.
        start: [count] work that each bin holds beforehand; levels ``start + work`` instead of ``work``.
        budget: number of exchanges of two items that refinement may look at.

    Returns:
        bins in the order of ``start``; bins are empty only where there are fewer items than bins.
    """
    base = np.zeros(count, np.int64) if start is None else start
    bins = _greedy(tokens, work, cap, base) or _spread(pack(tokens, cap), tokens, work, base)
    return refine(bins, tokens, work, cap, base, budget)


def _greedy(tokens: Ints, work: Ints, cap: int, base: Ints, by: Ints | None = None) -> Bins | None:
    """Each item, heaviest first, goes to the lowest bin with room; None if some item finds no room."""
    key = work if by is None else by
    order = np.lexsort((np.arange(len(key)), -tokens, -key)).tolist()
    sizes, weights = tokens.tolist(), key.tolist()
    heap = [(int(load), index) for index, load in enumerate(base.tolist())]
    heapq.heapify(heap)
    room = [cap] * len(heap)
    bins: Bins = [[] for _ in heap]
    empty = len(heap)
    left = len(order)
    for item in order:
        aside = []
        size = sizes[item]
        must_open = left <= empty  # as many items as empty bins are left: each must open one
        left -= 1
        while heap:
            load, index = heapq.heappop(heap)
            if room[index] >= size and (not must_open or not bins[index]):
                break
            aside.append((load, index))
        else:
            return None
        empty -= not bins[index]
        bins[index].append(item)
        room[index] -= size
        heapq.heappush(heap, (load + weights[item], index))
        for entry in aside:
            heapq.heappush(heap, entry)
    return bins


def _spread(bins: Bins, tokens: Ints, work: Ints, base: Ints) -> Bins:
    """Raise a packing to ``len(base)`` bins by splitting the heaviest, and hand the heaviest bin the lowest base."""
    count = len(base)
    heap = [(-int(work[one].sum()), index) for index, one in enumerate(bins) if len(one) > 1]
    heapq.heapify(heap)
    bins = [list(one) for one in bins]
    while len(bins) < count and heap:
        _, index = heapq.heappop(heap)
        halves: Bins = [[], []]
        sums = [0, 0]
        for item in sorted(bins[index], key=lambda item: (-int(work[item]), item)):
            side = int(sums[1] < sums[0])
            halves[side].append(item)
            sums[side] += int(work[item])
        bins[index] = halves[0]
        bins.append(halves[1])
        for at, half in ((index, halves[0]), (len(bins) - 1, halves[1])):
            if len(half) > 1:
                heapq.heappush(heap, (-int(work[half].sum()), at))
    bins += [[] for _ in range(count - len(bins))]
    heavy_first = sorted(range(count), key=lambda index: (-int(work[bins[index]].sum()) if bins[index] else 0, index))
    placed: Bins = [[] for _ in range(count)]
    for slot, index in zip(np.argsort(base, kind="stable").tolist(), heavy_first, strict=True):
        placed[slot] = bins[index]
    return placed


def refine(bins: Bins, tokens: Ints, work: Ints, cap: int, base: Ints, budget: int, width: int = 48) -> Bins:
    """Lower the highest bin by moving one of its items, or exchanging it for a lighter one, until no such step helps."""
    bins = [list(one) for one in bins]
    loads = base + np.array([int(work[one].sum()) if one else 0 for one in bins], np.int64)
    fill = np.array([int(tokens[one].sum()) if one else 0 for one in bins], np.int64)
    floor = _floor(work, base, len(bins))
    while budget > 0 and len(bins) > 1:
        highest = int(np.argmax(loads))
        if loads[highest] <= floor or len(bins[highest]) == 0:
            break
        lowest = np.argsort(loads, kind="stable")[:-1]
        lowest = lowest[lowest != highest]
        found = None
        for at in range(0, len(lowest), width):
            found, cost = _best_exchange(bins, tokens, work, cap, loads, fill, highest, lowest[at : at + width])
            budget -= cost
            if found is not None or budget <= 0:
                break
        if found is None:
            break
        _exchange(bins, tokens, work, loads, fill, highest, *found)
    return bins


def _floor(work: Ints, base: Ints, count: int) -> int:
    """A height that no levelling goes below, raised by what is not worth a search (one part in 16,384 of the mean)."""
    total = int(work.sum())
    mean = -(-(total + int(base.sum())) // count)
    heaviest = int(work.max(initial=0)) + int(base.min(initial=0))
    return max(mean, heaviest) + (total // count >> 14)


def _best_exchange(
    bins: Bins, tokens: Ints, work: Ints, cap: int, loads: Ints, fill: Ints, highest: int, others: Ints
) -> tuple[tuple[int, int, int] | None, int]:
    """The exchange with ``others`` that leaves the lower of maxima: (bin, item out, item in or -1), and what it cost to look."""
    mine = np.array(bins[highest], np.int64)
    theirs = [item for other in others.tolist() for item in (*bins[other], -1)]  # -1: take nothing in return
    owner = np.repeat(others, [len(bins[other]) + 1 for other in others.tolist()])
    back = np.array(theirs, np.int64)
    nothing = back < 0
    back_work = np.where(nothing, 0, work[back])
    back_tokens = np.where(nothing, 0, tokens[back])
    delta = work[mine][:, None] - back_work
    moved = tokens[mine][:, None] - back_tokens
    worse = np.maximum(loads[highest] - delta, loads[owner] + delta)
    bad = (delta <= 0) | (fill[owner] + moved > cap) | (fill[highest] - moved > cap)
    if len(mine) == 1:
        bad |= nothing
    worse[bad] = loads[highest]
    best = int(np.argmin(worse))
    if worse.flat[best] >= loads[highest]:
        return None, worse.size
    row, column = divmod(best, worse.shape[1])
    return (int(owner[column]), int(mine[row]), int(back[column])), worse.size


def _exchange(
    bins: Bins, tokens: Ints, work: Ints, loads: Ints, fill: Ints, source: int, target: int, out: int, back: int
) -> None:
    """Carry out what ``_best_exchange`` found."""
    bins[source].remove(out)
    bins[target].append(out)
    delta, moved = work[out], tokens[out]
    if back >= 0:
        bins[target].remove(back)
        bins[source].append(back)
        delta, moved = delta - work[back], moved - tokens[back]
    loads[source] -= delta
    loads[target] += delta
    fill[source] -= moved
    fill[target] += moved


def deal(work: Ints, ranks: int, classes: Ints | None = None) -> Bins:
    """Deal ``len(work)`` bins to ranks, equally many to each, with rank sums as even as a folding pass and exchanges make them.

    Args:
        work: [bins]; ``ranks`` divides their number.
        ranks: how many hands.
        classes: [bins] kind of each bin; every rank gets equally many of each kind, and exchanges stay within a kind.

    Returns:
        the bins of each rank.
    """
    kind = np.zeros(len(work), np.int64) if classes is None else classes
    order = np.lexsort((np.arange(len(work)), -work, kind)).tolist()
    hands: Bins = [[] for _ in range(ranks)]
    sums = [0] * ranks
    weights = work.tolist()
    for at in range(0, len(order), ranks):
        lowest = sorted(range(ranks), key=lambda rank: (sums[rank], rank))
        for rank, index in zip(lowest, order[at : at + ranks], strict=True):
            hands[rank].append(index)
            sums[rank] += weights[index]
    return _even_hands(hands, work, kind)


def _even_hands(hands: Bins, work: Ints, kind: Ints, rounds: int = 256) -> Bins:
    """Exchange bins of one kind between the heaviest and another hand while that lowers the heavier of the two."""
    sums = np.array([int(work[hand].sum()) for hand in hands], np.int64)
    for _ in range(rounds):
        top = int(np.argmax(sums))
        best: tuple[int, int, int, int] | None = None
        for other in np.argsort(sums, kind="stable").tolist()[:4]:
            if other == top:
                continue
            mine, theirs = np.array(hands[top]), np.array(hands[other])
            delta = work[mine][:, None] - work[theirs]
            after = np.maximum(sums[top] - delta, sums[other] + delta)
            after[(kind[mine][:, None] != kind[theirs]) | (delta <= 0)] = sums[top]
            at = int(np.argmin(after))
            if after.flat[at] < (sums[top] if best is None else best[0]):
                row, column = divmod(at, after.shape[1])
                best = (int(after.flat[at]), other, row, column)
        if best is None:
            return hands
        _, other, row, column = best
        delta = int(work[hands[top][row]] - work[hands[other][column]])
        hands[top][row], hands[other][column] = hands[other][column], hands[top][row]
        sums[top] -= delta
        sums[other] += delta
    return hands
