"""Batches as reinforcement-learning trainers shape them, from lengths: left-padded prompts, right-padded responses."""

from __future__ import annotations

import numpy as np
import torch

from steelyard.lengths import LengthSample


def make_batch(sample: LengthSample, vocab: int, seed: int, *, holes: float = 0.0) -> dict[str, torch.Tensor]:
    """Random tokens with the given lengths, and every field that actor and critic need.

    Args:
        sample: prompt and response lengths of each row.
        vocab: token ids are drawn from [1, vocab); 0 is the padding.
        seed: of tokens and fields.
        holes: share of the response tokens that the loss leaves out (tool output, say).

    Returns:
        ``input_ids``, ``attention_mask``, ``position_ids`` [B, P + R]; ``responses``, ``response_mask``,
        ``old_log_probs``, ``ref_log_prob``, ``rollout_log_probs``, ``advantages``, ``values``, ``returns`` [B, R]; all
        on the host. The log-probabilities are about those of a fresh model, so that a first step's ratios are near 1.
    """
    prompts, responses = torch.as_tensor(sample.prompts.copy()), torch.as_tensor(sample.responses.copy())
    prompt_width, response_width = int(prompts.max()), int(responses.max())
    columns = torch.arange(prompt_width + response_width)
    first = prompt_width - prompts
    mask = (columns >= first[:, None]) & (columns < prompt_width + responses[:, None])
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, vocab, mask.shape, generator=generator) * mask
    block = (len(sample), response_width)

    def normal(mean: float = 0.0, deviation: float = 1.0) -> torch.Tensor:
        return mean + deviation * torch.randn(block, generator=generator)

    kept = torch.rand(block, generator=generator) >= holes
    return {
        "input_ids": ids,
        "attention_mask": mask.long(),
        "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
        "responses": ids[:, prompt_width:],
        "response_mask": (mask[:, prompt_width:] & kept).float(),
        "old_log_probs": normal(-float(np.log(vocab)), 0.1),
        "advantages": normal(),
        "values": normal(),
        "returns": normal(),
        "ref_log_prob": normal(-float(np.log(vocab)), 0.1),
        "rollout_log_probs": normal(-float(np.log(vocab)), 0.1),
    }


def take_rows(batch: dict[str, torch.Tensor], rows: list[int]) -> dict[str, torch.Tensor]:
    """The named rows of every tensor."""
    index = torch.tensor(rows, dtype=torch.long)
    return {name: value.index_select(0, index) for name, value in batch.items()}
