"""Seconds of a micro-batch on the device at hand, fitted to measurements."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from steelyard.errors import InputError

if TYPE_CHECKING:
    from steelyard.cost.sequence import SequenceCost

_COEFFICIENTS = 3


@dataclass(frozen=True)
class Calibration:
    """A cost in seconds: ``fixed + per_linear * linear FLOPs + per_attention * attention FLOPs``, all at least 0.

    Attributes:
        cost: counts the FLOPs.
        fixed: seconds of a micro-batch whatever is in it.
        per_linear, per_attention: seconds per FLOP of each kind.
        samples: how many measurements were fitted.
        r_squared: share of the variance of the seconds that the fit explains.
        median_error, max_error: of \\|fitted - measured\\| / measured over the samples.
    """

    cost: SequenceCost
    fixed: float
    per_linear: float
    per_attention: float
    samples: int
    r_squared: float
    median_error: float
    max_error: float

    def __call__(self, lengths: Sequence[int] | np.ndarray) -> np.ndarray:
        """Seconds of each sequence without the fixed part, float64 [rows]."""
        return self.per_linear * self.cost.linear(lengths) + self.per_attention * self.cost.attention(lengths)

    def micro_batch(self, lengths: Sequence[int] | np.ndarray) -> float:
        """Seconds of one micro-batch."""
        return math.fsum(self(lengths)) + self.fixed

    def __str__(self) -> str:
        """The coefficients and the error in one line."""
        speeds = [
            f"{kind} at {1e-12 / each:.3g} TFLOP/s" if each else f"{kind} free"
            for kind, each in (("linear", self.per_linear), ("attention", self.per_attention))
        ]
        return (
            f"{self.fixed * 1e3:.3g} ms + {' + '.join(speeds)} (R² {self.r_squared:.4f}, error median "
            f"{self.median_error:.1%}, max {self.max_error:.1%}, {self.samples} samples)"
        )


def calibrate(cost: SequenceCost, samples: Iterable[tuple[Sequence[int] | np.ndarray, float]]) -> Calibration:
    """See ``SequenceCost.fit``."""
    measured = list(samples)
    if len(measured) < _COEFFICIENTS:
        raise InputError(
            f"a fit needs at least {_COEFFICIENTS} samples, got {len(measured)}: measure more micro-batches"
        )
    seconds = np.array([_seconds(number, taken) for number, (_, taken) in enumerate(measured)])
    columns = np.array(
        [[1.0, math.fsum(cost.linear(lengths)), math.fsum(cost.attention(lengths))] for lengths, _ in measured]
    )
    norms = np.linalg.norm(columns, axis=0)
    scaled = columns / np.where(norms > 0, norms, 1.0)
    if np.linalg.matrix_rank(scaled, tol=1e-9) < _COEFFICIENTS:
        raise InputError(
            "the samples do not tell the fixed cost, the cost per token and the cost of attention apart: measure "
            "micro-batches that differ in tokens, and in how long their sequences are"
        )
    fixed, linear, attention = (float(each) for each in _non_negative(scaled, seconds) / norms)
    residuals = columns @ np.array([fixed, linear, attention]) - seconds
    spread = float(np.sum((seconds - seconds.mean()) ** 2))
    errors = np.abs(residuals) / seconds
    return Calibration(
        cost=cost,
        fixed=fixed,
        per_linear=linear,
        per_attention=attention,
        samples=len(measured),
        r_squared=1.0 - float(residuals @ residuals) / spread if spread else float(not residuals.any()),
        median_error=float(np.median(errors)),
        max_error=float(errors.max()),
    )


def _seconds(number: int, taken: float) -> float:
    if not (isinstance(taken, int | float | np.number) and math.isfinite(taken) and taken > 0):
        raise InputError(f"sample {number}: {taken!r} must be a number of seconds above 0")
    return float(taken)


def _non_negative(columns: np.ndarray, target: np.ndarray) -> np.ndarray:
    """The non-negative coefficients with the least squared error.

    At the optimum, the coefficients that are not 0 solve the ordinary problem on their own columns. With three columns
    there are only seven such problems, so all are solved and the best answer without a negative coefficient is kept.
    """
    best, least = np.zeros(columns.shape[1]), float(target @ target)
    for size in range(1, columns.shape[1] + 1):
        for chosen in itertools.combinations(range(columns.shape[1]), size):
            part = columns[:, chosen]
            solution = np.linalg.lstsq(part, target, rcond=None)[0]
            error = float(np.sum((part @ solution - target) ** 2))
            if (solution >= 0).all() and error < least:
                best, least = np.zeros(columns.shape[1]), error
                best[list(chosen)] = solution
    return best
