"""The name of a platform: the device and the processor that figures belong to. No names of hosts."""

from __future__ import annotations

import re

from bench.record import Environment


def platform_name(environment: Environment) -> str:
    """E.g. ``cpu-amd-epyc-2-cores`` or ``cuda-nvidia-h200-intel-xeon-16-cores``."""
    parts = [environment.device]
    if environment.device_name != environment.cpu:
        parts.append(environment.device_name)
    parts += [environment.cpu, f"{environment.cores} cores"]
    return "-".join(re.sub(r"[^a-z0-9]+", "-", part.lower()).strip("-") for part in parts)
