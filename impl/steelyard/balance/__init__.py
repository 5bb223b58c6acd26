"""Which sequences share a micro-batch: plans that keep the token cap, need few micro-batches and level their work."""

from typing import TYPE_CHECKING

from steelyard.balance.microbatch import plan_micro_batches, plan_step
from steelyard.balance.plan import MicroBatchPlan, PlanSummary, StepSummary, digest_of, summarize_step

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = [
    "MicroBatchPlan",
    "PlanSummary",
    "StepSummary",
    "digest_of",
    "plan_micro_batches",
    "plan_step",
    "summarize_step",
    "verify_digest",
]


def verify_digest(plan: MicroBatchPlan | str, *groups: "ProcessGroup") -> None:
    """Raise ``PlanMismatch`` on every peer unless all hold the same plan, or digest (one collective per group)."""
    from steelyard.balance import agreement  # torch is needed only where ranks talk

    agreement.verify_digest(plan, *groups)
