"""Rows, what each of their tokens costs, and how a whole mini-batch is averaged.

Every token-level function below takes vectors over the **valid** tokens of one row (response mask on, and a token
before it), so nothing that a mask hides can enter a loss or a metric. The definitions follow verl's, clamps included,
because users compare with them; only verl's additions of 1e-8 to denominators are left out.

Letters: T tokens of a row = P of the prompt + R of the response, N valid tokens of the response, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0  # log ratios are clamped to +-20 before exp(), as in verl
K3_LIMIT = 10.0  # and the k3 estimate to +-10
AGGREGATION_MODES = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)
KL_TYPES = ("k1", "k2", "k3")


@dataclass(eq=False)
class Row:
    """One rollout: prompt ids [P], response ids [R], and per response token what the losses need, each [R].

    ``mask`` may have holes (tool output, say). Optional fields are needed by the step that reads them: old_log_probs
    and advantages by the actor (ref_log_probs for the KL loss, rollout_log_probs for truncated importance sampling),
    values and returns by the critic. Lists are converted.
    """

    prompt: Tensor
    response: Tensor
    mask: Tensor
    old_log_probs: Tensor | None = None
    advantages: Tensor | None = None
    ref_log_probs: Tensor | None = None
    rollout_log_probs: Tensor | None = None
    values: Tensor | None = None
    returns: Tensor | None = None

    def __post_init__(self) -> None:
        self.prompt = torch.as_tensor(self.prompt, dtype=torch.long)
        self.response = torch.as_tensor(self.response, dtype=torch.long)
        self.mask = torch.as_tensor(self.mask) != 0
        for name in ("mask", "old_log_probs", "advantages", "ref_log_probs", "rollout_log_probs", "values", "returns"):
            field = getattr(self, name)
            if field is None:
                continue
            if name != "mask":
                field = torch.as_tensor(field, dtype=torch.float64).detach()
                setattr(self, name, field)
            if field.shape != self.response.shape:
                raise ValueError(f"{name} has shape {tuple(field.shape)}, the response {tuple(self.response.shape)}")

    @property
    def ids(self) -> Tensor:
        """Prompt and response, [T]."""
        return torch.cat([self.prompt, self.response])

    @property
    def valid(self) -> Tensor:
        """Which response tokens count, bool [R]: the mask, less a first token that nothing precedes."""
        valid = self.mask.clone()
        if len(self.prompt) == 0:
            valid[:1] = False
        return valid

    def valid_field(self, name: str) -> Tensor:
        """An optional field at the valid tokens, float64 [N]; an error if the row lacks it."""
        field = getattr(self, name)
        if field is None:
            raise ValueError(f"this step needs the {name} of every row")
        return field[self.valid]


@dataclass(frozen=True, kw_only=True)
class AggregationSettings:
    """How token losses become one number: the names are verl's.

    Attributes:
        loss_agg_mode: one of AGGREGATION_MODES.
        loss_scale_factor: divisor of seq-mean-token-sum-norm; without it the divisor is ``width``.
        width: the padded width of the responses in the batch that is judged. Nothing is padded here: it must be told.
        global_batch_size: divisor of the three sequence means; it counts fully masked rows. Without it, the divisor is
            the number of rows with a valid token.
    """

    loss_agg_mode: str = "token-mean"
    loss_scale_factor: float | None = None
    width: int | None = None
    global_batch_size: int | None = None


@dataclass(frozen=True, kw_only=True)
class ActorSettings(AggregationSettings):
    """What the actor's loss depends on: loss = policy - entropy_coeff * entropy + kl_loss_coef * kl.

    Attributes:
        clip_ratio, clip_ratio_low, clip_ratio_high: the ratio is clipped to [1 - low, 1 + high]; either bound defaults
            to clip_ratio.
        clip_ratio_c: bound of the dual clip, for tokens with a negative advantage.
        entropy_coeff: weight of the entropy bonus.
        calculate_entropy: report the entropy although its weight is 0.
        use_kl_loss, kl_loss_coef, kl_loss_type: the KL loss to the reference policy; k1, k2 or k3.
        temperature: logits are divided by it before log-probabilities and entropy.
        importance_cap: the policy loss of each token is multiplied by min(exp(old - rollout), importance_cap), with the
            log-probabilities of the engine that sampled it (truncated importance sampling); None leaves it out.
    """

    clip_ratio: float = 0.2
    clip_ratio_low: float | None = None
    clip_ratio_high: float | None = None
    clip_ratio_c: float = 3.0
    entropy_coeff: float = 0.0
    calculate_entropy: bool = False
    use_kl_loss: bool = False
    kl_loss_coef: float = 0.001
    kl_loss_type: str = "k3"
    temperature: float = 1.0
    importance_cap: float | None = None


@dataclass(frozen=True, kw_only=True)
class CriticSettings(AggregationSettings):
    """What the critic's loss depends on: ``cliprange_value`` bounds how far a value may move from the old one."""

    cliprange_value: float = 0.5


def row_log_probs(
    logits_TV: Tensor, ids_T: Tensor, prompt_length: int, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy of each response token, both [R].

    Token t is predicted at position t - 1. The first token of a row without a prompt has no predecessor: 0 and 0.
    """
    start = max(prompt_length, 1)
    log_p = torch.log_softmax(logits_TV[start - 1 : len(ids_T) - 1] / temperature, dim=-1)
    chosen = log_p.gather(-1, ids_T[start:, None])[:, 0]
    entropy = -(log_p.exp() * log_p).sum(dim=-1)
    return _fill_front(chosen, prompt_length, len(ids_T)), _fill_front(entropy, prompt_length, len(ids_T))


def row_values(values_T: Tensor, prompt_length: int) -> Tensor:
    """The value before each response token, [R]: positions P - 1 .. P + R - 2; 0 where position -1 would be read."""
    start = max(prompt_length, 1)
    return _fill_front(values_T[start - 1 : len(values_T) - 1], prompt_length, len(values_T))


def _fill_front(outputs: Tensor, prompt_length: int, length: int) -> Tensor:
    """Put a 0 in front of the outputs of a row that begins with its response, so that there are R of them."""
    if prompt_length == 0 and length > 0:
        return torch.cat([outputs.new_zeros(1), outputs])
    return outputs


def policy_token_losses(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, settings: ActorSettings
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """PPO's clipped loss with the dual clip; r = exp(new - old), A the advantage. All [N].

        plain = -A r        clipped = -A clip(r, 1 - low, 1 + high)        upper = max(plain, clipped)
        loss  = min(upper, -A c) where A < 0, else upper

    Returns:
        loss; whether the clip was active (clipped > plain); whether the dual clip was (A < 0 and upper > -A c);
        old - new log-probability, whose mean is ``actor/ppo_kl``.
    """
    low = settings.clip_ratio if settings.clip_ratio_low is None else settings.clip_ratio_low
    high = settings.clip_ratio if settings.clip_ratio_high is None else settings.clip_ratio_high
    log_ratio = torch.clamp(log_probs - old_log_probs, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio = torch.exp(log_ratio)
    plain = -advantages * ratio
    clipped = -advantages * torch.clamp(ratio, 1.0 - low, 1.0 + high)
    upper = torch.maximum(plain, clipped)
    bound = -advantages * settings.clip_ratio_c
    loss = torch.where(advantages < 0, torch.minimum(upper, bound), upper)
    return loss, clipped > plain, (advantages < 0) & (upper > bound), -log_ratio


def kl_token_losses(log_probs: Tensor, ref_log_probs: Tensor, kl_loss_type: str) -> Tensor:
    """Estimate of KL(policy || reference) per token, [N]; d = ref - new log-probability.

    k1 = -d        k2 = d^2 / 2        k3 = exp(d) - d - 1 (low variance, clamped)
    """
    difference = ref_log_probs - log_probs
    if kl_loss_type == "k1":
        return -difference
    if kl_loss_type == "k2":
        return 0.5 * difference * difference
    if kl_loss_type == "k3":
        difference = torch.clamp(difference, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        return torch.clamp(torch.exp(difference) - difference - 1.0, -K3_LIMIT, K3_LIMIT)
    raise ValueError(f"kl_loss_type {kl_loss_type!r} is none of {KL_TYPES}")


def value_token_losses(
    predicted: Tensor, old_values: Tensor, returns: Tensor, cliprange_value: float
) -> tuple[Tensor, Tensor]:
    """Clipped value loss, [N]: max((v - G)^2, (clip(v, old - range, old + range) - G)^2) / 2.

    Returns: loss; whether the clipped square is the greater one.
    """
    near = torch.minimum(torch.maximum(predicted, old_values - cliprange_value), old_values + cliprange_value)
    plain, clipped = (predicted - returns) ** 2, (near - returns) ** 2
    return 0.5 * torch.maximum(plain, clipped), clipped > plain


def aggregate(token_losses: Sequence[Tensor], settings: AggregationSettings) -> Tensor:
    """One number for the whole mini-batch from each row's losses at its valid tokens (a list of [N], N may be 0).

    token-mean               sum over all tokens / valid tokens of the mini-batch
    token-sum                sum over all tokens
    seq-mean-token-sum       sum over rows of the row's sum / rows
    seq-mean-token-mean      sum over rows of the row's mean / rows
    seq-mean-token-sum-norm  seq-mean-token-sum / (loss_scale_factor, else the padded width)

    Rows: ``global_batch_size`` if given, else those with a valid token. A count of 0 divides as 1: no token, loss 0.
    """
    mode = settings.loss_agg_mode
    if mode not in AGGREGATION_MODES:
        raise ValueError(f"loss_agg_mode {mode!r} is none of {AGGREGATION_MODES}")
    token_count, row_count = 0, 0
    total_of_sums = total_of_means = torch.zeros((), dtype=torch.float64)
    for losses in token_losses:
        row_sum = losses.sum()
        token_count += len(losses)
        row_count += len(losses) > 0
        total_of_sums = total_of_sums + row_sum
        total_of_means = total_of_means + row_sum / max(len(losses), 1)
    if settings.global_batch_size is not None:
        row_count = settings.global_batch_size

    if mode == "token-sum":
        return total_of_sums
    if mode == "token-mean":
        return total_of_sums / max(token_count, 1)
    if mode == "seq-mean-token-mean":
        return total_of_means / max(row_count, 1)
    mean_of_sums = total_of_sums / max(row_count, 1)
    if mode == "seq-mean-token-sum":
        return mean_of_sums
    scale = settings.loss_scale_factor if settings.loss_scale_factor is not None else settings.width
    if scale is None:
        raise ValueError("seq-mean-token-sum-norm needs loss_scale_factor or width")
    return mean_of_sums / scale


def explained_variance(returns: Tensor, predicted: Tensor) -> float:
    """1 - Var(returns - predicted) / Var(returns), population variances over [N]; 0 if no two returns differ."""
    if len(returns) == 0 or returns.min() == returns.max():
        return 0.0
    return float(1.0 - (returns - predicted).var(unbiased=False) / returns.var(unbiased=False))
