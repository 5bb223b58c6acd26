"""Runs the commands of README.md's code blocks in a fresh clone, and prints which of them passed.

    bash ci/readme.sh                      all but the slow ones, some of those as a dry run
    bash ci/readme.sh --all                the slow ones too (hours)
    bash ci/readme.sh --env .tox/harness   in an environment that is there, instead of installing one in the clone
    bash ci/readme.sh --only asv           only commands that contain this text
    bash ci/readme.sh --list               only show what would be done

The clone holds the last commit, not the changes of the working tree. Every line of a shell block is a command, which
must end with exit code 0. A comment before the block says otherwise; its rules are separated by semicolons:

    <!-- run: text -->                  no commands, such as a tree of folders
    <!-- run: needs 8 GPUs -->          not run, and why
    <!-- run: slow -->                  run with --all only; "slow selftest ab": only commands with one of these words
    <!-- run: dry-run -->               slow commands get --dry-run where --all is not given
    <!-- run: exit gate=0,1,3 -->       commands with this word may end with one of these codes
    <!-- run: with python -u -->        the block is saved, and its path added to this command

In a command ``RUN``, ``RUN_A`` and ``RUN_B`` stand for the folder of a run, and ``rollouts.csv`` is there to be read.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SHELL = ("", "bash", "sh", "shell", "console")
MARKER = re.compile(r"<!--\s*run:\s*(.*?)\s*-->", re.DOTALL)
COMMENT = re.compile(r"(^|\s+)#.*$")
RUN_NAMES = re.compile(r"\bRUN(_A|_B)?\b")
QUICK_LIMIT_S, SLOW_LIMIT_S = 900, 7200
# What a shell that a reader opens does not hold: this program runs in the harness environment itself.
OURS = ("HARNESS_PYTHON", "OMP_NUM_THREADS", "PYTHONPATH", "VIRTUAL_ENV")
# A run for commands that judge or show one; the quickest that has records of both sides.
MAKES_A_RUN = ".tox/harness/bin/python -m bench run --only planning"
ROLLOUTS = "prompt_tokens,response_tokens\n" + "".join(f"{64 + row},{300 * (1 + row % 7)}\n" for row in range(64))


class ReadmeError(Exception):
    """A block of README.md does not say how it is to be run."""


@dataclass(frozen=True)
class Command:
    """One command of README.md.

    Attributes:
        line: where it stands, from 1.
        text: as it is run.
        block: saved to a file whose path is added to ``text``; empty for a command of the shell.
        why_not: why it is not run; empty when it is.
        codes: exit codes that it may end with.
        slow: whether it may take long.
    """

    line: int
    text: str
    block: str = ""
    why_not: str = ""
    codes: tuple[int, ...] = (0,)
    slow: bool = False


@dataclass(frozen=True)
class Rules:
    """What the comment before a block says; see the head of this file."""

    text: bool = False
    needs: str = ""
    slow: tuple[str, ...] | None = None
    dry_run: bool = False
    exits: tuple[tuple[str, tuple[int, ...]], ...] = ()
    command: str = ""

    @classmethod
    def of(cls, marker: str) -> Rules:
        """Read a marker.

        Raises:
            ReadmeError: a rule is unknown.
        """
        found: dict = {}
        for rule in filter(None, map(str.strip, marker.split(";"))):
            name, _, rest = rule.partition(" ")
            if name == "text" and not rest:
                found["text"] = True
            elif name == "needs" and rest:
                found["needs"] = rest
            elif name == "slow":
                found["slow"] = tuple(rest.split())
            elif name == "dry-run" and not rest:
                found["dry_run"] = True
            elif name == "exit" and re.fullmatch(r"(\S+=\d+(,\d+)*\s*)+", rest):
                pairs = (one.split("=") for one in rest.split())
                found["exits"] = tuple((word, tuple(map(int, codes.split(",")))) for word, codes in pairs)
            elif name == "with" and rest:
                found["command"] = rest
            else:
                raise ReadmeError(f"rule {rule!r} is unknown: see the head of ci/readme.py")
        return cls(**found)

    def is_slow(self, command: str) -> bool:
        words = shlex.split(command, comments=True)
        return self.slow is not None and (not self.slow or any(word in words for word in self.slow))

    def codes(self, command: str) -> tuple[int, ...]:
        words = shlex.split(command, comments=True)
        return next((codes for word, codes in self.exits if word in words), (0,))


@dataclass(frozen=True)
class Block:
    """A code block: its language, its first line in the file (from 1), its text and its rules."""

    language: str
    line: int
    text: str
    rules: Rules

    def commands(self, everything: bool) -> Iterator[Command]:
        """The commands of the block; those that are not run say why.

        Raises:
            ReadmeError: the block is no shell's, and has no rule that says what to do with it.
        """
        rules = self.rules
        if rules.text:
            return
        if rules.command:
            yield Command(self.line, rules.command, block=self.text)
        elif self.language in SHELL:
            for line, text in _lines(self.text, self.line):
                yield self._command(line, text, everything)
        elif rules.needs:
            yield Command(self.line, f"the {self.language} block", why_not=f"needs {rules.needs}")
        else:
            raise ReadmeError(
                f"README.md, line {self.line}: a block of {self.language} has no comment that says how it is run: "
                f"see the head of ci/readme.py"
            )

    def _command(self, line: int, text: str, everything: bool) -> Command:
        rules, slow = self.rules, self.rules.is_slow(text)
        if rules.needs:
            return Command(line, text, why_not=f"needs {rules.needs}")
        if slow and not everything:
            if rules.dry_run:
                return Command(line, f"{COMMENT.sub('', text)} --dry-run")
            return Command(line, text, why_not="slow: only with --all")
        return Command(line, text, codes=rules.codes(text), slow=slow)


def _lines(text: str, first: int) -> Iterator[tuple[int, str]]:
    """Commands with their line numbers; a backslash at the end of a line continues it."""
    start, parts = first, []
    for number, line in enumerate(text.splitlines(), first):
        parts.append(line.removesuffix("\\").strip())
        if line.endswith("\\"):
            continue
        command = " ".join(parts)
        if COMMENT.sub("", command).strip():
            yield start, command
        start, parts = number + 1, []


def blocks(markdown: str) -> Iterator[Block]:
    """The code blocks of a page, in order, each with the rules of the comment right before it.

    Raises:
        ReadmeError: a comment is not understood, or stands before something else than a block.
    """
    from markdown_it import MarkdownIt

    marker = ""
    for token in MarkdownIt("commonmark").parse(markdown):
        if token.type == "html_block" and (match := MARKER.search(token.content)):
            marker = match[1]
        elif token.type in ("fence", "code_block"):
            language = token.info.strip().split(" ")[0]
            # A fence's first line is the fence itself.
            line = token.map[0] + (2 if token.type == "fence" else 1)
            yield Block(language, line, token.content, Rules.of(marker))
            marker = ""
        elif marker:
            raise ReadmeError(f"README.md: 'run: {marker}' stands before no code block: move or remove it")


class Clone:
    """A fresh clone of this repository, in which commands run one after the other."""

    def __init__(self, folder: Path, environment: Path | None) -> None:
        self.folder = folder / "clone"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(self.folder)], check=True)
        (self.folder / "rollouts.csv").write_text(ROLLOUTS)
        self.variables = {name: value for name, value in os.environ.items() if name not in OURS}
        if environment is not None:
            (self.folder / ".tox").mkdir()
            (self.folder / ".tox" / "harness").symlink_to(environment.resolve())
            # That environment has another checkout installed; this one must come first.
            self.variables |= {
                "HARNESS_PYTHON": str(environment.resolve() / "bin" / "python"),
                "PYTHONPATH": f"{self.folder / 'impl'}{os.pathsep}{self.folder}",
                "OMP_NUM_THREADS": "1",
            }

    def run(self, command: Command) -> tuple[bool, str]:
        """Run a command; whether it ended as it may, and what it said if not."""
        text = command.text
        if command.block:
            file = self.folder.parent / f"block_{command.line}.py"
            file.write_text(command.block)
            text += f" {shlex.quote(str(file))}"
        elif RUN_NAMES.search(COMMENT.sub("", text)):
            text = RUN_NAMES.sub(self._a_run(), COMMENT.sub("", text))
        code, said = self._shell(text, SLOW_LIMIT_S if command.slow else QUICK_LIMIT_S)
        return code in command.codes, f"exit code {code}\n{said}"

    def _a_run(self) -> str:
        runs = self.folder / "results" / "runs"
        if not any(runs.glob("*/records.jsonl")):
            code, said = self._shell(MAKES_A_RUN, QUICK_LIMIT_S)
            if code:
                raise ReadmeError(f"{MAKES_A_RUN}: exit code {code}\n{said}")
        return str(min(runs.glob("*/records.jsonl")).parent.relative_to(self.folder))

    def _shell(self, text: str, limit: float) -> tuple[int, str]:
        with tempfile.TemporaryFile("w+", errors="replace") as log:
            process = subprocess.Popen(
                ["bash", "-c", text],
                cwd=self.folder,
                env=self.variables,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = process.wait(limit)
            except BaseException as error:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                if not isinstance(error, subprocess.TimeoutExpired):
                    raise
                code = 124
            log.seek(0)
            return code, log.read()[-3000:]


def main() -> int:
    options = _options()
    try:
        found = [
            command for block in blocks((ROOT / "README.md").read_text()) for command in block.commands(options.all)
        ]
        found = [command for command in found if options.only in command.text]
        if options.list:
            _show([(command, command.why_not or "to be run", 0.0) for command in found])
            return 0
        with tempfile.TemporaryDirectory(prefix="steelyard-readme-") as folder:
            results = list(_run_all(Clone(Path(folder), options.env), found))
    except ReadmeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    _show(results)
    return int(any(result.startswith("FAILED") for _, result, _ in results))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Run the commands of README.md in a fresh clone.")
    parser.add_argument("--all", action="store_true", help="the slow ones too")
    parser.add_argument("--env", type=Path, metavar="FOLDER", help="a harness environment that is there already")
    parser.add_argument("--only", default="", metavar="TEXT", help="only commands that contain TEXT")
    parser.add_argument("--list", action="store_true", help="only show what would be done")
    options = parser.parse_args()
    if options.env is not None and not (options.env / "bin" / "python").exists():
        parser.error(f"--env {options.env}: has no bin/python: name a folder such as .tox/harness")
    return options


def _run_all(clone: Clone, commands: list[Command]) -> Iterator[tuple[Command, str, float]]:
    for command in commands:
        if command.why_not:
            yield command, command.why_not, 0.0
            continue
        print(f"README.md, line {command.line}: {COMMENT.sub('', command.text)}", file=sys.stderr, flush=True)
        start = time.monotonic()
        passed, said = clone.run(command)
        if not passed:
            print(said, file=sys.stderr)
        yield command, "passed" if passed else f"FAILED: {said.splitlines()[0]}", time.monotonic() - start


def _show(results: list[tuple[Command, str, float]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("line", "command", "result", "s")
    for command, result, seconds in results:
        table.add_row(str(command.line), COMMENT.sub("", command.text), result, f"{seconds:.0f}" if seconds else "")
    Console(width=160).print(table)


if __name__ == "__main__":
    sys.exit(main())
