"""What the tests on a Ray cluster run in cells and on ranks."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from suites.launch.local import run_ranks

RANKS = "bench.tests.ray_jobs:"


def cell(payload: dict[str, Any]) -> dict[str, Any]:
    """A cell that starts ranks."""
    return {"ranks": run_ranks(RANKS + payload["job"], payload["ranks"], payload, time_limit=payload["limit"])}


def without_ranks(seconds: float) -> dict[str, float]:
    start = time.time()
    time.sleep(seconds)
    return {"start": start, "end": time.time()}


def wait_once(payload: dict[str, Any]) -> dict[str, Any]:
    """Waits for ever the first ``payload['waits']`` times; each time a line in a file names the nodes."""
    import ray
    import torch
    import torch.distributed as dist

    visits = Path(payload["visits"])
    nodes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(nodes, ray.get_runtime_context().get_node_id())
    if dist.get_rank() == 0:
        with visits.open("a") as file:
            file.write(f"{' '.join(nodes)}\n")
    dist.barrier()
    if len(visits.read_text().splitlines()) <= payload["waits"]:
        time.sleep(600 * (dist.get_rank() == 1))
        dist.barrier()
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total)
    return {"sum": total.item(), "threads": torch.get_num_threads(), "nodes": len(set(nodes))}


def die(payload: dict[str, Any]) -> None:
    import torch.distributed as dist

    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def stand_still(payload: dict[str, Any]) -> None:
    import torch.distributed as dist

    if dist.get_rank() == 1:
        time.sleep(600)  # here
    dist.barrier()
