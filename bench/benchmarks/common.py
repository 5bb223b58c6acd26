"""Profiles, the side that is measured, and settings that all benchmarks share."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

# suites/ of this checkout; the installed steelyard is not touched by it.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

PROFILES = ("smoke", "regular", "full")
SIDES = ("optimised", "naive")


def _choice(variable: str, allowed: tuple[str, ...], default: str) -> str:
    value = os.environ.get(variable, default)
    if value not in allowed:
        raise SystemExit(f"{variable}={value}: must be one of {', '.join(allowed)}")
    return value


PROFILE = _choice("STEELYARD_BENCH_PROFILE", PROFILES, "regular")
SIDE = _choice("STEELYARD_BENCH_SIDE", SIDES, "optimised")


def by_profile(smoke: Any, regular: Any, full: Any) -> Any:
    """The value of the profile that was chosen."""
    return dict(zip(PROFILES, (smoke, regular, full), strict=True))[PROFILE]


def needs(module: str) -> Any:
    """A module of the installed steelyard; a commit without it is skipped."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise NotImplementedError(f"this commit has no {module}") from error


def without_naive_side() -> None:
    """Skip where there is nothing naive to measure."""
    if SIDE == "naive":
        raise NotImplementedError("there is no naive side")


class Benchmark:
    """Ten samples a side in two rounds of processes: asv's own test cannot speak with fewer than about six."""

    version = "1"
    timeout = 300
    rounds = 2
    repeat = 5
    number = 1
    warmup_time = 0.0
