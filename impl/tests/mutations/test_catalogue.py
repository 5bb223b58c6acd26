"""The catalogue of planted faults stays applicable: its texts and its tests are there. `run.py` plants the faults."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest

spec = importlib.util.spec_from_file_location("mutations_run", Path(__file__).with_name("run.py"))
run = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = run
spec.loader.exec_module(run)


@pytest.mark.parametrize("fault", run.read_catalogue(), ids=lambda fault: fault.rule)
def test_a_fault_can_be_planted_and_names_a_test_that_is_there(fault):
    assert (run.ROOT / fault.file).read_text().count(fault.find) == 1
    assert fault.find != fault.replace
    path, _, function = fault.test.partition("::")
    source = (run.ROOT / path).read_text()
    assert not function or f"def {re.sub(r'[[].*', '', function)}(" in source
