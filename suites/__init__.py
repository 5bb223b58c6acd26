"""What is weighed: workloads, naive baselines, the judge, and the suites that compare them.

A suite is a module with one function ``measure(cell) -> list[Series]``. It starts its own ranks and returns the
samples; it raises ``RanksFailed`` when a rank died or hung. ``SUITES`` is the list that matrices and commands may name.
"""

SUITES = {
    "parity": "suites.parity",
    "throughput": "suites.throughput",
}
