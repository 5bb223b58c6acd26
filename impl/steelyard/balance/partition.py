"""Which sequences share a micro-batch, once their number is known: levelling of work within a token cap.

Pure functions, numpy only.

Words: an *item* is what must stay in one piece (a sequence, or the rows of one prompt); a *bin* is a micro-batch.
Items have tokens, which the cap limits, and work, which is levelled. Work is a whole number here (``quantise``): sums
of whole numbers do not depend on the order of the summands, so peers that plan on their own get the same plan.

Invariants of ``level`` and ``deal``, each with a test of its own:

1. every item is in exactly one bin, every bin in exactly one hand;
2. no bin holds more than ``cap`` tokens;
3. there are exactly ``count`` bins, and none is empty unless there are fewer items than bins;
4. the highest bin is never above that of the plain greedy pass, where that finds room for everything;
5. hands hold equally many bins, and equally many of each kind;
6. all of it depends on the arguments alone: budgets count evaluations, ties go to the lower position.

Bin packing itself is in ``bins.py``, the bounds that certify it in ``bounds.py``.
"""

from __future__ import annotations

import heapq
import itertools
import math

import numpy as np
from numpy.typing import NDArray

from steelyard.balance.bins import Bins, best_fit_decreasing

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

LARGE = 2_048  # items beyond which levelling does not try what seldom helps
QUANTUM_BITS = 50  # the work of all items together is below 2**50: exact as int64 and as float64


def quantise(work: Floats, extra: float = 0.0) -> tuple[Ints, int, float]:
    """Work in whole quanta, ``extra`` (the cost of one more bin) on the same scale, and the quantum.

    The quantum is a power of two, so that equal work stays equal; it is one part in ``2**50`` of the total or finer.
    """
    top = math.fsum(work.tolist()) + extra
    if not top > 0:
        return np.zeros(len(work), np.int64), 0, 1.0
    exponent = QUANTUM_BITS - 1 - int(np.frexp(top)[1])
    quanta = np.rint(np.ldexp(work, exponent)).astype(np.int64)
    return quanta, int(np.rint(np.ldexp(extra, exponent))), float(np.ldexp(1.0, -exponent))


def level(
    tokens: Ints,
    work: Ints,
    cap: int,
    count: int,
    *,
    packed: Bins | None = None,
    start: Ints | None = None,
    budget: int = 400_000,
) -> Bins:
    """Exactly ``count`` bins within the cap, with the smallest maximum of work that the budget finds.

    Args:
        tokens, work: [items].
        cap: tokens per bin.
        count: number of bins, at least that of ``packed``.
        packed: a packing within the cap, for where the heuristics find no room; made here if absent.
        start: [count] work that each bin holds beforehand: levels ``start + work``. None means 0.
        budget: exchanges of two items that refinement may look at; 0 takes the greedy pass as it is, if it has room.

    Returns:
        bins in the order of ``start``.
    """
    base = np.zeros(count, np.int64) if start is None else start
    greedy = _greedy(tokens, work, cap, base)
    # Where the greedy pass found no room, differencing hardly ever does.
    enough = budget == 0 if greedy else len(tokens) > LARGE
    difference = None if enough else _difference(tokens, work, cap, base)
    starts = [bins for bins in (greedy, difference) if bins]
    if not starts:
        packed = best_fit_decreasing(tokens, cap) if packed is None else packed
        starts = [spread(packed, work, base)]
    refined = [refine(bins, tokens, work, cap, base, budget // len(starts)) for bins in starts]
    highest = [int(bin_sums(bins, work, base).max()) for bins in refined]
    return refined[highest.index(min(highest))]


def bin_sums(bins: Bins, values: Ints, base: Ints | None = None) -> Ints:
    """[bins] sum of ``values`` over each bin, on top of ``base``."""
    ends = np.cumsum([len(one) for one in bins])
    flat = np.fromiter(itertools.chain.from_iterable(bins), np.int64, int(ends[-1]) if len(ends) else 0)
    loads = np.diff(np.concatenate(([0], np.cumsum(values[flat])))[np.concatenate(([0], ends))])
    return loads if base is None else loads + base


def _greedy(tokens: Ints, work: Ints, cap: int, base: Ints) -> Bins | None:
    """Each item, heaviest first, goes to the lowest bin with room; None if some item finds no room.

    Bins without room for the item at hand are parked by the room they have. Items mostly come in falling size, so a
    bin is parked and fetched back about once per item that it gets.
    """
    order = np.lexsort((-tokens, -work)).tolist()
    sizes, weights, loads = tokens.tolist(), work.tolist(), base.tolist()
    open_bins = [(load, index) for index, load in enumerate(loads)]
    heapq.heapify(open_bins)
    parked: list[tuple[int, int, int]] = []  # (-room, load, bin)
    unused = sorted(range(len(base)), key=lambda index: (loads[index], index), reverse=True)
    room = [cap] * len(base)
    bins: Bins = [[] for _ in loads]
    for left, item in zip(range(len(order), 0, -1), order, strict=True):
        size = sizes[item]
        while unused and bins[unused[-1]]:
            unused.pop()
        if left <= len(unused) and left <= sum(not bins[index] for index in unused):
            index = unused.pop()  # as many items as empty bins are left: each opens one
        else:
            while parked and -parked[0][0] >= size:
                _, load, index = heapq.heappop(parked)
                heapq.heappush(open_bins, (load, index))
            while open_bins and (open_bins[0][0] != loads[open_bins[0][1]] or room[open_bins[0][1]] < size):
                load, index = heapq.heappop(open_bins)
                if load == loads[index]:  # else it is an entry from before the bin grew
                    heapq.heappush(parked, (-room[index], load, index))
            if not open_bins:
                return None
            index = open_bins[0][1]
        bins[index].append(item)
        room[index] -= size
        loads[index] += weights[item]
        heapq.heappush(open_bins, (loads[index], index))
    return bins


def _difference(tokens: Ints, work: Ints, cap: int, base: Ints) -> Bins | None:
    """Differencing (Karmarkar and Karp 1982, in the balanced form of Michiels and others 2003), then repair of the cap.

    Items are cut into tuples of ``count``, heaviest first. The two tuples with the widest spread are joined, high
    against low, until one is left. ``base`` is a tuple too. Columns above the cap then give back their smallest items,
    which go to the lowest bin with room. None if one of them finds no room, or the repair would move more than an
    eighth of the items.
    """
    count = len(base)
    order = np.lexsort((-tokens, -work))
    tuples: list[tuple[int, int, Ints, list[list[int]]]] = []  # (-spread, age, sums descending, members)
    if base.any():
        slots = np.argsort(-base, kind="stable")
        tuples.append((int(base.min() - base.max()), 0, base[slots], [[-1 - slot] for slot in slots.tolist()]))
    for at in range(0, len(order), count):
        block = order[at : at + count]
        loads = np.zeros(count, np.int64)
        loads[: len(block)] = work[block]
        members = [[item] for item in block.tolist()] + [[] for _ in range(count - len(block))]
        tuples.append((int(loads[-1] - loads[0]), len(tuples), loads, members))
    heapq.heapify(tuples)
    age = len(tuples)
    while len(tuples) > 1:
        _, _, high, first = heapq.heappop(tuples)
        _, _, low, second = heapq.heappop(tuples)
        loads = high + low[::-1]
        joined = np.argsort(-loads, kind="stable")
        members = [first[at] + second[count - 1 - at] for at in joined.tolist()]
        loads = loads[joined]
        heapq.heappush(tuples, (int(loads[-1] - loads[0]), age, loads, members))
        age += 1
    columns = tuples[0][3] if tuples else [[] for _ in range(count)]
    return _repaired(_to_slots(columns), tokens, work, cap, base)


def _to_slots(columns: Bins) -> Bins:
    """Put each column where its marker (-1 - slot) says; without markers the order stays."""
    bins: Bins = [[] for _ in columns]
    for at, column in enumerate(columns):
        slot = next((-1 - one for one in column if one < 0), at)
        bins[slot] = [item for item in column if item >= 0]
    return bins


def _repaired(bins: Bins, tokens: Ints, work: Ints, cap: int, base: Ints) -> Bins | None:
    fill = bin_sums(bins, tokens)
    loads = bin_sums(bins, work, base)
    homeless: list[int] = []
    for index in np.flatnonzero(fill > cap).tolist():
        bins[index].sort(key=lambda item: (-int(tokens[item]), item))
        while fill[index] > cap:
            item = bins[index].pop()
            fill[index] -= tokens[item]
            loads[index] -= work[item]
            homeless.append(item)
    if len(homeless) * 8 > len(tokens):
        return None
    far = np.iinfo(np.int64).max
    for item in sorted(homeless, key=lambda item: (-int(work[item]), item)):
        index = int(np.argmin(np.where(fill + tokens[item] <= cap, loads, far)))
        if fill[index] + tokens[item] > cap:
            return None
        bins[index].append(item)
        fill[index] += tokens[item]
        loads[index] += work[item]
    return bins if all(bins) or len(tokens) < len(bins) else None


def spread(packed: Bins, work: Ints, base: Ints) -> Bins:
    """Raise a packing to ``len(base)`` bins by splitting the heaviest; the heaviest bin gets the lowest base."""
    count = len(base)
    bins = [list(one) for one in packed]
    loads = bin_sums(bins, work).tolist()
    heap = [(-loads[at], at) for at, one in enumerate(bins) if len(one) > 1]
    heapq.heapify(heap)
    while len(bins) < count and heap:
        _, at = heapq.heappop(heap)
        halves: Bins = [[], []]
        sums = [0, 0]
        for item in sorted(bins[at], key=lambda item: (-int(work[item]), item)):
            side = int(sums[1] < sums[0] or (bool(halves[0]) and not halves[1]))
            halves[side].append(item)
            sums[side] += int(work[item])
        bins[at] = halves[0]
        bins.append(halves[1])
        for place, half, load in zip((at, len(bins) - 1), halves, sums, strict=True):
            if len(half) > 1:
                heapq.heappush(heap, (-load, place))
    bins += [[] for _ in range(count - len(bins))]
    heavy_first = np.argsort(-bin_sums(bins, work), kind="stable").tolist()
    placed: Bins = [[] for _ in range(count)]
    for slot, at in zip(np.argsort(base, kind="stable").tolist(), heavy_first, strict=True):
        placed[slot] = bins[at]
    return placed


def refine(bins: Bins, tokens: Ints, work: Ints, cap: int, base: Ints, budget: int, width: int = 48) -> Bins:
    """Lower the highest bin by moving one of its items, or exchanging it for a lighter one, until no such step
    helps.
    """
    bins = [list(one) for one in bins]
    loads, fill = bin_sums(bins, work, base), bin_sums(bins, tokens)
    floor = _floor(work, base)
    while budget > 0 and len(bins) > 1:
        highest = int(np.argmax(loads))
        if loads[highest] <= floor or not bins[highest]:
            break
        others = np.argsort(loads, kind="stable")
        others = others[others != highest]
        found = None
        for at in range(0, len(others), width):
            found, spent = _best_exchange(bins, tokens, work, cap, loads, fill, highest, others[at : at + width])
            budget -= spent
            if found is not None or budget <= 0:
                break
        if found is None:
            break
        _exchange(bins, tokens, work, loads, fill, highest, *found)
    return bins


def _floor(work: Ints, base: Ints) -> int:
    """A height that no levelling goes below, raised by what is not worth a search (one part in 16,384 of the mean)."""
    mean = -(-(int(work.sum()) + int(base.sum())) // len(base))
    heaviest = int(work.max(initial=0)) + int(base.min(initial=0))
    return max(mean, heaviest) + (int(work.sum()) // len(base) >> 14)


def _best_exchange(
    bins: Bins, tokens: Ints, work: Ints, cap: int, loads: Ints, fill: Ints, highest: int, others: Ints
) -> tuple[tuple[int, int, int] | None, int]:
    """The exchange with ``others`` that leaves the lowest pair: (bin, item out, item in or -1), and the pairs looked
    at.
    """
    mine = np.array(bins[highest], np.int64)
    names = others.tolist()
    owner = np.repeat(others, [len(bins[other]) + 1 for other in names])
    back = np.fromiter(itertools.chain.from_iterable((*bins[other], -1) for other in names), np.int64, len(owner))
    nothing = back < 0  # -1: take nothing in return
    delta = work[mine][:, None] - np.where(nothing, 0, work[back])
    moved = tokens[mine][:, None] - np.where(nothing, 0, tokens[back])
    after = np.maximum(loads[highest] - delta, loads[owner] + delta)
    bad = (delta <= 0) | (fill[owner] + moved > cap) | (fill[highest] - moved > cap)
    if len(mine) == 1:
        bad |= nothing
    after[bad] = loads[highest]
    best = int(np.argmin(after))
    if after.flat[best] >= loads[highest]:
        return None, after.size
    row, column = divmod(best, after.shape[1])
    return (int(owner[column]), int(mine[row]), int(back[column])), after.size


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


def deal(work: Ints, ranks: int, kinds: Ints | None = None) -> Bins:
    """Deal ``len(work)`` bins to ranks, equally many to each, with sums as even as folding and exchanges make them.

    Args:
        work: [bins]; ``ranks`` divides their number.
        ranks: how many hands.
        kinds: [bins] kind of each bin, with a multiple of ``ranks`` of each kind: every hand gets equally many of it.

    Returns:
        the bins of each rank.
    """
    kind = np.zeros(len(work), np.int64) if kinds is None else kinds
    order = np.lexsort((-work, kind)).tolist()
    hands: Bins = [[] for _ in range(ranks)]
    sums = [0] * ranks
    weights = work.tolist()
    for at in range(0, len(order), ranks):
        lowest = sorted(range(ranks), key=lambda rank: (sums[rank], rank))
        for rank, index in zip(lowest, order[at : at + ranks], strict=True):
            hands[rank].append(index)
            sums[rank] += weights[index]
    return _even(hands, work, kind)


def _even(hands: Bins, work: Ints, kind: Ints, rounds: int = 256) -> Bins:
    """Exchange bins of one kind between the heaviest and a light hand while that lowers the heavier of the two."""
    sums = bin_sums(hands, work)
    good_enough = -(-int(sums.sum()) // len(hands)) * (1 + 2**-13)
    keys = _keys(work, kind)
    for _ in range(rounds):
        top = int(np.argmax(sums))
        if sums[top] <= good_enough:
            break
        found = (int(sums[top]), -1, -1, -1)
        for other in np.argsort(sums, kind="stable")[:4].tolist():
            if other != top:
                found = min(found, _best_swap(hands, sums, work, kind, keys, top, other))
        _, other, row, column = found
        if other < 0:
            break
        delta = work[hands[top][row]] - work[hands[other][column]]
        hands[top][row], hands[other][column] = hands[other][column], hands[top][row]
        sums[top] -= delta
        sums[other] += delta
    return hands


def _keys(work: Ints, kind: Ints) -> tuple[Ints, Ints, int]:
    """Keys by which bins of one kind stand together, by work; the key of no work; the bits that the keys leave out."""
    room = 61 - int(kind.max(initial=0) + 1).bit_length()
    shift = max(0, int(work.max(initial=0)).bit_length() + 1 - room)
    least = kind << room
    return least + (work >> shift), least, shift


def _best_swap(
    hands: Bins, sums: Ints, work: Ints, kind: Ints, keys: tuple[Ints, Ints, int], top: int, other: int
) -> tuple[int, int, int, int]:
    """The swap of two bins that leaves the lowest pair of hands: (higher sum, other, place in top, place in other).

    Half the gap is the best that a swap can move. So of the other hand's bins only the two around "mine less half the
    gap" matter for each of mine.
    """
    mine, theirs = np.array(hands[top]), np.array(hands[other])
    key, least, shift = keys
    theirs_order = np.argsort(key[theirs], kind="stable")
    wanted = np.maximum(key[mine] - (int(sums[top] - sums[other]) // 2 >> shift), least[mine])
    above = np.searchsorted(key[theirs][theirs_order], wanted)
    rows = np.tile(np.arange(len(mine)), 2)
    columns = theirs_order[np.clip(np.concatenate((above - 1, above)), 0, len(theirs) - 1)]
    delta = work[mine[rows]] - work[theirs[columns]]
    after = np.maximum(sums[top] - delta, sums[other] + delta)
    after[(kind[mine[rows]] != kind[theirs[columns]]) | (delta <= 0)] = sums[top]
    at = int(np.argmin(after))
    if after[at] >= sums[top]:
        return int(sums[top]), -1, -1, -1
    return int(after[at]), other, int(rows[at]), int(columns[at])
