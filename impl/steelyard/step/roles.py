"""What differs between the models of a reinforcement-learning step: inputs, output, loss, metrics.

A role knows nothing of micro-batches, ranks or packing. Its loss is a weighted sum over tokens, and every metric
follows from sums over the whole mini-batch, so neither can depend on how the batch was split.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from megatron.core import parallel_state

from steelyard.step.batch import MicroBatch
from steelyard.step.logprobs import token_log_probs
from steelyard.step.losses import Aggregation, clipped_policy_loss, clipped_value_loss

Sums = dict[str, torch.Tensor]


class Role(ABC):
    """One model of the step.

    Attributes:
        inputs: [B, R] fields of the batch that the loss needs.
        sums: names of the sums that ``loss`` returns, in order.
        output_name: what ``output`` computes for every scored token.
        aggregation: how token losses become one loss.
    """

    inputs: ClassVar[tuple[str, ...]]
    sums: ClassVar[tuple[str, ...]]
    output_name: ClassVar[str]
    aggregation: Aggregation

    @abstractmethod
    def output(self, model_output: torch.Tensor, part: MicroBatch) -> torch.Tensor:
        """[N] from what the last pipeline stage returned, with its graph."""

    @abstractmethod
    def loss(self, output: torch.Tensor, part: MicroBatch) -> tuple[torch.Tensor, Sums]:
        """The micro-batch's share of the loss (scalar with graph), and its sums (scalars without)."""

    @abstractmethod
    def metrics(self, totals: Mapping[str, float]) -> dict[str, float]:
        """The metrics of the whole mini-batch from the sums over it."""


@dataclass(frozen=True)
class ActorRole(Role):
    """The policy: log-probabilities of the response tokens, and PPO's clipped loss.

    Attributes:
        aggregation: how token losses become one loss.
        clip_low, clip_high: the ratio is held within [1 - low, 1 + high].
        dual_clip: bound for negative advantages; None switches it off.
        temperature: logits are divided by it.
    """

    inputs = ("old_log_probs", "advantages")
    sums = ("tokens", "pg_loss", "clipped", "clipped_lower", "negative_kl")
    output_name = "log_probs"

    aggregation: Aggregation = field(default_factory=Aggregation)
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = 3.0
    temperature: float = 1.0

    def output(self, model_output: torch.Tensor, part: MicroBatch) -> torch.Tensor:
        """Log-probabilities [N] from logits [b, S, V/tp], computed only where a response token is scored."""
        return token_log_probs(
            model_output.flatten(0, 1),
            part.labels,
            index=part.scored,
            temperature=self.temperature,
            group=parallel_state.get_tensor_model_parallel_group(),
        )

    def loss(self, output: torch.Tensor, part: MicroBatch) -> tuple[torch.Tensor, Sums]:
        losses, counts = clipped_policy_loss(
            output,
            part.fields["old_log_probs"],
            part.fields["advantages"],
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            dual_clip=self.dual_clip,
        )
        loss = (part.weights * losses).sum()
        sums = {name: _sum(value * part.mask) for name, value in counts.items()}
        return loss, {**sums, "tokens": _sum(part.mask), "pg_loss": _sum(loss)}

    def metrics(self, totals: Mapping[str, float]) -> dict[str, float]:
        tokens = max(totals["tokens"], 1.0)
        return {
            "actor/pg_loss": totals["pg_loss"],
            "actor/pg_clipfrac": totals["clipped"] / tokens,
            "actor/pg_clipfrac_lower": totals["clipped_lower"] / tokens,
            "actor/ppo_kl": -totals["negative_kl"] / tokens,
        }


@dataclass(frozen=True)
class CriticRole(Role):
    """The value function: one value per response token, and the clipped value loss.

    Attributes:
        aggregation: how token losses become one loss.
        clip: values move at most this far from the old ones before the loss stops rewarding it.
    """

    inputs = ("values", "returns")
    sums = ("tokens", "vf_loss", "clipped", "values", "returns", "squared_returns", "errors", "squared_errors")
    output_name = "values"

    aggregation: Aggregation = field(default_factory=Aggregation)
    clip: float = 0.5

    def output(self, model_output: torch.Tensor, part: MicroBatch) -> torch.Tensor:
        """Values [N] from the value head's [b, S, 1]."""
        return model_output.flatten().index_select(0, part.scored).float()

    def loss(self, output: torch.Tensor, part: MicroBatch) -> tuple[torch.Tensor, Sums]:
        returns = part.fields["returns"]
        losses, counts = clipped_value_loss(output, part.fields["values"], returns, clip=self.clip)
        loss = (part.weights * losses).sum()
        error = (returns - output) * part.mask
        kept = returns * part.mask
        return loss, {
            "tokens": _sum(part.mask),
            "vf_loss": _sum(loss),
            "clipped": _sum(counts["clipped"] * part.mask),
            "values": _sum(output * part.mask),
            "returns": _sum(kept),
            "squared_returns": _sum_of_squares(kept),
            "errors": _sum(error),
            "squared_errors": _sum_of_squares(error),
        }

    def metrics(self, totals: Mapping[str, float]) -> dict[str, float]:
        tokens = max(totals["tokens"], 1.0)
        variance = totals["squared_returns"] / tokens - (totals["returns"] / tokens) ** 2
        unexplained = totals["squared_errors"] / tokens - (totals["errors"] / tokens) ** 2
        return {
            "critic/vf_loss": totals["vf_loss"],
            "critic/vf_clipfrac": totals["clipped"] / tokens,
            "critic/vpred_mean": totals["values"] / tokens,
            "critic/explained_variance": 1.0 - unexplained / variance if variance > 0 else 0.0,
        }


def _sum(values: torch.Tensor) -> torch.Tensor:
    return values.detach().sum(dtype=torch.float64)


def _sum_of_squares(values: torch.Tensor) -> torch.Tensor:
    return values.detach().double().square().sum()
