"""ci/gpu.sh: refusals in one line, and on a CPU the whole way from a run to its table and its exit code."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bench.environment import ROOT

MATRIX = """description = "one quick cell"
[model]
layers = 2
hidden = 64
ffn = 96
heads = 4
kv_heads = 2
head_dim = 16
vocab = 256
[[suite]]
name = "planning"
workloads = ["rl-code-16k-cap"]
layouts = [{ dp = 2, pp = 2 }]
settings = { rows = 32, pairs = 1 }
"""


def gpu_sh(*arguments: str, root: Path = ROOT, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HARNESS_PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": "", **variables}
    # A checkout's own sources, and those of the one that is tested.
    environment.pop("PYTHONPATH", None)
    command = ["bash", str(root / "ci" / "gpu.sh"), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=240)


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({}, "torch finds no GPU here"),
        ({"BUDGET": "8m"}, "BUDGET=8m: give whole seconds"),
        ({"BUDGET": "30"}, "BUDGET=30: give whole seconds, more than the"),
        ({"WHEELS": "/nowhere"}, "WHEELS=/nowhere: holds no wheels"),
        ({"WHEELS": "/nowhere", "HARNESS_PYTHON": ""}, "HARNESS_PYTHON=python3"),
        ({"HARNESS_PYTHON": "no-such-python"}, "HARNESS_PYTHON=no-such-python is no program"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_what_cannot_run_is_said_in_one_line(tmp_path: Path, variables: dict[str, str], says: str) -> None:
    done = gpu_sh(RUNS=str(tmp_path), **variables)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_needs_no_gpu_and_shows_what_one_gpu_is_to_show(tmp_path: Path) -> None:
    done = gpu_sh("--dry-run", RUNS=str(tmp_path))
    assert done.returncode == 0, done.stderr
    cells = [line for line in done.stdout.splitlines() if "/" in line]
    suites = {line.split("/")[0] for line in cells}
    assert suites >= {"throughput", "packing", "handover", "oom", "memory", "planning", "parity"}
    assert any("float32" in line for line in cells)
    assert any("bfloat16" in line for line in cells)
    unable = [line for line in cells if "cannot run" in line]
    assert [line for line in unable if "cannot run: it needs 1 GPU" not in line] == []
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout of its own, since reference results are committed in it."""
    root = tmp_path_factory.mktemp("checkout")
    for name in ("impl", "suites", "bench", "ci"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__", "tests", "*.egg-info"))
    (root / ".gitignore").write_text("__pycache__/\nresults/runs/\n")
    (root / "quick.toml").write_text(MATRIX)
    subprocess.run(["git", "init", "--quiet"], cwd=root, check=True)
    commit(root)
    return root


def commit(root: Path) -> None:
    name = ["-c", "user.name=test", "-c", "user.email=test@example.org"]
    subprocess.run(["git", "add", "."], cwd=root, check=True)
    subprocess.run(["git", *name, "commit", "--quiet", "--message", "state"], cwd=root, check=True)


def run_quick(root: Path) -> tuple[subprocess.CompletedProcess[str], Path]:
    done = gpu_sh(root=root, DEVICE="cpu", MATRIX="quick.toml")
    folder = root / done.stdout.splitlines()[-1].removeprefix("records: ")
    return done, folder


def test_a_run_ends_with_a_short_table_and_fails_when_it_regressed(checkout: Path, tmp_path: Path) -> None:
    # Without reference results nothing is judged, and nothing fails.
    done, folder = run_quick(checkout)
    assert done.returncode == 0, done.stderr
    assert "not comparable: there are no reference results" in done.stdout
    table = done.stdout[done.stdout.index("found") :]
    assert "planning" in table
    assert "1/1" in table
    assert len(table.splitlines()) < 12

    # The records are read anywhere, without what else the run left behind.
    elsewhere = tmp_path / folder.name
    elsewhere.mkdir()
    shutil.copy(folder / "records.jsonl", elsewhere)
    in_bench = {"cwd": checkout, "env": {**os.environ, "PYTHONPATH": f"{checkout / 'impl'}{os.pathsep}{checkout}"}}
    report = [sys.executable, "-m", "bench", "report", str(elsewhere)]
    assert subprocess.run(report, **in_bench, capture_output=True, check=False).returncode == 0
    assert (elsewhere / "report.md").is_file()

    # Reference results that predicted half of it: the same run has now regressed.
    record = [sys.executable, "-m", "bench", "gate", str(folder), "--record"]
    subprocess.run(record, **in_bench, capture_output=True, check=True)
    (reference,) = (checkout / "results" / "reference").glob("*/quick.json")
    content = json.loads(reference.read_text())
    (cell,) = content["cells"].values()
    predicted = [
        one for one in cell["series"] if one["side"] == "optimised" and one["direction"] == "lower"
        and one["source"] == "predicted"
    ]  # fmt: skip
    assert predicted
    for one in predicted:
        one["values"] = [value / 2 for value in one["values"]]
    reference.write_text(json.dumps(content))
    commit(checkout)
    done, folder = run_quick(checkout)
    assert done.returncode == 1, done.stdout
    assert "regressed" in done.stdout
    assert "regressed" in "".join((folder / "report.md").read_text().splitlines()[:5]).lower(), "not in the comment"
    assert "1/1" in done.stdout[done.stdout.index("found") :], "the table comes last all the same"
