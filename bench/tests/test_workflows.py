"""The workflows obey GitHub's schema and our rules: pinned actions, least permissions, no GPU for strangers."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from bench.environment import ROOT

FOLDER = ROOT / ".github" / "workflows"
FILES = sorted(FOLDER.glob("*.yml"))
COMMENT = "./.github/workflows/comment.yml"
PINNED = re.compile(r"uses: [\w.-]+/[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+$")


def read(path: Path) -> dict[Any, Any]:
    return yaml.safe_load(path.read_text())


def jobs() -> list[Any]:
    return [
        pytest.param(path, job, id=f"{path.stem}-{name}")
        for path in FILES
        for name, job in read(path)["jobs"].items()
    ]  # fmt: skip


def schema_says(*files: Path) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "check_jsonschema",
        "--builtin-schema",
        "vendor.github-workflows",
        *map(str, files),
    ]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_workflows_obey_the_published_schema() -> None:
    assert {path.stem for path in FILES} >= {"ci", "gpu", "comment"}
    found = schema_says(*FILES)
    assert found.returncode == 0, found.stdout


@pytest.mark.parametrize(
    ("right", "wrong"),
    [("runs-on:", "runs-onn:"), ("timeout-minutes: 90", "timeout-minutes: long"), ("steps:", "step:")],
)
def test_the_schema_refuses_what_is_wrong(tmp_path: Path, right: str, wrong: str) -> None:
    source = (FOLDER / "gpu.yml").read_text()
    assert right in source
    broken = tmp_path / "gpu.yml"
    broken.write_text(source.replace(right, wrong))
    assert schema_says(broken).returncode == 1


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_actions_are_pinned_to_a_commit_with_its_version_beside_it(path: Path) -> None:
    used = [line.strip().removeprefix("- ") for line in path.read_text().splitlines() if "uses:" in line]
    assert used
    assert [line for line in used if not PINNED.match(line) and line != f"uses: {COMMENT}"] == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_workflow_may_read_and_only_comments_may_write(path: Path) -> None:
    workflow = read(path)
    assert workflow["permissions"] == {"contents": "read"}
    # YAML 1.1 reads the key `on` as true.
    assert "pull_request_target" not in workflow[True], "it would run a stranger's code with our rights"
    for job in workflow["jobs"].values():
        comments = path.stem == "comment" or job.get("uses") == COMMENT
        assert job.get("permissions") == ({"pull-requests": "write"} if comments else None)


def test_what_may_write_runs_nothing_of_the_pull_request() -> None:
    source = (FOLDER / "comment.yml").read_text()
    assert "checkout" not in source
    assert not re.search(r"ci/\w+\.sh|python|\bruns/\S+\.sh", source)


@pytest.mark.parametrize(("path", "job"), jobs())
def test_a_job_ends_and_leaves_no_credentials(path: Path, job: dict[str, Any]) -> None:
    assert "uses" in job or job["timeout-minutes"]
    for step in job.get("steps", []):
        if "actions/checkout" in step.get("uses", ""):
            assert step["with"]["persist-credentials"] is False


@pytest.mark.parametrize(("path", "job"), jobs())
def test_what_an_event_says_reaches_scripts_as_a_variable_only(path: Path, job: dict[str, Any]) -> None:
    for step in job.get("steps", []):
        script = step.get("run", "")
        assert "${{" not in script, "the text of an expression becomes part of the script"
        assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0


def test_every_script_that_is_named_is_there() -> None:
    named = {name for path in FILES for name in re.findall(r"\bci/\w+\.sh", path.read_text())}
    assert named >= {"ci/lint.sh", "ci/test.sh", "ci/gate.sh", "ci/gpu.sh", "ci/readme.sh", "ci/asv.sh"}
    assert [name for name in named if not (ROOT / name).is_file()] == []


def test_newer_pushes_take_the_place_of_older_runs() -> None:
    for path in FILES:
        workflow = read(path)
        assert "concurrency" in workflow or "workflow_call" in workflow[True]


# Who may use our own machines

OURS, THEIRS = "we/steelyard", "stranger/steelyard"


def event(name: str, head: str = OURS, labels: tuple[str, ...] = ()) -> SimpleNamespace:
    pull_request = SimpleNamespace(
        head=SimpleNamespace(repo=SimpleNamespace(full_name=head)), labels=SimpleNamespace(names=labels)
    )
    return SimpleNamespace(event_name=name, repository=OURS, event=SimpleNamespace(pull_request=pull_request))


def holds(condition: str, github: SimpleNamespace, **needs: str) -> bool:
    """Evaluate an expression of GitHub's; ``needs``: how the jobs before ended."""
    python = condition.replace("&&", " and ").replace("||", " or ").replace(".labels.*.name", ".labels.names")
    names = {
        "github": github,
        "contains": lambda values, value: value in values,
        "cancelled": lambda: False,
        "needs": SimpleNamespace(**{job: SimpleNamespace(result=result) for job, result in needs.items()}),
    }
    return bool(eval(python.replace("!cancelled()", "not cancelled()"), names))


def own_machine_jobs() -> list[dict[str, Any]]:
    return [job for path in FILES for job in read(path)["jobs"].values() if "self-hosted" in str(job.get("runs-on"))]


@pytest.mark.parametrize(
    ("github", "expected"),
    [
        (event("push"), True),
        (event("schedule"), True),
        (event("pull_request"), False),
        (event("pull_request", labels=("docs",)), False),
        (event("pull_request", labels=("gpu",)), True),
        (event("pull_request", THEIRS, ("gpu",)), False),
        (event("pull_request", THEIRS), False),
    ],
    ids=["push", "schedule", "no label", "other label", "label", "fork with label", "fork"],
)
def test_no_fork_runs_on_our_machines(github: SimpleNamespace, expected: bool) -> None:
    found = own_machine_jobs()
    assert found
    for job in found:
        assert holds(job["if"], github) is expected


def test_our_machines_ask_for_approval_and_are_the_matrices_of_the_harness() -> None:
    (job,) = own_machine_jobs()
    assert job["environment"] == "gpu"
    assert [step["run"] for step in job["steps"] if "run" in step] == ["bash ci/gpu.sh"]
    assert {one["machine"] for one in job["strategy"]["matrix"]["include"]} == {"h200x1", "h100x8"}


@pytest.mark.parametrize(("head", "comments"), [(OURS, True), (THEIRS, False)], ids=["ours", "fork"])
def test_a_report_is_commented_after_failures_too_but_not_for_a_fork(head: str, comments: bool) -> None:
    github = event("pull_request", head, ("gpu",))
    ended = {"gate": "failure", "weigh": "failure" if holds(own_machine_jobs()[0]["if"], github) else "skipped"}
    for name in ("ci", "gpu"):
        job = read(FOLDER / f"{name}.yml")["jobs"]["comment"]
        assert holds(job["if"], github, **ended) is comments
        assert not holds(job["if"], event("push"), gate="success", weigh="success")
