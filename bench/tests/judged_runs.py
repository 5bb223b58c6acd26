"""Runs of one made-up cell, for verdicts: everything about them is known."""

from __future__ import annotations

import numpy as np

from bench.record import Environment, OutcomeRecord, Records, SeriesRecord
from suites.measure import Series

ENVIRONMENT = Environment(
    device="cpu",
    device_name="A processor",
    cpu="A processor",
    cores=2,
    threads_per_rank=1,
    governor=None,
    memory_gib=8.0,
    platform="Linux",
    python="3.11.7",
    torch="2.13.0",
    megatron_core="0.16.1",
    numpy="2.4.6",
    commit="0123456789" * 4,
    dirty=False,
)
CASE = {"suite": "throughput", "rows": 4, "scale": 400.0, "pairs": 20}
PAIRS = 20


def made_run(
    *series: Series, run: str = "one", case: dict | None = None, status: str = "passed", **facts: object
) -> Records:
    """The records of a run of one cell."""
    environment = ENVIRONMENT.model_copy(update=facts)
    common = {"run": run, "cell": "cell", "case": {**CASE, **(case or {})}, "seconds": 1.0, "environment": environment}
    outcome = OutcomeRecord(**common, status=status, reason="" if status == "passed" else "a rank died")
    return Records((*(SeriesRecord(**common, **vars(one)) for one in series), outcome))


def steps(factor: float = 1.0, *, pairs: int = PAIRS, seed: int = 0, machine: float = 1.0) -> list[Series]:
    """Times of both sides, in pairs; ``factor`` slows the optimised one, ``machine`` both."""
    noise = np.random.default_rng(seed).normal(1.0, 0.01, (2, pairs))
    naive, optimised = machine * 2.0 * noise[0], machine * factor * noise[1]
    return [
        Series("tokens_per_second", "naive", "tokens/s", "higher", list(1000 / naive)),
        Series("tokens_per_second", "optimised", "tokens/s", "higher", list(1000 / optimised)),
        Series("step_seconds", "naive", "s", "lower", list(naive)),
        Series("step_seconds", "optimised", "s", "lower", list(optimised)),
    ]
