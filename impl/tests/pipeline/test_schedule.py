"""Which counts Megatron accepts and in which order it runs passes, against megatron-core itself."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
from megatron.core.enums import ModelType
from megatron.core.pipeline_parallel import schedules as megatron

from steelyard.errors import LayoutError, PlanError
from steelyard.pipeline import (
    Pipeline,
    check_count,
    is_legal_count,
    legal_count,
    nearest_legal_counts,
    simulate,
    stage_order,
)
from steelyard.pipeline.schedule import equal_overhead, schedule_table, warmup_passes


def interleaved(most_stages: int = 6, most_chunks: int = 4) -> Iterator[Pipeline]:
    for stages in range(2, most_stages + 1):
        for chunks in range(2, most_chunks + 1):
            for group in range(stages, 2 * stages + 3):
                yield Pipeline(stages, chunks, group)


class Accepted(Exception):  # noqa: N818
    """Megatron went past its checks."""


class Size:
    """A process group of which only the size and the rank are asked."""

    def __init__(self, size: int | None) -> None:
        self._size = size

    def size(self) -> int:
        if self._size is None:
            raise Accepted
        return self._size

    def rank(self) -> int:
        return 0


@pytest.fixture
def megatron_accepts(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, Pipeline], bool]:
    """Ask ``forward_backward_pipelining_with_interleaving``, which wants the context-parallel size after its checks."""
    config = SimpleNamespace(
        overlap_p2p_comm=True,
        batch_p2p_comm=False,
        finalize_model_grads_func=None,
        timers=None,
        hidden_size=8,
        no_sync_func=None,
        grad_sync_func=None,
        param_sync_func=None,
    )
    chunk = torch.nn.Module()
    chunk.config, chunk.model_type = config, ModelType.encoder_or_decoder  # type: ignore[assignment]
    groups = SimpleNamespace(tp=Size(1), cp=Size(None), embd=None, pos_embd=None, pp=None, dp_cp=None)
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, device=None, **rest: zeros(*size, **rest))

    def accepts(count: int, pipeline: Pipeline) -> bool:
        config.microbatch_group_size_per_vp_stage = pipeline.group_size
        communicator = SimpleNamespace(
            config=config,
            pp_group=Size(pipeline.stages),
            virtual_pipeline_model_parallel_size=pipeline.virtual,
        )
        try:
            megatron.forward_backward_pipelining_with_interleaving(
                forward_step_func=None,
                data_iterator=[iter(())] * pipeline.virtual,
                model=[chunk] * pipeline.virtual,
                num_microbatches=count,
                seq_length=8,
                micro_batch_size=1,
                p2p_communicator=communicator,
                pg_collection=groups,
            )
        except Accepted:
            return True
        except (ValueError, RuntimeError):
            return False
        raise AssertionError("Megatron ran a schedule without a model")

    return accepts


def megatron_passes(count: int, pipeline: Pipeline, stage: int, forward_only: bool) -> tuple[int, bool, int, int]:
    """megatron-core's own warm-up arithmetic for one stage."""
    communicator = SimpleNamespace(
        pp_group=SimpleNamespace(size=lambda: pipeline.stages, rank=lambda: stage),
        virtual_pipeline_model_parallel_size=pipeline.virtual if pipeline.virtual > 1 else None,
    )
    return megatron.get_pp_rank_microbatches(
        count, pipeline.virtual, pipeline.group_size, forward_only, False, communicator
    )


def test_legal_counts_are_those_of_megatron_over_thousands_of_combinations(
    megatron_accepts: Callable[[int, Pipeline], bool],
) -> None:
    seen = 0
    for pipeline in interleaved(6, 3):
        for count in range(1, 50):
            assert is_legal_count(count, pipeline) == megatron_accepts(count, pipeline), (count, pipeline)
            seen += 1
    assert seen > 3_000


def test_legal_count_is_the_least_that_is_not_below() -> None:
    for pipeline in interleaved(4, 3):
        for wanted in range(30):
            count = legal_count(wanted, pipeline)
            assert count >= max(1, wanted)
            assert is_legal_count(count, pipeline)
            assert not any(is_legal_count(lower, pipeline) for lower in range(max(1, wanted), count))


def test_legal_count_is_not_rounded_up_to_the_group_where_a_remainder_is_legal() -> None:
    assert legal_count(6, Pipeline(2, 2, 4)) == 6
    assert legal_count(5, Pipeline(4, 2)) == 8
    assert legal_count(5, Pipeline(2, 2, 4)) == 6


def test_one_chunk_per_stage_takes_any_count_and_no_pipeline_too() -> None:
    assert [legal_count(n, Pipeline(8)) for n in (0, 1, 3, 17)] == [1, 1, 3, 17]
    assert legal_count(7, None) == 7
    assert legal_count(7, None, multiple_of=4) == 8


@pytest.mark.parametrize("multiple", [1, 2, 3, 5])
def test_legal_count_is_a_multiple_of_what_is_asked(multiple: int) -> None:
    for pipeline, wanted in itertools.product(interleaved(4, 2), range(1, 20)):
        count = legal_count(wanted, pipeline, multiple_of=multiple)
        assert count % multiple == 0
        assert is_legal_count(count, pipeline)


def test_a_refused_count_names_the_nearest_legal_ones() -> None:
    pipeline = Pipeline(4, 2)
    assert nearest_legal_counts(9, pipeline) == (8, 12)
    assert nearest_legal_counts(3, pipeline) == (None, 4)
    with pytest.raises(PlanError, match=re.escape("9 micro-batches are refused")) as error:
        check_count(9, pipeline)
    assert "use 8 or 12 (predicted overhead 18.8% or 12.5% with equal micro-batches)" in str(error.value)
    assert "stages=4 <= group=4" in str(error.value)
    with pytest.raises(PlanError, match="use 4"):
        stage_order(0, 3, pipeline)
    with pytest.raises(PlanError, match="use at least 1"):
        check_count(0, Pipeline(2))
    with pytest.raises(PlanError, match="multiple_of=0"):
        legal_count(3, pipeline, multiple_of=0)


def test_schedule_table_is_megatrons_over_thousands_of_combinations() -> None:
    seen = 0
    for pipeline in interleaved():
        for count in range(pipeline.group_size, 36):
            expected = megatron.get_schedule_table(count, pipeline.virtual, pipeline.group_size)
            assert schedule_table(count, pipeline) == expected, (count, pipeline)
            seen += 1
    assert seen > 2_000


def test_warm_up_is_megatrons_over_thousands_of_combinations() -> None:
    seen = 0
    pipelines = [*interleaved(5, 3), *(Pipeline(stages) for stages in range(1, 9))]
    for pipeline in pipelines:
        for count in range(1, 24, 2):
            for stage, forward_only in itertools.product(range(pipeline.stages), (False, True)):
                total, _, warmup, remaining = megatron_passes(count, pipeline, stage, forward_only)
                ours = Pipeline(
                    pipeline.stages, pipeline.virtual, pipeline.group, backward=0.0 if forward_only else 2.0
                )
                assert warmup_passes(stage, count, ours) == warmup, (count, pipeline, stage)
                assert total - remaining == warmup
                seen += 1
    assert seen > 4_000


def test_stage_order_is_megatrons_over_thousands_of_combinations() -> None:
    """Warm-up, then one forward and one backward pass in turn, then backward passes, all in the order of the table."""
    seen = 0
    for pipeline in (*interleaved(5, 3), *(Pipeline(stages) for stages in range(1, 9))):
        for count in filter(lambda count: is_legal_count(count, pipeline), range(1, 32)):
            table = [(at, 0) for at in range(count)]
            if pipeline.virtual > 1:
                table = megatron.get_schedule_table(count, pipeline.virtual, pipeline.group_size)
            forward = [("F", micro_batch, chunk) for micro_batch, chunk in table]
            backward = [("B", micro_batch, pipeline.virtual - 1 - chunk) for micro_batch, chunk in table]
            for stage in range(pipeline.stages):
                total, _, warmup, remaining = megatron_passes(count, pipeline, stage, False)
                assert total == count * pipeline.virtual
                turns = [one for at in range(remaining) for one in (forward[warmup + at], backward[at])]
                expected = [*forward[:warmup], *turns, *backward[remaining:]]
                assert stage_order(stage, count, pipeline) == expected, (count, pipeline, stage)
                seen += 1
    assert seen > 3_000


def test_forward_only_runs_the_table_and_nothing_else() -> None:
    order = stage_order(1, 4, Pipeline(2, 2, backward=0))
    assert [(one.micro_batch, one.chunk) for one in order] == megatron.get_schedule_table(4, 2, 2)
    assert {one.direction for one in order} == {"F"}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"stages": 0}, "stages=0"),
        ({"stages": 2.0}, "stages=2.0"),
        ({"stages": True}, "stages=True"),
        ({"stages": 2, "virtual": 0}, "virtual=0"),
        ({"stages": 1, "virtual": 2}, "virtual=2 needs stages > 1"),
        ({"stages": 4, "group": 3}, "group=3"),
        ({"stages": 2, "backward": -1.0}, "backward=-1.0"),
        ({"stages": 2, "backward": float("nan")}, "backward=nan"),
        ({"stages": 2, "p2p": float("inf")}, "p2p=inf"),
        ({"stages": 2, "stage_cost": [1.0]}, "1 entries but there are 2"),
        ({"stages": 2, "stage_cost": [1.0, -1.0]}, "at least 0"),
        ({"stages": 2, "stage_cost": [0.0, 0.0]}, "not all of them 0"),
    ],
)
def test_a_pipeline_that_cannot_be_is_refused(arguments: dict, text: str) -> None:
    with pytest.raises(LayoutError, match=re.escape(text)):
        Pipeline(**arguments)


def test_stage_cost_becomes_shares_and_the_pipeline_stays_hashable() -> None:
    pipeline = Pipeline(2, stage_cost=[1, 3])
    assert pipeline.shares == (0.25, 0.75)
    assert Pipeline(2, 2).shares == (0.25,) * 4
    assert hash(pipeline) == hash(Pipeline(2, stage_cost=(1.0, 3.0)))


def test_equal_micro_batches_cost_the_overhead_that_the_error_names() -> None:
    for pipeline in interleaved(4, 3):
        for count in filter(lambda count: is_legal_count(count, pipeline), range(1, 20)):
            assert simulate([1.0] * count, pipeline).overhead == pytest.approx(equal_overhead(count, pipeline))
