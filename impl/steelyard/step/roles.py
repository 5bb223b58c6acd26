"""What differs between the models of a reinforcement-learning step: inputs, output, loss, metrics.

A role knows nothing of micro-batches, ranks or packing. Its loss is a weighted sum over tokens, and every metric
follows from sums and maxima over the whole mini-batch, so neither can depend on how the batch was split.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, Literal

import torch
from megatron.core import parallel_state

from steelyard.errors import InputError
from steelyard.step.batch import MicroBatch
from steelyard.step.logprobs import token_log_probs
from steelyard.step.losses import (
    KL_ESTIMATORS,
    Aggregation,
    KlEstimator,
    clipped_policy_loss,
    clipped_value_loss,
    kl_penalty,
)

Tensors = dict[str, torch.Tensor]
# Where the model's output belongs to a response token: at the position before it, which predicts it (log-probabilities,
# values), or at the token itself (scores).
Place = Literal["before", "at"]


class Role(ABC):
    """One model of the step.

    Attributes:
        outputs: what ``output`` computes for every scored token.
        place: which position of the model's output belongs to a response token.
        inputs: [B, R] fields of the batch that the loss needs.
        sums, maxima: what ``loss`` reports of a micro-batch, by how it is put together over micro-batches and ranks.
        aggregation: how token losses become one loss.
    """

    place: ClassVar[Place] = "before"
    sums: ClassVar[tuple[str, ...]] = ()
    maxima: ClassVar[tuple[str, ...]] = ()
    aggregation: Aggregation

    @property
    @abstractmethod
    def outputs(self) -> tuple[str, ...]: ...

    @property
    @abstractmethod
    def inputs(self) -> tuple[str, ...]: ...

    @abstractmethod
    def output(self, model_output: torch.Tensor, part: MicroBatch) -> Tensors:
        """``outputs``, each [N], from what the last pipeline stage returned, with their graph."""

    @abstractmethod
    def loss(self, output: Tensors, part: MicroBatch) -> tuple[torch.Tensor, Tensors]:
        """The micro-batch's share of the loss (scalar with graph), and ``sums`` and ``maxima`` (scalars without)."""

    @abstractmethod
    def metrics(self, totals: Mapping[str, float]) -> dict[str, float]:
        """The metrics of the whole mini-batch from the sums and maxima over it; always the same keys."""


@dataclass(frozen=True)
class ActorRole(Role):
    """The policy: log-probabilities of the response tokens, and PPO's clipped loss.

    loss = policy - entropy_coeff * entropy + kl_coef * KL, each aggregated alike.

    Attributes:
        aggregation: how token losses become one loss.
        clip_low, clip_high: the ratio is held within [1 - low, 1 + high].
        dual_clip: bound for negative advantages; None switches it off.
        temperature: logits are divided by it.
        entropy_coeff: weight of the entropy bonus.
        with_entropy: compute and report the entropy although its weight is 0.
        kl_coef: weight of the KL penalty to the reference policy (field ``ref_log_prob``); None leaves it out.
        kl_estimator: ``k1``, ``k2``, ``k3`` or ``low_var_kl`` (another name of k3).
        importance_cap: multiply each token's policy loss by min(exp(old - rollout), cap), where ``rollout_log_probs``
            are those of the engine that sampled (truncated importance sampling); None leaves it out.
    """

    sums = ("tokens", "pg_loss", "clipped", "clipped_lower", "negative_kl", "entropy_loss", "kl_loss")
    maxima = ("ratio",)

    aggregation: Aggregation = field(default_factory=Aggregation)
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = 3.0
    temperature: float = 1.0
    entropy_coeff: float = 0.0
    with_entropy: bool = False
    kl_coef: float | None = None
    kl_estimator: KlEstimator = "low_var_kl"
    importance_cap: float | None = None

    def __post_init__(self) -> None:
        if self.temperature <= 0:
            raise InputError(f"temperature={self.temperature} must be above 0")
        if self.kl_estimator not in KL_ESTIMATORS:
            raise InputError(f"kl_estimator={self.kl_estimator!r} is unknown: use one of {', '.join(KL_ESTIMATORS)}")

    @property
    def reports_entropy(self) -> bool:
        return self.with_entropy or self.entropy_coeff != 0.0

    @property
    def outputs(self) -> tuple[str, ...]:
        return ("log_probs", "entropy") if self.reports_entropy else ("log_probs",)

    @property
    def inputs(self) -> tuple[str, ...]:
        reference = () if self.kl_coef is None else ("ref_log_prob",)
        rollout = () if self.importance_cap is None else ("rollout_log_probs",)
        return ("old_log_probs", "advantages", *reference, *rollout)

    def output(self, model_output: torch.Tensor, part: MicroBatch) -> Tensors:
        """Log-probabilities [N] (and entropies [N]) from logits [b, S, V/tp], only where a response token is scored."""
        score = partial(
            token_log_probs,
            model_output.flatten(0, 1),
            part.labels,
            index=part.scored,
            temperature=self.temperature,
            group=parallel_state.get_tensor_model_parallel_group(),
        )
        if not self.reports_entropy:
            return {"log_probs": score()}
        log_probs, entropy = score(with_entropy=True)
        return {"log_probs": log_probs, "entropy": entropy}

    def loss(self, output: Tensors, part: MicroBatch) -> tuple[torch.Tensor, Tensors]:
        log_probs, fields = output["log_probs"], part.fields
        losses, counts = clipped_policy_loss(
            log_probs,
            fields["old_log_probs"],
            fields["advantages"],
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            dual_clip=self.dual_clip,
        )
        if self.importance_cap is not None:
            sampled = (fields["old_log_probs"] - fields["rollout_log_probs"]).clamp(-20.0, 20.0).exp()
            losses = losses * sampled.clamp(max=self.importance_cap)
        loss = policy_loss = (part.weights * losses).sum()
        entropy_loss = kl_loss = torch.zeros_like(loss)
        if self.reports_entropy:
            entropy_loss = (part.weights * output["entropy"]).sum()
            loss = loss - self.entropy_coeff * entropy_loss
        if self.kl_coef is not None:
            kl_loss = (part.weights * kl_penalty(log_probs, fields["ref_log_prob"], self.kl_estimator)).sum()
            loss = loss + self.kl_coef * kl_loss
        ratios = counts["negative_kl"].exp()
        return loss, {
            **{name: _sum(value * part.mask) for name, value in counts.items()},
            "tokens": _sum(part.mask),
            "pg_loss": _sum(policy_loss),
            "entropy_loss": _sum(entropy_loss),
            "kl_loss": _sum(kl_loss),
            "ratio": _greatest(ratios, part.mask),
        }

    def metrics(self, totals: Mapping[str, float]) -> dict[str, float]:
        tokens = max(totals["tokens"], 1.0)
        entropy = {"actor/entropy_loss": totals["entropy_loss"]} if self.reports_entropy else {}
        kl = {} if self.kl_coef is None else {"actor/kl_loss": totals["kl_loss"], "actor/kl_coef": self.kl_coef}
        return {
            "actor/pg_loss": totals["pg_loss"],
            "actor/pg_clipfrac": totals["clipped"] / tokens,
            "actor/pg_clipfrac_lower": totals["clipped_lower"] / tokens,
            "actor/ppo_kl": -totals["negative_kl"] / tokens,
            "actor/ratio_max": totals["ratio"] if totals["tokens"] else 1.0,
            **entropy,
            **kl,
        }


@dataclass(frozen=True)
class CriticRole(Role):
    """The value function: one value per response token, and the clipped value loss.

    Attributes:
        aggregation: how token losses become one loss.
        clip: values move at most this far from the old ones before the loss stops rewarding it.
    """

    outputs = ("values",)
    inputs = ("values", "returns")
    sums = ("tokens", "vf_loss", "clipped", "values", "returns", "squared_returns", "errors", "squared_errors")
    # The smallest return as the greatest of the negated ones.
    maxima = ("return", "negative_return")

    aggregation: Aggregation = field(default_factory=Aggregation)
    clip: float = 0.5

    def output(self, model_output: torch.Tensor, part: MicroBatch) -> Tensors:
        """Values [N] from the value head's [b, S, 1]."""
        return {"values": model_output.flatten().index_select(0, part.scored).float()}

    def loss(self, output: Tensors, part: MicroBatch) -> tuple[torch.Tensor, Tensors]:
        values, returns = output["values"], part.fields["returns"]
        losses, counts = clipped_value_loss(values, part.fields["values"], returns, clip=self.clip)
        loss = (part.weights * losses).sum()
        error, kept = (returns - values) * part.mask, returns * part.mask
        return loss, {
            "tokens": _sum(part.mask),
            "vf_loss": _sum(loss),
            "clipped": _sum(counts["clipped"] * part.mask),
            "values": _sum(values * part.mask),
            "returns": _sum(kept),
            "squared_returns": _sum_of_squares(kept),
            "errors": _sum(error),
            "squared_errors": _sum_of_squares(error),
            "return": _greatest(returns, part.mask),
            "negative_return": _greatest(-returns, part.mask),
        }

    def metrics(self, totals: Mapping[str, float]) -> dict[str, float]:
        tokens = max(totals["tokens"], 1.0)
        variance = totals["squared_returns"] / tokens - (totals["returns"] / tokens) ** 2
        unexplained = totals["squared_errors"] / tokens - (totals["errors"] / tokens) ** 2
        # Equal returns have no variance to explain; from sums it would be rounding, not zero.
        varies = totals["return"] > -totals["negative_return"]
        return {
            "critic/vf_loss": totals["vf_loss"],
            "critic/vf_clipfrac": totals["clipped"] / tokens,
            "critic/vpred_mean": totals["values"] / tokens,
            "critic/explained_variance": 1.0 - unexplained / variance if varies else 0.0,
        }


@dataclass(frozen=True)
class RewardRole(Role):
    """A reward model: one score at each response token; it is evaluated, not trained."""

    outputs = ("scores",)
    inputs = ()
    place = "at"

    aggregation: Aggregation = field(default_factory=Aggregation)

    def output(self, model_output: torch.Tensor, part: MicroBatch) -> Tensors:
        """Scores [N] from the value head's [b, S, 1]."""
        return {"scores": model_output.flatten().index_select(0, part.scored).float()}

    def loss(self, output: Tensors, part: MicroBatch) -> tuple[torch.Tensor, Tensors]:
        raise InputError("a reward model has no loss here: evaluate it with compute_scores")

    def metrics(self, totals: Mapping[str, float]) -> dict[str, float]:
        return {}


def _sum(values: torch.Tensor) -> torch.Tensor:
    return values.detach().sum(dtype=torch.float64)


def _sum_of_squares(values: torch.Tensor) -> torch.Tensor:
    return values.detach().double().square().sum()


def _greatest(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The greatest of the values in the mask; minus infinity when there is none."""
    kept = values.detach().double().masked_fill(mask == 0, -torch.inf)
    return torch.cat((kept, kept.new_full((1,), -torch.inf))).amax()
