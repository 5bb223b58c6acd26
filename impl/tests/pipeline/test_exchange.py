"""Steps whose stages exchange shapes; impl/tests/step/test_trace.py compares their calls with real ones."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import ArrayLike
from walking_stages import walk

from steelyard.errors import PlanError
from steelyard.pipeline import PassTimeline, Pipeline, legal_count, simulate, stage_order
from steelyard.pipeline.exchange import PARTNERS, stage_steps
from steelyard.pipeline.schedule import Pass
from steelyard.pipeline.simulate import makespans, run_many

PIPELINES = [
    Pipeline(1),
    Pipeline(2),
    Pipeline(4),
    Pipeline(2, 2),
    Pipeline(4, 2),
    Pipeline(3, 3, 5),
    Pipeline(4, 2, 6),
    Pipeline(2, backward=0.0),
    Pipeline(3, 2, backward=0.0),
]


def exchanged(work: ArrayLike, pipeline: Pipeline, fixed: float = 0.0) -> PassTimeline:
    timeline = simulate(work, replace(pipeline, exchange=True), fixed=fixed)
    return PassTimeline(tuple(timeline.spans), pipeline.stages)


def draws(pipeline: Pipeline, wanted: int, seed: int = 0) -> np.ndarray:
    count = legal_count(wanted, pipeline)
    return np.random.default_rng(seed).lognormal(0, 1, (count, pipeline.stages * pipeline.virtual))


@pytest.mark.parametrize("pipeline", PIPELINES, ids=str)
def test_every_call_has_a_partner_and_passes_are_those_of_the_schedule(pipeline: Pipeline) -> None:
    for wanted in (1, 5, 12):
        count = legal_count(wanted, pipeline)
        used = {}
        for stage in range(pipeline.stages):
            steps = stage_steps(stage, count, pipeline)
            assert [one for one in steps if isinstance(one, Pass)] == stage_order(stage, count, pipeline)
            ports = [port for one in steps if not isinstance(one, Pass) for port in one]
            used |= {(stage, port): ports.count(port) for port in PARTNERS}
        for (stage, port), times in used.items():
            other, further = PARTNERS[port]
            assert times == used[(stage + further) % pipeline.stages, other]


@pytest.mark.parametrize("pipeline", PIPELINES, ids=str)
def test_equal_micro_batches_take_the_time_that_they_take_without_exchange(pipeline: Pipeline) -> None:
    work = np.ones(legal_count(9, pipeline))
    assert exchanged(work, pipeline).makespan == pytest.approx(simulate(work, pipeline).makespan)


@pytest.mark.parametrize("pipeline", PIPELINES, ids=str)
def test_the_graph_says_what_stages_find_that_walk_through_their_steps(pipeline: Pipeline) -> None:
    for seed in range(10):
        costly = replace(pipeline, p2p=0.1 * (seed % 3), exchange=True)
        work = draws(pipeline, 3 + 2 * seed, seed)
        expected = walk(work, costly, fixed=0.05)
        found = simulate(work, costly, fixed=0.05)
        assert [span[:4] for span in found.spans] == [span[:4] for span in expected.spans]
        np.testing.assert_allclose([span[4:] for span in found.spans], [span[4:] for span in expected.spans])
        assert found.makespan == pytest.approx(expected.makespan)
        assert found.busy == pytest.approx(expected.busy)
        path = found.critical_path
        assert path[-1].end == found.makespan
        assert path[0].start == pytest.approx(0.0)
        assert makespans(work[None], costly)[0] == pytest.approx(walk(work, costly).makespan)


def test_cuts_stay_below_the_makespan_with_an_exchange() -> None:
    pipeline = Pipeline(4, 2, p2p=0.05, exchange=True)
    for seed in range(10):
        work, other = (draws(pipeline, 12, seed + shift).sum(axis=1) for shift in (0, 100))
        runs = run_many(np.array([work, other]), pipeline)
        assert runs.times[1] >= runs.times[0] + runs.slope(0) @ (other - work) - 1e-7


@pytest.mark.parametrize("pipeline", PIPELINES, ids=str)
def test_an_exchange_never_makes_a_step_shorter(pipeline: Pipeline) -> None:
    for seed in range(20):
        work = draws(pipeline, 11, seed)
        plain, met = simulate(work, pipeline), exchanged(work, pipeline)
        assert met.makespan >= plain.makespan * (1 - 1e-12)
        assert met.busy == pytest.approx(plain.busy)


def test_unequal_micro_batches_on_virtual_stages_lose_by_it() -> None:
    losses = []
    for seed in range(20):
        work = draws(Pipeline(4, 2), 12, seed)
        losses.append(exchanged(work, Pipeline(4, 2)).makespan / simulate(work, Pipeline(4, 2)).makespan - 1)
    assert np.mean(losses) > 0.05


def test_a_step_that_was_worked_out_by_hand() -> None:
    """Two stages, two chunks, micro-batches that take 1 and 3 in every virtual stage, in either direction.

    Stage 1 has finished micro-batch 0 in chunk 0 at 2, and waits until 4: stage 0 is still busy with micro-batch 1,
    which it sends in the call in which it receives. Stage 1 has finished micro-batch 0 in chunk 1 at 8, and waits with
    its backward pass until 10: stage 0 has not sent what stage 1 will need after that pass.
    """
    timeline = exchanged(np.array([[1.0] * 4, [3.0] * 4]), Pipeline(2, 2, backward=1.0))
    ends = [
        [(f"{one.direction}{one.micro_batch}{'ab'[one.chunk]}", one.start, one.end) for one in timeline.of_stage(stage)]
        for stage in range(2)
    ]
    assert ends[0] == [
        ("F0a", 0, 1), ("F1a", 1, 4), ("F0b", 4, 5), ("F1b", 7, 10),
        ("B0b", 11, 12), ("B1b", 17, 20), ("B0a", 20, 21), ("B1a", 23, 26),
    ]  # fmt: skip
    assert ends[1] == [
        ("F0a", 1, 2), ("F1a", 4, 7), ("F0b", 7, 8), ("B0b", 10, 11),
        ("F1b", 11, 14), ("B1b", 14, 17), ("B0a", 17, 18), ("B1a", 20, 23),
    ]  # fmt: skip


def test_a_stage_that_sends_waits_for_the_one_that_receives() -> None:
    """Stage 0 has finished micro-batch 1 at 4, but stage 1 is busy with micro-batch 0 until 6."""
    sizes = np.array([3.0, 1.0, 1.0])[:, None] * np.ones((1, 3))
    starts = [span.start for span in exchanged(sizes, Pipeline(3)).of_stage(0)]
    assert starts[:3] == [0, 3, 6]
    assert [span.start for span in simulate(sizes, Pipeline(3)).spans if span.stage == 0][:3] == [0, 3, 4]


def test_calls_and_passes_cost_what_is_said() -> None:
    pipeline = Pipeline(2, p2p=0.5)
    # F on stage 0, call, F and B on stage 1, call, B on stage 0; each pass takes 0.25 more.
    assert exchanged([2.0], pipeline, fixed=0.25).makespan == pytest.approx(1 + 0.5 + 3 + 0.5 + 2 + 4 * 0.25)


def test_stages_wait_between_their_passes() -> None:
    timeline = exchanged(draws(Pipeline(4, 2), 8), Pipeline(4, 2))
    for stage in range(4):
        spans = timeline.of_stage(stage)
        assert all(one.end <= other.start + 1e-12 for one, other in itertools.pairwise(spans))
        waiting = sum(end - start for start, end in timeline.waiting(stage))
        assert waiting == pytest.approx(timeline.idle[stage])
    assert timeline.overhead == pytest.approx(timeline.bubble / (1 - timeline.bubble))


def test_bad_input_is_refused_as_by_simulate() -> None:
    with pytest.raises(PlanError, match="use 4 or 6"):
        exchanged([1.0] * 5, Pipeline(2, 2))
    with pytest.raises(PlanError, match="micro-batch 1"):
        exchanged([1.0, -1.0], Pipeline(2))


def test_the_largest_schedules_do_not_deadlock() -> None:
    random.seed(0)
    for _ in range(25):
        stages = random.randint(2, 8)
        pipeline = Pipeline(stages, random.randint(1, 4), random.randint(stages, 2 * stages + 1))
        count = legal_count(random.randint(1, 30), pipeline)
        assert exchanged(np.ones(count), pipeline).makespan > 0
