"""Commit against commit, on a repository of two or three commits made from this checkout."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from bench import worktrees
from bench.cli import app
from bench.environment import ROOT
from steelyard.errors import InputError

# Enough on a quiet machine; where others work beside the test, the second number is needed.
PAIRS = (60, 240)
MATRIX = """
description = "of a test"
[model]
layers = 2
hidden = 64
ffn = 192
heads = 4
kv_heads = 2
head_dim = 16
vocab = 512
[defaults]
seed = 7
warmup = 2
[[suite]]
name = "throughput"
workloads = ["rl-code-16k-cap"]
settings = { rows = 4, scale = 200.0, time_limit = 120.0, micro_batch_size = 4 }
[[suite]]
name = "planning"
workloads = ["rl-code-16k-cap"]
layouts = [{ dp = 2 }]
settings = { rows = 32, planners = ["next-fit"] }
"""
PLANNER = "impl/steelyard/balance/microbatch.py"
STEP = "impl/steelyard/step/workers.py"
# Makes a function 5 % slower, whatever the machine does meanwhile: it works on for a share of the time that it took.
SLOWER = """

def _slower(function, clock):
    import functools
    import time

    @functools.wraps(function)
    def slow(*args, **kwargs):
        start = getattr(time, clock)()
        result = function(*args, **kwargs)
        end = start + 1.05 * (getattr(time, clock)() - start)
        while getattr(time, clock)() < end:
            pass
        return result

    return slow

"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository whose first commit is the package as it stands in this checkout, committed or not."""
    root = tmp_path_factory.mktemp("repository")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "impl/steelyard", "ci",
        "pyproject.toml",
         "README.md", "LICENSE"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes((ROOT / name).read_bytes())
    git(root, "init", "--quiet", "--initial-branch", "main")
    commit(root, "as it is")
    git(root, "tag", "as-it-is")
    return root


def git(root: Path, *arguments: str) -> str:
    who = ["-c", "user.name=A Test", "-c", "user.email=test@example.org"]
    return subprocess.run(
        ["git", *who, *arguments], cwd=root, capture_output=True, text=True, check=True
    ).stdout.strip()


def commit(root: Path, message: str) -> str:
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--message", message)
    return git(root, "rev-parse", "HEAD")


def plant(root: Path, message: str, *faults: tuple[str, str]) -> str:
    """A commit that appends texts to files of the first one; returns its hash."""
    git(root, "checkout", "--quiet", "--detach", "as-it-is")
    for file, text in faults:
        with (root / file).open("a") as source:
            source.write(text)
    return commit(root, message)


@pytest.fixture
def ab(tmp_path: Path, repository: Path) -> Iterator[Callable[..., Result]]:
    """Runs the command; afterwards nothing must be left of its worktrees."""
    (tmp_path / "small.toml").write_text(MATRIX)

    def run(reference: str, candidate: str, *arguments: object) -> Result:
        command = ["ab", reference, candidate, "--matrix", tmp_path / "small.toml", "--repository", repository]
        command += ["--out", tmp_path / "runs", "--rounds", 1, "--device", "cpu", "--json", *arguments]
        return CliRunner().invoke(app, [str(argument) for argument in command])

    yield run
    assert git(repository, "worktree", "list").count("\n") == 0


def verdicts(result: Result) -> dict[str, str]:
    """The verdict of every timed metric."""
    answer = json.loads(result.stdout.splitlines()[-1])
    return {one["metric"]: one["verdict"] for one in answer["comparisons"] if one["basis"] == "interleaved"}


@pytest.mark.long
def test_five_per_cent_in_planner_and_step_are_called_regressed(ab: Callable, repository: Path) -> None:
    planner = (PLANNER, f"{SLOWER}\nplan_step = _slower(plan_step, 'process_time')\n")
    step = (STEP, f"{SLOWER}\nWorker.update = _slower(Worker.update, 'process_time')\n")
    slow = plant(repository, "5 % slower", planner, step)
    expected = {"planning_ms": "regressed", "step_processor_seconds": "regressed"}
    for pairs in PAIRS:
        result = ab("as-it-is", slow, "--pairs", pairs)
        if verdicts(result).items() >= expected.items():
            break
    assert verdicts(result).items() >= expected.items(), result.output
    assert result.exit_code == 1


@pytest.mark.long
def test_an_identical_commit_is_neutral(ab: Callable) -> None:
    result = ab("as-it-is", "as-it-is", "--pairs", 24)
    assert set(verdicts(result).values()) == {"neutral"}, result.output
    assert result.exit_code == 0


def test_an_unknown_revision_is_one_line(ab: Callable) -> None:
    result = ab("as-it-is", "nowhere", "--pairs", 1)
    assert result.exit_code == 2
    assert "'nowhere'" in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_commit_with_other_pins_is_refused(repository: Path) -> None:
    pinned = plant(repository, "another torch", (worktrees.CONSTRAINTS, "\ntorch==1.0\n"))
    with pytest.raises(InputError, match="torch==1.0"):
        worktrees.resolve(repository, pinned)
