"""Ranks on this machine: one process each, one thread each, a time limit, and a reason when one dies or hangs.

``run_ranks("package.module:function", world, payload)`` starts ``world`` processes. Each joins a process group over a
file store (no port can clash), calls the function with the payload, and rank 0's JSON result comes back. A rank that
raises, is killed or outlives the limit ends all of them, and the parent raises ``RanksFailed`` with what is known.
Ranks belong to the process group of their cell (``suites.launch.alone``). Where a cell runs on a Ray cluster, the same
call starts them there (``suites.launch.on_ray``).
"""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from steelyard.model import host
from suites.launch import alone
from suites.launch.alone import THREADS_PER_RANK
from suites.launch.watch import DUMP_S, LAST_WORDS_S, RanksFailed, Watch, answer

__all__ = ["THREADS_PER_RANK", "RanksFailed", "run_ranks"]

# What the launcher needs beyond the time limit of the ranks to end them and tell why.
SLACK_S = DUMP_S + LAST_WORDS_S + 10.0

Launcher = Callable[[str, int, Any, float, str | None], Any]
# Set in the process of a cell whose ranks are to run elsewhere.
elsewhere: Launcher | None = None


def run_ranks(target: str, world: int, payload: Any, *, time_limit: float, device: str | None = None) -> Any:
    """Run ``target`` (``module:function``) on ``world`` ranks and return what rank 0's call returned, through JSON.

    Args:
        target: the function to call as ``function(payload)`` in every rank.
        world: number of ranks.
        payload: any JSON value.
        time_limit: seconds for the whole run, their start included.
        device: ``cpu`` or ``cuda``; None means CUDA where there are enough devices for the ranks.

    Raises:
        InputError: a rank met bad input; its message is passed on.
        RanksFailed: a rank raised, was killed, or did not end in time.
    """
    job = [target, world, payload, time_limit, device]
    if elsewhere is not None:
        return elsewhere(*job)
    if alone.inside:
        return _launch(job)
    return alone.run_alone("suites.launch.local:_launch", job, time_limit=time_limit + SLACK_S, device=device)


def _launch(job: list[Any]) -> Any:
    target, world, payload, time_limit, device = job
    method = "spawn" if alone.start_method(device) == "spawn" else "fork"
    with (
        tempfile.TemporaryDirectory(prefix="ranks-") as folder,
        Watch(multiprocessing.get_context(method)) as ranks,
        alone.rank_environment(),
    ):
        for rank in range(world):
            arguments = (_on_rank, rank, world, target, payload, time_limit, device, folder)
            ranks.start(f"rank {rank}", Path(folder) / f"{rank}.log", answer, *arguments)
        return ranks.results(time_limit)[0]


def _on_rank(
    rank: int, world: int, target: str, payload: Any, time_limit: float, device: str | None, folder: str
) -> Any:
    store = dist.FileStore(f"{folder}/store", world)
    return call_in_group(target, payload, host.pick_device(device, rank, world), store, rank, world, time_limit)


def call_in_group(
    target: str, payload: Any, device: torch.device, store: dist.Store, rank: int, world: int, time_limit: float
) -> Any:
    """Join the ranks' process group, call ``target``, and leave it together; the result of rank 0, None of others."""
    torch.set_num_threads(THREADS_PER_RANK)
    with host.running_on(device):
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=time_limit),
        )
        result = alone.call(target, payload)
        dist.barrier()
        dist.destroy_process_group()
    return result if rank == 0 else None
