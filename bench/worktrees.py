"""A commit in a worktree of its own, installed into an environment of its own that shares the heavy packages.

Steelyard is built from the commit and installed like a wheel, so what is missing in its packaging is missing here too.
Its dependencies (torch, megatron-core, ...) come from the environment that runs the harness: both sides have the same,
and nothing of two gigabytes is installed twice. A commit that pins other versions of them is refused.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from steelyard.errors import InputError

CONSTRAINTS = "ci/constraints.txt"


@dataclass(frozen=True)
class Installed:
    """A commit that can be run: its full hash, and the Python of its environment."""

    commit: str
    python: Path


def resolve(root: Path, revision: str) -> str:
    """The full hash of a revision in the repository ``root``.

    Raises:
        InputError: there is no such commit, or it pins other versions than this environment has.
    """
    try:
        commit = _git(root, "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}").strip()
    except (subprocess.CalledProcessError, OSError):
        raise InputError(f"revision {revision!r} is not a commit of {root}: name one that 'git log' shows") from None
    _check_pins(root, commit)
    return commit


def _check_pins(root: Path, commit: str) -> None:
    try:
        pins = _git(root, "show", f"{commit}:{CONSTRAINTS}")
    except subprocess.CalledProcessError:
        return
    for line in pins.splitlines():
        text = line.partition("#")[0].strip()
        if not text:
            continue
        pin = Requirement(text)
        have = metadata.version(pin.name)
        if not pin.specifier.contains(have, prereleases=True):
            raise InputError(
                f"commit {commit[:7]} pins {pin} in {CONSTRAINTS}, this environment has {pin.name} {have}: compare "
                f"commits with equal pins, or install the environment of that commit"
            )


@contextmanager
def installed(root: Path, commit: str, folder: Path) -> Iterator[Installed]:
    """``commit`` of the repository ``root``, built and installed under ``folder`` for the time of the context.

    Raises:
        InputError: the commit cannot be checked out or built.
    """
    tree, environment = folder / "tree", folder / "env"
    try:
        _git(root, "worktree", "add", "--detach", "--force", str(tree), commit)
    except subprocess.CalledProcessError as error:
        raise InputError(f"commit {commit[:7]} cannot be checked out: {_last_line(error.stderr)}") from None
    try:
        yield Installed(commit, _install(commit, tree, environment))
    finally:
        subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=root, capture_output=True, check=False)


def _install(commit: str, tree: Path, environment: Path) -> Path:
    venv.create(environment, symlinks=True, with_pip=False)
    python = environment / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", str(tree)]
    try:
        subprocess.run(pip, capture_output=True, text=True, check=True)
    except subprocess.CalledProcessError as error:
        raise InputError(f"commit {commit[:7]} cannot be installed: {_last_line(error.stderr)}") from None
    site = sysconfig.get_path("purelib", vars={"base": str(environment), "platbase": str(environment)})
    # Behind the environment's own packages, so that its Steelyard comes first.
    shared = sysconfig.get_path("purelib")
    Path(site, "shared.pth").write_text(f"import site; site.addsitedir({shared!r})\n")
    return python


def _git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True).stdout


def _last_line(text: str) -> str:
    return text.strip().splitlines()[-1] if text.strip() else "no reason given"
