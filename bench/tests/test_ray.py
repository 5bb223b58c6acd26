"""Cells on a real Ray cluster: two nodes on this machine, one of which goes away in the middle."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.cells import Machine, Task
from bench.record import FILE_NAME, RecordWriter, read_records
from bench.run import run_cells
from bench.tests import ray_jobs
from bench.tests.made_up import SIZES
from suites.launch import on_ray
from suites.launch.jobs import Ended, Job
from suites.launch.on_ray import Cluster, Node, place
from suites.matrix import Cell, Layout

# A node that is gone refuses the check at once, one on a busy machine answers late: only the first is to be found soon.
QUICK_HEALTH_CHECKS = {
    "health_check_initial_delay_ms": 500,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 20_000,
    "health_check_failure_threshold": 4,
}
NODE = {"num_cpus": 1, "object_store_memory": 80 * 2**20}


class Nodes:
    """The head of a cluster, and nodes that can be taken away; each has one CPU."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster as RealCluster

        head = {**NODE, "include_dashboard": False, "_system_config": QUICK_HEALTH_CHECKS}
        self.cluster = RealCluster(initialize_head=True, head_node_args=head)
        self.others: list[Any] = []

    def have(self, others: int) -> None:
        """Make it so many beside the head; Ray can start nodes in the main thread alone."""
        while len(self.others) < others:
            self.others.append(self.cluster.add_node(**NODE))
        while len(self.others) > others:
            self.take_away(self.others[0].node_id)

    def take_away(self, *candidates: str) -> None:
        """Kill one of the nodes with these ids; the head stays."""
        gone = next(node for node in self.others if node.node_id in candidates)
        self.others.remove(gone)
        self.cluster.remove_node(gone, allow_graceful=False)


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    there = Nodes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", there.cluster.address)
        yield there
    there.cluster.shutdown()


@pytest.fixture(scope="module")
def cluster(nodes: Nodes) -> Iterator[Cluster]:
    with Cluster() as joined:
        yield joined


@pytest.fixture(autouse=True)
def two_nodes(request: pytest.FixtureRequest) -> None:
    if "nodes" in request.fixturenames:
        request.getfixturevalue("nodes").have(others=1)


def job(name: str, what: str, *, limit: float = 60, **payload: Any) -> Job:
    """A cell of two ranks, one on each node."""
    settings = {"job": what, "ranks": 2, "limit": limit, **payload}
    return Job(name, "bench.tests.ray_jobs:cell", settings, 2, "cpu", False, limit)


def run(cluster: Cluster, *jobs: Job, started: Callable[[Job], None] = lambda job: None) -> dict[str, Ended]:
    return {ended.job.name: ended for ended in cluster.run(jobs, started, math.inf)}


def test_cells_run_side_by_side_unless_they_are_timed_on_one_machine(nodes: Nodes, cluster: Cluster) -> None:
    jobs = [Job(name, "bench.tests.ray_jobs:without_ranks", 2.0, 0, "cpu", name == "c", 60) for name in "abc"]
    a, b, c = (ended.result for _, ended in sorted(run(cluster, *jobs).items()))
    assert max(a["start"], b["start"]) < min(a["end"], b["end"])
    assert c["start"] > max(a["end"], b["end"])


def test_a_killed_rank_fails_its_cell_and_is_not_taken_for_a_lost_node(nodes: Nodes, cluster: Cluster) -> None:
    (ended,) = run(cluster, job("a", "die")).values()
    assert ended.status == "failed"
    assert "rank 1 failed: its process died" in ended.reason


def test_a_hanging_rank_is_named_with_its_line(nodes: Nodes, cluster: Cluster) -> None:
    (ended,) = run(cluster, job("a", "stand_still", limit=4)).values()
    lines = Path(ray_jobs.__file__).read_text().splitlines()
    line = next(at for at, text in enumerate(lines, 1) if text.endswith("# here"))
    assert ended.status == "failed"
    assert f"rank 1 stood at bench/tests/ray_jobs.py:{line} in stand_still" in ended.reason


def lose_a_node_once_started(nodes: Nodes, visits: Path) -> threading.Thread:
    def watch() -> None:
        while not visits.exists() or not visits.read_text().endswith("\n"):
            time.sleep(0.1)
        nodes.take_away(*visits.read_text().split())

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


def test_a_cell_whose_node_goes_away_runs_once_more(nodes: Nodes, cluster: Cluster, tmp_path: Path) -> None:
    nodes.have(others=2)
    visits = tmp_path / "visits"
    started: list[str] = []
    thread = lose_a_node_once_started(nodes, visits)
    (ended,) = run(
        cluster,
        job("a", "wait_once", visits=str(visits), waits=1),
        started=lambda job: started.append(job.name),
    ).values()
    thread.join()
    assert (ended.status, started) == ("done", ["a", "a"]), ended
    assert ended.result["ranks"] == {"sum": 1.0, "threads": 1, "nodes": 2}
    first, second = visits.read_text().splitlines()
    assert first != second


def test_a_cell_without_room_for_its_second_try_is_lost_and_the_rest_runs(
    nodes: Nodes, cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_ray, "ROOM_S", 2.0)
    visits = tmp_path / "visits"
    thread = lose_a_node_once_started(nodes, visits)
    other = Job("b", "bench.tests.ray_jobs:without_ranks", 0.0, 0, "cpu", False, 60)
    ended = run(cluster, job("a", "wait_once", visits=str(visits), waits=1), other)
    thread.join()
    assert ended["a"].status == "lost"
    assert ended["a"].reason == "its node went away, and 2 CPUs are not left on the others"
    assert ended["b"].status == "done"


def test_a_parity_cell_leaves_the_same_records_as_here(nodes: Nodes, cluster: Cluster, tmp_path: Path) -> None:
    cell = Cell(suite="parity", workload="rl-code-16k-cap", model=SIZES, rows=4, scale=400.0, role="reward",
                layout=Layout(tp=2))  # fmt: skip
    cpus, gpus = cluster.capacity()
    assert (cpus, gpus) == (2, 0)
    task = Task.of(cell, Machine("the Ray cluster", cpus, gpus, slots=cpus))
    with RecordWriter(tmp_path / FILE_NAME) as writer:
        assert run_cells([task], "r", writer, cluster.run, lambda cell: None, lambda outcome: None) is None
    *series, outcome = read_records(tmp_path).lines
    assert outcome.status == "passed", outcome
    assert {one.metric for one in series} == {"output_error", "parity_max_error"}
    assert outcome.environment.commit is not None
    assert outcome.conditions is not None


def node(name: str, cpus: int, machine: str = "", **facts: int) -> Node:
    return Node(name, machine or name, {"CPU": cpus, "GPU": 0}, **facts)


def test_a_cell_spreads_over_as_few_nodes_as_it_can_in_rank_order() -> None:
    chosen = place(6, "CPU", False, [node("a", 2), node("b", 4), node("c", 3)])
    assert chosen is not None
    assert [one.id for one in chosen] == ["b"] * 4 + ["c"] * 2
    assert place(10, "CPU", False, [node("a", 2), node("b", 4), node("c", 3)]) is None


def test_timed_cells_share_no_machine() -> None:
    there = [node("a", 4, "one", cells=1), node("b", 4, "one"), node("c", 2, "two")]
    assert [one.id for one in place(2, "CPU", True, there) or []] == ["c"] * 2
    assert place(4, "CPU", True, there) is None, "another node of the same machine is no other machine"
    assert [one.id for one in place(4, "CPU", False, there) or []] == ["a"] * 4
    taken = [node("a", 4, "one", cells=1, timed=1), node("b", 4, "one"), node("c", 2, "two")]
    assert place(4, "CPU", False, taken) is None, "nothing disturbs a timed cell"
