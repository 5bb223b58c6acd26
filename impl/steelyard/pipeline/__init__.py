"""The pipeline: what Megatron's schedules accept, the order in which they run, and the time that a plan takes on
them.
"""

from steelyard.pipeline.bound import makespan_lower_bound
from steelyard.pipeline.order import best_order, both_ends
from steelyard.pipeline.schedule import (
    Pipeline,
    check_count,
    is_legal_count,
    legal_count,
    nearest_legal_counts,
    stage_order,
)
from steelyard.pipeline.simulate import Span, Timeline, simulate
from steelyard.pipeline.spans import PassTimeline

__all__ = [
    "PassTimeline",
    "Pipeline",
    "Span",
    "Timeline",
    "best_order",
    "both_ends",
    "check_count",
    "is_legal_count",
    "legal_count",
    "makespan_lower_bound",
    "nearest_legal_counts",
    "simulate",
    "stage_order",
]
