"""Bin packing within a token cap: best-fit-decreasing, then repacking of a few bins at a time. Pure functions.

Bins that are forced (``reduction.py``) are left alone.

``pack`` never needs more bins than best-fit-decreasing, keeps the cap, and puts every item in exactly one bin.
"""

from __future__ import annotations

import heapq
import random
from bisect import bisect_left, insort

import numpy as np
from numpy.typing import NDArray

from steelyard.balance.reduction import Reduced, forced_bins

Ints = NDArray[np.int64]
Bins = list[list[int]]  # positions of items

WORD = 1 << 15  # bits that one evaluation of a subset sum stands for
FINEST = 1 << 18  # steps into which a cap is divided at most


def pack(tokens: Ints, cap: int, *, target: int = 0, budget: int = 20_000, reduced: Reduced | None = None) -> Bins:
    """Few non-empty bins within the cap.

    Args:
        tokens: [items] each between 1 and ``cap``.
        cap: tokens per bin.
        target: number of bins that is good enough; a proven lower bound makes the search stop where it cannot win.
        budget: evaluations (one item offered to one subset sum) that repacking may spend.
        reduced: ``forced_bins`` of the same, where it is known already.
    """
    bins = best_fit_decreasing(tokens, cap)
    if len(bins) <= target:
        return bins
    forced, rest = reduced or forced_bins(tokens, cap)
    if forced:
        left = [rest[one].tolist() for one in best_fit_decreasing(tokens[rest], cap)]
        if len(forced) + len(left) > len(bins):
            forced, left = [], bins
    else:
        left = bins
    return forced + _repack(left, tokens, cap, max(target - len(forced), 1), budget)


def best_fit_decreasing(tokens: Ints, cap: int) -> Bins:
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
        if room > sizes[item]:
            insort(rooms, (room - sizes[item], chosen))
    return bins


def first_fit_decreasing(tokens: Ints, cap: int) -> Bins:
    """Each item, longest first, goes to the first bin with room: the last bins are often small."""
    rooms = np.full(len(tokens), cap)
    bins: Bins = []
    for item in np.argsort(-tokens, kind="stable").tolist():
        chosen = int(np.argmax(rooms[: len(bins) + 1] >= tokens[item]))
        if chosen == len(bins):
            bins.append([])
        bins[chosen].append(item)
        rooms[chosen] -= tokens[item]
    return bins


def _repack(bins: Bins, tokens: Ints, cap: int, target: int, budget: int) -> Bins:
    """Take a few bins apart and fill them anew, each as full as it gets, until one of all bins is saved, and so on.

    What is kept never has more bins, nor a lower sum of squared fills: room gathers in few bins until one of them is
    empty. The choice of bins is drawn from a generator with a fixed seed.
    """
    draw = random.Random(0).random
    sizes = tokens.tolist()
    step = 1 + cap // FINEST
    steps, room = [-(-size // step) for size in sizes], cap // step  # rounded up: what fits in steps fits in tokens
    bins = [sorted(one, key=lambda item: (-sizes[item], item)) for one in bins]
    fill = [sum(sizes[item] for item in one) for one in bins]
    emptiest = list(zip(fill, range(len(bins)), strict=True))  # a heap; entries of bins that changed are left in it
    heapq.heapify(emptiest)
    turn = 0
    while len(bins) > target and budget > 0 and len(bins) > 1:
        turn += 1
        while emptiest[0][1] >= len(bins) or fill[emptiest[0][1]] != emptiest[0][0]:
            heapq.heappop(emptiest)
        chosen = {emptiest[0][1] if turn % 2 else int(draw() * len(bins))}
        wanted = min(3 + int(draw() * 3), len(bins))
        while len(chosen) < wanted:
            chosen.add(int(draw() * len(bins)))
        places = sorted(chosen)
        renewed, spent = _refill([bins[at] for at in places], steps, room)
        budget -= spent
        filled = [sum([sizes[item] for item in one]) for one in renewed]
        if len(renewed) > len(places) or sum([one * one for one in filled]) < sum([fill[at] ** 2 for at in places]):
            continue
        for at, one, tokens_in in zip(places, renewed, filled, strict=False):
            bins[at], fill[at] = one, tokens_in
            heapq.heappush(emptiest, (tokens_in, at))
        for at in reversed(places[len(renewed) :]):
            bins[at], fill[at] = bins[-1], fill[-1]
            bins.pop()
            fill.pop()
            if at < len(bins):
                heapq.heappush(emptiest, (fill[at], at))
    return bins


def _refill(bins: Bins, sizes: list[int], cap: int) -> tuple[Bins, int]:
    """Fill bins with all the items of ``bins``: the longest that is left, and what fills the rest of the cap best."""
    pool = sorted((item for one in bins for item in one), key=lambda item: (-sizes[item], item))
    renewed: Bins = []
    spent = 1
    while pool and len(renewed) <= len(bins):
        taken, cost = _fullest(pool, sizes, cap)
        spent += cost
        renewed.append([item for item in pool if item in taken])
        pool = [item for item in pool if item not in taken]
    if pool:
        renewed.append(pool)
    return renewed, spent


def _fullest(pool: list[int], sizes: list[int], cap: int) -> tuple[set[int], int]:
    """The first of ``pool`` and the others that fill the cap best with it, by subset sums in the bits of a whole
    number.
    """
    room = max(0, cap - sizes[pool[0]])
    candidates = [item for item in pool[1:] if sizes[item] <= room]
    mask = (1 << (room + 1)) - 1
    reachable = 1
    history = [reachable]
    for item in candidates:
        reachable |= (reachable << sizes[item]) & mask
        history.append(reachable)
        if reachable >> room:
            break
    taken, filled = {pool[0]}, reachable.bit_length() - 1
    for at in range(len(history) - 2, -1, -1):
        if not (history[at] >> filled) & 1:  # not reachable without this candidate
            taken.add(candidates[at])
            filled -= sizes[candidates[at]]
    return taken, 3 + len(history) * (1 + room // WORD)
