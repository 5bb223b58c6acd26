"""Plans: the way back to rows, the digest, and the summary."""

from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
import sys
from dataclasses import FrozenInstanceError

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.balance import MicroBatchPlan, plan_micro_batches, plan_step, summarize_step
from steelyard.errors import PlanError
from steelyard.pipeline import Pipeline, makespan_lower_bound, simulate


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=25),
    st.integers(50, 120),
    st.integers(1, 4),
    st.sampled_from([None, Pipeline(3), Pipeline(2, 2)]),
)
def test_restore_undoes_execution(lengths: list[int], cap: int, ranks: int, pipeline: Pipeline | None) -> None:
    for plan in plan_step(lengths, cap, ranks, pipeline=pipeline, min_count=2):
        expected = [lengths[row] * 1000 + row for row in plan.rows]
        lists = [[lengths[row] * 1000 + row for row in one] or ["filler"] for one in plan.indices]
        assert plan.restore(lists) == expected
        if plan.rows:
            tensors = [torch.tensor(one if "filler" not in one else [0.5]) for one in lists]
            assert plan.restore(tensors).tolist() == expected
            assert plan.restore([np.array(one) for one in lists]).tolist() == expected


def test_restore_is_differentiable_and_keeps_the_other_dimensions() -> None:
    plan = plan_micro_batches([5, 9, 3, 7], 12)
    outputs = [torch.rand(len(one), 2, requires_grad=True) for one in plan.indices]
    whole = plan.restore(outputs)
    assert whole.shape == (4, 2)
    whole[2].sum().backward()
    where = next(at for at, one in enumerate(plan.indices) if 2 in one)
    assert outputs[where].grad is not None
    assert outputs[where].grad.sum() == 2


def test_restore_of_rows_of_unequal_width_is_a_list_of_rows() -> None:
    plan = plan_micro_batches([5, 9, 3, 7], 12)
    assert len(plan.indices) == 2
    outputs = [torch.zeros(len(one), 4 + at) for at, one in enumerate(plan.indices)]
    rows = plan.restore(outputs)
    assert isinstance(rows, list)
    assert len(rows) == 4
    ragged = [torch.nested.nested_tensor([torch.full((row + 1,), float(row)) for row in one]) for one in plan.indices]
    assert [row.numel() for row in plan.restore(ragged)] == [1, 2, 3, 4]


def test_restore_refuses_outputs_that_are_not_the_plans() -> None:
    plan = plan_micro_batches([5, 9, 3, 7], 12)
    with pytest.raises(PlanError, match="outputs of 1 micro-batches but the plan has 2"):
        plan.restore([[1, 2, 3, 4]])
    with pytest.raises(PlanError, match="has 1 rows but micro-batch 0 has 2"):
        plan.restore([[1], [2, 3]])


def test_plan_step_positions_are_global_and_rows_are_where_the_rank_keeps_them() -> None:
    plans = plan_step([9, 8, 7, 6, 5, 4], 12, 2)
    for plan in plans:
        assert plan.rows == sorted(plan.rows)
        assert [[plan.rows[at] for at in one] for one in plan.positions] == plan.indices
        assert plan.lengths == [[9, 8, 7, 6, 5, 4][row] for row in plan.rows]
    assert sorted(plans[0].rows + plans[1].rows) == list(range(6))


def test_a_plan_is_frozen_and_survives_pickling() -> None:
    plan = plan_micro_batches([5, 9, 3, 7], 12, pipeline=Pipeline(2))
    again = pickle.loads(pickle.dumps(plan))
    assert again == plan
    assert again.digest == plan.digest
    with pytest.raises(FrozenInstanceError):
        plan.max_tokens = 3  # type: ignore[misc]


def test_digest_sees_order_contents_lengths_and_cap() -> None:
    facts = {
        "indices": [[0, 1], [2]],
        "rows": [0, 1, 2],
        "lengths": [3, 4, 5],
        "tokens": [7, 5],
        "work": [1.0, 1.0],
        "max_tokens": 9,
        "lower_bound": 2,
    }
    plan = MicroBatchPlan(**facts)
    for other in (
        {"indices": [[2], [0, 1]], "tokens": [5, 7]},
        {"indices": [[0], [1, 2]], "tokens": [3, 9]},
        {"lengths": [4, 3, 5]},
        {"max_tokens": 10},
        {"indices": [[0, 1], [2], []], "tokens": [7, 5, 0], "work": [1.0, 1.0, 0.0]},
    ):
        assert MicroBatchPlan(**{**facts, **other}).digest != plan.digest
    assert MicroBatchPlan(**{**facts, "work": [1.0, 1.0 + 1e-15]}).digest == plan.digest


def test_the_same_plan_comes_out_in_another_process() -> None:
    script = (
        "import numpy as np, json;"
        "from steelyard.balance import plan_step; from steelyard.pipeline import Pipeline;"
        "lengths = np.random.default_rng(0).integers(20, 4000, 200);"
        "groups = [f'prompt {row // 2}' for row in range(200)];"
        "plans = [plan_step(lengths, 9000, 4), plan_step(lengths, 9000, 4, pipeline=Pipeline(4)),"
        " plan_step(lengths, 9000, 2, pipeline=Pipeline(4, 2), groups=groups)];"
        "print(json.dumps([one.digest for plan in plans for one in plan]))"
    )
    found = []
    for seed in ("1", "77"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": seed[0]}
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=True, env=environment
        )
        found.append(json.loads(done.stdout))
    assert len(found[0]) == 10
    assert found[0] == found[1]


def test_summary_says_whether_the_plan_is_good() -> None:
    pipeline = Pipeline(2)
    plan = plan_micro_batches([6, 6, 4, 4, 2, 2], 12, cost=np.float64, pipeline=pipeline)
    summary = plan.summary()
    assert summary.count == len(plan.indices) == len(plan)
    assert summary.gap == summary.count - summary.lower_bound
    assert summary.lower_bound == 2
    assert summary.rows == 6
    assert summary.tokens == 24
    assert summary.work == pytest.approx(24)
    assert summary.overhead == pytest.approx(simulate(plan.work, pipeline).overhead)
    assert summary.bubble == pytest.approx(summary.overhead / (1 + summary.overhead))
    bound = makespan_lower_bound(plan.work, pipeline)
    assert summary.time_gap == pytest.approx(simulate(plan.work, pipeline).makespan / bound - 1, abs=1e-12)
    assert "slower than in the best order" in str(summary)
    assert "micro-batches" in str(summary)


def test_summary_counts_fillers_padding_and_what_is_above_the_cap() -> None:
    summary = plan_micro_batches([10, 2], 12, min_count=3).summary()
    assert (summary.fillers, summary.count, summary.fill) == (1, 3, pytest.approx(0.5))
    assert "1 of them fillers" in str(summary)
    padded = plan_micro_batches([10, 2], 12).summary()
    assert padded.padding == pytest.approx(1 - 12 / 20)
    assert padded.gap == 0
    assert padded.overhead is None
    assert re.search("least possible", str(padded))
    over = plan_micro_batches([20, 2], 12, oversize="alone").summary()
    assert over.over_cap == 1


def test_summary_of_a_step_compares_ranks() -> None:
    pipeline = Pipeline(2)
    plans = plan_step([9, 8, 7, 6, 5, 4, 3], 12, 2, pipeline=pipeline, cost=np.float64)
    summary = summarize_step(plans)
    work = [sum(plan.work) for plan in plans]
    assert (summary.ranks, summary.count) == (2, len(plans[0]))
    assert summary.gap == summary.count - plans[0].lower_bound
    assert summary.imbalance == pytest.approx(max(work) / np.mean(work))
    slowest = max(simulate(plan.work, pipeline).makespan for plan in plans)
    assert summary.time == pytest.approx(slowest / (sum(work) / 2 * 3 / 2))
    bound = max(makespan_lower_bound(plan.work, pipeline) for plan in plans)
    assert summary.time_gap == pytest.approx(slowest / bound - 1, abs=1e-12)
    alone = summarize_step(plan_step([9, 8], 12, 2))
    assert (alone.time, alone.time_gap) == (None, None)
    with pytest.raises(PlanError, match="no plan"):
        summarize_step([])


def test_planning_does_not_import_torch() -> None:
    script = "import sys, steelyard.balance as b; b.plan_step([5, 6], 9, 2); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.strip() == "False"
