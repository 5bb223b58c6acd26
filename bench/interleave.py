"""Two processes that measure the same cells in turns: whatever disturbs the machine disturbs both alike.

A side is a process of ``bench.ab_worker`` in the environment of its commit. Only one works at any time: it goes on
until it asks for its next turn (``suites.turns``) or has answered, then the other does. A coin says who goes first in
every turn: a regular order would fall in step with whatever else comes regularly (the longer steps of the naive side,
say) and make equal sides look different; after a fair coin, samples of equal sides can be exchanged, which is all that
the tests of ``bench.stats`` assume. Suites that never ask run as a whole, one side after the other. Both sides hold
their model at the same time, so a cell needs twice its memory.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import selectors
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from steelyard.errors import SteelyardError
from suites import turns

START_LIMIT_S = 300.0
# A side also waits while the other works, and its clock runs on.
TIME_LIMIT_FACTOR = 3.0


class SideFailed(SteelyardError):  # noqa: N818 - the name says what happened
    """The process of a side ended, or gave no sign in time."""


class Side:
    """The process of one side."""

    def __init__(self, name: str, python: Path, root: Path, folder: Path) -> None:
        self.name = name
        self._fifos = [folder / turns.REQUEST, folder / turns.GO]
        for path in self._fifos:
            os.mkfifo(path)
        # Opened for both directions, so that neither end ever waits for the other to open it.
        self._request, self._go = (os.open(path, os.O_RDWR | os.O_NONBLOCK) for path in self._fifos)
        environment = {
            **os.environ,
            "PYTHONPATH": str(root),
            "OMP_NUM_THREADS": "1",
            turns.VARIABLE: str(folder),
        }
        self._process = subprocess.Popen(
            [str(python), "-m", "bench.ab_worker"],
            cwd=root,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(folder / "log").open("wb"),
        )
        self._log = folder / "log"
        self.answer: dict[str, Any] | None = None

    def start(self, cell: dict[str, Any], device: str | None, limit: float) -> None:
        """Hand over a cell; returns when the side asks for a turn or has answered."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._request, 1024)  # what a side that failed has left
        self.answer = None
        self._process.stdin.write(json.dumps({"cell": cell, "device": device}).encode() + b"\n")
        self._process.stdin.flush()
        self._wait(limit)

    def go_on(self, limit: float) -> None:
        """Give the turn; returns when the side asks for the next or has answered."""
        os.write(self._go, b"g")
        self._wait(limit)

    def first_words(self) -> dict[str, Any]:
        """What the side says when it is ready."""
        self._wait(START_LIMIT_S)
        assert self.answer is not None
        return self.answer

    def _wait(self, limit: float) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._request, selectors.EVENT_READ)
            selector.register(self._process.stdout, selectors.EVENT_READ)
            ready = [key.fileobj for key, _ in selector.select(limit)]
        if not ready:
            raise SideFailed(f"side {self.name} gave no sign for {limit:g} s")
        if self._request in ready:
            os.read(self._request, 1)
            return
        line = self._process.stdout.readline()
        if not line:
            tail = self._log.read_text(errors="replace").strip().splitlines()[-1:]
            raise SideFailed(f"side {self.name} ended: {' '.join(tail) or 'without a word'}")
        self.answer = json.loads(line)

    def close(self) -> None:
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        os.close(self._request)
        os.close(self._go)


@contextlib.contextmanager
def sides(pythons: dict[str, Path], root: Path) -> Iterator[list[Side]]:
    """The processes of all sides, ready to measure with the harness in ``root``.

    Args:
        pythons: the interpreter of each side, by its name.
    """
    with contextlib.ExitStack() as stack:
        started = []
        for name, python in pythons.items():
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=f"steelyard-{name}-")))
            started.append(Side(name, python, root, folder))
            stack.callback(started[-1].close)
        yield started


def take_turns(
    one: Side, other: Side, cell: dict[str, Any], device: str | None, *, seed: int = 0
) -> list[dict[str, Any]]:
    """Measure a cell on both sides; their answers, in the order of the arguments.

    Args:
        seed: of the coin that says who goes first in every turn.

    Raises:
        SideFailed: a process ended or gave no sign.
    """
    limit = TIME_LIMIT_FACTOR * cell["time_limit"]
    cell = {**cell, "time_limit": limit}
    both = [one, other]
    for side in both:
        side.start(cell, device, limit)
    coin = random.Random(seed)
    while any(side.answer is None for side in both):
        for side in coin.sample(both, 2):
            if side.answer is None:
                side.go_on(limit)
    return [side.answer for side in both if side.answer is not None]
