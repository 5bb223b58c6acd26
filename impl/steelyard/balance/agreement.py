"""Ranks that plan together agree before any of them goes on: all get a plan, or all raise the same error.

Every exchange is one ``all_gather_object``. A rank whose own input is bad still takes part and sends its error, so
nobody waits for it; the error of the lowest rank is raised everywhere.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from steelyard import host_reads
from steelyard.balance.microbatch import Packed, check_fill, pack_items, plan_packed
from steelyard.balance.plan import MicroBatchPlan
from steelyard.balance.request import Batch, Cost, Settings, read_batch
from steelyard.balance.search import Totals, agreed_count
from steelyard.errors import PlanError, PlanMismatch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class _Report:
    """What a rank tells the others."""

    error: PlanError | None = None
    settings: Settings | None = None
    same_count: bool = True
    items: int = 0
    least: int = 0
    bound: int = 0
    totals: Totals | None = None


def gather(value: Any, group: ProcessGroup) -> list[Any]:
    """``value`` of every rank of ``group``; the one collective of this module."""
    values: list[Any] = [None] * dist.get_world_size(group)
    with host_reads.allowed("ranks agree on the plan before the first micro-batch"):
        dist.all_gather_object(values, value, group=group)
    return values


def plan_together(
    lengths: Any,
    values: tuple,
    cost: Cost | None,
    groups: Sequence[Hashable] | None,
    group: ProcessGroup,
    *,
    same_count: bool,
) -> MicroBatchPlan:
    """``plan_micro_batches`` for the ranks of ``group``; ``values`` are the fields of ``Settings``."""
    rank = dist.get_rank(group)
    local, report = _report(lengths, values, cost, groups, rank, same_count)
    reports: list[_Report] = gather(report, group)
    _raise_first_error(reports)
    assert local is not None
    batch, settings, packed = local
    if not same_count:
        for other, one in enumerate(reports):
            check_fill(one.items, one.least, settings, f"data-parallel rank {other}: ")
        return plan_packed(batch, settings, 1, packed)[0]
    count, bound = max(one.least for one in reports), max(one.bound for one in reports)
    for other, one in enumerate(reports):
        check_fill(one.items, count, settings, f"data-parallel rank {other}: ")
    if settings.pipeline is not None and settings.order == "auto":
        count = agreed_count([one.totals for one in reports if one.totals and one.items], settings, count)
    return plan_packed(batch, settings, 1, packed, count=count, bound=bound)[0]


def _report(
    lengths: Any, values: tuple, cost: Cost | None, groups: Sequence[Hashable] | None, rank: int, same_count: bool
) -> tuple[tuple[Batch, Settings, Packed] | None, _Report]:
    """Everything that can go wrong on this rank alone, caught so that it can be sent."""
    try:
        settings = Settings(*values)
        batch = read_batch(lengths, settings, cost, groups, rank=rank)
        packed = pack_items(batch, settings)
        totals = Totals.of(batch, settings.cap)
    except PlanError as error:
        return None, _Report(error=error)
    except Exception as error:  # a cost function of the caller may raise anything: the others must not wait for us
        return None, _Report(
            error=PlanError(f"data-parallel rank {rank} failed to plan: {type(error).__name__}: {error}")
        )
    report = _Report(None, settings, same_count, len(batch.items), packed.least, packed.bound, totals)
    return (batch, settings, packed), report


def _raise_first_error(reports: list[_Report]) -> None:
    for one in reports:
        if one.error is not None:
            raise one.error
    first = reports[0]
    for rank, one in enumerate(reports):
        if (one.settings, one.same_count) != (first.settings, first.same_count):
            raise PlanMismatch(
                f"data-parallel rank {rank} plans with {one.settings}, same_count={one.same_count} but rank 0 with "
                f"{first.settings}, same_count={first.same_count}: pass the same settings on every rank"
            )
    if not any(one.items for one in reports):
        raise PlanError("lengths is empty on every rank: there is no sequence to plan")


def verify_digest(plan: MicroBatchPlan | str, *groups: ProcessGroup) -> None:
    """Raise ``PlanMismatch`` on every peer unless all hold the same plan, or digest (one collective per group).

    Call it over the model-parallel peers (tensor, context and pipeline) before the first micro-batch.

    Args:
        groups: whose product are the peers, such as the tensor-and-pipeline group and the context-parallel group: what
            one exchange found goes into the next, so that all peers know of a difference anywhere, and none waits.
    """
    held = [(dist.get_rank(), plan if isinstance(plan, str) else plan.digest)]
    for group in groups:
        held = [one for found in gather(held, group) for one in found]
    if len({digest for _, digest in held}) <= 1:
        return
    shown = ", ".join(f"rank {rank}: {digest[:12]}" for rank, digest in sorted(held))
    raise PlanMismatch(
        f"model-parallel peers hold different plans ({shown}): plan from the same lengths, in the same order, with the "
        f"same settings on each of them"
    )
