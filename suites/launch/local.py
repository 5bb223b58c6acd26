"""Ranks on this machine: one process each, one thread each, a time limit, and a traceback when one dies or hangs.

``run_ranks("package.module:function", world, payload)`` starts ``world`` processes. Each joins a process group over a
file store (no port can clash), calls the function with the payload, and rank 0's JSON result comes back. A rank that
raises, is killed or outlives the limit ends all of them, and the parent raises ``RanksFailed`` with what is known.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from steelyard.errors import InputError, SteelyardError
from steelyard.model import host

THREADS_PER_RANK = 1
# Threads, and the warnings that megatron-core's imports give once for everything it could use and does not find.
RANK_ENVIRONMENT = {
    "OMP_NUM_THREADS": str(THREADS_PER_RANK),
    "MKL_NUM_THREADS": str(THREADS_PER_RANK),
    "PYTHONWARNINGS": "ignore::UserWarning",
}
PRELOADED = ["suites.judging"]
POLL_S = 0.05
# After the limit a rank gets this long to write where every thread stands.
DUMP_S = 2.0


class RanksFailed(SteelyardError):  # noqa: N818 - the name says what happened
    """A rank died or hung. ``reason`` is one line; ``detail`` holds the tracebacks by rank."""

    def __init__(self, reason: str, detail: str) -> None:
        self.reason, self.detail = reason, detail
        super().__init__(f"{reason}\n{detail}".rstrip())


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
    with tempfile.TemporaryDirectory(prefix="steelyard-ranks-") as folder:
        ranks = Path(folder)
        job = {"target": target, "payload": payload, "device": device, "world": world, "time_limit": time_limit}
        (ranks / "job.json").write_text(json.dumps(job))
        processes: list[BaseProcess] = []
        try:
            for rank in range(world):
                processes.append(_start(ranks, rank, device))
            late = _wait(processes, time.monotonic() + time_limit)
            codes = [process.exitcode for process in processes]
        finally:
            _end(processes)
        _raise_failure(ranks, codes, late, time_limit)
        return json.loads((ranks / "0.result.json").read_text())


def _start(folder: Path, rank: int, device: str | None) -> BaseProcess:
    # A process that imported CUDA libraries must not be forked once a device is in use; where there is none, ranks are
    # forked from one process that has imported everything, which saves seconds for each.
    method = "spawn" if device == "cuda" or (device is None and torch.cuda.is_available()) else "forkserver"
    context = multiprocessing.get_context(method)
    if method == "forkserver":
        context.set_forkserver_preload(PRELOADED)
    process = context.Process(target=_rank_main, args=(folder, rank), name=f"rank {rank}")
    before = {name: os.environ.get(name) for name in RANK_ENVIRONMENT}
    os.environ.update(RANK_ENVIRONMENT)
    try:
        process.start()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
    return process


def _wait(processes: list[BaseProcess], deadline: float) -> list[int]:
    """Wait until all ended, one failed, or time is up; return the ranks that were late."""
    while time.monotonic() < deadline:
        codes = [process.exitcode for process in processes]
        if all(code == 0 for code in codes):
            return []
        if any(code not in (None, 0) for code in codes):
            # Peers of a failed rank often fail too, a moment later, with the more telling message.
            time.sleep(min(1.0, max(0.0, deadline - time.monotonic())))
            return []
        time.sleep(POLL_S)
    late = [rank for rank, process in enumerate(processes) if process.exitcode is None]
    for rank in late:
        os.kill(processes[rank].pid, signal.SIGUSR1)
    time.sleep(DUMP_S)
    return late


def _end(processes: list[BaseProcess]) -> None:
    for process in processes:
        # A rank leads a session of its own: whatever it started is ended with it.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join()


def _raise_failure(folder: Path, codes: list[int | None], late: list[int], time_limit: float) -> None:
    """Raise what explains the failure best; ``codes`` are the exit codes from before this launcher ended the ranks."""
    errors = {}
    for rank in range(len(codes)):
        file = folder / f"{rank}.error.json"
        if file.exists():
            errors[rank] = json.loads(file.read_text())
    for error in errors.values():
        if error["input"]:
            raise InputError(error["message"])
    logs = {rank: (folder / f"{rank}.log").read_text(errors="replace")[-6000:] for rank in range(len(codes))}
    if late:
        detail = "\n".join(f"--- rank {rank} stood at ---\n{logs[rank]}" for rank in late)
        raise RanksFailed(f"ranks {late} did not end within {time_limit:g} s", detail)
    # A rank that crashed or was killed explains more than the errors of the peers that lost it.
    for rank, code in enumerate(codes):
        if code and rank not in errors:
            how = f"was ended by signal {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
            raise RanksFailed(f"rank {rank} {how}", f"--- rank {rank} ---\n{logs[rank]}")
    if errors:
        first = min(errors, key=lambda rank: errors[rank]["time"])
        detail = "\n".join(f"--- rank {rank} ---\n{error['traceback']}" for rank, error in sorted(errors.items()))
        raise RanksFailed(f"rank {first} failed: {errors[first]['message']}", detail)


def _rank_main(folder: Path, rank: int) -> None:
    os.setsid()
    log = os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    job = json.loads((folder / "job.json").read_text())
    try:
        result = _run_in_group(job, folder, rank)
        if rank == 0:
            (folder / "0.result.json").write_text(json.dumps(result))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException as error:
        _report(error, folder / f"{rank}.error.json")
        sys.stderr.flush()
        # Threads of the process group may still wait for peers: leave without them.
        os._exit(1)


def _run_in_group(job: dict[str, Any], folder: Path, rank: int) -> Any:
    torch.set_num_threads(THREADS_PER_RANK)
    device = host.pick_device(job["device"], rank=rank, world=job["world"])
    with host.running_on(device):
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=dist.FileStore(str(folder / "store"), job["world"]),
            rank=rank,
            world_size=job["world"],
            timeout=timedelta(seconds=job["time_limit"]),
        )
        module, function = job["target"].split(":")
        return getattr(importlib.import_module(module), function)(job["payload"])


def _report(error: BaseException, file: Path) -> None:
    first = str(error).strip().splitlines()[:1]
    report = {
        "message": first[0] if first else type(error).__name__,
        "input": isinstance(error, InputError),
        "traceback": traceback.format_exc(),
        "time": time.time(),
    }
    if not report["input"]:
        report["message"] = f"{type(error).__name__}: {report['message']}"
    partial = file.with_suffix(".part")
    partial.write_text(json.dumps(report))
    partial.rename(file)
