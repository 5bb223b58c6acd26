"""Sums over micro-batches and ranks become one dictionary of metrics, the same on every rank.

The device is read once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from steelyard.step.roles import Role


def reduce_metrics(role: Role, sums: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, float]:
    """The role's metrics over the whole mini-batch.

    Args:
        role: says which sums there are and what follows from them.
        sums: one mapping of scalars per micro-batch on the last pipeline stage; empty on the others.

    Every rank must call it. Sums are added over micro-batches and data-parallel ranks, handed to all pipeline stages,
    and read once.
    """
    device = torch.cuda.current_device()
    totals = torch.zeros(len(role.sums), dtype=torch.float64, device=device)
    for part in sums:
        totals += torch.stack([part[name] for name in role.sums])
    dist.all_reduce(totals, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    # The other stages hold zeros.
    dist.all_reduce(totals, group=parallel_state.get_pipeline_model_parallel_group())
    return role.metrics(dict(zip(role.sums, totals.tolist(), strict=True)))
