"""A plan of micro-batches, the summary that says whether it is good, and the way back from outputs to rows."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from steelyard.errors import PlanError
from steelyard.pipeline.bound import makespan_lower_bound
from steelyard.pipeline.schedule import Pipeline
from steelyard.pipeline.simulate import simulate


@dataclass(frozen=True)
class PlanSummary:
    """Is the plan good?

    Attributes:
        count: micro-batches, fillers included.
        lower_bound: least count that any plan of the same request can have, as far as it is proven.
        gap: ``count - lower_bound``; 0 is a certificate that the count is least.
        fillers: micro-batches without rows.
        rows, tokens: what the plan holds.
        fill: mean share of the cap that micro-batches with rows use.
        over_cap: micro-batches above the cap; only ``oversize="alone"`` makes any.
        imbalance: greatest over mean work of the micro-batches with rows, fixed cost included.
        padding: share of slots that would hold padding if each micro-batch were padded to its longest row.
        work: forward work of the whole plan, in the unit of the cost.
        overhead: predicted makespan over ideal, minus 1; None without a pipeline.
        bubble: predicted idle share of the makespan; None without a pipeline.
        time_gap: predicted makespan over what no order of these micro-batches goes below, minus 1; 0 is a certificate
            that the order is best; None without a pipeline.
    """

    count: int
    lower_bound: int
    gap: int
    fillers: int
    rows: int
    tokens: int
    fill: float
    over_cap: int
    imbalance: float
    padding: float
    work: float
    overhead: float | None
    bubble: float | None
    time_gap: float | None

    def __str__(self) -> str:
        best = "least possible" if self.gap == 0 else f"proven bound {self.lower_bound}"
        overhead = "" if self.overhead is None else f", predicted pipeline overhead {self.overhead:.1%}"
        overhead += "" if self.time_gap is None else f" (at most {self.time_gap:.1%} slower than in the best order)"
        fillers = f", {self.fillers} of them fillers" if self.fillers else ""
        return (
            f"{self.count} micro-batches ({best}{fillers}), {self.fill:.1%} of the cap used, greatest work "
            f"{self.imbalance:.3f} of the mean, {self.padding:.1%} padding if padded{overhead}"
        )


def digest_of(*facts: Any) -> str:
    """SHA-256 over whole numbers and lists of them: equal for equal facts in any process on any machine."""
    return hashlib.sha256(json.dumps(facts, separators=(",", ":")).encode()).hexdigest()


@dataclass(frozen=True)
class MicroBatchPlan:
    """The micro-batches of one data-parallel rank.

    Attributes:
        indices: rows of each micro-batch, in execution order: positions in the lengths that were planned (global ones
            from ``plan_step``). A filler is an empty list: it runs so that counts agree, and must carry no loss.
        rows: the positions this rank holds, ascending: the order in which it keeps them, and of ``restore``.
        lengths: tokens of each of ``rows``.
        tokens: tokens of each micro-batch.
        work: forward work of each micro-batch in the unit of the cost, fixed cost included.
        max_tokens: the cap that was asked for.
        lower_bound: proven least count for the same request, legality included; ``len(indices)`` may exceed it where a
            pipeline makes more micro-batches faster.
        pipeline: what the plan was made for, or None.
    """

    indices: list[list[int]]
    rows: list[int]
    lengths: list[int]
    tokens: list[int]
    work: list[float]
    max_tokens: int
    lower_bound: int
    pipeline: Pipeline | None = field(default=None)

    def __len__(self) -> int:
        return len(self.indices)

    @cached_property
    def digest(self) -> str:
        """SHA-256 over rows, tokens, order and cap: equal for equal plans in any process on any machine."""
        return digest_of(self.max_tokens, self.indices, self.rows, self.lengths)

    @cached_property
    def positions(self) -> list[list[int]]:
        """``indices`` as positions in ``rows``: what picks the rows of a micro-batch out of this rank's own batch."""
        local = {row: at for at, row in enumerate(self.rows)}
        return [[local[row] for row in one] for one in self.indices]

    def restore(self, outputs: Sequence[Any]) -> Any:
        """Bring outputs from execution order into the order of ``rows``.

        Args:
            outputs: one entry per micro-batch in execution order, each with one element per row (a list, an array or a
                tensor whose first dimension is the row). Entries of fillers are dropped, whatever they hold.

        Returns:
            One tensor or array if every entry is one and all but the first dimension agree (differentiable); else a
            list with one element per row.

        Raises:
            PlanError: a number of entries, or of rows in an entry, that is not the plan's.
        """
        if len(outputs) != len(self.indices):
            raise PlanError(f"restore got outputs of {len(outputs)} micro-batches but the plan has {len(self.indices)}")
        kept = []
        for at, (output, rows) in enumerate(zip(outputs, self.indices, strict=True)):
            if not rows:
                continue
            if getattr(output, "is_nested", False):
                output = output.unbind()
            if len(output) != len(rows):
                raise PlanError(f"output {at} has {len(output)} rows but micro-batch {at} has {len(rows)}")
            kept.append(output)
        executed = [at for one in self.positions for at in one]
        inverse = np.argsort(np.array(executed, np.int64), kind="stable")
        joined = _join(kept)
        if joined is not None:
            return joined[inverse]
        flat = [row for output in kept for row in output]
        return [flat[at] for at in inverse.tolist()]

    def summary(self) -> PlanSummary:
        """Is the plan good: count against bound, fill, imbalance, padding and, with a pipeline, predicted overhead."""
        real = [at for at, rows in enumerate(self.indices) if rows]
        length_of = dict(zip(self.rows, self.lengths, strict=True))
        slots = sum(len(self.indices[at]) * max(length_of[row] for row in self.indices[at]) for at in real)
        tokens, work = sum(self.tokens), [self.work[at] for at in real]
        timeline = None if self.pipeline is None else simulate(self.work, self.pipeline)
        return PlanSummary(
            count=len(self.indices),
            lower_bound=self.lower_bound,
            gap=len(self.indices) - self.lower_bound,
            fillers=len(self.indices) - len(real),
            rows=len(self.rows),
            tokens=tokens,
            fill=tokens / (self.max_tokens * len(real)) if real else 0.0,
            over_cap=sum(one > self.max_tokens for one in self.tokens),
            imbalance=max(work) * len(work) / sum(work) if sum(work) > 0 else 1.0,
            padding=1.0 - tokens / slots if slots else 0.0,
            work=sum(self.work),
            overhead=None if timeline is None else timeline.overhead,
            bubble=None if timeline is None else timeline.bubble,
            time_gap=None if self.pipeline is None else _gap([self]),
        )


@dataclass(frozen=True)
class StepSummary:
    """Is a step good, over all its ranks?

    Attributes:
        ranks, count: data-parallel ranks, and the greatest number of micro-batches on one of them.
        gap: ``count`` less the proven bound.
        fill: mean share of the cap that micro-batches with rows use.
        imbalance: greatest over mean work of the ranks.
        time: predicted time of the slowest rank over the ideal of the mean rank; None without a pipeline.
        time_gap: that time over what no orders of the same micro-batches on the same ranks go below, minus 1; None
            without a pipeline.
    """

    ranks: int
    count: int
    gap: int
    fill: float
    imbalance: float
    time: float | None
    time_gap: float | None


def summarize_step(plans: Sequence[MicroBatchPlan]) -> StepSummary:
    """Sum up the plans of all ranks, as ``plan_step`` returns them."""
    if not plans:
        raise PlanError("summarize_step got no plan")
    work = [sum(plan.work) for plan in plans]
    used = [tokens / plan.max_tokens for plan in plans for tokens in plan.tokens if tokens]
    lines = [simulate(plan.work, plan.pipeline) for plan in plans if plan.pipeline is not None]
    ideal = sum(line.ideal for line in lines)
    count = max(len(plan) for plan in plans)
    return StepSummary(
        ranks=len(plans),
        count=count,
        gap=count - max(plan.lower_bound for plan in plans),
        fill=sum(used) / len(used) if used else 0.0,
        imbalance=max(work) * len(work) / sum(work) if sum(work) > 0 else 1.0,
        time=max(line.makespan for line in lines) * len(lines) / ideal if ideal > 0 else None,
        time_gap=_gap(plans) if lines else None,
    )


def _gap(plans: Sequence[MicroBatchPlan]) -> float:
    """Time of the slowest rank over the greatest of the ranks' lower bounds, minus 1; 0 for a step without work."""
    on = [(plan.work, plan.pipeline) for plan in plans if plan.pipeline is not None]
    bound = max(makespan_lower_bound(work, pipeline) for work, pipeline in on)
    slowest = max(simulate(work, pipeline).makespan for work, pipeline in on)
    return max(0.0, slowest / bound - 1.0) if bound > 0 else 0.0


def _join(outputs: list[Any]) -> Any | None:
    """One tensor or array of all rows, or None where the pieces are something else or differ in shape."""
    if not outputs or not all(hasattr(one, "shape") for one in outputs):
        return None
    kinds = {(type(one).__module__.split(".")[0], tuple(one.shape[1:]), str(one.dtype)) for one in outputs}
    if len(kinds) != 1:
        return None
    if isinstance(outputs[0], np.ndarray):
        return np.concatenate(outputs)
    import torch  # only where the caller has tensors already

    return torch.cat(list(outputs))
