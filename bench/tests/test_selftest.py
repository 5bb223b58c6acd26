"""What the self-test says of pools whose properties are known, and of a small pool recorded here."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from bench import selftest
from bench.cli import app
from bench.environment import capture
from bench.platforms import platform_name
from bench.selftest import MetricTrust, Pool, SelfTest, Trust, assess, stored_pairs, with_pairs
from bench.tests.made_up import make_cell
from steelyard.errors import InputError


def made_pool(noise: float, *, load: float = 0.3, pairs: int = 200, bias: float = 1.0) -> Pool:
    """Step times whose pairs share a load that varies, and differ by ``noise``."""
    generator = np.random.default_rng(3)
    shared = 0.1 * np.exp(load * generator.normal(size=pairs))
    one, other = (shared * np.exp(noise * generator.normal(size=pairs) / np.sqrt(2)) for _ in range(2))
    return Pool(one, bias * other)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest, "REPORTS", 200)
    monkeypatch.setattr(selftest, "PAIRS", (8, 16, 32, 64))


def test_a_quiet_machine_needs_fewer_pairs_than_a_noisy_one(quick: None) -> None:
    quiet, noisy = (assess(made_pool(noise), "step_seconds", reports=200) for noise in (0.01, 0.08))
    assert quiet.enough == 16
    assert noisy.enough is None or noisy.enough > 16
    assert quiet.table[-1].power >= 0.95


def test_equal_sides_raise_few_alarms_however_noisy_they_are() -> None:
    # The noise makes any threshold easy to pass: only the certainty that is asked for holds alarms back.
    found = assess(made_pool(0.3, pairs=60), "step_seconds", reports=1000)
    assert max(row.false_alarms for row in found.table) <= 0.01 + 2 * np.sqrt(0.01 / 1000)


def test_pairs_too_few_to_be_certain_find_nothing(quick: None) -> None:
    first = assess(made_pool(0.001), "step_seconds", reports=50).table[0]
    assert (first.pairs, first.power, first.false_alarms) == (8, 0.0, 0.0)


def test_sides_that_differ_as_they_were_recorded_show(quick: None) -> None:
    # The toss within pairs hides a bias between the two processes; the stretches as recorded do not.
    biased = assess(made_pool(0.01, bias=1.06), "step_seconds", reports=50)
    fair = assess(made_pool(0.01), "step_seconds", reports=50)
    assert biased.recorded_false == biased.recorded
    assert fair.recorded_false == 0


def result(*enough: int | None) -> SelfTest:
    row = Trust(pairs=16, false_alarms=0.0, power=1.0)
    metrics = {
        f"metric_{index}": MetricTrust(pool=40, spread=0.01, table=(row,), recorded=2, recorded_false=0, enough=one)
        for index, one in enumerate(enough)
    }
    return SelfTest(
        time="2026-12-01T00:00:00Z",
        environment=capture("cpu"),
        seconds=1.0,
        metrics_per_report=10,
        reports=200,
        metrics=metrics,
    )


def test_auto_takes_what_was_stored_for_this_platform(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="selftest"):
        stored_pairs(folder=tmp_path)
    file = selftest.store(result(None, 24, 40), tmp_path)
    assert file.parent.name == platform_name(capture("cpu"))
    assert stored_pairs(folder=tmp_path) == 24
    selftest.store(result(None), tmp_path)
    with pytest.raises(InputError, match="no number of pairs"):
        stored_pairs(folder=tmp_path)


def test_pairs_replace_those_of_the_matrix_and_get_time_for_it() -> None:
    cell = make_cell("throughput", pairs=5, time_limit=100.0)
    (more,) = with_pairs([cell], "20")
    assert (more.pairs, more.time_limit) == (20, 400.0)
    (fewer,) = with_pairs([cell], "2")
    assert (fewer.pairs, fewer.time_limit) == (2, 100.0)
    for wrong in ("0", "-3", "many", "2.5"):
        with pytest.raises(InputError, match="auto"):
            with_pairs([cell], wrong)


def test_the_command_records_a_pool_here_and_stores_what_it_found(
    tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selftest, "ROUND_PAIRS", 20)
    monkeypatch.setattr(selftest, "LEAST_ROUNDS", 1)
    done = CliRunner().invoke(app, ["selftest", "--seconds", "1", "--json", "--reference", str(tmp_path)])
    assert done.exit_code == 0, done.output
    answer = json.loads(done.stdout.splitlines()[-1])
    assert {name: one["pool"] for name, one in answer["metrics"].items()} == dict.fromkeys(selftest.STEP_METRICS, 20)
    assert SelfTest.model_validate_json(Path(answer["file"]).read_bytes()).metrics.keys() == answer["metrics"].keys()
    assert "pairs for 95% power" in done.stdout


def test_a_bias_of_the_pool_is_no_false_alarm_after_the_toss() -> None:
    found = assess(made_pool(0.05, bias=1.03), "step_seconds", reports=300)
    assert max(row.false_alarms for row in found.table) <= 0.02
