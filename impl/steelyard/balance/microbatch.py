"""Plans of micro-batches: for one data-parallel rank, or for all ranks of a step at once.

Invariants, each with a test of its own:

1. every row is in exactly one micro-batch, of exactly one rank;
2. no micro-batch exceeds ``max_tokens``, except one that holds a single oversized item with ``oversize="alone"``;
3. the count of micro-batches is one that Megatron accepts, a multiple of ``multiple_of`` and at least ``min_count``;
4. all ranks of a step have the same count (unless ``same_count=False``);
5. ``lower_bound`` is true: no plan of the same request has fewer micro-batches; without a pipeline the count equals it
   or the gap is stated in ``summary()``;
6. rows of one group are in one micro-batch;
7. a plan depends on its arguments alone, so peers that plan on their own get the same one;
8. on ranks that plan together, either all get a plan or all raise the same error.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from steelyard.balance.bins import Bins, pack
from steelyard.balance.bounds import count_lower_bound
from steelyard.balance.partition import bin_sums, deal
from steelyard.balance.plan import MicroBatchPlan
from steelyard.balance.reduction import forced_bins
from steelyard.balance.request import Batch, Cost, Fill, Order, Oversize, Settings, read_batch
from steelyard.balance.search import arrange, level_items
from steelyard.errors import PlanError
from steelyard.pipeline.order import both_ends
from steelyard.pipeline.schedule import Pipeline, legal_count

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Ints = NDArray[np.int64]

# Evaluations spent on saving micro-batches, up to ``REPACKED`` items; beyond that fewer, as one saved matters less.
REPACKING = 60_000
REPACKED = 1_024


def plan_step(
    lengths: Any,
    max_tokens: int,
    ranks: int,
    *,
    cost: Cost | None = None,
    multiple_of: int = 1,
    min_count: int = 1,
    pipeline: Pipeline | None = None,
    oversize: Oversize = "error",
    fill: Fill = "split",
    same_count: bool = True,
    groups: Sequence[Hashable] | None = None,
    order: Order = "auto",
) -> list[MicroBatchPlan]:
    """Micro-batches for all data-parallel ranks of a step: packed once over all rows, then dealt out.

    Counts agree without a collective because every rank computes all plans, or one computes them and sends each its
    own.

    Args:
        lengths: [rows] tokens of every row of the mini-batch, as host integers.
        max_tokens: cap of tokens per micro-batch, for all context-parallel ranks together.
        ranks: data-parallel ranks.
        The rest is as in ``plan_micro_batches``.

    Returns:
        one plan per rank; positions are those in ``lengths``.

    Raises:
        PlanError: nothing can satisfy the request; the text names position, value and limit.
    """
    settings = Settings(max_tokens, multiple_of, min_count, pipeline, oversize, fill, order)
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise PlanError(f"ranks={ranks!r} must be a whole number of at least 1")
    batch = read_batch(lengths, settings, cost, groups)
    return plan_batch(batch, settings, ranks, same_count=same_count)


def plan_micro_batches(
    lengths: Any,
    max_tokens: int,
    *,
    cost: Cost | None = None,
    multiple_of: int = 1,
    min_count: int = 1,
    group: ProcessGroup | None = None,
    pipeline: Pipeline | None = None,
    oversize: Oversize = "error",
    fill: Fill = "split",
    same_count: bool = True,
    groups: Sequence[Hashable] | None = None,
    order: Order = "auto",
) -> MicroBatchPlan:
    """Micro-batches for the rows of one data-parallel rank.

    Args:
        lengths: [rows] tokens of this rank's rows, as host integers.
        max_tokens: cap of tokens per micro-batch, for all context-parallel ranks together.
        cost: work of each sequence, from [rows] lengths to [rows] float64; if it has ``micro_batch(lengths)``, that is
            the work of a whole micro-batch and includes what one more micro-batch costs. None means
            ``24576 * s + s * s`` and no cost of one more.
        multiple_of: the count must be a multiple of it.
        min_count: the count must be at least this.
        group: data-parallel group whose ranks call this together (one collective): they agree on the count, and if one
            cannot plan all raise the same error.
        pipeline: choose count, contents and order by predicted makespan on it, among the counts that Megatron accepts;
            with an ``order`` other than ``"auto"``, take the least of those counts.
        oversize: what to do with a sequence (or group of rows) above the cap: raise, or give it a micro-batch of its
            own.
        fill: with fewer sequences than micro-batches needed: split what can be split and add empty fillers, or raise.
        same_count: False where the ranks of ``group`` need not run the same number of micro-batches.
        groups: [rows] names; rows with the same name stay in one micro-batch.
        order: execution order. ``"auto"`` is the least predicted makespan with a pipeline, and largest first without
            one, which is what the allocator likes; ``"both_ends"`` is small at both ends; ``"as_given"`` follows the
            rows.

    Raises:
        PlanError: nothing can satisfy the request; the text names position, value and limit.
    """
    if group is not None:
        from steelyard.balance.agreement import plan_together  # torch is needed only where ranks talk

        values = (max_tokens, multiple_of, min_count, pipeline, oversize, fill, order)
        return plan_together(lengths, values, cost, groups, group, same_count=same_count)
    settings = Settings(max_tokens, multiple_of, min_count, pipeline, oversize, fill, order)
    return plan_batch(read_batch(lengths, settings, cost, groups), settings, 1)[0]


def plan_batch(batch: Batch, settings: Settings, ranks: int, *, same_count: bool = True) -> list[MicroBatchPlan]:
    """The plans of a checked batch; see ``plan_step``."""
    if not batch.items:
        raise PlanError("lengths is empty: there is no sequence to plan")
    plans = plan_packed(batch, settings, ranks, pack_items(batch, settings, ranks))
    return plans if same_count else [without_fillers(plan, settings) for plan in plans]


def without_fillers(plan: MicroBatchPlan, settings: Settings) -> MicroBatchPlan:
    """``plan`` less the fillers that only agreement between ranks asks for."""
    real = sum(map(bool, plan.indices))
    count = legal_count(max(real, settings.min_count), settings.pipeline, multiple_of=settings.multiple_of)
    spare = len(plan.indices) - count
    if spare <= 0:
        return plan
    fillers = [at for at, rows in enumerate(plan.indices) if not rows][:spare]
    kept = [at for at in range(len(plan.indices)) if at not in fillers]
    return replace(
        plan,
        indices=[plan.indices[at] for at in kept],
        tokens=[plan.tokens[at] for at in kept],
        work=[plan.work[at] for at in kept],
        lower_bound=min(plan.lower_bound, count),
    )


@dataclass(frozen=True)
class Packed:
    """What packing found: legal counts per rank.

    Attributes:
        bins: items of each bin, as positions among the items that are not above the cap.
        least: least legal count per rank that these bins allow.
        bound: least legal count per rank that the proven lower bound allows.
    """

    bins: Bins
    least: int
    bound: int


def pack_items(batch: Batch, settings: Settings, ranks: int = 1) -> Packed:
    """Pack items into few bins; no harder than the legal counts can make use of."""
    alone = batch.tokens > settings.cap
    extra, rest = int(alone.sum()), batch.tokens[~alone]

    def legal(bins: int) -> int:
        wanted = max(-(-(extra + bins) // ranks), settings.min_count)
        return legal_count(wanted, settings.pipeline, multiple_of=settings.multiple_of)

    reduced = forced_bins(rest, settings.cap)
    bound = legal(count_lower_bound(rest, settings.cap, reduced))
    size = max(REPACKED, len(rest))
    budget = REPACKING * REPACKED // size * math.isqrt(REPACKED) // math.isqrt(size)
    bins = pack(rest, settings.cap, target=bound * ranks - extra, budget=budget, reduced=reduced)
    return Packed(bins, legal(len(bins)), bound)


def check_fill(items: int, count: int, settings: Settings, where: str = "") -> None:
    """Raise where ``fill="error"`` and there are not enough sequences for ``count`` micro-batches."""
    if settings.fill == "error" and items < count:
        raise PlanError(
            f"{where}{count} micro-batches are required (min_count={settings.min_count}, "
            f"multiple_of={settings.multiple_of}, pipeline={settings.pipeline}) but the sequences make only {items}: "
            f"lower the requirement, add sequences, or pass fill='split' to add empty micro-batches"
        )


def plan_packed(
    batch: Batch, settings: Settings, ranks: int, packed: Packed, *, count: int | None = None, bound: int | None = None
) -> list[MicroBatchPlan]:
    """Plans with the same number of micro-batches on each rank.

    Args:
        count: micro-batches per rank that were agreed on; None leaves the choice to the pipeline, or takes the least.
        bound: proven bound to write into the plans; None takes that of ``packed``.
    """
    least = packed.least if count is None else count
    check_fill(len(batch.items), least * ranks, settings)
    if settings.pipeline is not None and settings.order == "auto":
        hands = arrange(batch, settings, ranks, least, packed.bins, exact=count is not None)
    else:
        bins = level_items(batch, settings, least * ranks, packed.bins)
        dealt = deal(bin_sums(bins, batch.work), ranks)
        hands = [_ordered([bins[at] for at in hand], batch, settings) for hand in dealt]
    return [make_plan(batch, settings, hand, packed.bound if bound is None else bound) for hand in hands]


def _ordered(bins: Bins, batch: Batch, settings: Settings) -> Bins:
    """Micro-batches of one rank in execution order; ties go to the one with the lower first row, fillers last."""
    given = sorted(bins, key=lambda one: (not one, min((batch.items[item][0] for item in one), default=0)))
    if settings.order == "as_given":
        return given
    work = bin_sums(given, batch.work)
    places = both_ends(work) if settings.order == "both_ends" else np.argsort(-work, kind="stable").tolist()
    return [given[at] for at in places]


def make_plan(batch: Batch, settings: Settings, bins: Bins, bound: int) -> MicroBatchPlan:
    """Write the micro-batches of one rank, items in execution order, down as rows."""
    rows = [sorted(itertools.chain.from_iterable([batch.items[item] for item in one])) for one in bins]
    held = sorted(itertools.chain.from_iterable(rows))
    return MicroBatchPlan(
        indices=rows,
        rows=held,
        lengths=batch.lengths[held].tolist(),
        tokens=bin_sums(rows, batch.lengths).tolist(),
        work=batch.micro_batch_works(rows),
        max_tokens=settings.max_tokens,
        lower_bound=bound,
        pipeline=settings.pipeline,
    )
