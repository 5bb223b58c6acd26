"""Plants every fault of catalogue.toml, one at a time, and checks that the test named beside it fails.

    python impl/tests/mutations/run.py            the whole catalogue
    python impl/tests/mutations/run.py cap count  the faults whose rule contains one of the words

A fault is a piece of source text and what takes its place. It is planted in a copy of the checkout, never in the
checkout itself. A fault that no test notices ends the run with exit code 1: then the rule is not guarded.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

ROOT = Path(__file__).resolve().parents[3]
CATALOGUE = Path(__file__).with_name("catalogue.toml")
COPIED = ("impl", "suites", "bench", "ci", ".github", "README.md", "pyproject.toml")
TIME_LIMIT_S = 300
# pytest's exit code for "tests ran and some failed"; others mean that the test did not run at all.
TESTS_FAILED = 1


@dataclass(frozen=True)
class Fault:
    """One rule, the change that breaks it, and the test that must notice."""

    rule: str
    file: str
    find: str
    replace: str
    test: str

    def plant(self, root: Path) -> None:
        """Write the broken file into a copy of the checkout.

        Raises:
            ValueError: the text to replace is not there exactly once.
        """
        path = root / self.file
        source = path.read_text()
        if source.count(self.find) != 1:
            raise ValueError(f"{self.file} holds {source.count(self.find)} times, not once: {self.find!r}")
        path.write_text(source.replace(self.find, self.replace))


def read_catalogue() -> list[Fault]:
    """Every fault, in the order of the file."""
    return [Fault(**entry) for entry in tomllib.loads(CATALOGUE.read_text())["fault"]]


def is_noticed(fault: Fault) -> tuple[bool, str]:
    """Whether the named test fails with the fault planted, and what pytest said."""
    with tempfile.TemporaryDirectory(prefix="steelyard-fault-") as folder:
        copy = Path(folder)
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
            else:
                shutil.copy(source, copy / name)
        fault.plant(copy)
        # The copy comes before the installed package.
        environment = {**os.environ, "PYTHONPATH": f"{copy / 'impl'}{os.pathsep}{copy}", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "", fault.test]
        result = subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, text=True, timeout=TIME_LIMIT_S, check=False
        )
        return result.returncode == TESTS_FAILED, result.stdout[-3000:] + result.stderr[-1000:]


def main(words: list[str]) -> int:
    console = Console()
    faults = [fault for fault in read_catalogue() if not words or any(word in fault.rule for word in words)]
    unnoticed = 0
    for number, fault in enumerate(faults, 1):
        noticed, output = is_noticed(fault)
        console.print(f"[{number}/{len(faults)}] {'noticed' if noticed else 'NOT NOTICED'}: {fault.rule}", markup=False)
        if not noticed:
            unnoticed += 1
            console.print(output, markup=False)
    console.print(f"{len(faults) - unnoticed} of {len(faults)} faults noticed")
    return 1 if unnoticed or not faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
