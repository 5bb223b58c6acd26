"""Packing under verl's names against the real functions on two gloo ranks, tensor or context parallel."""

from __future__ import annotations

import os
import pickle
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from megatron.core import parallel_state

from impl.tests.compat.mcore_cases import Case, assert_same_params, assert_same_rows, row_masks, with_gradient
from steelyard.compat.verl import packed as shared
from steelyard.compat.verl.models.mcore import util as ours
from steelyard.model.host import running_on

verl = pytest.importorskip("verl.models.mcore.util", reason="the tests compare with the real package")

WORLD, BATCHES = 2, 25
LAYOUTS = {"tp2": (2, 1), "cp2": (1, 2)}


def batches() -> list[Case]:
    """The same on every rank: lengths of all sizes, some rows without a token, every third mask with holes."""
    generator = torch.Generator().manual_seed(1)

    def draw(low: int, high: int, count: int = 1) -> list[int]:
        return torch.randint(low, high, (count,), generator=generator).tolist()

    found = []
    for number in range(BATCHES):
        (count,) = draw(1, 6)
        mask = row_masks([*draw(0, 6, count - 1), draw(1, 6)[0]], draw(0, 12, count))
        if number % 3 == 0:
            mask &= torch.rand(mask.shape, generator=generator) < 0.8
        found.append(Case(mask))
    return found


def assert_same_ways_back(here: Callable[..., Any], there: Callable[..., Any], output: torch.Tensor) -> None:
    """Results and gradients; the output of this rank is its own, or no test could tell whose is where."""
    output = output * (1 + dist.get_rank())
    (one, gradient), (other, expected) = with_gradient(here, output), with_gradient(there, output)
    assert_same_rows(one, other)
    assert torch.equal(gradient, expected)


def padded_rows(case: Case) -> None:
    count, width = case.mask.shape
    packed, params = ours.preprocess_packed_seqs(case.rows, case.mask)
    theirs, their_params = verl.preprocess_packed_seqs(case.rows, case.mask)
    assert_same_rows(packed, theirs)
    assert_same_params(params, their_params)
    back = (case.mask, count, width)
    assert torch.equal(ours.postprocess_packed_seqs(packed, params, *back), case.rows * case.mask.unsqueeze(-1))
    for known in (params, their_params):
        assert_same_ways_back(
            lambda x, known=known: ours.postprocess_packed_seqs(x, known, *back),
            lambda x: verl.postprocess_packed_seqs(x, their_params, *back),
            packed,
        )
    whole = ours.postprocess_packed_seqs(packed.to(torch.uint8), params, *back)
    assert_same_rows(whole, verl.postprocess_packed_seqs(packed.to(torch.uint8), params, *back))


def fused_outputs(case: Case) -> None:
    packed, params = ours.preprocess_packed_seqs(case.rows, case.mask)
    labels_mask = packed[..., 0] % 3 > 0
    results = []
    for module in (ours, verl):
        output = SimpleNamespace(entropy=packed[0, :, 0].clone(), log_probs=packed[0, :, 1].clone())
        results.append(
            module.postprocess_packed_seqs_for_dict_output(labels_mask, output, params, case.mask, *case.mask.shape)
        )
    for name in ("entropy", "log_probs"):
        assert_same_rows(results[0][name], results[1][name])


def nested_rows(case: Case, **settings: Any) -> None:
    rows, count = case.nested(case.rows), len(case.mask)
    packed, params, _ = ours.preprocess_thd_engine(rows, **settings)
    theirs, their_params, _ = verl.preprocess_thd_engine(rows, **settings)
    assert_same_rows(packed, theirs)
    assert_same_params(params, their_params)
    assert_same_rows(ours.postprocess_thd_engine(packed, params, rows, count, **settings), rows)
    for known, lengths in ((params, None), (their_params, None), (their_params, case.lengths)):
        assert_same_ways_back(
            lambda x, known=known, lengths=lengths: ours.postprocess_thd_engine(
                x, known, rows, count, lengths=lengths, **settings
            ),
            lambda x: verl.postprocess_thd_engine(x, their_params, rows, count, **settings),
            packed,
        )


def contiguous_pieces(case: Case) -> None:
    class Params(verl.PackedSeqParams):
        def __init__(self, cp_partition_mode: str, **rest: Any) -> None:
            super().__init__(**rest)

    with (
        mock.patch.object(verl, "PackedSeqParams", Params),
        mock.patch.object(verl, "_PACKED_SEQ_PARAMS_HAS_CP_PARTITION_MODE", True),
        mock.patch.object(shared, "takes_partition_mode", return_value=True),
    ):
        nested_rows(case, cp_layout="contiguous")


def a_group_of_its_own(case: Case) -> None:
    # Ranks that are tensor parallel make a context-parallel group for once.
    groups = {"create": True, "return_value": dist.group.WORLD}
    with mock.patch.object(parallel_state, "get_dynamic_data_context_parallel_groups", **groups):
        nested_rows(case, local_cp_size=WORLD)


def padded_nested_rows(case: Case) -> None:
    rows = case.nested(case.rows)
    output, mask, _ = ours.preprocess_bshd_engine(rows)
    for one, other in zip((output, mask), verl.preprocess_bshd_engine(rows)[:2], strict=True):
        assert_same_rows(one, other)
    assert_same_rows(ours.postprocess_bshd_engine(output, mask), rows)
    # gloo gathers no bool: verl gets its mask as bytes.
    theirs = mask.to(torch.uint8)
    for lengths in (None, case.lengths):
        assert_same_ways_back(
            lambda x, lengths=lengths: ours.postprocess_bshd_engine(x, mask, lengths=lengths),
            lambda x: verl.postprocess_bshd_engine(x, theirs),
            output,
        )


def compacted_rows(case: Case) -> None:
    if parallel_state.get_context_parallel_world_size() > 1:
        return
    results = [module.preprocess_bshd(case.rows, case.mask, case.ids, True) for module in (ours, verl)]
    for one, other in zip(*results, strict=True):
        assert_same_rows(one, other)


SCENARIOS = (
    padded_rows,
    fused_outputs,
    nested_rows,
    contiguous_pieces,
    a_group_of_its_own,
    padded_nested_rows,
    compacted_rows,
)


def _rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    failures: dict[str, str] = {}
    with running_on("cpu"):
        for layout, (tp, cp) in LAYOUTS.items():
            parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp, context_parallel_size=cp)
            for scenario in SCENARIOS:
                name = f"{layout} {scenario.__name__}"
                try:
                    for case in batches():
                        scenario(case)
                    failures[name] = ""
                except Exception:
                    failures[name] = traceback.format_exc()
                dist.barrier()
            parallel_state.destroy_model_parallel()
    Path(folder, f"{rank}.pickle").write_bytes(pickle.dumps(failures))
    deadline = time.monotonic() + 20
    while len(list(Path(folder).glob("*.pickle"))) < WORLD and time.monotonic() < deadline:
        time.sleep(0.01)  # a peer may still be in the last collective
    os._exit(0)  # gloo's threads now and then abort an orderly exit


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What each rank raised: scenario -> traceback, empty where all was well."""
    folder = tmp_path_factory.mktemp("ranks")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("OMP_NUM_THREADS", "1")
        context = mp.spawn(_rank, (str(folder),), nprocs=WORLD, join=False)
        deadline = time.monotonic() + 200
        while not context.join(timeout=1):  # True once all have ended
            if time.monotonic() > deadline:
                for process in context.processes:
                    process.kill()
                pytest.fail("the ranks did not finish within 200 s: one waits for the other")
    return [pickle.loads(Path(folder, f"{rank}.pickle").read_bytes()) for rank in range(WORLD)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_two_ranks_get_what_verl_gives(
    failures: list[dict[str, str]], scenario: Callable[..., Any], layout: str
) -> None:
    raised = [one[f"{layout} {scenario.__name__}"] for one in failures]
    assert not any(raised), "\n".join(raised)
