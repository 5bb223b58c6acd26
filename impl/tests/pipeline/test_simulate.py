"""The simulator: closed formula, an independent simulator, timelines, and many candidates at once."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.errors import PlanError
from steelyard.pipeline import Pipeline, legal_count, makespan_lower_bound, simulate, stage_order
from steelyard.pipeline.simulate import makespans, run_many


@st.composite
def pipelines(draw: st.DrawFn) -> Pipeline:
    stages = draw(st.integers(1, 5))
    virtual = draw(st.integers(1, 3)) if stages > 1 else 1
    shares = st.lists(st.floats(0.1, 3.0), min_size=stages * virtual, max_size=stages * virtual)
    return Pipeline(
        stages,
        virtual,
        stages + draw(st.integers(0, 3)),
        backward=draw(st.sampled_from([0.0, 1.0, 2.0, 3.0])),
        p2p=draw(st.sampled_from([0.0, 0.3])),
        stage_cost=draw(st.none() | shares),
    )


@st.composite
def steps(draw: st.DrawFn) -> tuple[np.ndarray, Pipeline]:
    pipeline = draw(pipelines())
    count = legal_count(draw(st.integers(1, 9)), pipeline)
    work = draw(st.lists(st.floats(0.0, 10.0), min_size=count, max_size=count))
    return np.array(work), pipeline


def by_hand(work: np.ndarray, pipeline: Pipeline) -> dict[tuple[int, int, str], tuple[float, float]]:
    """(virtual stage, micro-batch, direction) -> (start, end), by trying every stage again and again."""
    stages, last = pipeline.stages, pipeline.stages * pipeline.virtual - 1
    orders = [stage_order(stage, len(work), pipeline) for stage in range(stages)]
    clock, at, done = [0.0] * stages, [0] * stages, {}
    while any(at[stage] < len(orders[stage]) for stage in range(stages)):
        for stage in range(stages):
            while at[stage] < len(orders[stage]):
                direction, micro_batch, chunk = orders[stage][at[stage]]
                part = chunk * stages + stage
                if direction == "F":
                    source = None if part == 0 else (part - 1, micro_batch, "F")
                else:
                    source = (part, micro_batch, "F") if part == last else (part + 1, micro_batch, "B")
                if source is not None and source not in done:
                    break
                hop = pipeline.p2p if source is not None and source[0] % stages != stage else 0.0
                arrived = 0.0 if source is None else done[source][1] + hop
                start = max(clock[stage], arrived)
                length = work[micro_batch] * pipeline.shares[part] * (1.0 if direction == "F" else pipeline.backward)
                clock[stage] = start + length
                done[(part, micro_batch, direction)] = (start, clock[stage])
                at[stage] += 1
    return done


@pytest.mark.parametrize(
    ("stages", "virtual"), [(1, 1), *itertools.product((2, 3, 4, 8, 16), (1, 2, 4))], ids=lambda size: str(size)
)
@pytest.mark.parametrize("groups", [1, 2, 5])
@pytest.mark.parametrize("backward", [2.0, 3.0])
def test_equal_micro_batches_cost_the_closed_formula(stages: int, virtual: int, groups: int, backward: float) -> None:
    count = stages * groups
    timeline = simulate([0.7] * count, Pipeline(stages, virtual, backward=backward))
    overhead = (stages - 1) / (count * virtual)
    assert timeline.overhead == pytest.approx(overhead, abs=1e-9)
    assert timeline.bubble == pytest.approx(overhead / (1 + overhead), abs=1e-9)


def test_a_legal_remainder_costs_no_more_than_the_formula_says() -> None:
    assert simulate([1.0] * 8, Pipeline(4, 2)).overhead == pytest.approx(3 / 16)
    assert simulate([1.0] * 10, Pipeline(4, 2, group=6)).overhead == pytest.approx(3 / 20)


@settings(max_examples=150, deadline=None)
@given(steps())
def test_every_span_is_that_of_an_independent_simulator(step: tuple[np.ndarray, Pipeline]) -> None:
    work, pipeline = step
    timeline = simulate(work, pipeline)
    expected = by_hand(work, pipeline)
    assert len(timeline.spans) == len(expected)
    for span in timeline.spans:
        start, end = expected[(span.chunk * pipeline.stages + span.stage, span.micro_batch, span.direction)]
        assert span.start == pytest.approx(start, abs=1e-9)
        assert span.end == pytest.approx(end, abs=1e-9)
    assert timeline.makespan == pytest.approx(max(end for _, end in expected.values()))
    assert timeline.ideal == pytest.approx(work.sum() * (1 + pipeline.backward) / pipeline.stages)


@settings(max_examples=100, deadline=None)
@given(steps())
def test_many_candidates_at_once_are_the_single_ones(step: tuple[np.ndarray, Pipeline]) -> None:
    work, pipeline = step
    several = np.array([work, work[::-1], work * 0.5])
    one_by_one = [simulate(one, pipeline).makespan for one in several]
    assert makespans(several, pipeline) == pytest.approx(one_by_one)
    parts = several[:, :, None] * np.array(pipeline.shares)
    assert makespans(parts, pipeline) == pytest.approx(one_by_one)


@settings(max_examples=100, deadline=None)
@given(steps(), st.integers(0, 2**32 - 1))
def test_slopes_are_a_subgradient(step: tuple[np.ndarray, Pipeline], seed: int) -> None:
    work, pipeline = step
    other = np.random.default_rng(seed).random(len(work)) * 5
    here, there = makespans(np.array([work, other]), pipeline)
    assert there >= here + run_many(work[None], pipeline).slope(0) @ (other - work) - 1e-7


@settings(max_examples=100, deadline=None)
@given(steps())
def test_critical_path_has_no_slack_from_start_to_end(step: tuple[np.ndarray, Pipeline]) -> None:
    work, pipeline = step
    timeline = simulate(work, pipeline)
    path = timeline.critical_path
    assert path[0].start == pytest.approx(0.0, abs=1e-9)
    assert path[-1].end == pytest.approx(timeline.makespan)
    for before, after in itertools.pairwise(path):
        hop = pipeline.p2p if before.stage != after.stage else 0.0
        assert after.start == pytest.approx(before.end + hop, abs=1e-9)


@settings(max_examples=150, deadline=None)
@given(steps(), st.randoms(use_true_random=False))
def test_no_order_goes_below_the_lower_bound(step: tuple[np.ndarray, Pipeline], random: object) -> None:
    work, pipeline = step
    shuffled = list(work)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    bound = makespan_lower_bound(work, pipeline)
    assert simulate(work, pipeline).makespan >= bound - 1e-9
    assert simulate(shuffled, pipeline).makespan >= bound - 1e-9


def test_lower_bound_is_reached_by_equal_micro_batches_on_one_chunk() -> None:
    assert makespan_lower_bound([1.0] * 8, Pipeline(4)) == pytest.approx(simulate([1.0] * 8, Pipeline(4)).makespan)


def test_idle_time_and_busy_time_fill_the_makespan() -> None:
    timeline = simulate([1.0, 2.0, 3.0, 1.0], Pipeline(2, stage_cost=[1, 3]))
    assert timeline.busy == pytest.approx((7 * 0.25 * 3, 7 * 0.75 * 3))
    assert [idle + busy for idle, busy in zip(timeline.idle, timeline.busy, strict=True)] == pytest.approx(
        [timeline.makespan] * 2
    )


def test_work_per_virtual_stage_is_taken_as_it_is() -> None:
    work = np.array([[1.0, 2.0], [3.0, 1.0]])
    assert simulate(work, Pipeline(2)).busy == pytest.approx((12.0, 9.0))


def test_transfers_are_on_the_way_of_every_micro_batch() -> None:
    still = simulate([1.0] * 4, Pipeline(4))
    moved = simulate([1.0] * 4, Pipeline(4, p2p=0.1))
    assert moved.makespan >= still.makespan + 6 * 0.1 - 1e-9
    assert moved.ideal == still.ideal


def test_a_step_without_work_has_no_overhead() -> None:
    timeline = simulate([0.0, 0.0], Pipeline(2))
    assert (timeline.makespan, timeline.overhead, timeline.bubble) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("work", "text"),
    [
        ([], "cannot run"),
        ([1.0, -1.0], "micro-batch 1 is -1.0"),
        ([1.0, float("nan")], "micro-batch 1 is nan"),
        ([[1.0, 2.0, 3.0]], "one column per virtual stage"),
        (3.0, "one number per micro-batch"),
    ],
)
def test_work_that_cannot_be_is_refused(work: object, text: str) -> None:
    with pytest.raises(PlanError, match=text):
        simulate(work, Pipeline(2))  # type: ignore[arg-type]


def test_a_count_that_megatron_refuses_is_refused_here() -> None:
    with pytest.raises(PlanError, match="use 8 or 12"):
        simulate([1.0] * 9, Pipeline(4, 2))
