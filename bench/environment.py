"""What machine and software a run had, and what else went on while a cell ran, for its records."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import psutil

from bench.record import Conditions, Environment, GpuState
from suites.launch.alone import THREADS_PER_RANK

ROOT = Path(__file__).resolve().parents[1]
GIB = 2**30
# Others that take more than this share of the cores make the figures of a cell doubtful.
BUSY_SHARE = 0.1
# The kernel counts processor time in ticks: below this a share of it means little.
LEAST_SECONDS = 1.0
LIBRARIES = ("transformer-engine", "flash-attn", "triton", "mbridge", "megatron-bridge", "transformers", "ray", "verl")
# Bits of NVML's clock event reasons; that a GPU is idle, or set so by its owner, holds nothing back.
HELD_BACK = {
    0x004: "power cap",
    0x008: "hardware slowdown",
    0x020: "temperature (driver)",
    0x040: "temperature (hardware)",
    0x080: "power brake",
}


def capture(device: Literal["cpu", "cuda"]) -> Environment:
    """The environment for cells that run on ``device``."""
    cpu = _cpu_model()
    gpu: dict[str, Any] = {}
    if device == "cuda":
        with _nvml() as nvml:
            gpu = _gpus(nvml)
    return Environment(
        device=device,
        **{"device_name": cpu, **gpu},
        cpu=cpu,
        cores=len(_cores()),
        threads_per_rank=THREADS_PER_RANK,
        governor=_governor(),
        memory_gib=round(psutil.virtual_memory().total / GIB, 1),
        platform=platform.platform(),
        python=platform.python_version(),
        torch=_version("torch"),
        megatron_core=_version("megatron-core"),
        numpy=_version("numpy"),
        libraries=_libraries(device),
        commit=commit(),
        dirty=is_dirty(),
    )


class Observer:
    """Watches the machine from its making to ``conditions``: what other processes did meanwhile."""

    def __init__(self, device: Literal["cpu", "cuda"]) -> None:
        self._device = device
        self._load = psutil.getloadavg()[0]
        self._gpus = self._gpu_states()
        self._start, self._busy, self._own = time.monotonic(), _busy_seconds(), _own_seconds()

    def conditions(self, elsewhere: float = 0.0) -> Conditions:
        """What went on since; ``elsewhere``: processor seconds of this cell's ranks that are no children of ours."""
        seconds = time.monotonic() - self._start
        others = _busy_seconds() - self._busy - (_own_seconds() - self._own) - elsewhere
        cores = max(0.0, others / max(seconds, LEAST_SECONDS))
        return Conditions(
            load_at_start=round(self._load, 2),
            load_at_end=round(psutil.getloadavg()[0], 2),
            others_cores=round(cores, 2),
            gpus_at_start=self._gpus,
            gpus_at_end=self._gpu_states(),
            busy=_busy_words(cores, len(_cores()), sum(gpu.processes or 0 for gpu in self._gpus)),
        )

    def _gpu_states(self) -> tuple[GpuState, ...]:
        if self._device == "cpu":
            return ()
        with _nvml() as nvml:
            return tuple(_gpu_state(nvml, handle) for handle in _handles(nvml)) if nvml else ()


def _busy_words(others: float, cores: int, gpu_processes: int) -> str:
    words = []
    if others > BUSY_SHARE * cores:
        words.append(f"other processes kept {others:.1f} of {cores} cores busy")
    if gpu_processes:
        words.append(f"{gpu_processes} other processes were on the GPUs")
    return ", and ".join(words)


def _busy_seconds() -> float:
    """Processor seconds that the cores we may use have spent on anything, or were taken away by the host."""
    times = psutil.cpu_times(percpu=True)
    mine = [times[core] for core in _cores() if core < len(times)] or times
    kinds = ("user", "nice", "system", "irq", "softirq", "steal")
    return sum(getattr(core, kind, 0.0) for core in mine for kind in kinds)


def _own_seconds() -> float:
    # Children count once they were waited for, however they ended.
    return sum(os.times()[:4])


def _cores() -> list[int]:
    # A container or taskset may leave fewer cores than the machine has.
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def _governor() -> str | None:
    file = Path(f"/sys/devices/system/cpu/cpu{_cores()[0]}/cpufreq/scaling_governor")
    with contextlib.suppress(OSError):
        return file.read_text().strip()
    return None


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


@contextlib.contextmanager
def _nvml() -> Iterator[Any]:
    """The module ``pynvml``, ready to be asked, or None; unlike torch it takes no memory on the device."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def _handles(nvml: Any) -> list[Any]:
    """The GPUs that this process may use."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = range(nvml.nvmlDeviceGetCount()) if visible is None else [one.strip() for one in visible.split(",") if one]
    return [
        nvml.nvmlDeviceGetHandleByIndex(int(name)) if str(name).isdigit() else nvml.nvmlDeviceGetHandleByUUID(name)
        for name in names
    ]


def _gpus(nvml: Any) -> dict[str, Any]:
    handles = _handles(nvml) if nvml else []
    if not handles:
        return {"device_name": "unknown (NVML tells of no GPU)"}
    return {
        "device_name": ", ".join(sorted({nvml.nvmlDeviceGetName(handle) for handle in handles})),
        "devices": len(handles),
        "driver": nvml.nvmlSystemGetDriverVersion(),
        "device_memory_gib": round(min(nvml.nvmlDeviceGetMemoryInfo(one).total for one in handles) / GIB, 1),
    }


def _gpu_state(nvml: Any, handle: Any) -> GpuState:
    def ask(question: Callable[..., Any], *arguments: Any) -> Any:
        # Virtual GPUs and older drivers refuse some questions.
        with contextlib.suppress(nvml.NVMLError):
            return question(handle, *arguments)
        return None

    reasons = ask(nvml.nvmlDeviceGetCurrentClocksThrottleReasons) or 0
    state = ask(nvml.nvmlDeviceGetPerformanceState)
    processes = ask(nvml.nvmlDeviceGetComputeRunningProcesses)
    milliwatts, limit = ask(nvml.nvmlDeviceGetPowerUsage), ask(nvml.nvmlDeviceGetEnforcedPowerLimit)
    return GpuState(
        sm_mhz=ask(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_SM),
        sm_most_mhz=ask(nvml.nvmlDeviceGetMaxClockInfo, nvml.NVML_CLOCK_SM),
        memory_mhz=ask(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_MEM),
        power_state=None if state is None else f"P{state}",
        watts=None if milliwatts is None else milliwatts / 1000,
        limit_watts=None if limit is None else limit / 1000,
        celsius=ask(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU),
        held_back=tuple(word for bit, word in HELD_BACK.items() if reasons & bit),
        processes=None if processes is None else len(processes),
    )


def _libraries(device: str) -> dict[str, str]:
    found = {name: version for name in LIBRARIES if (version := _version(name))}
    if device == "cuda":
        import torch

        if torch.version.cuda:
            found["cuda"] = torch.version.cuda
            found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def commit() -> str | None:
    """The commit of this checkout; None where that is not known."""
    return _git("rev-parse", "HEAD")


def is_dirty() -> bool | None:
    """Whether files of this checkout differ from its commit; reference results are not what is measured."""
    changes = _git("status", "--porcelain", "--", ".", ":!results/reference")
    return None if changes is None else bool(changes)


def _git(*arguments: str) -> str | None:
    """Output of git in this checkout; None without git or outside a repository."""
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
