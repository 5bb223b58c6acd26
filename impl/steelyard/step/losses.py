"""Losses token by token, and the weights that aggregate them; no loss here knows how a batch was split.

Every aggregation mode is a weighted sum over tokens whose weights follow from the response mask of the whole
mini-batch. So a micro-batch adds up ``weight * loss`` of its own tokens, and the sum over micro-batches and ranks is
the loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from steelyard.errors import InputError

AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
AggregationMode = Literal[
    "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
]

KL_ESTIMATORS = ("k1", "k2", "k3", "low_var_kl")
KlEstimator = Literal["k1", "k2", "k3", "low_var_kl"]


@dataclass(frozen=True)
class Aggregation:
    """How token losses become one loss, under the names that verl uses.

    Attributes:
        mode: ``token-mean``: over all tokens. ``token-sum``: their sum. ``seq-mean-token-sum``: mean over rows of each
            row's sum. ``seq-mean-token-mean``: mean over rows of each row's mean. ``seq-mean-token-sum-norm``: mean
            over rows of each row's sum divided by ``scale_factor``.
        scale_factor: divisor of the last mode; None means the width of the response block.
        global_batch_size: rows that the sequence means divide by, fully masked ones included; None means the rows with
            at least one token in the mask.
    """

    mode: AggregationMode = "token-mean"
    scale_factor: float | None = None
    global_batch_size: int | None = None

    def __post_init__(self) -> None:
        if self.mode not in AGGREGATIONS:
            raise InputError(f"aggregation mode {self.mode!r} is unknown: use one of {', '.join(AGGREGATIONS)}")

    def weights(self, mask: torch.Tensor) -> torch.Tensor:
        """[B, R] weight of every token of this rank's rows, before the division by ``denominator``."""
        if self.mode == "seq-mean-token-mean":
            return mask / mask.sum(1, keepdim=True).clamp(min=1.0)
        if self.mode == "seq-mean-token-sum-norm":
            return mask / (self.scale_factor or max(mask.size(1), 1))
        return mask

    def denominator(self, totals: torch.Tensor) -> torch.Tensor:
        """What the weighted sum over all tokens of the mini-batch is divided by (scalar, where ``totals`` is).

        Args:
            totals: [2] tokens in the mask and rows with such a token, over all data-parallel ranks (``mask_totals``).
        """
        tokens, rows = totals.clamp(min=1.0)
        if self.mode == "token-mean":
            return tokens
        if self.mode == "token-sum":
            return torch.ones_like(tokens)
        return rows if self.global_batch_size is None else torch.full_like(rows, self.global_batch_size)


def mask_totals(mask: torch.Tensor) -> torch.Tensor:
    """[B, R] -> [2] float64: tokens in the mask, and rows with at least one."""
    return torch.stack((mask.sum(dtype=torch.float64), mask.any(1).sum(dtype=torch.float64)))


def clipped_policy_loss(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = 3.0,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """PPO's clipped loss of each token [N], and what its metrics count.

    With ratio r and advantage A: max(-A r, -A clip(r, 1 - low, 1 + high)); where A < 0, at most -A * dual_clip
    (dual-clip PPO, arXiv 1912.09729). The log-ratio is held within ±20, so that the exponential stays finite.
    """
    log_ratio = (log_probs - old_log_probs).clamp(-20.0, 20.0)
    ratio = log_ratio.exp()
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = torch.maximum(plain, clipped)
    counts = {"clipped": clipped > plain, "negative_kl": log_ratio}
    if dual_clip is None:
        return loss, {**counts, "clipped_lower": torch.zeros_like(plain, dtype=torch.bool)}
    bound = -advantages * dual_clip
    negative = advantages < 0
    counts["clipped_lower"] = (loss > bound) & negative
    return torch.where(negative, torch.minimum(loss, bound), loss), counts


def clipped_value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, *, clip: float = 0.5
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """PPO's clipped value loss of each token [N], and what its metrics count.

    Half the larger of two squared errors: of the value, and of the value held within ``clip`` of the old one.
    """
    held = torch.minimum(torch.maximum(values, old_values - clip), old_values + clip)
    plain, clipped = (values - returns).square(), (held - returns).square()
    return 0.5 * torch.maximum(plain, clipped), {"clipped": clipped > plain}


def kl_penalty(log_probs: torch.Tensor, ref_log_probs: torch.Tensor, estimator: KlEstimator) -> torch.Tensor:
    """An estimate of the KL divergence to the reference policy at each token [N] (Schulman, "Approximating KL", 2020).

    With d = reference - policy: k1 is -d, k2 is d²/2, k3 (low_var_kl) is exp(d) - d - 1. As in verl, d is held within
    ±20 and the last within ±10.
    """
    difference = ref_log_probs - log_probs
    if estimator == "k1":
        return -difference
    if estimator == "k2":
        return 0.5 * difference.square()
    difference = difference.clamp(-20.0, 20.0)
    return (difference.exp() - difference - 1.0).clamp(-10.0, 10.0)
