"""One side of ``bench ab``: measures cells when it is told to, in the environment of its commit.

Started as ``python -m bench.ab_worker``. Each line of stdin is a job (``{"cell": ..., "device": ...}``), each line of
stdout what ``bench.weigh`` answers. What suites print goes to stderr. Every job runs in a process of its own, forked
where there is no GPU from one that has imported torch and megatron-core.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from typing import Any

from bench.cells import Machine, Task
from steelyard.errors import InputError
from suites.launch.alone import run_alone
from suites.launch.local import RanksFailed
from suites.matrix import Cell

START_LIMIT_S = 200.0


def main() -> None:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    run_alone("bench.ab_worker:nothing", None, time_limit=START_LIMIT_S)
    _say(answers, {"steelyard": importlib.import_module("steelyard").__file__})
    for line in sys.stdin:
        job = json.loads(line)
        _say(answers, _measure(Task.of(Cell.model_validate(job["cell"]), Machine.this(), job["device"])))


def nothing(_: None) -> None:
    """The first process of a side: afterwards the imports that later ones share are done."""


def _measure(task: Task) -> dict[str, Any]:
    job = task.job()
    try:
        return run_alone(job.target, job.payload, time_limit=job.time_limit, device=task.device, name=task.cell.id)
    except RanksFailed as error:
        return {"series": [], "reason": error.reason, "detail": error.detail}
    except InputError as error:
        return {"series": [], "reason": str(error), "detail": ""}


def _say(answers: Any, answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
