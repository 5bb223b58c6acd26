"""What a user of a Megatron trainer sets, in the words of this package."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from steelyard.errors import InputError
from steelyard.parallel import ParallelLayout

Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True)
class Setting:
    """One choice of everything that memory and speed of a training step depend on.

    Attributes:
        layout: how the model is spread over GPUs.
        max_tokens: token budget of a micro-batch per GPU; with fixed micro-batches it is not used.
        micro_batch_size: rows of a fixed, padded micro-batch; None means dynamic micro-batches up to ``max_tokens``.
        recompute: activations computed again in the backward pass.
        offload: whether parameters, gradients and optimizer state leave the GPU while another role or the rollout
            engine uses it.
        chunked_logits: whether log-probabilities are computed in chunks of tokens, so that the whole [T, V/tp] logits
            are never held in float32.
        optimizer_on_host: whether master weights and moments stay in the host's memory, where the optimizer steps too
            (Megatron's ``optimizer_cpu_offload`` with a fraction of 1).

    Raises:
        InputError: a value is none that its field can have.
    """

    layout: ParallelLayout
    max_tokens: int = 16384
    micro_batch_size: int | None = None
    recompute: Recompute = "none"
    offload: bool = False
    chunked_logits: bool = True
    optimizer_on_host: bool = False

    def __post_init__(self) -> None:
        for name in ("max_tokens", "micro_batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"{name}={value!r} must be a whole number of at least 1")
        if self.recompute not in get_args(Recompute):
            raise InputError(f"recompute={self.recompute!r} must be one of {', '.join(get_args(Recompute))}")
