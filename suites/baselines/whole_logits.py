"""N7. Logits of packed rows restored to the padded layout before the log-probabilities, as verl 0.3 ran it.

verl's Megatron actor, before its forward pass took a ``logits_processor`` (2025): the packed logits went through
``postprocess_packed_seqs`` (baseline N6, ``packing_syncs.unpack``), which makes [B, S, V] of them, zero in all padding;
the loss then cut out the responses and took log-probabilities at every response column, padding included. All of it in
float32, the type in which the last pipeline stage hands out logits.

``log_probs`` alone takes the whole vocabulary, and PyTorch's fused cross entropy does what Megatron's
vocabulary-parallel one did. In ``step``, a whole training step, it is Megatron's own, on any number of tensor-parallel
ranks. There the rest is Steelyard's: rows are packed without host reads, so what the step needs more than Steelyard's
is what N7 costs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

from steelyard.step import RolloutBatch
from steelyard.step.batch import make_micro_batch
from steelyard.step.losses import clipped_policy_loss
from suites.baselines import fixed_split, packing_syncs
from suites.baselines.fixed_split import Batch

# From [N, V] logits and [N] labels to [N].
Losses = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
CROSS_ENTROPY: Losses = partial(torch.nn.functional.cross_entropy, reduction="none")


def log_probs(
    parts: Sequence[torch.Tensor],
    offsets: torch.Tensor,
    mask: torch.Tensor,
    responses: torch.Tensor,
    losses: Losses = CROSS_ENTROPY,
) -> torch.Tensor:
    """[B, R] log-probabilities of the responses, meaningless where there is no response token.

    Args:
        parts: [T/cp, V] packed logits of every context-parallel rank.
        offsets, mask: as for ``packing_syncs.unpack``; mask [B, S].
        responses: [B, R] token ids, the last R columns of the batch.
        losses: the cross entropy that is used.
    """
    logits_BSV = packing_syncs.unpack(parts, offsets, mask)
    # A token is scored by the logits at the column before it.
    block_BRV = logits_BSV[:, -responses.size(1) - 1 : -1].contiguous()
    return -losses(block_BRV.flatten(0, 1), responses.flatten()).view(responses.shape)


def step(
    batch: Batch,
    models: list[torch.nn.Module],
    optimizer,
    micro_batch_size: int = 1,
    *,
    multiple_of: int = 1,
) -> float:
    """One optimizer step of an actor; returns the mean of the micro-batch losses (0 on stages without them).

    Args:
        batch: this data-parallel rank's rows, as ``suites.workloads.make_batch`` shapes them; on the host.
        models, optimizer: of this rank, without context parallelism.
        micro_batch_size: rows of a micro-batch.
        multiple_of: each row is padded to it; sequence parallelism splits positions over tp ranks.
    """
    gradients = partial(fixed_split.run, batch, models, micro_batch_size, partial(_forward_step, multiple_of))
    return fixed_split.optimizer_step(models, optimizer, gradients)


def _forward_step(multiple_of: int, micro_batches: Iterator[Batch], model: torch.nn.Module):
    batch = next(micro_batches)
    rollouts = RolloutBatch.of(batch)
    part = make_micro_batch(
        rollouts,
        range(rollouts.rows),
        torch.zeros_like(rollouts.response_mask),
        torch.ones(()),
        (),
        device=torch.cuda.current_device(),
        tp=multiple_of,
    )
    output = model(part.input_ids, part.position_ids, None, packed_seq_params=part.packed_seq_params)
    return output, partial(_loss, batch, part.packed_seq_params.cu_seqlens_q_padded)


def _loss(batch: Batch, offsets: torch.Tensor, output: torch.Tensor):
    there = {name: value.to(torch.cuda.current_device()) for name, value in batch.items()}
    found = log_probs(
        [output.flatten(0, 1).float()],
        offsets,
        there["attention_mask"].bool(),
        there["input_ids"][:, -there["response_mask"].size(1) :],
        vocab_parallel_cross_entropy,
    )
    losses, _ = clipped_policy_loss(found, there["old_log_probs"], there["advantages"])
    loss = (losses * there["response_mask"]).sum() / there["response_mask"].sum().clamp(min=1.0)
    return loss, loss.detach().clone()


def logits_bytes(rows: int, width: int, response_width: int, vocab: int) -> int:
    """Bytes of the restored logits and of their response part, beside the packed ones."""
    return 4 * vocab * rows * (width + response_width)
