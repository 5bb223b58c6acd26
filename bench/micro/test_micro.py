"""Planning, simulation and packing, by size; results are checked beside the times."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from steelyard.balance import plan_step
from steelyard.cost import ModelShape
from steelyard.lengths import workload
from steelyard.memory.predict import predict_peak
from steelyard.packing import PackedLayout, next_token_labels, pack, unpack
from steelyard.parallel import ParallelLayout
from steelyard.pipeline import Pipeline, best_order, simulate

SIMULATION_LIMIT_S = 0.1
PREDICTION_LIMIT_S = 20.0


@pytest.mark.benchmark(group="plan")
@pytest.mark.parametrize("rows", [128, 512, 2048])
@pytest.mark.parametrize("pipeline", [None, Pipeline(4), Pipeline(4, 2)], ids=["no pipeline", "pp4", "pp4-vpp2"])
def test_plan_step(benchmark, rows, pipeline):
    lengths = workload("rl-code-16k-cap").draw(rows, 7).totals
    plans = benchmark(plan_step, lengths, int(lengths.max()), 4, pipeline=pipeline)
    assert sorted(row for plan in plans for row in plan.rows) == list(range(rows))


@pytest.mark.benchmark(group="simulate")
@pytest.mark.parametrize(("stages", "chunks", "count"), [(4, 2, 64), (16, 4, 512)])
def test_simulate(benchmark, stages, chunks, count):
    work = np.random.default_rng(7).uniform(0.2, 2.0, count)
    timeline = benchmark(simulate, work, Pipeline(stages, chunks))
    assert timeline.overhead >= 0
    if benchmark.enabled:
        assert benchmark.stats.stats.median < SIMULATION_LIMIT_S


@pytest.mark.benchmark(group="simulate")
def test_best_order(benchmark):
    work = np.random.default_rng(7).uniform(0.2, 2.0, 64)
    order = benchmark(best_order, work, Pipeline(4, 2))
    assert sorted(order) == list(range(64))


@pytest.fixture(params=[16, 64])
def rows(request):
    torch.set_num_threads(1)
    sample = workload("rl-code-16k-cap").draw(request.param, 7, scale=8.0)
    prompts = int(sample.prompts.max())
    layout = PackedLayout.of(sample.totals, starts=prompts - sample.prompts)
    width = prompts + int(sample.responses.max())
    ids = unpack(torch.arange(1, layout.total + 1), layout, width)
    return ids, layout


@pytest.mark.benchmark(group="pack")
def test_layout(benchmark, rows):
    _, layout = rows
    assert benchmark(PackedLayout.of, layout.lengths).total == layout.total


@pytest.mark.benchmark(group="pack")
def test_pack(benchmark, rows):
    ids, layout = rows
    assert benchmark(pack, ids, layout).tolist() == list(range(1, layout.total + 1))


@pytest.mark.benchmark(group="pack")
def test_unpack(benchmark, rows):
    ids, layout = rows
    packed = pack(ids, layout)
    assert torch.equal(benchmark(unpack, packed, layout, ids.size(1)), ids)


@pytest.mark.benchmark(group="pack")
def test_next_token_labels(benchmark, rows):
    ids, layout = rows
    assert benchmark(next_token_labels, ids, layout).numel() == layout.total


@pytest.mark.benchmark(group="predict")
def test_predict_peak_of_a_7b_model(benchmark):
    """The first stage of tp2 pp2 dp2 with four micro-batches of 16k tokens, all layers."""
    layout, shape = ParallelLayout(tp=2, pp=2, dp=2), ModelShape.preset("qwen2.5-7b")
    found = benchmark.pedantic(predict_peak, (shape, layout, [[2048] * 8] * 4), rounds=3)
    assert found.parameters == 1_903_953_408
    if benchmark.enabled:
        assert benchmark.stats.stats.median < PREDICTION_LIMIT_S
