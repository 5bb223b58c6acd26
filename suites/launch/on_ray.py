"""Cells on a Ray cluster: a placement group for each, one actor per rank, on GPUs or CPUs as the cell says.

The driver decides itself where ranks go (``place``): on as few nodes as possible, in rank order, so that
tensor-parallel neighbours share a node; and nothing else on a machine where times are taken. Each bundle of the
placement group names its node. The cell's own process is an actor too, on the first node; its ``run_ranks`` starts the
actors of the ranks.

A cell whose node goes away is started once more, where there is room; when that happens again it is ``lost``.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Before the import: nothing is reported to others, and nodes of one machine find each other at 127.0.0.1.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from steelyard.errors import InputError
from suites.launch import alone, local, watch
from suites.launch.jobs import Ended, Job

ROOT = Path(__file__).resolve().parents[2]
# Workers start and import torch and megatron-core before a cell can begin.
START_S = 120.0
# Ray needs up to 13 s, by its defaults, to notice that a node does not answer.
NOTICE_S = 15.0
ANSWER_S = 5.0
# How long a cell that fits nowhere waits for room.
ROOM_S = 60.0
POLL_S = 0.25
ATTEMPTS = 2


@dataclass
class Node:
    """A node of the cluster as the driver sees it: ``free`` counts CPUs and GPUs that no cell of ours holds."""

    id: str
    machine: str
    free: dict[str, int]
    cells: int = 0
    timed: int = 0


def place(ranks: int, unit: str, timed: bool, nodes: Sequence[Node]) -> list[Node] | None:
    """The node of every rank, or None when there is no room now.

    A timed cell takes machines on which nothing runs; no cell goes where a timed one runs. Nodes with the most room
    come first, so that a cell spreads over as few as possible.
    """
    taken = {node.machine for node in nodes if node.timed or (timed and node.cells)}
    rooms = sorted((node for node in nodes if node.machine not in taken), key=lambda node: (-node.free[unit], node.id))
    seats = [node for node in rooms for _ in range(node.free[unit])]
    return seats[:ranks] if len(seats) >= ranks else None


@dataclass
class _Running:
    job: Job
    attempt: int
    group: PlacementGroup
    seat: Any
    answer: Any
    nodes: list[str]
    start: float = field(default_factory=time.monotonic)


class Cluster:
    """Use as a context: it joins the cluster that ``RAY_ADDRESS`` or this machine names."""

    def __enter__(self) -> Cluster:
        packages = [str(ROOT / "impl" / "steelyard"), str(ROOT / "suites"), str(ROOT / "bench")]
        environment = {"py_modules": packages, "env_vars": alone.RANK_ENVIRONMENT}
        try:
            ray.init(address="auto", runtime_env=environment, log_to_driver=False, logging_level="error")
        except ConnectionError:
            raise InputError(
                "--on ray: no Ray cluster found: start one with 'ray start --head', or name one in RAY_ADDRESS"
            ) from None
        return self

    def __exit__(self, *error: object) -> None:
        ray.shutdown()

    def capacity(self) -> tuple[int, int]:
        """(CPUs, GPUs) of all nodes that are alive."""
        totals = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        return tuple(sum(int(total.get(unit, 0)) for total in totals) for unit in ("CPU", "GPU"))

    def run(self, jobs: Iterable[Job], started: Callable[[Job], None], deadline: float) -> Iterator[Ended]:
        """Run jobs side by side where there is room, until ``deadline``; yields each at its end, omits the rest."""
        waiting = [(job, 1) for job in jobs]
        running: list[_Running] = []
        idle_since = time.monotonic()
        try:
            while (waiting or running) and time.monotonic() < deadline:
                for entry in list(waiting):
                    if one := self._start(*entry, running):
                        waiting.remove(entry)
                        running.append(one)
                        started(one.job)
                if running:
                    idle_since = time.monotonic()
                elif time.monotonic() - idle_since > ROOM_S:
                    yield _no_room(*waiting.pop(0))
                for one in self._ended(running):
                    running.remove(one)
                    ended = _outcome(one)
                    remove_placement_group(one.group)
                    if ended is None:
                        waiting.insert(0, (one.job, one.attempt + 1))
                    else:
                        yield ended
        finally:
            for one in running:
                remove_placement_group(one.group)

    def _start(self, job: Job, attempt: int, running: Sequence[_Running]) -> _Running | None:
        unit = "GPU" if job.device == "cuda" else "CPU"
        chosen = place(max(job.ranks, 1), unit, job.timed, _nodes(running))
        if chosen is None:
            return None
        needs = {"CPU": 1, "GPU": 1} if unit == "GPU" else {"CPU": 1}
        group = placement_group(
            [needs] * len(chosen), bundle_label_selector=[{"ray.io/node-id": node.id} for node in chosen]
        )
        # What the last cell held may take a moment to be given back; a node may also go away right now.
        if not group.wait(NOTICE_S):
            remove_placement_group(group)
            return None
        nodes = [node.id for node in chosen]
        seat = _seat(group, 0, job.device, holds=job.ranks == 0)
        return _Running(job, attempt, group, seat, seat.call_cell.remote(job, group, nodes), nodes)

    def _ended(self, running: Sequence[_Running]) -> list[_Running]:
        if not running:
            time.sleep(POLL_S)
            return []
        ready, _ = ray.wait([one.answer for one in running], num_returns=1, timeout=POLL_S)
        now = time.monotonic()
        return [one for one in running if one.answer in ready or now - one.start > one.job.time_limit + 2 * START_S]


def _nodes(running: Sequence[_Running]) -> list[Node]:
    nodes = {
        node["NodeID"]: Node(
            node["NodeID"],
            node["NodeManagerAddress"],
            {unit: int(node["Resources"].get(unit, 0)) for unit in ("CPU", "GPU")},
        )
        for node in ray.nodes()
        if node["Alive"]
    }
    for one in running:
        for at, name in enumerate(one.nodes):
            if node := nodes.get(name):
                for unit in ("CPU", "GPU") if one.job.device == "cuda" else ("CPU",):
                    node.free[unit] -= 1
                first = at == one.nodes.index(name)
                node.cells += first
                node.timed += first and one.job.timed
    return list(nodes.values())


def _outcome(one: _Running) -> Ended | None:
    """How a cell ended; None when it is to be started again."""
    seconds = time.monotonic() - one.start
    answer: dict[str, Any] = {}
    try:
        answer = ray.get(one.answer, timeout=0)
    except GetTimeoutError:
        told = watch.describe(watch.hang({"the cell": _where(one.seat)}, one.job.time_limit))
        answer = {"error": told}
    except RayError as error:
        lost = _lost(one.nodes, error)
        told = {"message": f"the cell's process died: {_cause(error)}", "kind": "ranks", "detail": str(error)}
        answer = {"error": {**told, "kind": "lost", "message": "its node went away"} if lost else told}
    if "error" not in answer:
        return Ended(one.job, "done", seconds, answer["result"])
    error = answer["error"]
    if error["kind"] != "lost":
        return Ended(one.job, "failed", seconds, reason=error["message"], detail=error["detail"])
    if one.attempt < ATTEMPTS:
        return None
    return Ended(one.job, "lost", seconds, reason=f"{error['message']}, for the second time")


def _no_room(job: Job, attempt: int) -> Ended:
    what = f"{max(job.ranks, 1)} {'GPUs' if job.device == 'cuda' else 'CPUs'}"
    if attempt > 1:
        return Ended(job, "lost", 0.0, reason=f"its node went away, and {what} are not left on the others")
    return Ended(job, "not_run", 0.0, reason=f"it needs {what} of the Ray cluster, and they were not free")


def _lost(nodes: Sequence[str], error: Exception) -> bool:
    """Whether a node is gone, as the cause of ``error``. A process that died alone is reported by its node at once."""
    deadline = time.monotonic() + (1.0 if "worker process has died" in str(error) else NOTICE_S)
    while True:
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        if not alive.issuperset(nodes):
            return True
        if time.monotonic() >= deadline:
            return False
        time.sleep(POLL_S)


def _cause(error: Exception) -> str:
    """The one line of Ray's text that says why a process died."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if "exit detail" in line.lower() or "has died" in line]
    return (telling or lines or [type(error).__name__])[0][:300]


# ---- in the workers of the cluster


@ray.remote(max_restarts=0, max_concurrency=2)
class _Seat:
    """The process of a cell or of a rank; the second thread answers where the first one stands."""

    def __init__(self) -> None:
        self._thread: int | None = None

    def call_cell(self, job: Job, group: PlacementGroup, nodes: list[str]) -> dict[str, Any]:
        """Run the cell; its ranks go to the bundles of ``group``. One that holds its bundle itself stays here."""
        if job.ranks:
            local.elsewhere = _Ranks(group, nodes, job.device)
        return self._answer(lambda: alone.call(job.target, job.payload))

    def prepare(self, world: int, device: str) -> tuple[str, int]:
        """Import what every rank needs, which is no part of its time; the address of a store where ranks can meet."""
        import torch.distributed as dist

        from steelyard.model import host

        with host.running_on(host.pick_device(device)):
            address = ray.util.get_node_ip_address()
        self._store = dist.TCPStore(address, 0, world, is_master=True, wait_for_workers=False)
        return address, self._store.port

    def call_rank(
        self, target: str, payload: Any, rank: int, world: int, address: tuple[str, int], device: str, limit: float
    ) -> dict[str, Any]:
        """Run one rank; also how much processor time it took, and on which node."""
        import torch.distributed as dist

        from steelyard.model import host

        def call() -> Any:
            store = self._store if rank == 0 else dist.TCPStore(*address, world, is_master=False)
            # Ray shows a rank no other GPU than its own.
            return local.call_in_group(target, payload, host.pick_device(device), store, rank, world, limit)

        answer = self._answer(call)
        return {**answer, "seconds": time.process_time(), "node": ray.get_runtime_context().get_node_id()}

    def where(self) -> str:
        """The stack of the thread that computes, as faulthandler writes it."""
        frame = sys._current_frames().get(self._thread or 0)
        lines = ["Current thread (most recent call first):"]
        while frame is not None:
            code = frame.f_code
            lines.append(f'  File "{code.co_filename}", line {frame.f_lineno} in {code.co_name}')
            frame = frame.f_back
        return "\n".join(lines)

    def _answer(self, call: Callable[[], Any]) -> dict[str, Any]:
        self._thread = threading.get_ident()
        try:
            return {"result": call()}
        except BaseException as error:
            return {"error": watch.describe(error)}


def _seat(group: PlacementGroup, bundle: int, device: str, *, holds: bool) -> Any:
    """An actor in a bundle; ``holds``: it takes the bundle's CPU and GPU, which a cell leaves to its ranks."""
    return _Seat.options(
        num_cpus=int(holds),
        num_gpus=int(holds and device == "cuda"),
        scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle),
    ).remote()


def _where(seat: Any) -> str:
    with contextlib.suppress(RayError):
        return ray.get(seat.where.remote(), timeout=ANSWER_S)
    return "it does not answer"


@dataclass
class _Ranks:
    """``run_ranks`` on the bundles of a placement group; called in the process of the cell."""

    group: PlacementGroup
    nodes: list[str]
    device: str

    def __call__(self, target: str, world: int, payload: Any, time_limit: float, device: str | None) -> Any:
        if world > len(self.nodes):
            raise InputError(f"the cell starts {world} ranks, and was given room for {len(self.nodes)}")
        seats = [_seat(self.group, rank, self.device, holds=True) for rank in range(world)]
        try:
            answers = self._answers(seats, (target, payload), time_limit)
        finally:
            for seat in seats:
                ray.kill(seat)
        errors = [(f"rank {rank}", one["error"]) for rank, one in enumerate(answers) if "error" in one]
        watch.raise_input_error(error for _, error in errors)
        watch.raise_first([(name, error) for name, error in errors if error["kind"] == "died"] or errors)
        here = ray.get_runtime_context().get_node_id()
        alone.elsewhere_seconds += sum(one["seconds"] for one in answers if one["node"] == here)
        return answers[0]["result"]

    def _answers(self, seats: list[Any], job: tuple[str, Any], time_limit: float) -> list[dict]:
        """What every rank answered; when one fails, what the others say soon after it."""
        world = len(seats)
        answers: list[dict] = [{} for _ in seats]
        try:
            address = ray.get([seat.prepare.remote(world, self.device) for seat in seats], timeout=START_S)[0]
        except RayError as error:
            if _lost(self.nodes, error):
                raise watch.NodeLost("a node of its ranks went away") from None
            raise watch.RanksFailed(f"its ranks did not start: {_cause(error)}", str(error)) from None
        deadline = time.monotonic() + time_limit
        calls = {
            seat.call_rank.remote(*job, rank, world, address, self.device, time_limit): rank
            for rank, seat in enumerate(seats)
        }
        failed = False
        while calls and (left := deadline - time.monotonic()) > 0:
            ready, _ = ray.wait(list(calls), num_returns=1, timeout=left)
            for ref in ready:
                rank = calls.pop(ref)
                try:
                    answers[rank] = ray.get(ref)
                except RayError as error:
                    answers[rank] = {"error": self._dead(rank, error)}
                if "error" in answers[rank] and not failed:
                    failed, deadline = True, min(deadline, time.monotonic() + watch.LAST_WORDS_S)
        if failed:
            # The errors of the others may be the first that is heard of a node that is gone.
            silent = [rank for rank in calls.values() if _where(seats[rank]) == "it does not answer"]
            if silent and _lost(self.nodes, TimeoutError()):
                raise watch.NodeLost(f"the node of rank {silent[0]} went away")
        elif calls:
            raise watch.hang({f"rank {rank}": _where(seats[rank]) for rank in sorted(calls.values())}, time_limit)
        return answers

    def _dead(self, rank: int, error: RayError) -> dict[str, Any]:
        if _lost(self.nodes, error):
            raise watch.NodeLost(f"the node of rank {rank} went away")
        return {"message": f"its process died: {_cause(error)}", "kind": "died", "detail": str(error), "time": 0.0}
