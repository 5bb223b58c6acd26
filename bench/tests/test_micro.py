"""The micro-benchmarks: off in the plain run, and with a history that later runs are compared with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

from bench.environment import ROOT

ONE = "bench/micro/test_micro.py::test_simulate[4-2-64]"


def micro(storage: Path, *arguments: str) -> subprocess.CompletedProcess:
    quick = ("--benchmark-max-time=0.05", "--benchmark-min-rounds=5", "-p", "no:cacheprovider")
    command = [sys.executable, "-m", "pytest", "-q", ONE, *quick, f"--benchmark-storage=file://{storage}", *arguments]
    return subprocess.run(command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, check=False)


def test_the_plain_run_leaves_them_alone() -> None:
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    assert not any("bench/micro".startswith(path) for path in options["testpaths"])


def test_a_run_is_kept_and_the_next_is_compared_with_it(tmp_path: Path) -> None:
    first = micro(tmp_path, "--benchmark-autosave")
    assert first.returncode == 0, first.stdout
    (kept,) = tmp_path.rglob("*.json")
    # As if the kept run had been a hundred times as fast: the same code is then far slower than it.
    data = json.loads(kept.read_text())
    data["benchmarks"][0]["stats"]["median"] /= 100
    kept.write_text(json.dumps(data))
    second = micro(tmp_path, "--benchmark-compare", "--benchmark-compare-fail=median:200%")
    assert "(0001" in second.stdout
    assert "Performance has regressed" in second.stdout + second.stderr
    assert second.returncode != 0
