"""Ragged batches drawn by hypothesis, on one rank, against the judge: rows without prompt or response, any budget."""

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from steelyard.lengths import LengthSample
from steelyard.step import StepSettings
from suites import judging
from suites.matrix import Cell
from suites.parity import LIMIT
from suites.ranks import parallel_groups

LENGTHS = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 12)), min_size=1, max_size=5).filter(
    lambda rows: any(response for _, response in rows) and all(prompt + response for prompt, response in rows)
)


def against_the_judge(payload):
    """The worst error of any kind over all draws."""
    cell = Cell.model_validate(payload)
    layout, worst = cell.layout.parallel(), []
    with parallel_groups(layout, cell.seed):
        models = judging.build_models(cell, layout)

        @settings(max_examples=30, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
        @given(LENGTHS, st.integers(0, 10**6), st.integers(0, 40), st.booleans(), st.booleans())
        def check(rows, seed, spare, packed, extras):
            prompts, responses = (np.array(column) for column in zip(*rows, strict=True))
            sample = LengthSample(prompts, responses, "ragged", "drawn")
            drawn, options = cell.model_copy(update={"seed": seed}), judging.LossOptions(extras=extras)
            case = judging.make_case(drawn, [options], sample)
            step = StepSettings(max_tokens=int(sample.totals.max()) + spare, packed=packed, layout=layout)
            found = judging.compare(drawn, case, models, step, [(list(range(len(rows))), None)], options)
            worst.append(max(error.error for error in found.values()))
            assert worst[-1] < LIMIT, (rows, seed, found)

        check()
    return {"draws": len(worst), "worst": max(worst)}
