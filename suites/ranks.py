"""What a suite does first and last on every rank: Megatron's groups for the cell, and facts gathered on rank 0."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from steelyard.model.build import initialize_parallel
from steelyard.parallel import ParallelLayout

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


@contextmanager
def parallel_groups(layout: ParallelLayout, seed: int, *, optimizer_instances: int = 1) -> Iterator[None]:
    """megatron-core's process groups for the time of the context."""
    initialize_parallel(layout, seed=seed, optimizer_instances=optimizer_instances)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()


def gather_to_all(value: object) -> list:
    """One Python object from every rank, in the order of ranks, on every rank."""
    gathered: list = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered
