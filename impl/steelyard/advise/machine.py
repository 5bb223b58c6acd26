"""GPUs as far as memory and speed of a training step depend on them: shipped figures, or a user's own."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from steelyard.errors import InputError
from steelyard.hints import did_you_mean


@dataclass(frozen=True)
class Gpu:
    """One GPU and its links.

    Attributes:
        name: for messages.
        gib: memory in GiB.
        tflops: dense bfloat16 matrix products, 1e12 FLOP/s at the peak.
        hbm: memory bandwidth in GB/s.
        nvlink: GB/s in one direction to the other GPUs of a node.
        network: GB/s in one direction to GPUs of other nodes.
        pcie: GB/s in one direction to the host's memory.

    Raises:
        InputError: a figure is not a number above 0.
    """

    name: str
    gib: float
    tflops: float
    hbm: float
    nvlink: float
    network: float
    pcie: float

    def __post_init__(self) -> None:
        for each in fields(self)[1:]:
            value = getattr(self, each.name)
            if not (isinstance(value, int | float) and math.isfinite(value) and value > 0):
                raise InputError(f"GPU {self.name}: {each.name}={value!r} must be a number above 0")


# NVIDIA's data sheets (A100 80GB SXM, H100 SXM, H200 SXM, DGX B200): dense bfloat16, memory and NVLink, whose figures
# count both directions (600, 900, 900, 1,800 GB/s) and are halved here. Memory is what nvidia-smi reports, rounded.
# Network: one port per GPU of a DGX, 200 Gb/s with A100 and 400 Gb/s later. PCIe 4.0 x16 with A100, 5.0 x16 later.
GPUS = {
    "a100": Gpu("a100", 80, 312, 2039, 300, 25, 32),
    "h100": Gpu("h100", 79.6, 989, 3350, 450, 50, 64),
    "h200": Gpu("h200", 140.4, 989, 4800, 450, 50, 64),
    "b200": Gpu("b200", 179, 2250, 8000, 900, 50, 64),
}


def gpu_named(name: str) -> Gpu:
    """A shipped GPU; upper and lower case are the same."""
    if name.casefold() not in GPUS:
        raise InputError(f"unknown GPU {name!r}{did_you_mean(name, GPUS)}: choose one of {', '.join(GPUS)}")
    return GPUS[name.casefold()]
