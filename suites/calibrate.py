"""What one more micro-batch costs on this machine: timed steps of a small GPTModel, fitted by ``SequenceCost.fit``.

A micro-batch takes some time whatever is in it: launches, the loss, bookkeeping of the schedule. Planners that ignore
it cut a batch into too many. Here one rank runs real forward and backward passes of micro-batches of several sizes and
shapes; a step of four equal ones less a step of one is three micro-batches without what a step costs once. The least
time of some repeats counts, as other work on the machine only ever adds.

The result is told in tokens: how many tokens' linear work of the same model take as long. That carries over to the work
that the planning suite counts, as far as the share of the fixed cost in a micro-batch does.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from steelyard.cost import SequenceCost
from suites.launch.local import run_ranks
from suites.matrix import Sizes

SIZES = Sizes(layers=4, hidden=128, ffn=384, heads=8, kv_heads=4, head_dim=16, vocab=1024)
# Rows and tokens of a row: few and many tokens, in short rows and in long ones, so that all coefficients show.
SHAPES = ((1, 16), (4, 16), (16, 16), (1, 128), (4, 128), (1, 512), (2, 256), (1, 1024))
EQUAL = 4  # micro-batches of the longer step
REPEATS = 4
TIME_LIMIT_S = 240.0


@dataclass(frozen=True)
class FixedCost:
    """``tokens``: tokens whose linear work takes as long as a micro-batch takes beside its rows; ``text``: the fit."""

    tokens: float
    text: str


@lru_cache(maxsize=1)
def fixed_cost() -> FixedCost:
    """Calibrate on this machine's CPU, once per process; takes some 10 seconds on a quiet core.

    Raises:
        RanksFailed: the rank died or hung.
    """
    seconds = run_ranks("suites.calibrate:on_rank", 1, SIZES.model_dump(), time_limit=TIME_LIMIT_S, device="cpu")
    cost = SequenceCost(SIZES.shape())
    fit = cost.fit([([tokens] * rows, taken) for (rows, tokens), taken in zip(SHAPES, seconds, strict=True)])
    per_token = fit.per_linear * float(cost.linear([1])[0])
    return FixedCost(fit.fixed / per_token if per_token else math.inf, str(fit))


def on_rank(payload: dict[str, Any]) -> list[float]:
    """Seconds of one micro-batch of each of ``SHAPES``, forward and backward."""
    import torch

    from steelyard.model.build import build_model
    from steelyard.parallel import ParallelLayout
    from suites.ranks import parallel_groups

    layout = ParallelLayout()
    with parallel_groups(layout, seed=0):
        models = build_model(Sizes.model_validate(payload).shape(), layout, dtype=torch.float32)
        _step(models, *SHAPES[-1], 1)  # the first step of a process allocates
        return [_micro_batch_seconds(models, *shape) for shape in SHAPES]


def _micro_batch_seconds(models: list[Any], rows: int, tokens: int) -> float:
    """Steps of one and of several micro-batches take turns."""
    several, one = [], []
    for _ in range(REPEATS):
        several.append(_step(models, rows, tokens, EQUAL))
        one.append(_step(models, rows, tokens, 1))
    return max((min(several) - min(one)) / (EQUAL - 1), 1e-9)


def _step(models: list[Any], rows: int, tokens: int, count: int) -> float:
    """Processor seconds of a step of ``count`` micro-batches of ``rows`` rows of ``tokens`` tokens."""
    from steelyard.lengths import LengthSample
    from steelyard.step import ActorRole, StepSettings, forward_backward_batch
    from suites.workloads import make_batch

    prompts = np.full(rows * count, tokens // 4)
    sample = LengthSample(prompts, tokens - prompts, "equal rows", "made up")
    batch = make_batch(sample, SIZES.vocab, seed=0)
    indices = [list(range(at, at + rows)) for at in range(0, rows * count, rows)]
    start = time.process_time()
    forward_backward_batch(batch, ActorRole(), models, StepSettings(micro_batch_size=rows), indices=indices)
    return time.process_time() - start
