"""What is weighed: workloads, naive baselines, the judge, and the suites that compare them.

A suite is a module with one function ``measure(cell) -> list[Series]``. It starts its own ranks and returns the
samples; it raises ``RanksFailed`` when a rank died or hung. ``SUITES`` is the list that matrices and commands may name.
"""

import ast
from pathlib import Path

SUITES = {
    "bubbles": "suites.bubbles",
    "handover": "suites.handover",
    "memory": "suites.memory_check",
    "oom": "suites.oom",
    "overrides": "suites.overrides",
    "packing": "suites.packing",
    "parity": "suites.parity",
    "planning": "suites.planning",
    "throughput": "suites.throughput",
}

# Suites that compute here and start no rank, so that any layout can be weighed on any machine.
WITHOUT_RANKS = {"planning"}
# Suites that take one rank's part here, on one device, whatever the layout.
ON_ONE_DEVICE = {"handover", "memory", "oom", "packing"}
# Suites that predict for a GPU of the cell's capacity, whatever is there, and measure what one rank can.
PREDICTING = {"handover", "oom"}
# Suites whose ranks wait instead of computing: they run on the CPU, whatever is there and however many cores.
PACED = {"bubbles"}
# Suites whose samples are no times: other cells may run on the same machine meanwhile.
MAY_SHARE = {"memory", "overrides", "parity"}


def describe(suite: str) -> str:
    """The first line of a suite's docstring, read without importing it."""
    source = Path(__file__).parent / f"{SUITES[suite].rpartition('.')[2]}.py"
    return (ast.get_docstring(ast.parse(source.read_text())) or "").splitlines()[0]
