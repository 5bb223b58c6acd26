"""What is weighed: workloads, naive baselines, the judge, and the suites that compare them.

A suite is a module with one function ``measure(cell) -> list[Series]``. It starts its own ranks and returns the
samples; it raises ``RanksFailed`` when a rank died or hung. ``SUITES`` is the list that matrices and commands may name.
"""

SUITES = {
    "packing": "suites.packing",
    "parity": "suites.parity",
    "planning": "suites.planning",
    "throughput": "suites.throughput",
}

# Suites that compute here and start no rank, so that any layout can be weighed on any machine.
WITHOUT_RANKS = {"planning"}
# Suites that take one rank's part here, on one device, whatever the layout.
ON_ONE_DEVICE = {"packing"}
