"""``python -m bench`` with a suite of faults: every way in which a cell can end.

A cell's seed chooses what it does (``DOES``), and each visit leaves a line in the file that ``VISITS`` names.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from suites import SUITES
from suites.launch import alone
from suites.launch.local import run_ranks
from suites.matrix import Cell
from suites.measure import Series

HERE = "bench.tests.faulty"
VISITS = "STEELYARD_TEST_VISITS"
MATRIX = """
description = "faults"
[model]
layers = 4
hidden = 64
ffn = 96
heads = 4
kv_heads = 2
head_dim = 16
vocab = 128
[[suite]]
name = "faulty"
workloads = ["rl-math-short"]
axes = {{ seed = {seeds} }}
settings = {{ rows = 4, scale = 400.0, time_limit = 120 }}
{more}
"""


def passes(cell: Cell) -> list[float]:
    return [1.0, 2.0]


def passes_too(cell: Cell) -> list[float]:
    return [3.0]


def crashes(cell: Cell) -> list[float]:
    os.kill(os.getpid(), signal.SIGSEGV)
    raise AssertionError("unreachable")


def hangs(cell: Cell) -> list[float]:
    subprocess.Popen(["sleep", "600"])
    time.sleep(600)  # here
    raise AssertionError("unreachable")


def takes_long(cell: Cell) -> list[float]:
    """Only at its first visit."""
    if Path(os.environ[VISITS]).read_text().count("takes_long") == 1:
        run_ranks(f"{HERE}:sleep_in_ranks", 2, None, time_limit=600, device="cpu")
    return [1.0]


def loses_a_rank(cell: Cell) -> list[float]:
    return run_ranks(f"{HERE}:die_on_rank_one", 2, None, time_limit=cell.time_limit, device="cpu")


def runs_out_of_memory(cell: Cell) -> list[float]:
    return run_ranks(f"{HERE}:take_memory", 2, None, time_limit=120, device="cpu")


def fills_the_disk(cell: Cell) -> list[float]:
    with open("/dev/full", "w") as disk:
        disk.write("no room for this")
    return []


DOES = [passes, passes_too, crashes, hangs, takes_long, loses_a_rank, runs_out_of_memory, fills_the_disk]


def sleep_in_ranks(payload: Any) -> None:
    subprocess.Popen(["sleep", "600"])
    time.sleep(600)


def die_on_rank_one(payload: Any) -> list[float]:
    import torch.distributed as dist

    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
    return []


def take_memory(payload: Any) -> list[float]:
    import torch
    import torch.distributed as dist

    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_AS, (2**33, 2**33))
        torch.zeros(2**34)
    dist.barrier()
    return []


def measure(cell: Cell, device: str | None = None) -> list[Series]:
    does = DOES[cell.seed]
    with Path(os.environ[VISITS]).open("a") as visits:
        visits.write(f"{does.__name__}\n")
    return [Series("samples", "both", "1", "none", does(cell))]


if __name__ == "__main__":
    from bench.cli import app

    SUITES["faulty"] = HERE
    # A hang need not be waited for any longer.
    alone.SLACK_S = 1.0
    app(sys.argv[1:])
