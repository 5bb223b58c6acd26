"""What is handed to a place where cells run, and what comes back from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Job:
    """One cell to run.

    Attributes:
        name: id of the cell.
        target, payload: ``module:function`` that is called in the cell's process, and its one argument (JSON).
        ranks: how many ranks it starts; 0 when it computes in its own process.
        device: what it runs on.
        timed: its samples are times, so that nothing else may run on its machines meanwhile.
        time_limit: seconds after which it is ended.
    """

    name: str
    target: str
    payload: Any
    ranks: int
    device: Literal["cpu", "cuda"]
    timed: bool
    time_limit: float


@dataclass(frozen=True)
class Ended:
    """How a job ended: with a ``result``, or with a reason why there is none.

    Attributes:
        status: ``done``, ``failed``, ``lost`` (its machine went away, twice) or ``not_run``.
        reason, detail: one line, and tracebacks or stacks.
        seconds: how long it took.
    """

    job: Job
    status: Literal["done", "failed", "lost", "not_run"]
    seconds: float
    result: Any = None
    reason: str = ""
    detail: str = ""
