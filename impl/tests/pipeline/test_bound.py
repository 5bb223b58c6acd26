"""The lower bound of the makespan against every order of few micro-batches."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from steelyard.pipeline import Pipeline, both_ends, legal_count, makespan_lower_bound, simulate


def best_of_all_orders(work: np.ndarray, pipeline: Pipeline) -> float:
    return min(simulate(work[list(order)], pipeline).makespan for order in itertools.permutations(range(len(work))))


def drawn(seed: int) -> tuple[np.ndarray, Pipeline]:
    """A small step: any number of stages, chunks and groups, often unequal stages, sometimes work per virtual stage."""
    draw = np.random.default_rng(seed)
    stages = int(draw.integers(1, 5))
    virtual = int(draw.integers(1, 4)) if stages > 1 else 1
    pipeline = Pipeline(
        stages,
        virtual,
        stages + int(draw.integers(0, 3)),
        backward=float(draw.choice([0.0, 0.5, 1.0, 2.0, 3.0])),
        p2p=float(draw.choice([0.0, 0.3])),
        stage_cost=(draw.random(stages * virtual) + 0.1).tolist() if draw.random() < 0.5 else None,
    )
    count = legal_count(int(draw.integers(1, 6)), pipeline)
    work = draw.lognormal(0.0, 1.2, count)
    return (work[:, None] * draw.random((count, stages * virtual)) if draw.random() < 0.3 else work), pipeline


def test_no_order_of_few_micro_batches_goes_below_the_bound_and_the_best_is_near_it() -> None:
    gaps = []
    for seed in range(150):
        work, pipeline = drawn(seed)
        if len(work) > 5:
            continue
        best, bound = best_of_all_orders(work, pipeline), makespan_lower_bound(work, pipeline)
        assert best >= bound * (1 - 1e-12), (seed, pipeline)
        gaps.append(best / bound - 1)
    assert len(gaps) > 100
    assert np.median(gaps) < 0.02
    assert np.mean(gaps) < 0.08


@pytest.mark.parametrize("pipeline", [Pipeline(4), Pipeline(8), Pipeline(4, 2), Pipeline(3, stage_cost=[2, 1, 3])])
def test_stages_wait_while_a_heavy_micro_batch_travels_and_the_bound_knows(pipeline: Pipeline) -> None:
    work = np.array([1.0, 0.5, 40.0, 1.0] if pipeline.virtual > 1 else [1.0, 0.5, 40.0, 1.0, 2.0])
    bound = makespan_lower_bound(work, pipeline)
    busy = max(simulate(work, pipeline).busy)
    assert bound > busy
    assert best_of_all_orders(work, pipeline) <= 1.02 * bound


def test_equal_micro_batches_meet_the_bound_on_one_chunk() -> None:
    for pipeline in (Pipeline(1), Pipeline(4), Pipeline(8, backward=3.0), Pipeline(4, backward=0.0)):
        assert makespan_lower_bound([1.0] * 8, pipeline) == pytest.approx(simulate([1.0] * 8, pipeline).makespan)


def test_a_large_step_has_a_bound_too() -> None:
    work = np.sort(np.random.default_rng(0).random(600))
    work = work[both_ends(work)]
    for pipeline in (Pipeline(4), Pipeline(4, 2)):
        time = simulate(work, pipeline).makespan
        assert 0.9 * time < makespan_lower_bound(work, pipeline) <= time
