"""The actor whose log-probabilities take all logits at once in float32, as trainers without chunks do."""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

from steelyard.step import ActorRole
from steelyard.step.batch import MicroBatch


class WholeLogitsActor(ActorRole):
    """For the memory that it takes: megatron-core's own cross entropy over every position of a micro-batch."""

    def output(self, model_output: torch.Tensor, part: MicroBatch) -> dict[str, torch.Tensor]:
        logits_TV = model_output.flatten(0, 1)
        labels = torch.zeros(logits_TV.size(0), dtype=torch.long, device=logits_TV.device)
        labels[part.scored] = part.labels
        return {"log_probs": -vocab_parallel_cross_entropy(logits_TV, labels)[part.scored]}
