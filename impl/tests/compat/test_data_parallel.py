"""Two gloo ranks call ``rearrange_micro_batches`` together: all get micro-batches or all raise the same error."""

from __future__ import annotations

import os
import pickle
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from steelyard.compat.verl.utils.seqlen_balancing import rearrange_micro_batches
from steelyard.errors import InputError, PlanError, SequenceTooLong

pytest.importorskip("tensordict", reason="verl's batches are TensorDicts")

WORLD, CAP = 2, 20
LENGTHS = ([20, 12, 8, 11, 9, 20, 20], [20, 13, 13, 13, 8, 8, 8])  # alone: 5 and 6 micro-batches


def _batch(lengths: list[int]) -> dict[str, torch.Tensor]:
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    return {"input_ids": mask * 7, "attention_mask": mask}


def _plan(lengths: list[int], **arguments: Any) -> list[list[int]]:
    micro_batches, indices = rearrange_micro_batches(_batch(lengths), CAP, dist.group.WORLD, **arguments)
    assert [one["attention_mask"].sum().item() for one in micro_batches] == [
        sum(lengths[row] for row in rows) for rows in indices
    ]
    return indices


def _without_mask(rank: int) -> list[list[int]]:
    batch = _batch(LENGTHS[rank])
    if rank == 1:
        del batch["attention_mask"]
    return rearrange_micro_batches(batch, CAP, dist.group.WORLD)[1]


def _collectives(rank: int, **arguments: Any) -> tuple[int, list[list[int]]]:
    names = ("all_gather_object", "all_reduce", "all_gather", "broadcast", "barrier")
    calls, kept = [], {name: getattr(dist, name) for name in names}

    def counted(name: str) -> Callable[..., Any]:
        return lambda *args, **named: (calls.append(name), kept[name](*args, **named))[1]

    for name in names:
        setattr(dist, name, counted(name))
    try:
        indices = _plan(LENGTHS[rank], **arguments)
    finally:
        for name in names:
            setattr(dist, name, kept[name])
    return calls.count("all_gather_object"), len(calls), indices


SCENARIOS: dict[str, Callable[[int], Any]] = {
    "unequal": lambda rank: _plan(LENGTHS[rank]),
    "divided": lambda rank: _plan(LENGTHS[rank], num_batches_divided_by=7),
    "at least": lambda rank: _plan(LENGTHS[rank], min_num_micro_batch=7),
    "alone": lambda rank: _plan(LENGTHS[rank], same_micro_num_in_dp=False),
    "too long": lambda rank: _plan([5, 6, CAP + 1] if rank == 1 else [5, 6]),
    "too few": lambda rank: _plan([5, 6] if rank == 0 else [CAP] * 3),
    "no groups": lambda rank: _plan([5, 6, 7] if rank == 0 else [5, 6], force_group_size=2),
    "no mask": _without_mask,
    "other divisor": lambda rank: _plan(LENGTHS[rank], num_batches_divided_by=1 + rank),
    "collectives": lambda rank: _collectives(rank),
    "no collective": lambda rank: _collectives(rank, same_micro_num_in_dp=False),
}


def _rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    outcomes: dict[str, Any] = {}
    for name, scenario in SCENARIOS.items():
        try:
            outcomes[name] = scenario(rank)
        except InputError as error:
            outcomes[name] = error
        except Exception:
            outcomes[name] = traceback.format_exc()
    Path(folder, f"{rank}.pickle").write_bytes(pickle.dumps(outcomes))
    deadline = time.monotonic() + 20
    while len(list(Path(folder).glob("*.pickle"))) < WORLD and time.monotonic() < deadline:
        time.sleep(0.01)  # a peer may still be in the last collective
    os._exit(0)  # gloo's threads now and then abort an orderly exit


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What both ranks got: scenario -> [ranks] index lists or error."""
    folder = tmp_path_factory.mktemp("ranks")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("OMP_NUM_THREADS", "1")
        context = mp.spawn(_rank, (str(folder),), nprocs=WORLD, join=False)
        deadline = time.monotonic() + 90
        while not context.join(timeout=1):  # True once all have ended
            if time.monotonic() > deadline:
                for process in context.processes:
                    process.kill()
                pytest.fail("the ranks did not finish within 90 s: one waits for the other")
    ranks = [pickle.loads(Path(folder, f"{rank}.pickle").read_bytes()) for rank in range(WORLD)]
    return {name: [one[name] for one in ranks] for name in ranks[0]}


@pytest.mark.parametrize(("scenario", "count"), [("unequal", 6), ("divided", 7), ("at least", 7)])
def test_ranks_run_the_same_number_of_micro_batches(outcomes: dict[str, list[Any]], scenario: str, count: int) -> None:
    plans = outcomes[scenario]
    assert [len(indices) for indices in plans] == [count] * WORLD
    for indices, lengths in zip(plans, LENGTHS, strict=True):
        assert sorted(row for rows in indices for row in rows) == list(range(len(lengths)))
        assert all(rows and sum(lengths[row] for row in rows) <= CAP for rows in indices)


def test_ranks_that_need_not_agree_take_their_own_count(outcomes: dict[str, list[Any]]) -> None:
    assert [len(indices) for indices in outcomes["alone"]] == [5, 6]


def test_planning_together_takes_one_collective_and_alone_none(outcomes: dict[str, list[Any]]) -> None:
    assert [found[:2] for found in outcomes["collectives"]] == [(1, 1)] * WORLD
    assert [found[:2] for found in outcomes["no collective"]] == [(0, 0)] * WORLD


@pytest.mark.parametrize(
    ("scenario", "kind", "text"),
    [
        ("too long", SequenceTooLong, f"sequence 2 of data-parallel rank 1 has {CAP + 1} tokens"),
        ("too few", PlanError, "data-parallel rank 0: 3 micro-batches are required"),
        ("no groups", PlanError, "3 rows make no groups of force_group_size=2"),
        ("no mask", PlanError, "data-parallel rank 1 failed to plan: BatchError: the batch has no 'attention_mask'"),
        ("other divisor", PlanError, "pass the same settings on every rank"),
    ],
)
def test_what_is_wrong_on_one_rank_is_raised_on_both(
    outcomes: dict[str, list[Any]], scenario: str, kind: type[PlanError], text: str
) -> None:
    errors = outcomes[scenario]
    assert all(isinstance(error, kind) for error in errors), errors
    assert {str(error) for error in errors} == {str(errors[0])}
    assert text in str(errors[0])
