"""What machine and software a run had, for its records."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Literal

import psutil

from bench.record import Environment
from suites.launch.local import THREADS_PER_RANK

ROOT = Path(__file__).resolve().parents[1]
GIB = 2**30


def capture(device: Literal["cpu", "cuda"]) -> Environment:
    """The environment as it is now, for cells that run on ``device``."""
    cpu = _cpu_model()
    gpu = _gpu() if device == "cuda" else {}
    return Environment(
        device=device,
        **{"device_name": cpu, **gpu},
        cpu=cpu,
        cores=_cores(),
        threads_per_rank=THREADS_PER_RANK,
        memory_gib=round(psutil.virtual_memory().total / GIB, 1),
        platform=platform.platform(),
        python=platform.python_version(),
        torch=_version("torch"),
        megatron_core=_version("megatron-core"),
        numpy=_version("numpy"),
        commit=commit(),
        dirty=None if (changes := _git("status", "--porcelain")) is None else bool(changes),
        load_at_start=round(psutil.getloadavg()[0], 2),
    )


def _cores() -> int:
    # A container or taskset may leave fewer cores than the machine has.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _gpu() -> dict[str, str | float]:
    """Name, driver and memory from NVML, which unlike torch takes no memory on the device for the answer."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return {"device_name": f"unknown ({error})"}
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return {
            "device_name": ", ".join(sorted({pynvml.nvmlDeviceGetName(handle) for handle in handles})),
            "driver": pynvml.nvmlSystemGetDriverVersion(),
            "device_memory_gib": round(min(pynvml.nvmlDeviceGetMemoryInfo(h).total for h in handles) / GIB, 1),
        }
    finally:
        pynvml.nvmlShutdown()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def commit() -> str | None:
    """The commit of this checkout; None where that is not known."""
    return _git("rev-parse", "HEAD")


def _git(*arguments: str) -> str | None:
    """Output of git in this checkout; None without git or outside a repository."""
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
