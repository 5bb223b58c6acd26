"""Log-probabilities and entropy of chosen tokens, from logits whose vocabulary is split over ranks.

The logits are the largest tensor of a step: 205,280 tokens x 76,032 entries are 58 GiB in fp32. So they stay in the
type the model computed them in, and only chunks of tokens are ever held in fp32, forward and backward; the softmax is
computed again in the backward pass instead of being kept.

Dimensions: T rows of logits, N scored tokens, C tokens of a chunk, V entries of the vocabulary on this rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, overload

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from steelyard.errors import InputError

CHUNK_BYTES = 64 * 2**20
"""What one fp32 copy of a chunk may take; at most two exist at a time, beside one in the type of the logits."""

# Stands in for -inf, so that a vocabulary entry with probability 0 adds 0 to the entropy instead of 0 * inf.
_LEAST = -1e30


@overload
def token_log_probs(
    logits: torch.Tensor,
    labels: torch.Tensor,
    *,
    index: torch.Tensor | None = None,
    temperature: float = 1.0,
    group: dist.ProcessGroup | None = None,
    with_entropy: Literal[False] = False,
    chunk_tokens: int | None = None,
) -> torch.Tensor: ...


@overload
def token_log_probs(
    logits: torch.Tensor,
    labels: torch.Tensor,
    *,
    index: torch.Tensor | None = None,
    temperature: float = 1.0,
    group: dist.ProcessGroup | None = None,
    with_entropy: Literal[True],
    chunk_tokens: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...


def token_log_probs(
    logits: torch.Tensor,
    labels: torch.Tensor,
    *,
    index: torch.Tensor | None = None,
    temperature: float = 1.0,
    group: dist.ProcessGroup | None = None,
    with_entropy: bool = False,
    chunk_tokens: int | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """log softmax(logits / temperature) at the labels, and the entropy of the same distribution, both in nats.

    Args:
        logits: [T, V] of any floating type; rank r of the group holds the entries from r * V of the vocabulary.
        labels: [N] ids in the whole vocabulary, the same on all ranks of the group. An id outside it gives -inf.
        index: [N] rows of the logits that are scored, each at most once; None means all T in order.
        temperature: the logits are divided by it.
        group: ranks that share the vocabulary; None means that it is not split. All of them must call.
        with_entropy: compute the entropy too.
        chunk_tokens: tokens of a chunk; None takes as many as fit into ``CHUNK_BYTES``. Changes no value beyond
            rounding.

    Returns:
        [N] log-probabilities, or the pair of them and [N] entropies; fp32 (fp64 if the logits are), with gradients to
        the logits in their own type. Two all-reduces in the forward pass, none in the backward pass.

    Raises:
        InputError: shapes that do not belong together, or a temperature or chunk size that is not above zero.

    Source: the gradients are d log p / dz = (onehot - p) / temperature and dH / dz = -p (log p + H) / temperature.
    """
    if logits.dim() != 2:
        raise InputError(f"logits have shape {tuple(logits.shape)}: flatten them to [tokens, vocabulary]")
    scored = logits.size(0) if index is None else index.numel()
    if labels.dim() != 1 or labels.numel() != scored:
        raise InputError(f"labels have shape {tuple(labels.shape)}, but {scored} tokens are scored: give one for each")
    if not temperature > 0:
        raise InputError(f"temperature={temperature} must be above 0")
    if chunk_tokens is None:
        wide = torch.promote_types(logits.dtype, torch.float32).itemsize
        chunk_tokens = max(1, CHUNK_BYTES // (wide * max(1, logits.size(1))))
    if chunk_tokens < 1:
        raise InputError(f"chunk_tokens={chunk_tokens} must be at least 1")
    log_probs, entropy = _TokenLogProbs.apply(logits, labels, index, temperature, group, with_entropy, chunk_tokens)
    return (log_probs, entropy) if with_entropy else log_probs


class _TokenLogProbs(torch.autograd.Function):
    """The chunked computation. What it keeps is the logits as given and a few numbers per scored token."""

    @staticmethod
    def forward(
        ctx: Any,
        logits_TV: torch.Tensor,
        labels: torch.Tensor,
        index: torch.Tensor | None,
        temperature: float,
        group: dist.ProcessGroup | None,
        with_entropy: bool,
        chunk_tokens: int,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        ctx.temperature, ctx.chunk_tokens = temperature, chunk_tokens
        ctx.first = 0 if group is None else dist.get_rank(group) * logits_TV.size(1)
        # Outputs without a gradient arrive as None in the backward pass, which then skips their part.
        ctx.set_materialize_grads(False)
        maxima, sums = _local_statistics(ctx, logits_TV, labels, index, with_entropy)
        peak, at_label = _combine(maxima, sums, temperature, group)
        log_total = sums[0].log()
        log_probs = (at_label - peak) / temperature - log_total
        entropy = log_total - sums[1] / sums[0] if with_entropy else None
        kept = (labels, index, peak, sums[0], log_total, entropy)
        ctx.save_for_backward(logits_TV, *kept)
        return log_probs, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, d_log_probs: torch.Tensor | None, d_entropy: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        logits_TV, labels, index, peak, total, log_total, entropy = ctx.saved_tensors
        if d_log_probs is None:
            d_log_probs = torch.zeros_like(peak)
        gradient_TV = torch.empty_like(logits_TV) if index is None else torch.zeros_like(logits_TV)
        scale = 1.0 / (total * ctx.temperature)
        at_label = d_log_probs / ctx.temperature
        for part in _parts(peak.numel(), ctx.chunk_tokens):
            d_CV = _shift(_chunk(logits_TV, index, part), peak[part], ctx.temperature)
            if d_entropy is None:
                d_CV.exp_().mul_((-d_log_probs[part] * scale[part]).unsqueeze(1))
            else:
                # p (-g - h (log p + H)), where log p is the shifted logit minus log_total.
                fixed = -d_log_probs[part] - d_entropy[part] * (entropy[part] - log_total[part])
                e_CV = d_CV.exp()
                d_CV.clamp_(min=_LEAST).mul_(-d_entropy[part].unsqueeze(1)).add_(fixed.unsqueeze(1))
                d_CV.mul_(e_CV).mul_(scale[part].unsqueeze(1))
            column, inside = _local_labels(labels[part], ctx.first, logits_TV.size(1))
            added = torch.where(inside, at_label[part], 0.0).unsqueeze(1)
            d_CV.scatter_(1, column, d_CV.gather(1, column) + added)
            if index is None:
                gradient_TV[part] = d_CV
            else:
                gradient_TV.index_copy_(0, index[part], d_CV.to(gradient_TV.dtype))
        return gradient_TV, None, None, None, None, None, None


def _local_statistics(
    ctx: Any, logits_TV: torch.Tensor, labels: torch.Tensor, index: torch.Tensor | None, with_entropy: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """What this rank's part of the vocabulary says: maxima [2, N] (peak, logit at the label, -inf where it is
    elsewhere), and sums [1 or 2, N] of e^d, and d e^d for the entropy, where d = (logit - peak) / temperature."""
    dtype = torch.promote_types(logits_TV.dtype, torch.float32)
    maxima = torch.empty((2, labels.numel()), dtype=dtype, device=logits_TV.device)
    sums = torch.empty((2 if with_entropy else 1, labels.numel()), dtype=dtype, device=logits_TV.device)
    for part in _parts(labels.numel(), ctx.chunk_tokens):
        z_CV = _chunk(logits_TV, index, part)
        column, inside = _local_labels(labels[part], ctx.first, logits_TV.size(1))
        maxima[1, part] = torch.where(inside, z_CV.gather(1, column).squeeze(1), -torch.inf)
        peak = z_CV.amax(1).clamp_(min=_LEAST)
        maxima[0, part] = peak
        d_CV = _shift(z_CV, peak, ctx.temperature)
        if with_entropy:
            e_CV = d_CV.exp()
            sums[0, part] = e_CV.sum(1)
            sums[1, part] = d_CV.clamp_(min=_LEAST).mul_(e_CV).sum(1)
        else:
            sums[0, part] = d_CV.exp_().sum(1)
    return maxima, sums


def _combine(
    maxima: torch.Tensor, sums: torch.Tensor, temperature: float, group: dist.ProcessGroup | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Peak [N] and logit at the label [N] over all ranks; ``sums`` becomes relative to that peak, and global."""
    if group is None or dist.get_world_size(group) == 1 or maxima.size(1) == 0:
        return maxima[0], maxima[1]
    own = maxima[0].clone()
    dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=group)
    shift = (own - maxima[0]) / temperature
    if sums.size(0) == 2:
        # (d + shift) e^(d + shift), summed.
        sums[1] += shift * sums[0]
    sums *= shift.exp()
    dist.all_reduce(sums, group=group)
    return maxima[0], maxima[1]


def _parts(count: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def _chunk(logits_TV: torch.Tensor, index: torch.Tensor | None, part: slice) -> torch.Tensor:
    """The rows of one chunk [C, V] in fp32 (or wider) and in memory of their own."""
    rows = logits_TV[part] if index is None else logits_TV.index_select(0, index[part])
    # index_select made a copy; a slice is a view of the logits, which must stay as they are.
    return rows.to(torch.promote_types(rows.dtype, torch.float32), copy=index is None)


def _shift(z_CV: torch.Tensor, peak: torch.Tensor, temperature: float) -> torch.Tensor:
    """(z - peak) / temperature, in place; the difference first, so that large logits keep their digits."""
    d_CV = z_CV.sub_(peak.unsqueeze(1))
    return d_CV if temperature == 1.0 else d_CV.div_(temperature)


def _local_labels(labels: torch.Tensor, first: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """([C, 1] column of each label on this rank, [C] whether it is here); labels elsewhere get a column that exists."""
    column = labels - first
    inside = (column >= 0) & (column < width)
    return column.clamp(0, width - 1).unsqueeze(1), inside
