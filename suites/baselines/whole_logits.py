"""N7. Logits of packed rows restored to the padded layout before the log-probabilities, as verl 0.3 ran it.

verl's Megatron actor, before its forward pass took a ``logits_processor`` (2025): the packed logits went through
``postprocess_packed_seqs`` (baseline N6, ``packing_syncs.unpack``), which makes [B, S, V] of them, zero in all padding;
the loss then cut out the responses and took log-probabilities at every response column, padding included. All of it in
float32, the type in which the last pipeline stage hands out logits.

With one tensor-parallel rank, so that PyTorch's fused cross entropy does what Megatron's vocabulary-parallel one did.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from suites.baselines import packing_syncs


def log_probs(
    parts: Sequence[torch.Tensor], offsets: torch.Tensor, mask: torch.Tensor, responses: torch.Tensor
) -> torch.Tensor:
    """[B, R] log-probabilities of the responses, meaningless where there is no response token.

    Args:
        parts: [T/cp, V] packed logits of every context-parallel rank.
        offsets, mask: as for ``packing_syncs.unpack``; mask [B, S].
        responses: [B, R] token ids, the last R columns of the batch.
    """
    logits_BSV = packing_syncs.unpack(parts, offsets, mask)
    # A token is scored by the logits at the column before it.
    block_BRV = logits_BSV[:, -responses.size(1) - 1 : -1].contiguous()
    losses = torch.nn.functional.cross_entropy(block_BRV.flatten(0, 1), responses.flatten(), reduction="none")
    return -losses.view(responses.shape)


def logits_bytes(rows: int, width: int, response_width: int, vocab: int) -> int:
    """Bytes of the restored logits and of their response part, beside the packed ones."""
    return 4 * vocab * rows * (width + response_width)
