"""Modules of this folder that tests import by name, and the fixture ``ranks`` of the step's tests for them."""

import importlib.util
import sys
from pathlib import Path

# Processes of ranks import the modules by name.
sys.path.insert(0, str(Path(__file__).parent))
spec = importlib.util.spec_from_file_location("step_conftest", Path(__file__).parents[1] / "step" / "conftest.py")
step = importlib.util.module_from_spec(spec)
spec.loader.exec_module(step)
ranks = step.ranks
