"""Ranks on this machine: one process each, one thread each, a time limit, and a traceback when one dies or hangs.

``run_ranks("package.module:function", world, payload)`` starts ``world`` fresh interpreters. Each joins a process group
over a file store (no port can clash), calls the function with the payload, and rank 0's JSON result comes back. A rank
that raises, is killed or outlives the limit ends all of them, and the parent raises ``RanksFailed`` with what is known.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

from steelyard.errors import InputError, SteelyardError

THREADS_PER_RANK = 1
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
        time_limit: seconds for the whole run, start of the interpreters included.
        device: ``cpu`` or ``cuda``; None means CUDA where there are enough devices for the ranks.

    Raises:
        InputError: a rank met bad input; its message is passed on.
        RanksFailed: a rank raised, was killed, or did not end in time.
    """
    with tempfile.TemporaryDirectory(prefix="steelyard-ranks-") as folder:
        ranks = Path(folder)
        (ranks / "payload.json").write_text(json.dumps({"target": target, "payload": payload, "device": device}))
        logs = [(ranks / f"{rank}.log").open("wb") for rank in range(world)]
        processes: list[subprocess.Popen] = []
        try:
            for rank in range(world):
                processes.append(_start(ranks, rank, world, time_limit, logs[rank]))
            late = _wait(processes, time.monotonic() + time_limit)
            codes = [process.poll() for process in processes]
        finally:
            _end(processes)
            for log in logs:
                log.close()
        _raise_failure(ranks, codes, late, time_limit)
        return json.loads((ranks / "0.result.json").read_text())


def _start(folder: Path, rank: int, world: int, time_limit: float, log: Any) -> subprocess.Popen:
    root = Path(__file__).resolve().parents[2]
    paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    threads = {name: str(THREADS_PER_RANK) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    environment = {**os.environ, **threads, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", "suites.launch.local", str(folder), str(rank), str(world), str(time_limit)]
    # A session of its own: whatever a rank starts is ended with it.
    return subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)


def _wait(processes: list[subprocess.Popen], deadline: float) -> list[int]:
    """Wait until all ended, one failed, or time is up; return the ranks that were late."""
    while time.monotonic() < deadline:
        codes = [process.poll() for process in processes]
        if all(code == 0 for code in codes):
            return []
        if any(code not in (None, 0) for code in codes):
            # Peers of a failed rank often fail too, a moment later, with the more telling message.
            time.sleep(min(1.0, max(0.0, deadline - time.monotonic())))
            return []
        time.sleep(POLL_S)
    late = [rank for rank, process in enumerate(processes) if process.poll() is None]
    for rank in late:
        processes[rank].send_signal(signal.SIGUSR1)
    time.sleep(DUMP_S)
    return late


def _end(processes: list[subprocess.Popen]) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


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


def _rank_main(folder: Path, rank: int, world: int, time_limit: float) -> None:
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    job = json.loads((folder / "payload.json").read_text())
    try:
        import torch
        import torch.distributed as dist

        from steelyard.model import host

        torch.set_num_threads(THREADS_PER_RANK)
        device = host.pick_device(job["device"], rank=rank, world=world)
        with host.running_on(device):
            dist.init_process_group(
                "nccl" if device.type == "cuda" else "gloo",
                store=dist.FileStore(str(folder / "store"), world),
                rank=rank,
                world_size=world,
                timeout=timedelta(seconds=time_limit),
            )
            module, function = job["target"].split(":")
            result = getattr(importlib.import_module(module), function)(job["payload"])
            if rank == 0:
                (folder / "0.result.json").write_text(json.dumps(result))
            dist.barrier()
            dist.destroy_process_group()
    except BaseException as error:
        report = {
            "message": str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__,
            "input": isinstance(error, InputError),
            "traceback": traceback.format_exc(),
            "time": time.time(),
        }
        if not report["input"]:
            report["message"] = f"{type(error).__name__}: {report['message']}"
        partial = folder / f"{rank}.error.part"
        partial.write_text(json.dumps(report))
        partial.rename(folder / f"{rank}.error.json")
        sys.stderr.flush()
        # Threads of the process group may still wait for peers: leave without them.
        os._exit(1)


if __name__ == "__main__":
    _rank_main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
