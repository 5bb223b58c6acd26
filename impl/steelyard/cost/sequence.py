"""Forward work of sequences, counted from the shape of a model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from steelyard.cost.calibration import Calibration, calibrate
from steelyard.cost.shape import ModelShape
from steelyard.errors import InputError, LengthsError

Lengths = Sequence[int] | np.ndarray


class SequenceCost:
    r"""FLOPs of one forward pass over each sequence of a packed micro-batch.

    A multiply and an add are two FLOPs. Matrix products are counted, as ``torch.utils.flop_counter`` counts them;
    norms, rotary positions, softmax and activations are not.

    *Per token.* A product with a matrix of w weights costs 2w, so a token costs twice the weights that it meets: the
    projections of attention (for latent attention with keys and values unfolded from the latent, as training does),
    a dense feed-forward or the router, the chosen experts and the shared ones, and the output projection (``vocab``
    columns, or one with ``value_head``).

    *Attention.* The token at position i (from 1) attends to itself and the i-1 before it, so a sequence of s tokens has

        1 + 2 + ... + s = s (s + 1) / 2

    causal pairs. One pair costs, per head, 2·d for the product of query and key (d = ``head_dim``) and 2·v for the
    weighted value (v = ``value_dim``), so a layer costs ``heads``·(d + v)·s·(s + 1). Key-value heads do not enter: a
    shared key is still multiplied with each query. Without causality there are s² pairs: 2·``heads``·(d + v)·s².

    Sequences of a packed micro-batch do not attend to each other, so their costs add.

    Args:
        shape: the model.
        fixed: work of a micro-batch whatever is in it (launches, communication), in FLOPs.
        value_head: the model ends in one value per token, as a critic does, instead of logits.
        causal: False counts all s² pairs, for comparison with counters that do not know the mask.

    Raises:
        InputError: ``fixed`` is negative or not finite.
    """

    def __init__(self, shape: ModelShape, *, fixed: float = 0.0, value_head: bool = False, causal: bool = True) -> None:
        if not (isinstance(fixed, int | float | np.number) and math.isfinite(fixed) and fixed >= 0):
            raise InputError(f"fixed={fixed!r} must be a number of FLOPs, 0 or more")
        self.shape, self.fixed, self.value_head, self.causal = shape, float(fixed), value_head, causal
        self._per_token = {
            "projections": 2 * shape.layers * shape.attention_weights,
            "feed_forward": 2 * shape.feed_forward_weights(shape.experts_per_token),
            "output": 2 * shape.hidden * (1 if value_head else shape.vocab),
        }
        self._linear = float(sum(self._per_token.values()))
        self._attention = float(shape.layers * shape.heads * (shape.head_dim + shape.value_dim))

    def __call__(self, lengths: Lengths) -> np.ndarray:
        """Forward FLOPs of each sequence, float64 [rows]; ``LengthsError`` where a length is not a number of tokens."""
        tokens = _tokens(lengths)
        return self._linear * tokens + self._attention * self._pairs(tokens)

    def micro_batch(self, lengths: Lengths) -> float:
        """Forward FLOPs of one micro-batch: its sequences, in any order, and the fixed cost."""
        return math.fsum(self(lengths)) + self.fixed

    def linear(self, lengths: Lengths) -> np.ndarray:
        """The part that grows with the tokens, float64 [rows]."""
        return self._linear * _tokens(lengths)

    def attention(self, lengths: Lengths) -> np.ndarray:
        """The part that grows with the pairs of tokens, float64 [rows]."""
        return self._attention * self._pairs(_tokens(lengths))

    def parts(self, lengths: Lengths) -> dict[str, np.ndarray]:
        """``projections``, ``attention``, ``feed_forward``, ``output``: float64 [rows] each, adding up to a call."""
        tokens = _tokens(lengths)
        return {name: flops * tokens for name, flops in self._per_token.items()} | {"attention": self.attention(tokens)}

    def fit(self, samples: Iterable[tuple[Lengths, float]]) -> Calibration:
        """Fit measured seconds of micro-batches: seconds = fixed + a·(linear FLOPs) + b·(attention FLOPs).

        Args:
            samples: pairs of the lengths in a micro-batch and the seconds it took.

        Returns:
            A cost in seconds that can be used wherever this one can, with its error stated.

        Raises:
            InputError: fewer than 3 samples, seconds that are not above 0, or samples that do not tell the three
                coefficients apart.
        """
        return calibrate(self, samples)

    def _pairs(self, tokens: np.ndarray) -> np.ndarray:
        """Twice the pairs of tokens that attention computes."""
        return tokens * (tokens + 1) if self.causal else 2 * tokens * tokens

    def __repr__(self) -> str:
        return f"SequenceCost({self.shape.name}, fixed={self.fixed:g}, value_head={self.value_head})"


def _tokens(lengths: Any) -> np.ndarray:
    """Lengths as float64, in which lengths to 2**31 and their FLOPs keep their order."""
    try:
        tokens = np.asarray(lengths, dtype=np.float64)
    except (TypeError, ValueError):
        raise LengthsError(f"lengths must be a list of whole numbers, not {type(lengths).__name__}") from None
    if tokens.ndim != 1:
        raise LengthsError(f"lengths must be one list of whole numbers, but have {tokens.ndim} dimensions")
    wrong = ~((tokens >= 0) & (tokens == np.floor(tokens)) & np.isfinite(tokens))
    if wrong.any():
        position = int(np.argmax(wrong))
        raise LengthsError(f"sequence {position} has length {tokens[position]:g}: it must be a whole number, 0 or more")
    return tokens
