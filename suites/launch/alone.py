"""A cell alone: a process group of its own, in which everything that it starts is ended with it.

``run_alone`` starts a leader, which makes a session and forks a worker; the worker calls the function and answers. The
leader only waits: for the worker, and for the process that asked. When that one is gone, by whatever end, the leader
ends the group, so that nothing is left behind.

Where there is no GPU, leaders are forked from one process that has imported torch and megatron-core, which saves
seconds for each cell; ranks are forked from the worker. Forking and CUDA do not go together: with a GPU all are started
anew.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import multiprocessing
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import connection
from pathlib import Path
from typing import Any

from steelyard.errors import InputError
from suites.launch import watch
from suites.launch.jobs import Ended, Job

THREADS_PER_RANK = 1
# Threads, and the warnings that megatron-core's imports give once for everything it could use and does not find.
RANK_ENVIRONMENT = {
    "OMP_NUM_THREADS": str(THREADS_PER_RANK),
    "MKL_NUM_THREADS": str(THREADS_PER_RANK),
    "PYTHONWARNINGS": "ignore::UserWarning",
}
PRELOADED = ["suites.judging"]
# What a cell's process needs beyond the limit of the cell to start, and to end its ranks and tell why.
SLACK_S = 30.0
# Whether this process is the worker of a cell.
inside = False
# Processor seconds that ranks of this cell took on this machine in processes that are no children of this one.
elsewhere_seconds = 0.0


def run_here(jobs: Iterable[Job], started: Callable[[Job], None], deadline: float) -> Iterator[Ended]:
    """Run jobs here, one after the other, until ``deadline`` (of ``time.monotonic``); the rest is left out."""
    for job in jobs:
        start = time.monotonic()
        limit = min(job.time_limit + SLACK_S, deadline - start)
        if limit <= 0:
            return
        started(job)
        try:
            result = run_alone(job.target, job.payload, time_limit=limit, device=job.device)
        except (watch.RanksFailed, InputError) as error:
            if time.monotonic() >= deadline:
                return
            told = watch.describe(error)
            seconds = time.monotonic() - start
            yield Ended(job, "failed", seconds, reason=told["message"], detail=told["detail"])
        else:
            yield Ended(job, "done", time.monotonic() - start, result)


def run_alone(
    target: str, payload: Any, *, time_limit: float, device: str | None = None, name: str = "the cell"
) -> Any:
    """Call ``target`` (``module:function``) with ``payload`` in a process group of its own; its result comes by JSON.

    Args:
        device: ``cpu``, ``cuda``, or None for what is there.
        name: what a failure calls the process.

    Raises:
        InputError, RanksFailed: raised in the function, or the process died or hung.
    """
    context = multiprocessing.get_context(start_method(device))
    if context.get_start_method() == "forkserver":
        context.set_forkserver_preload(PRELOADED)
    with (
        tempfile.TemporaryDirectory(prefix="steelyard-", ignore_cleanup_errors=True) as folder,
        watch.Watch(context) as children,
        rank_environment(),
    ):
        children.start(name, Path(folder) / "cell.log", _lead, target, payload, folder, leads=True)
        return children.results(time_limit)[0]


def start_method(device: str | None) -> str:
    """How the first process of a cell is started; those inside are forked from it unless this is ``spawn``."""
    import torch

    return "spawn" if device == "cuda" or (device is None and torch.cuda.is_available()) else "forkserver"


@contextlib.contextmanager
def rank_environment() -> Iterator[None]:
    """Environment variables for processes that are started in this context."""
    before = {name: os.environ.get(name) for name in RANK_ENVIRONMENT}
    os.environ.update(RANK_ENVIRONMENT)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _lead(answers: connection.Connection, log: str, target: str, payload: Any, folder: str) -> None:
    os.setsid()
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # stacks are asked of the worker
    arguments = (answers, log, _work, target, payload, folder)
    worker = multiprocessing.get_context("fork").Process(target=watch.answer, args=arguments)
    worker.start()
    answers.close()
    asked = multiprocessing.parent_process()
    assert asked is not None
    while worker.exitcode is None:
        # Ranks hold the worker's end of its sentinel too, so its death alone may not show there: look at times.
        if asked.sentinel in connection.wait([worker.sentinel, asked.sentinel], watch.POLL_S):
            shutil.rmtree(folder, ignore_errors=True)
            os.killpg(0, signal.SIGKILL)
    if worker.exitcode < 0:
        # End as the worker did, so that who watches this process sees how.
        if worker.exitcode != -signal.SIGKILL:
            signal.signal(-worker.exitcode, signal.SIG_DFL)
        os.kill(os.getpid(), -worker.exitcode)
    os._exit(worker.exitcode)


def _work(target: str, payload: Any, folder: str) -> Any:
    global inside
    inside = True
    # What is made in here is removed with the folder, also when this process is killed.
    tempfile.tempdir = os.environ["TMPDIR"] = folder
    # Objects of the imports are no garbage of the cell, and collecting among them must not be part of its times.
    gc.collect()
    gc.freeze()
    return call(target, payload)


def call(target: str, payload: Any) -> Any:
    """Import ``module:function`` and call it with ``payload``."""
    module, function = target.split(":")
    return getattr(importlib.import_module(module), function)(payload)
