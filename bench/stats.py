"""Statistics of paired samples: medians, and the ratio of two sides with an interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

# With two pairs a bootstrap knows three resamples: an interval from them would only look like one.
LEAST_PAIRS = 3
CONFIDENCE = 0.95
RESAMPLES = 5000


@dataclass(frozen=True)
class Ratio:
    """A ratio of medians.

    Attributes:
        value: median of the candidate over median of the reference.
        low, high: ends of the 95 % bootstrap interval; None where there are too few pairs for one.
        pairs: how many pairs it rests on.
    """

    value: float
    low: float | None
    high: float | None
    pairs: int


def median(values: Sequence[float]) -> float:
    """Median of ``values``; NaN when there are none."""
    return float(np.median(values)) if len(values) else math.nan


def ratio_of_medians(candidate: Sequence[float], reference: Sequence[float], *, seed: int = 0) -> Ratio:
    """How many times the reference's median the candidate's is, from samples that were taken in interleaved pairs.

    Pairs are resampled whole, so that what slowed both samples of a pair (another load on the machine) cancels. The
    interval is the percentile bootstrap's: it cannot reach beyond the samples seen, so with few pairs it can be too
    narrow; read it together with ``pairs``. Equal inputs and seeds give equal intervals.

    Raises:
        ValueError: the two sides differ in their number of samples.
    """
    if len(candidate) != len(reference):
        raise ValueError(f"{len(candidate)} samples against {len(reference)} are not pairs")
    sides = (np.asarray(candidate, dtype=float), np.asarray(reference, dtype=float))
    with np.errstate(divide="ignore", invalid="ignore"):
        value = float(np.divide(median(candidate), median(reference)))
        if len(candidate) < LEAST_PAIRS or not math.isfinite(value):
            return Ratio(value, None, None, len(candidate))
        interval = stats.bootstrap(
            sides,
            lambda a, b, axis: np.median(a, axis=axis) / np.median(b, axis=axis),
            paired=True,
            vectorized=True,
            n_resamples=RESAMPLES,
            confidence_level=CONFIDENCE,
            method="percentile",
            rng=np.random.default_rng(seed),
        ).confidence_interval
    return Ratio(value, float(interval.low), float(interval.high), len(candidate))
