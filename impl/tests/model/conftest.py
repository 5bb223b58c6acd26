"""Checkpoints, and the modules of this folder that tests import by name."""

import sys
from pathlib import Path

import pytest

# Processes of ranks import the modules by name.
sys.path.insert(0, str(Path(__file__).parent))
import hf_checkpoints


@pytest.fixture(scope="session")
def written(tmp_path_factory):
    """The folder of a family's checkpoint, made once."""
    made = {}

    def folder(family):
        if family not in made:
            made[family] = hf_checkpoints.write(family, tmp_path_factory.mktemp(family) / family)
        return made[family]

    return folder
