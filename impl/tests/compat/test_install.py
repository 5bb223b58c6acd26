"""``install`` and ``uninstall``, in interpreters of their own: they change modules that other tests use."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("verl", reason="install() needs a verl to change")

SCRIPT = Path(__file__).with_name("installing.py")


def run(*arguments: str, **environment: str) -> str:
    """What a new interpreter printed."""
    result = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def raised() -> dict[str, str]:
    """Scenario -> traceback, empty where all was well."""
    return json.loads(run(str(SCRIPT)).splitlines()[-1])


@pytest.mark.parametrize(
    "scenario",
    [
        "every_name_is_replaced_and_given_back",
        "installing_twice_is_installing_once",
        "a_reloaded_module_can_be_installed_again",
        "verls_own_engine_plans_with_steelyard",
        "verls_own_models_pack_with_steelyard",
        "verls_workers_empty_the_cache_with_steelyard",
        "stand_ins_travel_by_name",
        "another_version_is_refused",
        "a_changed_verl_is_refused",
    ],
)
def test_installing(raised: dict[str, str], scenario: str) -> None:
    assert not raised[scenario], raised[scenario]


def test_every_scenario_is_looked_at(raised: dict[str, str]) -> None:
    assert len(raised) == 9


def test_verls_environment_variable_installs() -> None:
    code = "import verl.utils.seqlen_balancing as theirs; print(theirs.ceildiv.__wrapped__.__module__)"
    printed = run("-c", code, VERL_USE_EXTERNAL_MODULES="steelyard.compat.verl.auto")
    assert printed.split() == ["steelyard.compat.verl.utils.seqlen_balancing"]


def test_a_missing_verl_is_told_and_the_functions_work_without_it() -> None:
    code = """
import sys
sys.modules["verl"] = None
import steelyard.compat.verl as compat
try:
    compat.install()
except ValueError as error:
    print(type(error).__name__, error)
from steelyard.compat.verl.utils.seqlen_balancing import get_seqlen_balanced_partitions
print(get_seqlen_balanced_partitions([3, 1, 2], 2, False))
"""
    printed = run("-c", code).splitlines()
    assert printed[0].startswith("InputError verl cannot be imported")
    assert printed[0].endswith("install verl 0.9.1 before steelyard.compat.verl")
    assert sorted(json.loads(printed[1])) == [[0], [1, 2]]
