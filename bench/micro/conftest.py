"""Micro-benchmarks: what a trainer calls once per step or per micro-batch, timed by pytest-benchmark.

They lie outside ``testpaths``, so the plain test run leaves them alone::

    pytest bench/micro --benchmark-autosave                                    # time, and keep
    pytest bench/micro --benchmark-compare --benchmark-compare-fail=median:20% # and compare with the last kept
    pytest-benchmark --storage file://results/runs/micro compare               # all that was kept

History is kept in ``results/runs/micro``. Medians say more than means where other processes run.
"""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if (
        config.getoption("benchmark_storage") == "file://./.benchmarks"
    ):  # the default, which is not in an ignored folder
        config.option.benchmark_storage = f"file://{ROOT / 'results' / 'runs' / 'micro'}"
