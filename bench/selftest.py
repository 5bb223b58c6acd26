"""How far verdicts can be trusted on this machine: false alarms of a whole report, and power against 5 %.

Two processes of this very checkout take turns on one small real step, as two commits would in ``bench ab``. That gives
a pool of pairs of identical sides. Reports are then drawn from it, thousands of them: each metric gets a stretch of the
pool, as long as the number of pairs under test, and within each pair chance decides which sample belongs to which side.
Such reports have nothing to find, so every finding is a false alarm. For the power, one metric's candidate is made 5 %
slower.

The judgement is the one of ``bench.compare``. What only shows between different processes or days is not in the
figures, except that the pool is made of several rounds, each with processes of its own. Stretches of the pool as they
were recorded, without the toss, are counted beside.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import to_json

from bench.ab import NAMES, merge, weigh
from bench.cells import Device
from bench.compare import changes
from bench.environment import capture
from bench.gate import REFERENCE
from bench.judging import judging
from bench.platforms import platform_name
from bench.record import Environment
from bench.stats import holm, p_values
from steelyard.errors import InputError
from suites.matrix import Cell, Layout, Sizes

FILE_NAME = "selftest.json"
SLOW_DOWN = 1.05
POWER = 0.95
# Timed metrics in a report of the smoke matrix.
METRICS = 10
REPORTS = 1000
PAIRS = (8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 64, 96, 128, 192, 256, 320, 384, 448, 512)
ROUND_PAIRS = 100
LEAST_ROUNDS = 2
# What is judged in a step, and where it says something: wall time everywhere, processor time of all ranks on a CPU.
STEP_METRICS = ("step_seconds", "step_processor_seconds")
CELL = Cell(
    suite="throughput",
    workload="rl-code-16k-cap",
    model=Sizes(layers=2, hidden=64, ffn=192, heads=4, kv_heads=2, head_dim=16, vocab=512),
    layout=Layout(),
    rows=8,
    scale=64.0,
    warmup=3,
    seed=7,
    time_limit=300.0,
)


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Trust(_Strict):
    """What so many pairs are good for: shares of reports."""

    pairs: int
    false_alarms: float
    power: float


class MetricTrust(_Strict):
    """One metric of the step.

    Attributes:
        spread: standard deviation of a pair's ratio.
        table: by number of pairs.
        recorded, recorded_false: stretches as they were recorded, and how many of them alone raised an alarm.
        enough: the number of pairs that reaches the power; None when the pool never did.
    """

    pool: int
    spread: float
    table: tuple[Trust, ...]
    recorded: int
    recorded_false: int
    enough: int | None


class SelfTest(_Strict):
    """The whole result, as stored for ``--pairs auto``."""

    time: datetime
    environment: Environment
    seconds: float
    metrics_per_report: int
    reports: int
    metrics: dict[str, MetricTrust]

    @property
    def enough(self) -> int | None:
        """A slower step shows in all of its metrics, so the one that needs the fewest pairs decides."""
        return min((one.enough for one in self.metrics.values() if one.enough), default=None)


@dataclass(frozen=True)
class Pool:
    """Pairs of identical sides, in the order they were taken."""

    one: np.ndarray
    other: np.ndarray


def run_selftest(
    seconds: float, *, device: Device | None = None, note: Callable[[str], None] = lambda text: None
) -> SelfTest:
    """Record a pool within about ``seconds`` and measure what verdicts are worth."""
    start = time.monotonic()
    pools = record_pools(seconds, device=device, note=note)
    note("drawing reports")
    return SelfTest(
        time=datetime.now(UTC),
        environment=capture("cuda" if device == "cuda" else "cpu"),
        seconds=round(time.monotonic() - start, 1),
        metrics_per_report=METRICS,
        reports=REPORTS,
        metrics={name: assess(pool, name) for name, pool in pools.items()},
    )


def record_pools(
    seconds: float, *, device: Device | None = None, note: Callable[[str], None] = lambda text: None
) -> dict[str, Pool]:
    """Pairs of every metric of the step, by rounds until the time is up (two rounds at least).

    Raises:
        InputError: the step cannot run here.
    """
    start = time.monotonic()
    answers: dict[str, list[dict[str, Any]]] = {name: [] for name in NAMES}
    cell = CELL.model_copy(update={"pairs": ROUND_PAIRS})
    longest = 0.0
    while len(answers["A"]) < LEAST_ROUNDS or time.monotonic() - start + longest < seconds:
        begin = time.monotonic()
        note(f"round {len(answers['A']) + 1}")
        one = weigh(
            dict.fromkeys(NAMES, Path(sys.executable)), [cell], device=device, rounds=1, first_round=len(answers["A"])
        )[cell.id]
        for name, (answer,) in one.items():
            if answer["reason"]:
                raise InputError(f"the step of the self-test did not run: {answer['reason']}")
            answers[name].append(answer)
        longest = max(longest, time.monotonic() - begin)
    values = {
        name: {one["metric"]: np.array(one["values"]) for one in merge(rounds) if one["side"] == "optimised"}
        for name, rounds in answers.items()
    }
    there = [name for name in STEP_METRICS if name in values["A"]]
    return {name: Pool(values["A"][name], values["B"][name]) for name in there}


def assess(
    pool: Pool, metric: str, *, metrics: int = METRICS, reports: int | None = None, seed: int = 0
) -> MetricTrust:
    """False alarms and power, by number of pairs, up to the first that reaches the power."""
    reports = reports or REPORTS
    threshold = judging().threshold(metric).interleaved
    generator = np.random.default_rng(seed)
    table: list[Trust] = []
    enough = None
    for pairs in PAIRS:
        if pairs > len(pool.one) // 2:
            break
        one, other = _draw(pool, (reports, metrics), pairs, generator)
        p, ratio = p_values(other, one, paired=True), _ratio(one, other)
        quiet = changes(holm(p), ratio, threshold)
        p[:, 0] = p_values(SLOW_DOWN * other[:, 0], one[:, 0], paired=True)
        ratio[:, 0] *= SLOW_DOWN
        found = (changes(holm(p), ratio, threshold) & (ratio > 1))[:, 0]
        table.append(Trust(pairs=pairs, false_alarms=float(quiet.any(axis=1).mean()), power=float(found.mean())))
        if table[-1].power >= POWER:
            enough = pairs
            break
    length = table[-1].pairs if table else len(pool.one)
    recorded = len(pool.one) // length
    one, other = (side[: recorded * length].reshape(recorded, length) for side in (pool.one, pool.other))
    alarms = changes(p_values(other, one, paired=True), _ratio(one, other), threshold)
    return MetricTrust(
        pool=len(pool.one),
        spread=float(np.log(pool.other / pool.one).std()),
        table=tuple(table),
        recorded=recorded,
        recorded_false=int(alarms.sum()),
        enough=enough,
    )


def _draw(
    pool: Pool, shape: tuple[int, int], pairs: int, generator: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """[reports, metrics, pairs] of both sides: a stretch of the pool for each metric, sides tossed in every pair."""
    starts = generator.integers(len(pool.one) - pairs + 1, size=(*shape, 1))
    at = starts + np.arange(pairs)
    one, other = pool.one[at], pool.other[at]
    swap = generator.random(at.shape) < 0.5
    return np.where(swap, other, one), np.where(swap, one, other)


def _ratio(reference: np.ndarray, candidate: np.ndarray) -> np.ndarray:
    return np.median(candidate, axis=-1) / np.median(reference, axis=-1)


def text(result: SelfTest) -> str:
    """The result in words and a small table."""
    lines = [
        f"{result.environment.cpu}, {result.environment.cores} cores, {result.environment.device}: reports of "
        f"{result.metrics_per_report} timed metrics, {result.reports} of them drawn for every row"
    ]
    for name, one in result.metrics.items():
        lines.append(f"\n{name}: {one.pool} pairs of identical sides, which differ by {one.spread:.1%} (deviation)")
        lines.append("  pairs   reports with a false alarm   5 % slow-down found")
        lines += [f"  {row.pairs:5}   {row.false_alarms:26.1%}   {row.power:19.1%}" for row in one.table]
        lines.append(f"  as recorded, not permuted: {one.recorded_false} of {one.recorded} stretches raise an alarm")
        lines.append(f"  pairs for {POWER:.0%}: {one.enough or 'more than this pool can tell'}")
    lines.append(f"\npairs for {POWER:.0%} power (--pairs auto): {result.enough or 'not reached'}")
    return "\n".join(lines)


def store(result: SelfTest, folder: Path = REFERENCE) -> Path:
    """Keep the result beside the reference results of its platform; returns the file."""
    file = folder / platform_name(result.environment) / FILE_NAME
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(to_json(result, indent=1) + b"\n")
    return file


def stored_pairs(device: Device | None = None, folder: Path = REFERENCE) -> int:
    """The number of pairs that the self-test on this platform found enough.

    Raises:
        InputError: there was none, or no number was enough.
    """
    file = folder / platform_name(capture("cuda" if device == "cuda" else "cpu")) / FILE_NAME
    remedy = "run 'python -m bench selftest' first (longer, on a quieter machine), or give a number"
    try:
        result = SelfTest.model_validate_json(file.read_bytes())
    except (OSError, ValidationError):
        raise InputError(f"--pairs auto: this platform has no self-test ({file}): {remedy}") from None
    if result.enough is None:
        raise InputError(f"--pairs auto: no number of pairs reached {POWER:.0%} power in {file}: {remedy}")
    return result.enough


def with_pairs(cells: Sequence[Cell], pairs: str, device: Device | None = None) -> list[Cell]:
    """The cells with a number of pairs, or with as many as the self-test found enough (``auto``).

    Raises:
        InputError: neither a positive number nor ``auto``; or there was no self-test.
    """
    if pairs != "auto" and not (pairs.isdecimal() and int(pairs) > 0):
        raise InputError(f"--pairs {pairs}: must be a positive number, or auto")
    count = stored_pairs(device) if pairs == "auto" else int(pairs)
    return [
        # More samples take longer than the cell was given time for.
        cell.model_copy(update={"pairs": count, "time_limit": cell.time_limit * max(1.0, count / cell.pairs)})
        for cell in cells
    ]
