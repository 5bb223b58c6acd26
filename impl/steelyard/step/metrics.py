"""Sums and maxima over micro-batches and ranks become one dictionary of metrics, the same on every rank.

The device is read once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from steelyard.step.roles import Role


def reduce_metrics(role: Role, parts: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, float]:
    """The role's metrics over the whole mini-batch.

    Args:
        role: says which sums and maxima there are and what follows from them.
        parts: what ``forward_backward_batch`` put out: ``sums`` and ``maxima`` of each micro-batch on the last pipeline
            stage, nothing on the others.

    Every rank must call it. Sums and maxima are put together over micro-batches, data- and context-parallel ranks,
    handed to all pipeline stages, and read once.
    """
    device = torch.cuda.current_device()
    sums = torch.zeros(len(role.sums), dtype=torch.float64, device=device)
    maxima = torch.full((len(role.maxima),), -torch.inf, dtype=torch.float64, device=device)
    for part in parts:
        sums += part["sums"]
        maxima = torch.maximum(maxima, part["maxima"])
    # The other stages hold zeros and minus infinities.
    for group in (
        parallel_state.get_data_parallel_group(with_context_parallel=True),
        parallel_state.get_pipeline_model_parallel_group(),
    ):
        dist.all_reduce(sums, group=group)
        if role.maxima:
            dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=group)
    totals = torch.cat((sums, maxima)).tolist()
    return role.metrics(dict(zip((*role.sums, *role.maxima), totals, strict=True)))
