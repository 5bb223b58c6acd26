"""One training step of the judge: loss, gradients and metrics of a whole mini-batch, and AdamW."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from suites.reference.losses import (
    ActorSettings,
    CriticSettings,
    Row,
    aggregate,
    explained_variance,
    kl_token_losses,
    policy_token_losses,
    row_log_probs,
    row_values,
    value_token_losses,
)
from suites.reference.model import ReferenceConfig, Weights, forward_row

AdamState = dict[str, tuple[Tensor, Tensor]]


@dataclass(frozen=True, eq=False)
class JudgeResult:
    """What a step has to agree with.

    Attributes:
        loss: the number that was differentiated.
        grads: by weight name, float64; zeros for a weight that the loss does not reach.
        grad_norm: 2-norm over all gradients, before any clipping.
        metrics: verl's names.
        log_probs, entropies, values: one [R] per row, masked tokens included; the actor fills the first two (entropies
            if it computed them), the critic the last.
    """

    loss: float
    grads: Weights
    grad_norm: float
    metrics: dict[str, float]
    log_probs: list[Tensor] = field(default_factory=list)
    entropies: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)


def actor_step(
    weights: Mapping[str, Tensor], config: ReferenceConfig, rows: Sequence[Row], settings: ActorSettings
) -> JudgeResult:
    """Policy loss, optional entropy bonus and KL loss of a mini-batch.

    Metrics: ``actor/pg_loss``, ``actor/entropy_loss`` and ``actor/kl_loss`` (unweighted) are aggregated as the mode
    says; the clip fractions and ``actor/ppo_kl`` are means over the valid tokens of the mini-batch whatever the mode.
    """
    leaves = _leaf_copies(weights)
    with_entropy = settings.calculate_entropy or settings.entropy_coeff != 0.0
    log_probs, entropies = [], []
    policy_losses, valid_entropies, kl_losses = [], [], []
    clip_active, dual_clip_active, old_minus_new = [], [], []
    for row in rows:
        logits_TV = forward_row(leaves, config, row.ids)
        row_log_prob, row_entropy = row_log_probs(logits_TV, row.ids, len(row.prompt), settings.temperature)
        log_probs.append(row_log_prob)
        valid_log_prob = row_log_prob[row.valid]
        loss, clipped, dual_clipped, drift = policy_token_losses(
            valid_log_prob, row.valid_field("old_log_probs"), row.valid_field("advantages"), settings
        )
        if settings.importance_cap is not None:
            log_weight = row.valid_field("old_log_probs") - row.valid_field("rollout_log_probs")
            loss = loss * torch.exp(torch.clamp(log_weight, -20, 20)).clamp(max=settings.importance_cap)
        policy_losses.append(loss)
        clip_active.append(clipped)
        dual_clip_active.append(dual_clipped)
        old_minus_new.append(drift)
        if with_entropy:
            entropies.append(row_entropy)
            valid_entropies.append(row_entropy[row.valid])
        if settings.use_kl_loss:
            ref_log_prob = row.valid_field("ref_log_probs")
            kl_losses.append(kl_token_losses(valid_log_prob, ref_log_prob, settings.kl_loss_type))

    total = policy_loss = aggregate(policy_losses, settings)
    metrics = {
        "actor/pg_loss": policy_loss.item(),
        "actor/pg_clipfrac": _token_mean(clip_active),
        "actor/pg_clipfrac_lower": _token_mean(dual_clip_active),
        "actor/ppo_kl": _token_mean(old_minus_new),
        "actor/ratio_max": _greatest_ratio(old_minus_new),
    }
    if with_entropy:
        entropy_loss = aggregate(valid_entropies, settings)
        total = total - settings.entropy_coeff * entropy_loss
        metrics["actor/entropy_loss"] = entropy_loss.item()
    if settings.use_kl_loss:
        kl_loss = aggregate(kl_losses, settings)
        total = total + settings.kl_loss_coef * kl_loss
        metrics["actor/kl_loss"] = kl_loss.item()
        metrics["actor/kl_coef"] = settings.kl_loss_coef
    grads = _gradients(total, leaves)
    return JudgeResult(
        loss=total.item(),
        grads=grads,
        grad_norm=global_grad_norm(grads.values()),
        metrics=metrics,
        log_probs=[x.detach() for x in log_probs],
        entropies=[x.detach() for x in entropies],
    )


def critic_step(
    weights: Mapping[str, Tensor], config: ReferenceConfig, rows: Sequence[Row], settings: CriticSettings
) -> JudgeResult:
    """Clipped value loss of a mini-batch.

    Metrics: ``critic/vf_loss`` is aggregated as the mode says; the clip fraction, the mean prediction and the explained
    variance are over the valid tokens of the mini-batch whatever the mode.
    """
    leaves = _leaf_copies(weights)
    values, token_losses, clip_active, valid_values, valid_returns = [], [], [], [], []
    for row in rows:
        row_value = row_values(forward_row(leaves, config, row.ids), len(row.prompt))
        predicted, returns = row_value[row.valid], row.valid_field("returns")
        loss, clipped = value_token_losses(predicted, row.valid_field("values"), returns, settings.cliprange_value)
        values.append(row_value)
        token_losses.append(loss)
        clip_active.append(clipped)
        valid_values.append(predicted)
        valid_returns.append(returns)

    total = aggregate(token_losses, settings)
    metrics = {
        "critic/vf_loss": total.item(),
        "critic/vf_clipfrac": _token_mean(clip_active),
        "critic/vpred_mean": _token_mean(valid_values),
        "critic/explained_variance": explained_variance(_joined(valid_returns), _joined(valid_values)),
    }
    grads = _gradients(total, leaves)
    return JudgeResult(
        loss=total.item(),
        grads=grads,
        grad_norm=global_grad_norm(grads.values()),
        metrics=metrics,
        values=[x.detach() for x in values],
    )


def _leaf_copies(weights: Mapping[str, Tensor]) -> Weights:
    """Float64 copies of the weights that gradients can be taken for; the originals stay untouched."""
    return {name: weight.detach().double().clone().requires_grad_() for name, weight in weights.items()}


def _gradients(loss: Tensor, leaves: Weights) -> Weights:
    """d loss / d weight for every weight; zeros where the loss does not depend on it (no rows: all of them)."""
    if not loss.requires_grad:
        return {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(leaves, grads, strict=True))


def _joined(rows: Sequence[Tensor]) -> Tensor:
    """All rows' tokens in one vector, detached, float64; empty if there are no rows."""
    return torch.cat([torch.zeros(0, dtype=torch.float64), *(row.detach().double() for row in rows)])


def _token_mean(rows: Sequence[Tensor]) -> float:
    """Mean over the tokens of all rows; 0 if there is none."""
    tokens = _joined(rows)
    return float(tokens.sum() / max(len(tokens), 1))


def _greatest_ratio(old_minus_new: Sequence[Tensor]) -> float:
    """The greatest exp(new - old) over all valid tokens; 1 when there is none."""
    drifts = _joined(old_minus_new)
    return math.exp(-drifts.min().item()) if len(drifts) else 1.0


def global_grad_norm(grads: Iterable[Tensor]) -> float:
    """Square root of the sum of the squares of all gradients."""
    return math.sqrt(sum(float((grad.double() ** 2).sum()) for grad in grads))


def adamw_step(
    weights: Mapping[str, Tensor],
    grads: Mapping[str, Tensor],
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    max_grad_norm: float | None = 1.0,
    step: int,
    state: AdamState | None = None,
) -> tuple[Weights, AdamState]:
    """One AdamW update as Megatron does it; nothing is changed in place.

        g = grad * min(1, max_grad_norm / (norm + 1e-6))
        m = b1 m + (1 - b1) g        v = b2 v + (1 - b2) g^2
        w = w - lr * (m / (1 - b1^step) / (sqrt(v / (1 - b2^step)) + eps) + weight_decay * w)

    Matrices decay; biases and norm weights (one dimension) do not. ``step`` counts from 1. ``state`` maps a name to
    (m, v), empty or None before the first step. ``max_grad_norm`` None or 0: no clipping.

    Returns: the new weights, the new state.
    """
    beta1, beta2 = betas
    scale = 1.0
    if max_grad_norm:
        scale = min(1.0, max_grad_norm / (global_grad_norm(grads.values()) + 1e-6))
    new_weights: Weights = {}
    new_state: AdamState = {}
    for name, weight in weights.items():
        weight = weight.detach().double()
        grad = grads[name].double() * scale
        mean, square = (state or {}).get(name, (torch.zeros_like(weight), torch.zeros_like(weight)))
        mean = beta1 * mean + (1.0 - beta1) * grad
        square = beta2 * square + (1.0 - beta2) * grad * grad
        direction = (mean / (1.0 - beta1**step)) / (torch.sqrt(square / (1.0 - beta2**step)) + eps)
        decay = weight_decay if weight.dim() > 1 else 0.0
        new_weights[name] = weight - lr * (direction + decay * weight)
        new_state[name] = (mean, square)
    return new_weights, new_state
