"""Runs every asv benchmark of a profile once in this process, and prints what the tracked ones found as JSON.

A plain caller of the classes as asv would call them, since a process of its own for each would take minutes.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

BENCH = Path(__file__).resolve().parents[1]
MODULES = ("planning", "packing", "simulation", "step", "prediction")


def main() -> None:
    sys.path.insert(0, str(BENCH))
    found: dict[str, object] = {}
    for module in MODULES:
        loaded = importlib.import_module(f"benchmarks.{module}")
        for cls in (
            one for one in vars(loaded).values() if isinstance(one, type) and one.__module__ == loaded.__name__
        ):
            for name in (one for one in dir(cls) if one.startswith(("time_", "track_", "peakmem_"))):
                found[f"{module}.{name}"] = call(cls, name)
    print(json.dumps(found))


def call(cls: type, name: str) -> object:
    benchmark, argument = cls(), cls.params[0][0]
    try:
        benchmark.setup(argument)
    except NotImplementedError:
        return "skipped"
    try:
        return getattr(benchmark, name)(argument)
    finally:
        getattr(benchmark, "teardown", lambda _: None)(argument)


if __name__ == "__main__":
    main()
