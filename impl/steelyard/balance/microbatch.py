"""Plans of micro-batches: for one data-parallel rank, or for all ranks of a step at once.

Invariants, each with a test of its own:

1. every row is in exactly one micro-batch, of exactly one rank;
2. no micro-batch exceeds ``max_tokens``, except one that holds a single oversized item with ``oversize="alone"``;
3. the count of micro-batches is one that Megatron accepts, a multiple of ``multiple_of`` and at least ``min_count``;
4. all ranks of a step have the same count (unless ``same_count=False``);
5. ``lower_bound`` is true: no plan of the same request has fewer micro-batches; without a pipeline the count equals it or the
   gap is stated in ``summary()``;
6. rows of one group are in one micro-batch;
7. a plan depends on its arguments alone, so peers that plan on their own get the same one;
8. on ranks that plan together, either all get a plan or all raise the same error.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from steelyard.balance import partition
from steelyard.balance.plan import MicroBatchPlan
from steelyard.balance.request import Batch, Cost, Fill, Order, Oversize, Settings, read_batch
from steelyard.errors import PlanError
from steelyard.pipeline.order import best_order, both_ends
from steelyard.pipeline.schedule import Pipeline, legal_count

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Ints = NDArray[np.int64]


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

    Counts agree without a collective because every rank computes all plans, or one computes them and sends each its own.

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
        cost: work of each sequence, from [rows] lengths to [rows] float64; if it has ``micro_batch(lengths)``, that is the
            work of a whole micro-batch and includes what one more micro-batch costs. None means ``24576 * s + s * s``.
        multiple_of: the count must be a multiple of it.
        min_count: the count must be at least this.
        group: data-parallel group whose ranks call this together (one collective): they agree on the count, and if one
            cannot plan all raise the same error.
        pipeline: choose count, contents and order by predicted makespan on it, among the counts that Megatron accepts.
        oversize: what to do with a sequence (or group of rows) above the cap: raise, or give it a micro-batch of its own.
        fill: with fewer sequences than micro-batches needed: split what can be split and add empty fillers, or raise.
        same_count: False where the ranks of ``group`` need not run the same number of micro-batches.
        groups: [rows] names; rows with the same name stay in one micro-batch.
        order: execution order. ``"auto"`` is the least predicted makespan with a pipeline, and largest first without one,
            which is what the allocator likes; ``"both_ends"`` is small at both ends; ``"as_given"`` follows the rows.

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
    least, bound = least_counts(batch, settings, ranks)
    return plan_count(batch, settings, ranks, least, bound)


def least_counts(batch: Batch, settings: Settings, ranks: int = 1) -> tuple[int, int]:
    """Legal counts per rank: the least that packing reached, and the proven bound for it."""
    alone = batch.tokens > settings.max_tokens
    extra, rest = int(alone.sum()), batch.tokens[~alone]
    packed = extra + len(partition.pack(rest, settings.max_tokens))
    proven = extra + partition.count_lower_bound(rest, settings.max_tokens)

    def legal(bins: int) -> int:
        wanted = max(-(-bins // ranks), settings.min_count)
        return legal_count(wanted, settings.pipeline, multiple_of=settings.multiple_of)

    return legal(packed), legal(proven)


def check_fill(items: int, count: int, settings: Settings, where: str = "") -> None:
    """Raise where ``fill="error"`` and there are not enough sequences for ``count`` micro-batches."""
    if settings.fill == "error" and items < count:
        raise PlanError(
            f"{where}{count} micro-batches are required (min_count={settings.min_count}, multiple_of={settings.multiple_of}, "
            f"pipeline={settings.pipeline}) but only {items} can be made of the sequences: lower the requirement, add "
            f"sequences, or pass fill='split' to add empty micro-batches"
        )


def plan_count(batch: Batch, settings: Settings, ranks: int, count: int, bound: int) -> list[MicroBatchPlan]:
    """Plans with exactly ``count`` micro-batches on each rank."""
    check_fill(len(batch.items), count * ranks, settings)
    bins = _level(batch, settings, count * ranks)
    work = np.array([int(batch.work[one].sum()) if one else 0 for one in bins], np.int64)
    hands = partition.deal(work, ranks)
    return [make_plan(batch, settings, [bins[at] for at in hand], bound) for hand in hands]


def _level(batch: Batch, settings: Settings, count: int) -> partition.Bins:
    """``count`` bins of items, oversized items alone in theirs."""
    alone = np.flatnonzero(batch.tokens > settings.max_tokens)
    rest = np.flatnonzero(batch.tokens <= settings.max_tokens)
    bins: partition.Bins = []
    if count > len(alone):
        levelled = partition.level(batch.tokens[rest], batch.work[rest], settings.max_tokens, count - len(alone))
        bins = [rest[one].tolist() for one in levelled]
    return [[item] for item in alone.tolist()] + bins


def make_plan(batch: Batch, settings: Settings, bins: partition.Bins, bound: int) -> MicroBatchPlan:
    """Order the bins of one rank and write them down as rows."""
    rows = [sorted(row for item in one for row in batch.items[item]) for one in bins]
    work = [batch.micro_batch_work(one) for one in rows]
    order = _order(rows, work, settings)
    rows, work = [rows[at] for at in order], [work[at] for at in order]
    held = sorted(row for one in rows for row in one)
    return MicroBatchPlan(
        indices=rows,
        rows=held,
        lengths=batch.lengths[held].tolist(),
        tokens=[int(batch.lengths[one].sum()) if one else 0 for one in rows],
        work=work,
        max_tokens=settings.max_tokens,
        lower_bound=bound,
        pipeline=settings.pipeline,
    )


def _order(rows: list[list[int]], work: list[float], settings: Settings) -> list[int]:
    """Positions of the micro-batches in execution order; ties go to the one with the lower first row, fillers last."""
    given = sorted(range(len(rows)), key=lambda at: (not rows[at], rows[at][:1]))
    if settings.order == "as_given":
        return given
    ordered = [work[at] for at in given]
    if settings.order == "both_ends":
        places = both_ends(ordered)
    elif settings.order == "auto" and settings.pipeline is not None:
        places = best_order(ordered, settings.pipeline)
    else:
        places = sorted(range(len(given)), key=lambda at: (-ordered[at], at))
    return [given[at] for at in places]
