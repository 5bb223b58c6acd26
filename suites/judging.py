"""One case for the judge, and how far a step of the optimised system is from its verdict. Runs on ranks."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from steelyard.balance import MicroBatchPlan
from steelyard.cost import ModelShape
from steelyard.lengths import LengthSample
from steelyard.model.build import build_model, build_optimizer
from steelyard.parallel import ParallelLayout
from steelyard.step import Actor, ActorRole, Critic, CriticRole, RolloutBatch, StepSettings, forward_backward_batch
from suites import reference
from suites.matrix import Cell
from suites.ranks import DTYPES, gather_to_all
from suites.weights import load, squared_differences
from suites.workloads import make_batch, take_rows

Share = tuple[list[int], MicroBatchPlan | None]

# Below a thousandth of the whole gradient's norm float32 holds no digits of a single gradient.
GRADIENT_FLOOR = 1e-3
METRIC_FLOOR = 1e-2
LEARNING_RATE = 1e-4
# Where log-ratios and value differences may lie: away from the edges of clipping, where rounding would decide.
LOG_RATIO_STEPS = (-1.6, -0.6, -0.1, 0.05, 0.1, 0.5)
VALUE_STEPS = (-0.9, -0.3, 0.0, 0.2, 0.8)


@dataclass(frozen=True)
class Error:
    """A relative error and where it is largest."""

    error: float
    where: str


@dataclass(frozen=True, eq=False)
class Case:
    """Weights, a whole mini-batch over all data-parallel ranks, and what the judge says of it."""

    config: reference.ReferenceConfig
    weights: dict[str, torch.Tensor]
    sample: LengthSample
    batch: dict[str, torch.Tensor]
    verdict: reference.JudgeResult


def make_case(cell: Cell) -> Case:
    """The case of a cell, the same on every rank; rank 0 asks the judge."""
    config = reference.ReferenceConfig.from_fields(_fields(cell.model.shape(), cell.role == "critic"))
    weights = reference.init_weights(config, cell.seed)
    sample = cell.draw()
    batch = make_batch(sample, cell.model.vocab, cell.seed, holes=0.1)
    shared: list = [None, None]
    if dist.get_rank() == 0:
        _set_old_outputs(batch, config, weights, cell)
        rows = judge_rows(batch)
        if cell.role == "actor":
            verdict = reference.actor_step(weights, config, rows, reference.ActorSettings())
        else:
            verdict = reference.critic_step(weights, config, rows, reference.CriticSettings())
        shared = [batch, verdict]
    dist.broadcast_object_list(shared, src=0)
    return Case(config, weights, sample, *shared)


def _fields(shape: ModelShape, value_head: bool) -> dict[str, object]:
    names = (
        "layers",
        "hidden",
        "ffn",
        "heads",
        "kv_heads",
        "head_dim",
        "vocab",
        "tied",
        "qkv_bias",
        "qk_norm",
        "rope_theta",
        "norm_eps",
    )
    return {**{name: getattr(shape, name) for name in names}, "value_head": value_head}


def judge_rows(batch: dict[str, torch.Tensor]) -> list[reference.Row]:
    """The batch row by row, without any padding."""
    width = batch["responses"].size(1)
    split = batch["input_ids"].size(1) - width
    rows = []
    for index in range(batch["input_ids"].size(0)):
        prompt = int(batch["attention_mask"][index, :split].sum())
        response = int(batch["attention_mask"][index, split:].sum())
        fields = {name: batch[name][index, :response] for name in ("old_log_probs", "advantages", "values", "returns")}
        rows.append(
            reference.Row(
                prompt=batch["input_ids"][index, split - prompt : split],
                response=batch["responses"][index, :response],
                mask=batch["response_mask"][index, :response],
                **fields,
            )
        )
    return rows


def _set_old_outputs(batch: dict, config: reference.ReferenceConfig, weights: dict, cell: Cell) -> None:
    """Old outputs around the judge's own, so that some tokens are clipped and none is at an edge; a loss away from
    zero.
    """
    generator = torch.Generator().manual_seed(cell.seed + 1)
    # A loss around zero would be a difference of large sums, whose relative error says nothing.
    batch["advantages"] += 1.0
    steps = torch.tensor(LOG_RATIO_STEPS if cell.role == "actor" else VALUE_STEPS)
    name = "old_log_probs" if cell.role == "actor" else "values"
    for index, row in enumerate(judge_rows(batch)):
        with torch.no_grad():
            output = reference.forward_row(weights, config, row.ids)
            if cell.role == "actor":
                now, _ = reference.row_log_probs(output, row.ids, len(row.prompt), 1.0)
            else:
                now = reference.row_values(output, len(row.prompt))
        shift = steps[torch.randint(len(steps), now.shape, generator=generator)]
        jitter = 0.02 * torch.rand(now.shape, generator=generator)
        batch[name][index, : len(now)] = (now - shift - jitter).float()


def compare(cell: Cell, case: Case, settings: StepSettings, shares: Sequence[Share]) -> dict[str, Error]:
    """Run the optimised system on the case and compare it with the verdict; the same result on every rank.

    The plain optimizer's gradient buffers hold whole gradients on every rank, so gradients are compared there; outputs
    and the metrics of an update (gradient norm included) come from a second model under the distributed optimizer.

    Args:
        shares: for each data-parallel rank its rows of the mini-batch, and its micro-batches (None lets the engine
            plan).
    """
    critic = cell.role == "critic"
    rows, indices = shares[parallel_state.get_data_parallel_rank()]
    batch = RolloutBatch.of(take_rows(case.batch, rows))

    models = build(cell, case, settings.layout, distributed=False)
    forward_backward_batch(batch, CriticRole() if critic else ActorRole(), models, settings, indices=indices)
    worst_gradient = gradient_error(models, case)

    models = build(cell, case, settings.layout, distributed=True)
    worker = (Critic if critic else Actor)(models, settings, build_optimizer(models, lr=LEARNING_RATE))
    outputs = worker.compute_values(batch) if critic else worker.compute_log_prob(batch)
    metrics = worker.update(batch, indices=indices)
    verdict = case.verdict
    expected = {**verdict.metrics, f"{cell.role}/grad_norm": verdict.grad_norm, f"{cell.role}/lr": LEARNING_RATE}
    name = "critic/vf_loss" if critic else "actor/pg_loss"
    return {
        "loss_error": Error(_relative(metrics[name], verdict.loss), name),
        "gradient_error": worst_gradient,
        "metrics_error": _metrics_error(metrics, expected),
        "output_error": _output_error(outputs, rows, verdict.values if critic else verdict.log_probs),
    }


def build(cell: Cell, case: Case, layout: ParallelLayout, *, distributed: bool) -> list[torch.nn.Module]:
    """The cell's model with the judge's weights, under the plain or the distributed optimizer."""
    models = build_model(
        cell.model.shape(),
        layout,
        dtype=DTYPES[cell.dtype],
        value_head=cell.role == "critic",
        override_ddp_config={"use_distributed_optimizer": distributed},
    )
    load(models, case.weights, case.config)
    return models


def _relative(got: float, expected: float) -> float:
    return abs(got - expected) / max(abs(expected), METRIC_FLOOR)


def _worst(errors: dict[str, float]) -> Error:
    # Not a number must count as the largest error, not as none.
    finite = {name: error if math.isfinite(error) else math.inf for name, error in errors.items()}
    name = max(finite, key=lambda name: finite[name])
    return Error(finite[name], name)


def gradient_error(models: list[torch.nn.Module], case: Case) -> Error:
    """Over all parameters and ranks, the norm of the difference from the judge's gradient over that gradient's norm."""
    # Squares of shards add up to those of the whole; copies on several ranks count the same in both sums.
    differences, norms = defaultdict(float), defaultdict(float)
    for share in gather_to_all(squared_differences(models, case.verdict.grads, case.config)):
        for name, (difference, norm) in share.items():
            differences[name] += difference
            norms[name] += norm
    floor = GRADIENT_FLOOR * math.sqrt(sum(norms.values()))
    errors = {name: math.sqrt(differences[name]) / max(math.sqrt(norms[name]), floor) for name in norms}
    return _worst(errors)


def _metrics_error(got: dict[str, float], expected: dict[str, float]) -> Error:
    if set(got) != set(expected):
        return Error(math.inf, f"metrics differ: {sorted(set(got) ^ set(expected))}")
    return _worst({name: _relative(got[name], expected[name]) for name in expected})


def _output_error(got: torch.Tensor, rows: list[int], expected: list[torch.Tensor]) -> Error:
    """Over all ranks, the largest difference of an output from the judge's, over the judge's largest output."""
    worst = (0.0, "none")
    for place, row in enumerate(rows):
        truth = expected[row]
        found = got[place, : len(truth)].cpu().double()
        error = float((found - truth).abs().max() / truth.abs().max().clamp(min=METRIC_FLOOR)) if len(truth) else 0.0
        outside = float(got[place, len(truth) :].abs().sum())
        error = error if math.isfinite(error) and outside == 0.0 else math.inf
        worst = max(worst, (error, f"row {row}"))
    return Error(*max(gather_to_all(worst)))
