"""How others choose micro-batches: the planners that ``suites.planning`` compares with Steelyard's.

All have one signature, ``plan(lengths, max_tokens, ranks, pipeline, clock) -> hands``: for every data-parallel rank its
micro-batches in execution order, each a list of positions in ``lengths``. Two families:

- *spread, then plan* (verl): the controller deals rows to ranks, equally many to each, then every rank plans its own
  rows and the ranks agree on the largest count;
- *pack, then distribute* (slime, NeMo-RL): one pass over all rows makes micro-batches, a multiple of the ranks in
  number, which are then dealt to the ranks.

They are written from the description of what the named versions do, in pure Python as those are, and are not slowed
down. What ranks do at the same time is timed as such: see ``Clock``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from steelyard.pipeline import Pipeline
from suites.baselines.differencing import partition

Bins = list[list[int]]
Hands = list[Bins]
T = TypeVar("T")


class RefusedError(Exception):
    """The planner stops with an error on these lengths, as the system that it reproduces does."""


class Clock:
    """Remembers how much less time ranks take that do together what this process does one after the other."""

    def __init__(self) -> None:
        self.saved = 0.0

    def on_ranks(self, work: Callable[[list[int]], T], hands: Sequence[list[int]]) -> list[T]:
        """``work`` on the rows of every rank; only the slowest rank's time counts."""
        results, times = [], []
        for rows in hands:
            start = time.process_time()
            results.append(work(rows))
            times.append(time.process_time() - start)
        self.saved += sum(times) - max(times)
        return results


def workload(tokens: int) -> int:
    """verl's estimate of the work of a sequence, with the constants of one dense 7B model."""
    return 24576 * tokens + tokens * tokens


# ---- spread, then plan: verl


def verl_v0(lengths: list[int], max_tokens: int, ranks: int, pipeline: Pipeline | None, clock: Clock) -> Hands:
    """N2. verl 0.2 (``rearrange_micro_batches`` of early 2025): differencing on tokens, no order, cap never checked.

    Count: tokens over the cap, rounded up, the largest over the ranks.
    """
    shares = partition(lengths, ranks, equal_size=True)
    count = max(_least(lengths, rows, max_tokens) for rows in shares)
    return clock.on_ranks(lambda rows: _parts(rows, lengths, count), shares)


def verl_v0_virtual(lengths: list[int], max_tokens: int, ranks: int, pipeline: Pipeline | None, clock: Clock) -> Hands:
    """N3. verl 0.3, with virtual pipeline stages: as ``verl_v0``, with the count rounded up to a multiple of the group
    there. A count above a rank's rows is an assertion error in verl.
    """
    shares = partition(lengths, ranks, equal_size=True)
    count = _rounded(max(_least(lengths, rows, max_tokens) for rows in shares), pipeline)
    return clock.on_ranks(lambda rows: _parts(rows, lengths, count), shares)


def verl_balanced(lengths: list[int], max_tokens: int, ranks: int, pipeline: Pipeline | None, clock: Clock) -> Hands:
    """N4. verl 0.6 (``use_dynamic_bsz_balance``): as ``verl_v0_virtual`` but differencing on work, and micro-batches
    small at both ends. The cap is still not checked.
    """
    work = [workload(tokens) for tokens in lengths]
    shares = partition(work, ranks, equal_size=True)
    count = _rounded(max(_least(lengths, rows, max_tokens) for rows in shares), pipeline)
    return clock.on_ranks(lambda rows: _both_ends(_parts(rows, work, count), work), shares)


def verl_0_9_1(lengths: list[int], max_tokens: int, ranks: int, pipeline: Pipeline | None, clock: Clock) -> Hands:
    """verl 0.9.1: as ``verl_balanced``, and while a micro-batch of some rank is above the cap all ranks start anew with
    a larger count (one more, or one group more with virtual stages).
    """
    work = [workload(tokens) for tokens in lengths]
    shares = partition(work, ranks, equal_size=True)
    count = _rounded(max(_least(lengths, rows, max_tokens) for rows in shares), pipeline)

    def attempt(rows: list[int]) -> tuple[Bins, bool]:
        bins = _parts(rows, work, count)
        return bins, all(sum(lengths[row] for row in one) <= max_tokens for one in bins)

    while True:
        tried = clock.on_ranks(attempt, shares)
        if all(fits for _, fits in tried):
            return [_both_ends(bins, work) for bins, _ in tried]
        count += _group(pipeline)


def _least(lengths: list[int], rows: list[int], max_tokens: int) -> int:
    return min(len(rows), -(-sum(lengths[row] for row in rows) // max_tokens))


def _group(pipeline: Pipeline | None) -> int:
    """What verl and slime make the count a multiple of: stricter than Megatron's rule."""
    return pipeline.group_size if pipeline is not None and pipeline.virtual > 1 else 1


def _rounded(count: int, pipeline: Pipeline | None) -> int:
    group = _group(pipeline)
    return -(-count // group) * group


def _parts(rows: list[int], values: list[int], count: int) -> Bins:
    """The rows of one rank in ``count`` parts of about equal sums, rows ascending."""
    if count > len(rows):
        raise RefusedError(f"{count} micro-batches from {len(rows)} rows")
    return [sorted(rows[at] for at in one) for one in partition([values[row] for row in rows], count, equal_size=False)]


def _both_ends(bins: Bins, work: list[int]) -> Bins:
    """Heaviest first, then every second one reversed in front: small at both ends, large in the middle."""
    falling = sorted(bins, key=lambda one: (sum(work[row] for row in one), one[0]), reverse=True)
    return falling[::2][::-1] + falling[1::2]


# ---- pack, then distribute: slime, NeMo-RL, and the best of what is published


def slime_first_fit(lengths: list[int], max_tokens: int, ranks: int, pipeline: Pipeline | None, clock: Clock) -> Hands:
    """slime's ``dp_schedule.py`` (2026): first-fit in arrival order over all rows, the largest micro-batches split
    until ranks (times the group, with virtual stages) divide their number, dealt by differencing on work; no order.
    """
    bins = _split_to(_first_fit(range(len(lengths)), lengths, max_tokens), lengths, lengths, ranks * _group(pipeline))
    return _dealt(bins, [workload(tokens) for tokens in lengths], ranks)


def next_fit(lengths: list[int], max_tokens: int, ranks: int, pipeline: Pipeline | None, clock: Clock) -> Hands:
    """NeMo-RL's ``concatenative`` packer (0.3): rows in arrival order, a new micro-batch where the next row does not
    fit; a multiple of the ranks in number, dealt in turn.
    """
    bins: Bins = [[]]
    room = max_tokens
    for row, tokens in enumerate(lengths):
        if tokens > room:
            bins.append([])
            room = max_tokens
        bins[-1].append(row)
        room -= tokens
    bins = _split_to(bins, lengths, lengths, ranks * _group(pipeline))
    return [bins[rank::ranks] for rank in range(ranks)]


def first_fit_decreasing(
    lengths: list[int], max_tokens: int, ranks: int, pipeline: Pipeline | None, clock: Clock
) -> Hands:
    """The best combination of published parts that keeps the cap: first-fit-decreasing (NeMo-RL, AReaL), heaviest
    micro-batches split to a multiple of the ranks (slime), dealt by differencing on work (slime), small at both ends
    (verl). Nobody ships the whole.
    """
    work = [workload(tokens) for tokens in lengths]
    falling = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    bins = _split_to(_first_fit(falling, lengths, max_tokens), lengths, work, ranks * _group(pipeline))
    return [_both_ends(hand, work) for hand in _dealt(bins, work, ranks)]


def _first_fit(order: Sequence[int], lengths: list[int], max_tokens: int) -> Bins:
    """Each row goes to the first micro-batch with room."""
    bins: Bins = []
    rooms: list[int] = []
    for row in order:
        tokens = lengths[row]
        for at, room in enumerate(rooms):
            if tokens <= room:
                bins[at].append(row)
                rooms[at] = room - tokens
                break
        else:
            bins.append([row])
            rooms.append(max_tokens - tokens)
    return bins


def _split_to(bins: Bins, lengths: list[int], size: list[int], multiple: int) -> Bins:
    """Split the largest micro-batch that has several rows in two of about equal size, until ``multiple`` divides their
    number.
    """
    bins = [list(one) for one in bins]
    while len(bins) % multiple:
        several = [at for at, one in enumerate(bins) if len(one) > 1]
        if not several:
            raise RefusedError(f"{len(bins)} micro-batches of one row each, but {multiple} must divide their number")
        at = max(several, key=lambda at: sum(size[row] for row in bins[at]))
        halves: Bins = [[], []]
        sums = [0, 0]
        for row in sorted(bins[at], key=lambda row: (-size[row], row)):
            side = int(sums[1] < sums[0])
            halves[side].append(row)
            sums[side] += size[row]
        bins[at] = halves[0]
        bins.append(halves[1])
    return bins


def _dealt(bins: Bins, work: list[int], ranks: int) -> Hands:
    """Equally many micro-batches to each rank, with about equal sums of work."""
    shares = partition([sum(work[row] for row in one) for one in bins], ranks, equal_size=True)
    return [[bins[at] for at in share] for share in shares]


Plan = Callable[[list[int], int, int, Pipeline | None, Clock], Hands]

# By the names that records, tables and plots show.
PLANNERS: dict[str, Plan] = {
    "N2": verl_v0,
    "N3": verl_v0_virtual,
    "N4": verl_balanced,
    "verl-0.9.1": verl_0_9_1,
    "slime": slime_first_fit,
    "next-fit": next_fit,
    "FFD+KK": first_fit_decreasing,
}
