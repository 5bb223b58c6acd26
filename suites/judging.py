"""One case for the judge, and how far a step of the optimised system is from its verdict. Runs on ranks."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from steelyard.balance import MicroBatchPlan
from steelyard.lengths import LengthSample
from steelyard.model.build import build_model, build_optimizer
from steelyard.parallel import ParallelLayout
from steelyard.step import (
    Actor,
    ActorRole,
    Aggregation,
    Critic,
    CriticRole,
    Reward,
    RolloutBatch,
    StepSettings,
    forward_backward_batch,
)
from suites import reference
from suites.matrix import Cell
from suites.ranks import DTYPES, gather_to_all
from suites.weights import load, squared_differences
from suites.workloads import make_batch, take_rows

Share = tuple[list[int], MicroBatchPlan | None]

# Below a thousandth of the whole gradient's norm float32 holds no digits of a single gradient.
GRADIENT_FLOOR = 1e-3
# Metrics below a tenth are compared absolutely: a mean of log-ratios is a difference of numbers a hundred times larger.
METRIC_FLOOR = 0.1
LEARNING_RATE = 1e-4
TEMPERATURE = 0.9
# Where log-ratios and value differences may lie: away from the edges of clipping, where rounding would decide.
LOG_RATIO_STEPS = (-1.6, -0.6, -0.1, 0.05, 0.1, 0.5, 1.4)
VALUE_STEPS = (-0.9, -0.3, 0.0, 0.2, 0.8)
SHAPE_FIELDS = ("layers", "hidden", "ffn", "heads", "kv_heads", "head_dim", "vocab", "tied", "qkv_bias", "qk_norm")


@dataclass(frozen=True)
class Error:
    """A relative error and where it is largest."""

    error: float
    where: str


@dataclass(frozen=True)
class LossOptions:
    """What the loss is made of.

    Attributes:
        mode: how token losses are aggregated.
        extras: all that is off by default: entropy bonus, KL penalty, truncated importance weights, and the other
            denominators of the aggregation.
    """

    mode: str = "token-mean"
    extras: bool = False

    def role(self, name: str) -> ActorRole | CriticRole:
        """The optimised system's role."""
        given = {"scale_factor": 7.0, "global_batch_size": 11} if self.extras else {}
        aggregation = Aggregation(self.mode, **given)
        if name == "critic":
            return CriticRole(aggregation=aggregation)
        more = {"entropy_coeff": 0.05, "kl_coef": 0.1, "importance_cap": 1.2} if self.extras else {}
        return ActorRole(aggregation=aggregation, temperature=TEMPERATURE, **more)

    def judge(self, name: str, width: int) -> reference.ActorSettings | reference.CriticSettings:
        """The same for the judge."""
        settings: dict[str, Any] = {"loss_agg_mode": self.mode, "width": width}
        if self.extras:
            settings |= {"loss_scale_factor": 7.0, "global_batch_size": 11}
        if name == "critic":
            return reference.CriticSettings(**settings)
        if self.extras:
            settings |= {"entropy_coeff": 0.05, "use_kl_loss": True, "kl_loss_coef": 0.1, "importance_cap": 1.2}
        return reference.ActorSettings(temperature=TEMPERATURE, **settings)


@dataclass(frozen=True, eq=False)
class Case:
    """Weights, a whole mini-batch over all data-parallel ranks, and what the judge says of it under each option."""

    config: reference.ReferenceConfig
    weights: dict[str, torch.Tensor]
    sample: LengthSample
    batch: dict[str, torch.Tensor]
    outputs: list[torch.Tensor]
    verdicts: dict[LossOptions, reference.JudgeResult] = field(default_factory=dict)


def make_case(cell: Cell, options: Sequence[LossOptions], sample: LengthSample | None = None) -> Case:
    """The case of a cell, or of other lengths; the same on every rank. Rank 0 asks the judge."""
    fields = {name: getattr(cell.model.shape(), name) for name in (*SHAPE_FIELDS, "rope_theta", "norm_eps")}
    config = reference.ReferenceConfig.from_fields({**fields, "value_head": cell.role != "actor"})
    weights = reference.init_weights(config, cell.seed)
    sample = cell.draw() if sample is None else sample
    batch = make_batch(sample, cell.model.vocab, cell.seed, holes=0.1)
    shared: list = [None, None, None]
    if dist.get_rank() == 0:
        outputs = _judge_outputs(batch, config, weights, cell.role)
        _set_old_outputs(batch, outputs, cell)
        rows, width = judge_rows(batch), batch["responses"].size(1)
        step = reference.actor_step if cell.role == "actor" else reference.critic_step
        verdicts = {one: step(weights, config, rows, one.judge(cell.role, width)) for one in set(options)}
        shared = [batch, outputs, verdicts]
    dist.broadcast_object_list(shared, src=0)
    return Case(config, weights, sample, *shared)


def judge_rows(batch: dict[str, torch.Tensor]) -> list[reference.Row]:
    """The batch row by row, without any padding."""
    width = batch["responses"].size(1)
    split = batch["input_ids"].size(1) - width
    names = {name: name for name in ("old_log_probs", "advantages", "values", "returns", "rollout_log_probs")}
    names["ref_log_probs"] = "ref_log_prob"
    rows = []
    for index in range(batch["input_ids"].size(0)):
        prompt = int(batch["attention_mask"][index, :split].sum())
        response = int(batch["attention_mask"][index, split:].sum())
        rows.append(
            reference.Row(
                prompt=batch["input_ids"][index, split - prompt : split],
                response=batch["responses"][index, :response],
                mask=batch["response_mask"][index, :response],
                **{ours: batch[theirs][index, :response] for ours, theirs in names.items()},
            )
        )
    return rows


def _judge_outputs(batch: dict, config: reference.ReferenceConfig, weights: dict, role: str) -> list[torch.Tensor]:
    """[R] of each row: log-probabilities, values, or scores at the tokens themselves."""
    outputs = []
    for row in judge_rows(batch):
        with torch.no_grad():
            output = reference.forward_row(weights, config, row.ids)
        if role == "actor":
            outputs.append(reference.row_log_probs(output, row.ids, len(row.prompt), TEMPERATURE)[0])
        elif role == "critic":
            outputs.append(reference.row_values(output, len(row.prompt)))
        else:
            outputs.append(output[len(row.prompt) :])
    return outputs


def _set_old_outputs(batch: dict, outputs: list[torch.Tensor], cell: Cell) -> None:
    """Old outputs around the judge's own, so that some tokens are clipped and none is at an edge; a loss away from
    0.
    """
    generator = torch.Generator().manual_seed(cell.seed + 1)
    # A loss around zero would be a difference of large sums, whose relative error says nothing.
    batch["advantages"] += 1.0
    steps = torch.tensor(LOG_RATIO_STEPS if cell.role == "actor" else VALUE_STEPS)
    name = "old_log_probs" if cell.role == "actor" else "values"
    for index, now in enumerate(outputs):
        shift = steps[torch.randint(len(steps), now.shape, generator=generator)]
        jitter, reference_jitter, rollout_jitter = 0.1 * torch.rand((3, *now.shape), generator=generator)
        batch[name][index, : len(now)] = (now - shift - 0.2 * jitter).float()
        batch["ref_log_prob"][index, : len(now)] = (now + 3.0 * reference_jitter).float()
        batch["rollout_log_probs"][index, : len(now)] = batch["old_log_probs"][index, : len(now)] - 5.0 * rollout_jitter


@dataclass(frozen=True, eq=False)
class Models:
    """The cell's model twice: plain DDP holds whole gradients on every rank, the distributed optimizer takes steps."""

    plain: list[torch.nn.Module]
    distributed: list[torch.nn.Module]
    optimizer: Any


def build_models(cell: Cell, layout: ParallelLayout) -> Models:
    """Both models of a cell; ``compare`` puts the judge's weights into them."""
    distributed = _build(cell, layout, distributed=True)
    plain = _build(cell, layout, distributed=False)
    return Models(plain, distributed, build_optimizer(distributed, lr=LEARNING_RATE))


def _build(cell: Cell, layout: ParallelLayout, *, distributed: bool) -> list[torch.nn.Module]:
    """The cell's model, with gradients whole or spread over data-parallel ranks."""
    return build_model(
        cell.model.shape(),
        layout,
        dtype=DTYPES[cell.dtype],
        value_head=cell.role != "actor",
        override_ddp_config={"use_distributed_optimizer": distributed},
    )


def compare(
    cell: Cell, case: Case, models: Models, settings: StepSettings, shares: Sequence[Share], options: LossOptions
) -> dict[str, Error]:
    """Run the optimised system on the case and compare it with the verdict; the same result on every rank.

    Args:
        shares: for each data-parallel rank its rows of the mini-batch, and its micro-batches (None lets the engine
            plan).
    """
    rows, indices = shares[parallel_state.get_data_parallel_rank()]
    batch = RolloutBatch.of(take_rows(case.batch, rows))
    load(models.distributed, case.weights, case.config)
    if cell.role == "reward":
        scores = Reward(models.distributed, settings).compute_scores(batch, per_token=True)
        return {"output_error": _output_error(scores, rows, case.outputs)}

    role = options.role(cell.role)
    load(models.plain, case.weights, case.config)
    for model in models.plain:
        model.zero_grad_buffer()
    forward_backward_batch(batch, role, models.plain, settings, indices=indices)
    verdict = case.verdicts[options]
    worst_gradient = gradient_error(models.plain, case, verdict)

    worker = (Critic if cell.role == "critic" else Actor)(models.distributed, settings, models.optimizer, role)
    outputs = worker.evaluate(batch)[role.outputs[0]]
    metrics = worker.update(batch, indices=indices)
    expected = {**verdict.metrics, f"{cell.role}/grad_norm": verdict.grad_norm, f"{cell.role}/lr": LEARNING_RATE}
    name = "critic/vf_loss" if cell.role == "critic" else "actor/pg_loss"
    return {
        "loss_error": Error(_relative(metrics[name], verdict.metrics[name]), name),
        "gradient_error": worst_gradient,
        "metrics_error": _metrics_error(metrics, expected),
        "output_error": _output_error(outputs, rows, case.outputs),
    }


def _relative(got: float, expected: float) -> float:
    return abs(got - expected) / max(abs(expected), METRIC_FLOOR)


def _worst(errors: dict[str, float]) -> Error:
    # Not a number must count as the largest error, not as none.
    finite = {name: error if math.isfinite(error) else math.inf for name, error in errors.items()}
    name = max(finite, key=lambda name: finite[name])
    return Error(finite[name], name)


def gradient_error(models: list[torch.nn.Module], case: Case, verdict: reference.JudgeResult) -> Error:
    """Over all parameters and ranks, the norm of the difference from the judge's gradient over that gradient's norm."""
    # Squares of shards add up to those of the whole; copies on several ranks count the same in both sums.
    differences, norms = defaultdict(float), defaultdict(float)
    for share in gather_to_all(squared_differences(models, verdict.grads, case.config)):
        for name, (difference, norm) in share.items():
            differences[name] += difference
            norms[name] += norm
    # Without a token in the mask every gradient is zero, and must be.
    floor = max(GRADIENT_FLOOR * math.sqrt(sum(norms.values())), 1e-12)
    return _worst({name: math.sqrt(differences[name]) / max(math.sqrt(norms[name]), floor) for name in norms})


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
