"""What a record says of its machine, and whether something else was running there."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest

from bench import environment
from bench.environment import Observer, capture
from bench.record import GpuState


def test_the_environment_names_what_decides_on_speed() -> None:
    found = capture("cpu")
    assert found.cores >= 1
    assert found.threads_per_rank == 1
    assert found.libraries["transformers"]
    assert found.devices is None


SPIN = "import time\nend = time.process_time() + {}\nwhile time.process_time() < end: pass"


def test_other_work_on_the_cores_makes_a_record_doubtful() -> None:
    observer = Observer("cpu")
    # A process that is not waited for is no child's time: it counts as somebody else's.
    other = subprocess.Popen([sys.executable, "-c", SPIN.format(60)])
    time.sleep(2.5)
    disturbed = observer.conditions()
    other.kill()
    other.wait()
    assert disturbed.others_cores > 0.1 * len(os.sched_getaffinity(0))
    assert "other processes kept" in disturbed.busy
    assert "cores busy" in disturbed.busy


@pytest.mark.parametrize("elsewhere", [0.0, 0.4])
def test_our_own_work_and_that_of_our_ranks_elsewhere_is_not_somebody_elses(
    monkeypatch: pytest.MonkeyPatch, elsewhere: float
) -> None:
    own = sum(os.times()[:4])
    # The cores did what we do, what our ranks did elsewhere, and one second more in two.
    monkeypatch.setattr(environment, "_busy_seconds", lambda: sum(os.times()[:4]) - own + (elsewhere + 1) * spun)
    clock = iter([0.0, 2.0])
    spun = False
    with monkeypatch.context() as patch:
        patch.setattr(environment.time, "monotonic", lambda: next(clock))
        observer = Observer("cpu")
        spun = True
        subprocess.run([sys.executable, "-c", SPIN.format(0.5)], check=True)
        assert observer.conditions(elsewhere).others_cores == pytest.approx(0.5, abs=0.05)


class Nvml(SimpleNamespace):
    """NVML as a machine of two GPUs answers; the second one refuses to tell its power."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    class NVMLError(Exception):
        pass

    def nvmlInit(self) -> None:  # noqa: N802
        self.open = True

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.open = False

    def __getattr__(self, name: str) -> Any:
        answers = {
            "nvmlDeviceGetCount": lambda: 2,
            "nvmlDeviceGetHandleByIndex": lambda index: index,
            "nvmlDeviceGetHandleByUUID": lambda uuid: int(uuid[-1]),
            "nvmlDeviceGetName": lambda gpu: "H200",
            "nvmlSystemGetDriverVersion": lambda: "570.1",
            "nvmlDeviceGetMemoryInfo": lambda gpu: SimpleNamespace(total=(140 + gpu) * 2**30),
            "nvmlDeviceGetCurrentClocksThrottleReasons": lambda gpu: 0x5,
            "nvmlDeviceGetPerformanceState": lambda gpu: 0,
            "nvmlDeviceGetComputeRunningProcesses": lambda gpu: ["somebody"] * gpu,
            "nvmlDeviceGetPowerUsage": self._watts,
            "nvmlDeviceGetEnforcedPowerLimit": lambda gpu: 700_000,
            "nvmlDeviceGetClockInfo": lambda gpu, clock: {1: 1980, 2: 3201}[clock],
            "nvmlDeviceGetMaxClockInfo": lambda gpu, clock: 1980,
            "nvmlDeviceGetTemperature": lambda gpu, sensor: 41,
        }
        return answers[name]

    def _watts(self, gpu: int) -> int:
        if gpu == 1:
            raise self.NVMLError
        return 650_000


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    there = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", there)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return there


def test_gpus_are_named_with_driver_and_memory(nvml: Nvml) -> None:
    found = capture("cuda")
    assert (found.device_name, found.driver, found.devices, found.device_memory_gib) == ("H200", "570.1", 2, 140.0)
    assert not nvml.open


def test_clocks_power_and_other_processes_of_gpus_are_kept(nvml: Nvml) -> None:
    conditions = Observer("cuda").conditions()
    first, second = conditions.gpus_at_start
    assert first == GpuState(
        sm_mhz=1980, sm_most_mhz=1980, memory_mhz=3201, power_state="P0", watts=650.0, limit_watts=700.0, celsius=41,
        held_back=("power cap",), processes=0,
    )  # fmt: skip
    assert (second.watts, second.processes) == (None, 1), "what it does not tell is not known"
    assert "1 other processes were on the GPUs" in conditions.busy


def test_only_visible_gpus_count(nvml: Nvml, monkeypatch: pytest.MonkeyPatch) -> None:
    for visible, memory in (("1", 141.0), ("GPU-uuid-1", 141.0), ("0,1", 140.0)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert capture("cuda").device_memory_gib == memory
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert capture("cuda").device_name == "unknown (NVML tells of no GPU)"
