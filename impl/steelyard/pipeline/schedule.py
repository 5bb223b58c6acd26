"""What Megatron accepts as a number of micro-batches, and the order in which every stage runs them.

The rules are those of megatron-core's ``forward_backward_pipelining_without_interleaving`` and
``forward_backward_pipelining_with_interleaving`` (schedules.py, 0.16), restated and not copied:

- one chunk per stage (1F1B): every count is accepted;
- several chunks per stage (interleaved): ``stages <= group <= count``, and the last group is either whole or holds at
  least ``stages`` micro-batches (``count % group == 0 or count % group >= stages``);
- stage ``s`` of ``p`` runs ``p - 1 - s`` forward passes ahead of its first backward pass with one chunk, and
  ``2 * (p - 1 - s) + (chunks - 1) * group`` with several; then it alternates one forward and one backward pass; what
  is left are backward passes;
- with several chunks a group of micro-batches passes chunk 0, then chunk 1, and so on, before the next group starts;
  backward passes follow the same table with the chunks reversed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from steelyard.errors import LayoutError, PlanError

if TYPE_CHECKING:
    from steelyard.parallel import ParallelLayout

Direction = Literal["F", "B"]


class Pass(NamedTuple):
    """One forward ("F") or backward ("B") pass of a micro-batch through one chunk of a stage."""

    direction: Direction
    micro_batch: int
    chunk: int


@dataclass(frozen=True)
class Pipeline:
    """A pipeline, as far as time depends on it.

    Attributes:
        stages: pipeline-parallel size.
        virtual: chunks per stage (virtual pipeline size); 1 is plain 1F1B.
        group: micro-batches that pass a chunk before the next chunk's turn (Megatron's
            ``microbatch_group_size_per_vp_stage``). None means Megatron's default, ``stages``.
        backward: time of a backward pass over that of its forward pass: 2, or 3 with full recomputation.
            0 means forward passes only (log-probabilities, values).
        p2p: time of one transfer between two stages, in the unit of the work that is simulated.
        stage_cost: share of the forward work in each of the ``stages * virtual`` virtual stages, in the order in which
            a micro-batch meets them (virtual stage ``chunk * stages + stage``); any scale. None means equal shares.
        exchange: whether stages exchange shapes before every transfer, as Megatron's do where micro-batches differ in
            length; ``p2p`` is then the time of one call in which they meet. See ``exchange.py``.
    """

    stages: int
    virtual: int = 1
    group: int | None = None
    backward: float = 2.0
    p2p: float = 0.0
    stage_cost: Sequence[float] | None = None
    exchange: bool = False

    @classmethod
    def of(cls, layout: ParallelLayout, **more: Any) -> Pipeline:
        """The pipeline that a plan for ``layout`` reckons with; ``more`` are further attributes.

        Stages always exchange shapes. With one chunk each they hardly wait for it, and plans are made faster without.
        """
        return cls(layout.pp, layout.vpp, layout.group, exchange=layout.vpp > 1, **more)

    def __post_init__(self) -> None:
        for name in ("stages", "virtual"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise LayoutError(f"pipeline {name}={value!r} must be a whole number of at least 1")
        if self.virtual > 1 and self.stages == 1:
            raise LayoutError(f"pipeline virtual={self.virtual} needs stages > 1: virtual stages interleave real ones")
        if self.group is None:
            object.__setattr__(self, "group", self.stages)
        elif not isinstance(self.group, int) or isinstance(self.group, bool) or self.group < self.stages:
            raise LayoutError(f"pipeline group={self.group!r} must be a whole number of at least stages={self.stages}")
        for name in ("backward", "p2p"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise LayoutError(f"pipeline {name}={value!r} must be a finite number of at least 0")
        if self.stage_cost is not None:
            object.__setattr__(self, "stage_cost", self._checked_stage_cost(self.stage_cost))

    def _checked_stage_cost(self, stage_cost: Sequence[float]) -> tuple[float, ...]:
        costs = tuple(float(cost) for cost in stage_cost)
        if len(costs) != self.stages * self.virtual:
            raise LayoutError(
                f"pipeline stage_cost has {len(costs)} entries but there are {self.stages * self.virtual} virtual "
                f"stages (stages * virtual): give one share for each"
            )
        if not all(math.isfinite(cost) and cost >= 0 for cost in costs) or sum(costs) <= 0:
            raise LayoutError(f"pipeline stage_cost={costs} must hold finite shares of at least 0, not all of them 0")
        return costs

    @property
    def group_size(self) -> int:
        """``group`` with its default resolved."""
        return self.stages if self.group is None else self.group

    @property
    def shares(self) -> tuple[float, ...]:
        """Share of a micro-batch's forward work in each virtual stage; sums to 1."""
        parts = self.stages * self.virtual
        if self.stage_cost is None:
            return (1.0 / parts,) * parts
        total = sum(self.stage_cost)
        return tuple(cost / total for cost in self.stage_cost)


def is_legal_count(count: int, pipeline: Pipeline) -> bool:
    """Whether Megatron runs ``count`` micro-batches on this pipeline."""
    if count < 1:
        return False
    if pipeline.virtual == 1:
        return True
    group = pipeline.group_size
    return group <= count and (count % group == 0 or count % group >= pipeline.stages)


def legal_count(n: int, pipeline: Pipeline | None, *, multiple_of: int = 1) -> int:
    """Least number of micro-batches of at least ``n`` that Megatron accepts and ``multiple_of`` divides.

    ``pipeline=None`` stands for no pipeline, where every count is accepted. A common multiple of ``multiple_of`` and
    the group is always legal, so there is an answer.
    """
    if multiple_of < 1:
        raise PlanError(f"multiple_of={multiple_of} must be at least 1")
    count = max(1, -(-n // multiple_of)) * multiple_of
    while pipeline is not None and not is_legal_count(count, pipeline):
        count += multiple_of
    return count


def nearest_legal_counts(count: int, pipeline: Pipeline) -> tuple[int | None, int]:
    """Greatest legal count of at most ``count`` (None if there is none) and least legal count of at least ``count``."""
    below: int | None = count
    while below is not None and not is_legal_count(below, pipeline):
        below = below - 1 if below > 1 else None
    return below, legal_count(count, pipeline)


def equal_overhead(count: int, pipeline: Pipeline) -> float:
    """Overhead of ``count`` equal micro-batches on equal stages without transfers.

    ``(stages - 1) / (count * virtual)``, exact for every legal count of at least ``stages``.
    """
    return (pipeline.stages - 1) / (count * pipeline.virtual)


def check_count(count: int, pipeline: Pipeline) -> None:
    """Raise ``PlanError`` with the nearest legal counts, and what they cost, where Megatron would refuse ``count``
    micro-batches.
    """
    if is_legal_count(count, pipeline):
        return
    below, above = nearest_legal_counts(count, pipeline)
    legal = [above] if below is None else [below, above]
    costs = " or ".join(f"{equal_overhead(one, pipeline):.1%}" for one in legal)
    if pipeline.virtual == 1:
        raise PlanError(f"{count} micro-batches cannot run: use at least {above}")
    raise PlanError(
        f"{count} micro-batches are refused by the interleaved schedule, which wants stages={pipeline.stages} <= "
        f"group={pipeline.group_size} <= count and count % group to be 0 or at least stages: use "
        f"{' or '.join(map(str, legal))} (predicted overhead {costs} with equal micro-batches)"
    )


def schedule_table(count: int, pipeline: Pipeline) -> list[tuple[int, int]]:
    """(micro-batch, chunk) in the order of the forward passes of any stage; ``count * virtual`` entries."""
    group = pipeline.group_size if pipeline.virtual > 1 else count
    return [
        (micro_batch, chunk)
        for start in range(0, count, group)
        for chunk in range(pipeline.virtual)
        for micro_batch in range(start, min(start + group, count))
    ]


def warmup_passes(stage: int, count: int, pipeline: Pipeline) -> int:
    """Forward passes that ``stage`` runs before its first backward pass is due."""
    total = count * pipeline.virtual
    if pipeline.backward == 0:
        return total
    ahead = pipeline.stages - 1 - stage
    if pipeline.virtual > 1:
        ahead = 2 * ahead + (pipeline.virtual - 1) * pipeline.group_size
    return min(ahead, total)


def stage_order(stage: int, count: int, pipeline: Pipeline) -> list[Pass]:
    """Every pass of ``stage`` in the order in which Megatron runs it.

    Raises:
        PlanError: ``count`` is one that the schedule refuses.
    """
    check_count(count, pipeline)
    table = schedule_table(count, pipeline)
    forward = [Pass("F", micro_batch, chunk) for micro_batch, chunk in table]
    if pipeline.backward == 0:
        return forward
    backward = [Pass("B", micro_batch, pipeline.virtual - 1 - chunk) for micro_batch, chunk in table]
    warmup = warmup_passes(stage, count, pipeline)
    order = forward[:warmup]
    for ahead, behind in zip(forward[warmup:], backward, strict=False):
        order += (ahead, behind)
    return order + backward[len(forward) - warmup :]
