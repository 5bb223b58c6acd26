"""Bins that an optimal packing may be taken to contain, so that only the other items need a search. Pure functions.

The reduction of Martello and Toth (Knapsack Problems, 1990, section 8.4), for bins of one and two items. Take the
longest item. If no other fits beside it, it is alone in every packing. If one fits but no two do, some optimal packing
puts it beside the longest that fits: whatever is there instead can take that one's place. What is forced is taken out
and the next longest item is looked at, until one is not settled. Where many sequences are above half the cap, this
settles up to nearly all of them.
"""

from __future__ import annotations

from bisect import bisect_left

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Reduced = tuple[list[list[int]], Ints]


def forced_bins(tokens: Ints, cap: int) -> Reduced:
    """Bins of one or two items that some optimal packing contains, and the positions of all other items, ascending.

    Args:
        tokens: [items] each between 1 and ``cap``.
        cap: tokens per bin.
    """
    count = len(tokens)
    # One number per item, its tokens in the upper digits and its position in the lower ones: one list to take out of.
    left = [size * count + item for item, size in enumerate(tokens.tolist())]
    left.sort()
    bins: list[list[int]] = []
    while left:
        room = cap - left[-1] // count
        if len(left) > 2 and left[0] // count + left[1] // count <= room:
            break
        bins.append([left.pop() % count])
        at = bisect_left(left, (room + 1) * count) - 1
        if at >= 0:
            bins[-1].append(left.pop(at) % count)
    return bins, np.sort(np.array([one % count for one in left], np.int64))
