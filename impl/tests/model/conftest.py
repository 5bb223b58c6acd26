"""Checkpoints, and the fixture ``ranks`` of the step's tests, which calls ``module:function`` of this folder."""

import importlib.util
import sys
from pathlib import Path

import pytest

# Processes of ranks import the modules by name.
sys.path.insert(0, str(Path(__file__).parent))
import hf_checkpoints

spec = importlib.util.spec_from_file_location("step_conftest", Path(__file__).parents[1] / "step" / "conftest.py")
step = importlib.util.module_from_spec(spec)
spec.loader.exec_module(step)
ranks = step.ranks


@pytest.fixture(scope="session")
def written(tmp_path_factory):
    """The folder of a family's checkpoint, made once."""
    made = {}

    def folder(family):
        if family not in made:
            made[family] = hf_checkpoints.write(family, tmp_path_factory.mktemp(family) / family)
        return made[family]

    return folder
