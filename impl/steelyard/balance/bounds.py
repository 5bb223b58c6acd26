"""Proven lower bounds of the number of bins. Pure functions of numpy.

``count_lower_bound`` never exceeds the number of bins of any packing that keeps the cap. It is the greatest of three
bounds, for all items and for those that ``reduction.py`` leaves, on top of the bins that are forced:

- all tokens over the cap;
- L2 of Martello and Toth (Knapsack Problems, 1990, section 8.3). For a threshold a: items above ``cap - a`` share a
  bin with no item of at least a; items above ``cap / 2`` are apart from each other; and of the items between a and
  ``cap / 2``, what does not fit beside those needs bins of its own;
- dual feasible functions (Fekete and Schepers, Mathematical Programming 91, 2001): ``u_k`` after a threshold. ``u_k``
  rounds a share x of the cap to a multiple of 1/k, so that shares that fit together still do; it sees that two items
  of 0.34 of the cap fit a bin and three do not.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from steelyard.balance.reduction import Reduced, forced_bins

Ints = NDArray[np.int64]

DEEPEST = 20  # u_k for k up to this; larger k look at items so small that the sum of tokens decides


def count_lower_bound(tokens: Ints, cap: int, reduced: Reduced | None = None) -> int:
    """A number of bins that no packing goes below.

    Args:
        tokens: [items] each between 1 and ``cap``, with a sum below 2**62.
        cap: tokens per bin.
        reduced: ``forced_bins`` of the same, where it is known already.
    """
    forced, rest = reduced or forced_bins(tokens, cap)
    return max(_bound(tokens, cap), len(forced) + _bound(tokens[rest], cap)) if forced else _bound(tokens, cap)


def _bound(tokens: Ints, cap: int) -> int:
    if len(tokens) == 0:
        return 0
    ascending = np.sort(tokens)
    half = int(np.searchsorted(ascending, cap // 2, side="right"))  # items before it are at most cap / 2
    thresholds = np.concatenate(([0], np.unique(ascending[:half])))
    low = np.searchsorted(ascending, thresholds, side="left")  # items from here on are at least the threshold
    high = np.searchsorted(ascending, cap - thresholds, side="right")  # items from here on exclude it
    total = -(-int(ascending.sum()) // cap)
    return max(total, _l2(ascending, cap, half, low, high), _dual_feasible(ascending, cap, low, high))


def _l2(ascending: Ints, cap: int, half: int, low: Ints, high: Ints) -> int:
    sums = np.concatenate(([0], np.cumsum(ascending)))
    apart = high - half
    room = apart * cap - (sums[high] - sums[half])  # apart * cap is below twice their tokens: no overflow
    spill = np.maximum(0, (sums[half] - sums[low]) - room)
    return len(ascending) - half + int((-(-spill // cap)).max())


def _dual_feasible(ascending: Ints, cap: int, low: Ints, high: Ints) -> int:
    """The best of u_k over all k and thresholds; u_k in units of 1 / (k (k + 1)), so that everything stays whole."""
    best = 0
    for k in range(1, DEEPEST + 1):
        if int(ascending[-1]) * (k + 1) >= 2**62:
            break
        scaled = ascending * (k + 1)
        whole = scaled // cap
        value = np.where(whole * cap == scaled, whole * k, whole * (k + 1))
        sums = np.concatenate(([0], np.cumsum(value)))
        covered = (len(ascending) - high) * (k * (k + 1)) + np.maximum(0, sums[high] - sums[low])
        best = max(best, -(-int(covered.max()) // (k * (k + 1))))
    return best
