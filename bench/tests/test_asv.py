"""asv: the benchmarks on both sides, and its commands on this repository's own last two commits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from bench import worktrees
from bench.environment import ROOT

CONFIG = ROOT / "bench" / "asv.conf.json"
# They need no torch, so that each of their many processes starts at once.
QUICK = "Planning|Simulation"


def methods(side: str) -> dict[str, object]:
    environment = {**os.environ, "STEELYARD_BENCH_PROFILE": "smoke", "STEELYARD_BENCH_SIDE": side}
    command = [sys.executable, str(ROOT / "bench" / "tests" / "asv_methods.py")]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_the_optimised_side_is_timed_and_correct() -> None:
    found = methods("optimised")
    assert "skipped" not in found.values()
    for name in ("track_share_over_cap", "track_rows_lost_or_doubled"):
        assert found[f"planning.{name}"] == 0
    assert found["packing.track_wrong_tokens"] == 0
    assert found["packing.track_host_reads"] == 0
    assert found["simulation.track_error_of_equal_micro_batches"] < 1e-9
    assert found["prediction.track_static_bytes_per_parameter"] == pytest.approx(18, rel=0.01)


def test_one_switch_measures_the_naive_side_by_the_same_benchmarks() -> None:
    found = methods("naive")
    skipped = {name.split(".")[0] for name, value in found.items() if value == "skipped"}
    assert skipped == {"simulation", "prediction"}
    assert found["packing.track_wrong_tokens"] == 0
    assert found["packing.track_host_reads"] > 0
    assert found["planning.track_predicted_time_over_ideal"] > 1


def test_an_unknown_profile_or_side_is_named() -> None:
    for variable in ("STEELYARD_BENCH_PROFILE", "STEELYARD_BENCH_SIDE"):
        done = subprocess.run(
            [sys.executable, "-c", "import bench.benchmarks.common"],
            cwd=ROOT, env={**os.environ, variable: "quick"}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert f"{variable}=quick" in done.stderr


@pytest.fixture
def asv(tmp_path: Path) -> Callable[..., str]:
    """Runs asv with the repository's configuration, but with results and the machine's file in a folder of the test."""
    text = CONFIG.read_text()
    for before, after in (
        ('"../results/runs/asv', f'"{tmp_path}/asv'),
        ('"repo": ".."', f'"repo": "{ROOT}"'),
        ('"benchmarks"', f'"{ROOT}/bench/benchmarks"'),
    ):
        assert before in text
        text = text.replace(before, after)
    config = tmp_path / "asv.conf.json"
    config.write_text(text)

    def run(command: str, *arguments: str) -> str:
        environment = {**os.environ, "HOME": str(tmp_path), "STEELYARD_BENCH_PROFILE": "smoke"}
        line = [sys.executable, "-m", "asv", command, "--config", str(config), *arguments]
        done = subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{' '.join(line)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout

    return run


@pytest.mark.long
def test_asv_checks_runs_compares_and_publishes_the_last_two_commits(tmp_path: Path, asv: Callable[..., str]) -> None:
    commits = [worktrees.resolve(ROOT, revision) for revision in ("HEAD~1", "HEAD")]
    asv("machine", "--yes")
    assert "No problems found" in asv("check", "-E", "existing:same")
    for commit in commits:
        with worktrees.installed(ROOT, commit, tmp_path / commit) as one:
            same = ("-E", f"existing:{one.python}", "--set-commit-hash", commit)
            asv("run", *same, "--quick", "--bench", QUICK)
    assert "Planning.time_plan" in asv("compare", *commits)
    asv("publish")
    graphs = {path.name for path in (tmp_path / "asv" / "html").rglob("*.json")}
    assert {"planning.Planning.time_plan.json", "simulation.Simulation.time_simulate.json"} <= graphs
    results = sorted((tmp_path / "asv" / "results").glob("*/????????-*.json"))
    assert sorted(path.name[:8] for path in results) == sorted(commit[:8] for commit in commits)
    for path in results:
        measured = json.loads(path.read_text())["results"]
        assert measured["planning.Planning.track_share_over_cap"][0] == [0.0]
        assert all(sample is not None for sample in measured["planning.Planning.time_plan"][0])


def test_every_timed_benchmark_has_samples_enough_and_a_version_of_its_own() -> None:
    from bench.benchmarks.common import Benchmark

    assert Benchmark.rounds * Benchmark.repeat >= 6
    assert Benchmark.version
