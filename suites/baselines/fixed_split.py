"""Fixed micro-batches of padded rows, and the mean of their means (baselines N1, N5 and N13 together).

What verl's Megatron actor and critic ran in 2025 with ``use_dynamic_bsz=False`` and packing off (``megatron_actor.py``
of verl 0.3): contiguous rows, ``ppo_micro_batch_size_per_gpu`` of them each; before the model, the left padding is
removed and rows are padded to the longest of the micro-batch (``remove_left_padding``); log-probabilities of all
positions; the loss of a micro-batch is the mean over its own tokens, and the schedule averages micro-batches.

Not part of it, since they are baselines of their own: logits restored to the whole width, the batch moved to the device
at once, extra copies of the logits for the entropy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

from steelyard.step.losses import clipped_policy_loss, clipped_value_loss

Batch = dict[str, torch.Tensor]


def forward_backward(
    batch: Batch,
    role: str,
    models: list[torch.nn.Module],
    micro_batch_size: int,
    *,
    multiple_of: int = 1,
    temperature: float = 1.0,
) -> list[float]:
    """Gradients of the mean of micro-batch means; returns the loss of each micro-batch on the last stage.

    Args:
        batch: this data-parallel rank's rows, as ``suites.workloads.make_batch`` shapes them.
        role: ``actor`` or ``critic``.
        models: this rank's chunks.
        micro_batch_size: rows of a micro-batch.
        multiple_of: the width is rounded up to it; sequence parallelism splits positions over tp ranks.
    """
    return run(batch, models, micro_batch_size, partial(_forward_step, role, multiple_of, temperature))


def run(
    batch: Batch, models: list[torch.nn.Module], micro_batch_size: int, forward_step: Callable[..., tuple]
) -> list[float]:
    """A schedule over fixed micro-batches of the rows in their order; returns the loss of each on the last stage.

    Args:
        batch: this data-parallel rank's rows.
        models: this rank's chunks.
        micro_batch_size: rows of a micro-batch.
        forward_step: as megatron-core's schedules take it; its iterator gives the rows of each micro-batch.
    """
    rows = batch["input_ids"].size(0)
    count = -(-rows // micro_batch_size)

    def micro_batches() -> Iterator[Batch]:
        for start in range(0, rows, micro_batch_size):
            yield {name: value[start : start + micro_batch_size] for name, value in batch.items()}

    losses = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[micro_batches() for _ in models] if len(models) > 1 else micro_batches(),
        model=models if len(models) > 1 else models[0],
        num_microbatches=count,
        seq_length=1,
        micro_batch_size=1,
        forward_only=False,
    )
    return [float(loss) for loss in losses]


def step(
    batch: Batch, role: str, models: list[torch.nn.Module], optimizer, micro_batch_size: int, *, multiple_of: int = 1
) -> float:
    """One optimizer step; returns the mean of the micro-batch losses (0 on stages without them)."""
    gradients = partial(forward_backward, batch, role, models, micro_batch_size, multiple_of=multiple_of)
    return optimizer_step(models, optimizer, gradients)


def optimizer_step(models: list[torch.nn.Module], optimizer, gradients: Callable[[], list[float]]) -> float:
    """A step along fresh gradients; returns the mean of the losses that came with them (0 where there are none)."""
    for model in models:
        model.zero_grad_buffer()
    optimizer.zero_grad()
    losses = gradients()
    optimizer.step()
    return sum(losses) / len(losses) if losses else 0.0


def _forward_step(
    role: str, multiple_of: int, temperature: float, micro_batches: Iterator[Batch], model: torch.nn.Module
):
    batch = {name: value.to(torch.cuda.current_device()) for name, value in next(micro_batches).items()}
    ids, lengths = _remove_left_padding(batch["input_ids"], batch["attention_mask"].bool(), multiple_of)
    positions = torch.arange(ids.size(1), device=ids.device).expand_as(ids)
    output = model(ids, positions, None)
    return output, partial(_loss, role, temperature, batch, ids, lengths)


def _remove_left_padding(ids: torch.Tensor, mask: torch.Tensor, multiple: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row moved to the left edge, in the width of the longest row."""
    lengths = mask.sum(1)
    width = -(-int(lengths.max()) // multiple) * multiple
    moved = ids.new_zeros((ids.size(0), width))
    for row in range(ids.size(0)):
        moved[row, : lengths[row]] = ids[row, mask[row]]
    return moved, lengths


def _loss(role: str, temperature: float, batch: Batch, ids: torch.Tensor, lengths: torch.Tensor, output: torch.Tensor):
    if role == "actor":
        # The token after each position; what stands behind the end of a row is never selected below.
        labels = ids.roll(-1, dims=1)
        at_positions = -vocab_parallel_cross_entropy(output.float() / temperature, labels)
    else:
        at_positions = output.squeeze(-1).float()
    mask = batch["response_mask"]
    responses = batch["attention_mask"][:, -mask.size(1) :].sum(1)
    # One slice per row: a response token is scored at the position before it.
    at_responses = torch.stack(
        [
            torch.nn.functional.pad(
                at_positions[row, lengths[row] - responses[row] - 1 : lengths[row] - 1],
                (0, mask.size(1) - responses[row]),
            )
            for row in range(mask.size(0))
        ]
    )
    if role == "actor":
        losses, _ = clipped_policy_loss(at_responses, batch["old_log_probs"], batch["advantages"])
    else:
        losses, _ = clipped_value_loss(at_responses, batch["values"], batch["returns"])
    loss = (losses * mask).sum() / mask.sum().clamp(min=1.0)
    return loss, loss.detach().clone()
