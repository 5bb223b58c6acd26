"""Processes under watch: what each one answers, and when one dies or hangs, in one line why.

A child answers through a pipe, not through a file, so that a full disk cannot swallow the reason of a failure. Its
output goes to a log, and so does the stack of every thread when it is asked for one (SIGUSR1): the line where a rank
stands is part of the reason.
"""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import json
import multiprocessing.connection as connection
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from steelyard.errors import InputError, SteelyardError

ROOT = Path(__file__).resolve().parents[2]
# After the limit a process gets this long to write where its threads stand.
DUMP_S = 2.0
# After a failure the others get this long: peers of a lost rank often fail too, with the more telling message.
LAST_WORDS_S = 1.0
# A sentinel stays silent while a process that the child forked holds it, so exit codes are looked at now and then.
POLL_S = 0.2
LOG_TAIL = 6000
PACKAGES = f"{os.sep}site-packages{os.sep}"
_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$')


class RanksFailed(SteelyardError):  # noqa: N818 - the name says what happened
    """A rank or the process of a cell died or hung. ``reason`` is one line; ``detail`` holds tracebacks or stacks."""

    def __init__(self, reason: str, detail: str = "") -> None:
        self.reason, self.detail = reason, detail
        super().__init__(f"{reason}\n{detail}".rstrip())

    def __reduce__(self) -> tuple:
        return type(self), (self.reason, self.detail)


class NodeLost(SteelyardError):  # noqa: N818
    """A machine of a cell went away while it ran there."""


def describe(error: BaseException) -> dict[str, Any]:
    """An error as plain data, to be sent to the process that waits; ``kind``: input, ranks, lost or error."""
    if isinstance(error, RanksFailed):
        return {"message": error.reason, "kind": "ranks", "detail": error.detail, "time": time.time()}
    if isinstance(error, NodeLost):
        return {"message": str(error), "kind": "lost", "detail": "", "time": time.time()}
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    kind = "input" if isinstance(error, InputError) else "error"
    message = first if kind == "input" else f"{type(error).__name__}: {first}"
    if _is_out_of_memory(error):
        message = f"out of memory: {message}"
    return {"message": message, "kind": kind, "detail": traceback.format_exc(), "time": time.time()}


def _is_out_of_memory(error: BaseException) -> bool:
    # torch.OutOfMemoryError is CUDA's; torch's allocator for the CPU and system calls know only words and numbers.
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and "allocate memory" in str(error)


def answer(answers: connection.Connection, log: str, function: Callable[..., Any], *arguments: Any) -> None:
    """What a child runs: ``function(*arguments)``, whose result goes to the watcher as JSON, or its error."""
    redirect(log)
    try:
        result = json.dumps(function(*arguments))
    except BaseException as error:
        answers.send({"error": describe(error)})
        with contextlib.suppress(OSError):  # a full disk
            traceback.print_exc()
        # Threads of a process group may still wait for peers: leave without them.
        os._exit(1)
    answers.send({"result": result})


def redirect(log: str) -> None:
    """Output and, on SIGUSR1, stacks go to the file ``log``."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(file, descriptor)
    os.close(file)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)


@dataclass
class Child:
    """One process, and what is known of it. ``name`` is how a reason calls it, e.g. ``rank 3``."""

    name: str
    process: BaseProcess
    answers: connection.Connection
    log: Path
    leads: bool
    answer: dict[str, Any] | None = None
    closed: bool = False
    code: int | None = None

    def look(self) -> None:
        """Notice an end and an answer; the end first, since an answer may come just before it."""
        self.code = self.process.exitcode
        if self.answer is None and not self.closed and self.answers.poll():
            try:
                self.answer = self.answers.recv()
            except (EOFError, OSError):
                self.closed = True

    @property
    def failed(self) -> bool:
        return self.code not in (None, 0) or bool(self.answer and "error" in self.answer)

    @property
    def error(self) -> dict[str, Any] | None:
        return self.answer.get("error") if self.answer else None

    def signal(self, number: int) -> None:
        """Send a signal to the process, or to its whole group when it leads one."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if self.leads:
                os.killpg(self.process.pid, number)
            else:
                os.kill(self.process.pid, number)

    def end(self) -> None:
        """End the process, and its group when it leads one, also when it ended but left others behind."""
        self.signal(signal.SIGKILL)
        self.process.kill()  # it may not lead its group yet
        self.process.join()
        self.signal(signal.SIGKILL)

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-LOG_TAIL:] if self.log.exists() else ""


class Watch:
    """Use as a context: ``start`` children in it, then ``results``; whatever happens, none is left at its end."""

    def __init__(self, context: BaseContext) -> None:
        self._context = context
        self._children: list[Child] = []
        self._kills = oom_kills()

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *error: object) -> None:
        for child in self._children:
            child.end()
            child.answers.close()

    def start(self, name: str, log: Path, main: Callable[..., None], *arguments: Any, leads: bool = False) -> None:
        """Start a process that calls ``main(answers, log, *arguments)``; see ``answer``.

        Args:
            leads: it makes a session of its own, in which it and all that it starts are ended together.
        """
        receiver, sender = self._context.Pipe(duplex=False)
        process = self._context.Process(target=main, args=(sender, str(log), *arguments), name=name)
        process.start()
        sender.close()
        self._children.append(Child(name, process, receiver, log, leads))

    def results(self, time_limit: float) -> list[Any]:
        """What every child returned, in the order of their start.

        Raises:
            InputError: a child met bad input; its message is passed on.
            RanksFailed: a child raised, was killed, or did not end in ``time_limit`` seconds.
        """
        if self._wait(time.monotonic() + time_limit):
            self._raise_failure()
            return [json.loads(child.answer["result"]) for child in self._children]
        raise self._late(time_limit)

    def _wait(self, deadline: float) -> bool:
        """Wait until all ended or one failed; False when time is up before."""
        failed = False
        while True:
            for child in self._children:
                child.look()
            running = [child for child in self._children if child.code is None]
            if not running:
                return True
            if not failed and any(child.failed for child in self._children):
                failed, deadline = True, min(deadline, time.monotonic() + LAST_WORDS_S)
            left = deadline - time.monotonic()
            if left <= 0:
                return failed
            unheard = [child.answers for child in running if child.answer is None and not child.closed]
            connection.wait([*unheard, *(child.process.sentinel for child in running)], min(left, POLL_S))

    def _late(self, time_limit: float) -> RanksFailed:
        late = [child for child in self._children if child.code is None]
        for child in late:
            child.signal(signal.SIGUSR1)
        time.sleep(DUMP_S)
        logs = {child.name: child.tail() for child in late}
        return hang(logs, time_limit)

    def _raise_failure(self) -> None:
        """Raise what explains the failure best, if there is one."""
        errors = [(child.name, child.error) for child in self._children if child.error]
        raise_input_error(error for _, error in errors)
        # A process that crashed or was killed explains more than the errors of the peers that lost it.
        for child in self._children:
            if child.code and not child.error:
                raise RanksFailed(f"{child.name} {self._how_it_ended(child.code)}", _section(child.name, child.tail()))
        raise_first(errors)
        for child in self._children:
            if child.answer is None:
                raise RanksFailed(f"{child.name} ended without an answer", _section(child.name, child.tail()))

    def _how_it_ended(self, code: int) -> str:
        if code > 0:
            return f"exited with code {code}"
        how = f"was ended by signal {signal.Signals(-code).name}"
        if -code == signal.SIGKILL and oom_kills() > self._kills:
            how += ": out of memory (the kernel's out-of-memory killer struck meanwhile)"
        return how


def raise_input_error(errors: Any) -> None:
    """Raise the first that is bad input, as bad input."""
    for error in errors:
        if error["kind"] == "input":
            raise InputError(error["message"])


def raise_first(errors: Sequence[tuple[str, dict[str, Any]]]) -> None:
    """Raise the error that came first, with the tracebacks of all; ``errors``: name of the process and its error."""
    if errors:
        name, first = min(errors, key=lambda one: one[1]["time"])
        if first["kind"] == "ranks":
            raise RanksFailed(first["message"], first["detail"])
        raise RanksFailed(f"{name} failed: {first['message']}", "\n".join(_section(n, e["detail"]) for n, e in errors))


def hang(stacks: dict[str, str], time_limit: float) -> RanksFailed:
    """What to say of processes that were late, from the stacks that each wrote."""
    places: dict[str, list[str]] = {}
    for name, text in stacks.items():
        places.setdefault(stands_at(text), []).append(name)
    where = "; ".join(f"{_together(names)} stood {place}" for place, names in places.items())
    detail = "\n".join(_section(name, text) for name, text in stacks.items())
    return RanksFailed(f"did not end within {time_limit:g} s: {where}", detail)


def _together(names: Sequence[str]) -> str:
    """``rank 0, rank 3`` as ``ranks 0, 3``; many are cut short."""
    ranks = [name.removeprefix("rank ") for name in names]
    if len(names) == 1 or ranks == list(names):
        return ", ".join(names)
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"ranks {', '.join(ranks[:8])}{more}"


def stands_at(text: str) -> str:
    """Where the main thread stood, from a stack of faulthandler: the innermost line, and the nearest one of ours."""
    start = max(text.rfind("Current thread "), text.rfind("Thread 0x") if "Current thread " not in text else -1)
    frames = []
    for line in text[max(start, 0) :].splitlines()[1:]:
        if not (match := _FRAME.match(line)):
            break
        frames.append(match.groups())
    if not frames:
        return "at a line that it did not tell"
    mine = [frame for frame in frames if frame[0].startswith(f"{ROOT}{os.sep}") and PACKAGES not in frame[0]]
    innermost = frames[0]
    place = f"at {_short(innermost[0])}:{innermost[1]} in {innermost[2]}"
    if mine and mine[0] != innermost:
        place += f", called from {_short(mine[0][0])}:{mine[0][1]} in {mine[0][2]}"
    return place


def _short(path: str) -> str:
    return path.split(PACKAGES)[-1].removeprefix(f"{ROOT}{os.sep}")


def _section(name: str, text: str) -> str:
    return f"--- {name} ---\n{text}".rstrip()


def oom_kills(file: str = "/proc/vmstat") -> int:
    """How many processes the kernel's out-of-memory killer has ended since the machine started; 0 where unknown."""
    with contextlib.suppress(OSError):
        for line in Path(file).read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0
