"""Ranks that plan together, on real gloo ranks: all get a plan or all raise the same error."""

from __future__ import annotations

import os
import pickle
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from steelyard.balance import plan_micro_batches, verify_digest
from steelyard.errors import PlanError, PlanMismatch, SequenceTooLong
from steelyard.lengths import workload
from steelyard.pipeline import Pipeline, is_legal_count

CAP = 20_000


def _lengths(rank: int) -> list[int]:
    return workload("rl-code-16k-cap").draw(24 + 10 * rank, rank).totals.tolist()


def _fails(lengths: Any) -> np.ndarray:
    return np.asarray(lengths) / 0.0 if len(lengths) == 3 else _raise()


def _raise() -> np.ndarray:
    raise ZeroDivisionError("in the cost of the caller")


def _counted(rank: int, group: dist.ProcessGroup) -> tuple[int, Any]:
    calls = []
    gather = dist.all_gather_object
    dist.all_gather_object = lambda *args, **rest: (calls.append(1), gather(*args, **rest))[1]
    try:
        plan = plan_micro_batches(_lengths(rank), CAP, group=group)
    finally:
        dist.all_gather_object = gather
    return len(calls), plan


def _peers(rank: int, group: dist.ProcessGroup, changed: int | None) -> str:
    plan = plan_micro_batches(_lengths(0), CAP)
    if rank == changed:
        plan = replace(plan, indices=plan.indices[::-1])
    verify_digest(plan, group)
    return plan.digest


SCENARIOS: dict[str, Callable[[int, int, dist.ProcessGroup], Any]] = {
    "unequal rows": lambda rank, world, group: plan_micro_batches(_lengths(rank), CAP, group=group),
    "not the same count": lambda rank, world, group: plan_micro_batches(
        _lengths(rank), CAP, group=group, same_count=False
    ),
    "pipeline": lambda rank, world, group: plan_micro_batches(
        _lengths(rank), CAP, group=group, pipeline=Pipeline(4, 2), multiple_of=2
    ),
    "too long": lambda rank, world, group: plan_micro_batches(
        [5, 6, 70] if rank == world - 1 else [5, 6], 50, group=group
    ),
    "alone": lambda rank, world, group: plan_micro_batches(
        [5, 6, 70] if rank == world - 1 else [5, 6], 50, group=group, oversize="alone"
    ),
    "bad input": lambda rank, world, group: plan_micro_batches([5, float("nan") if rank == 0 else 6], 50, group=group),
    "bad settings": lambda rank, world, group: plan_micro_batches([5, 6], 0 if rank == 0 else 50, group=group),
    "two bad ranks": lambda rank, world, group: plan_micro_batches([5, 6 - 6 * (rank > 0)], 6, group=group),
    "failing cost": lambda rank, world, group: plan_micro_batches(
        [5, 6], 50, cost=_fails if rank == 1 else None, group=group
    ),
    "one empty": lambda rank, world, group: plan_micro_batches([] if rank == 0 else [5, 6], 6, group=group),
    "all empty": lambda rank, world, group: plan_micro_batches([], 6, group=group),
    "one too few": lambda rank, world, group: plan_micro_batches(
        [5] if rank == 0 else [5, 6], 6, group=group, fill="error"
    ),
    "other settings": lambda rank, world, group: plan_micro_batches([5, 6], 50 + rank, group=group),
    "collectives": lambda rank, world, group: _counted(rank, group),
    "equal peers": lambda rank, world, group: _peers(rank, group, None),
    "a different peer": lambda rank, world, group: _peers(rank, group, world - 1),
}


def _rank(rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    half = [dist.new_group(list(range(start, start + world // 2))) for start in (0, world // 2)]
    outcomes: dict[str, Any] = {}
    for name, scenario in SCENARIOS.items():
        try:
            outcomes[name] = scenario(rank, world, dist.group.WORLD)
        except PlanError as error:
            outcomes[name] = error
        except Exception:
            outcomes[name] = traceback.format_exc()
    outcomes["half"] = plan_micro_batches(_lengths(rank), CAP, group=half[rank // (world // 2)])
    Path(folder, f"{rank}.pickle").write_bytes(pickle.dumps(outcomes))
    deadline = time.monotonic() + 20
    while len(list(Path(folder).glob("*.pickle"))) < world and time.monotonic() < deadline:
        time.sleep(0.01)  # a peer may still be in the last collective
    os._exit(0)  # gloo's threads now and then abort an orderly exit


@pytest.fixture(scope="module", params=[2, 4])
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What every rank of a run got: scenario -> [ranks] plan or error."""
    world = request.param
    folder = tmp_path_factory.mktemp(f"ranks{world}")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("OMP_NUM_THREADS", "1")
        context = mp.spawn(_rank, (world, str(folder)), nprocs=world, join=False)
        deadline = time.monotonic() + 60
        while not context.join(timeout=1):  # True once all have ended
            if time.monotonic() > deadline:
                for process in context.processes:
                    process.kill()
                pytest.fail(f"{world} ranks did not finish within 60 s: some wait for others")
    ranks = [pickle.loads(Path(folder, f"{rank}.pickle").read_bytes()) for rank in range(world)]
    return {name: [one[name] for one in ranks] for name in ranks[0]}


def same_error(errors: list[Any], kind: type[PlanError]) -> PlanError:
    assert [type(error) for error in errors] == [kind] * len(errors), errors
    assert len({str(error) for error in errors}) == 1
    return errors[0]


def test_ranks_with_unequal_rows_get_plans_of_one_count(outcomes: dict[str, list[Any]]) -> None:
    plans = outcomes["unequal rows"]
    alone = [plan_micro_batches(_lengths(rank), CAP) for rank in range(len(plans))]
    assert {len(plan) for plan in plans} == {max(len(plan) for plan in alone)}
    assert {plan.lower_bound for plan in plans} == {max(plan.lower_bound for plan in alone)}
    for rank, plan in enumerate(plans):
        assert plan.rows == list(range(24 + 10 * rank))
        assert sorted(row for one in plan.indices for row in one) == plan.rows
        assert max(plan.tokens) <= CAP


def test_ranks_need_not_agree_on_the_count(outcomes: dict[str, list[Any]]) -> None:
    plans = outcomes["not the same count"]
    assert plans == [plan_micro_batches(_lengths(rank), CAP) for rank in range(len(plans))]
    assert len({len(plan) for plan in plans}) > 1


def test_ranks_agree_on_the_count_that_a_pipeline_wants(outcomes: dict[str, list[Any]]) -> None:
    plans = outcomes["pipeline"]
    (count,) = {len(plan) for plan in plans}
    assert is_legal_count(count, Pipeline(4, 2))
    assert count % 2 == 0
    assert all(max(plan.tokens) <= CAP and plan.lower_bound <= count for plan in plans)


def test_a_row_above_the_cap_on_one_rank_makes_all_raise(outcomes: dict[str, list[Any]]) -> None:
    errors = outcomes["too long"]
    error = same_error(errors, SequenceTooLong)
    assert vars(error) == {"position": 2, "length": 70, "max_tokens": 50, "rank": len(errors) - 1}
    plans = outcomes["alone"]
    assert {len(plan) for plan in plans} == {2}
    assert sorted(plans[-1].indices) == [[0, 1], [2]]


@pytest.mark.parametrize(
    ("scenario", "text"),
    [
        ("bad input", "lengths[1]=nan"),
        ("bad settings", "max_tokens=0"),
        ("two bad ranks", "lengths[1]=0"),
        ("failing cost", "data-parallel rank 1 failed to plan: ZeroDivisionError: in the cost of the caller"),
        ("all empty", "lengths is empty on every rank"),
        ("one too few", "data-parallel rank 0: 2 micro-batches are required"),
    ],
)
def test_what_is_wrong_on_one_rank_is_raised_on_all(outcomes: dict[str, list[Any]], scenario: str, text: str) -> None:
    assert text in str(same_error(outcomes[scenario], PlanError))


def test_a_rank_without_rows_gets_fillers(outcomes: dict[str, list[Any]]) -> None:
    first, *others = outcomes["one empty"]
    assert first.indices == [[], []]
    assert first.rows == []
    assert first.restore([["filler"], ["filler"]]) == []
    assert first.summary().fillers == 2
    assert all(sorted(plan.indices) == [[0], [1]] for plan in others)


def test_ranks_with_different_settings_are_told(outcomes: dict[str, list[Any]]) -> None:
    error = same_error(outcomes["other settings"], PlanMismatch)
    assert "max_tokens=50" in str(error)
    assert "max_tokens=51" in str(error)


def test_planning_together_takes_one_collective(outcomes: dict[str, list[Any]]) -> None:
    assert [calls for calls, _ in outcomes["collectives"]] == [1] * len(outcomes["collectives"])


def test_a_group_of_some_ranks_plans_by_itself(outcomes: dict[str, list[Any]]) -> None:
    plans = outcomes["half"]
    half = len(plans) // 2
    for ranks in (range(half), range(half, len(plans))):
        assert {len(plans[rank]) for rank in ranks} == {max(len(plan_micro_batches(_lengths(at), CAP)) for at in ranks)}


def test_peers_with_the_same_plan_go_on(outcomes: dict[str, list[Any]]) -> None:
    assert set(outcomes["equal peers"]) == {plan_micro_batches(_lengths(0), CAP).digest}


def test_a_peer_with_a_different_plan_is_an_error_on_every_rank(outcomes: dict[str, list[Any]]) -> None:
    error = same_error(outcomes["a different peer"], PlanMismatch)
    assert "hold different plans" in str(error)
    assert f"rank {len(outcomes['a different peer']) - 1}: " in str(error)
