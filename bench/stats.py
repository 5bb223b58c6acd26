"""Statistics of two sides: the ratio of their medians with an interval, and whether they differ at all.

Samples of interleaved runs are pairs: what slowed both of a pair cancels. They are tested by Wilcoxon's signed ranks;
samples that are not pairs by Mann and Whitney's. Both are exact up to some tens of samples, take any distribution of
times, and a single outlier moves them by one rank only.
"""

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


def ratio_of_medians(
    candidate: Sequence[float], reference: Sequence[float], *, paired: bool = True, seed: int = 0
) -> Ratio:
    """How many times the reference's median the candidate's is; by default from samples taken in interleaved pairs.

    Pairs are resampled whole, so that what slowed both samples of a pair (another load on the machine) cancels. The
    interval is the percentile bootstrap's: it cannot reach beyond the samples seen, so with few pairs it can be too
    narrow; read it together with ``pairs``. Equal inputs and seeds give equal intervals.

    Raises:
        ValueError: paired sides differ in their number of samples.
    """
    fewest = min(len(candidate), len(reference))
    if paired and len(candidate) != len(reference):
        raise ValueError(f"{len(candidate)} samples against {len(reference)} are not pairs")
    sides = (np.asarray(candidate, dtype=float), np.asarray(reference, dtype=float))
    with np.errstate(divide="ignore", invalid="ignore"):
        value = float(np.divide(median(candidate), median(reference)))
        if fewest < LEAST_PAIRS or not math.isfinite(value):
            return Ratio(value, None, None, fewest)
        interval = stats.bootstrap(
            sides,
            lambda a, b, axis: np.median(a, axis=axis) / np.median(b, axis=axis),
            paired=paired,
            vectorized=True,
            n_resamples=RESAMPLES,
            confidence_level=CONFIDENCE,
            method="percentile",
            rng=np.random.default_rng(seed),
        ).confidence_interval
    return Ratio(value, float(interval.low), float(interval.high), fewest)


def p_values(candidate: np.ndarray, reference: np.ndarray, *, paired: bool) -> np.ndarray:
    """Two-sided probability of a difference at least as large between sides that are equal, along the last axis.

    Args:
        candidate, reference: [..., n] samples; the same ``n`` when ``paired``.
    """
    a, b = np.asarray(candidate, dtype=float), np.asarray(reference, dtype=float)
    if a.min() > 0 and b.min() > 0:  # then pairs of large samples weigh no more than pairs of small ones
        a, b = np.log(a), np.log(b)
    if paired:
        # No difference at all is no sign of one; scipy would answer not-a-number.
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.nan_to_num(stats.wilcoxon(a - b, axis=-1).pvalue, nan=1.0)
    return np.nan_to_num(stats.mannwhitneyu(a, b, axis=-1).pvalue, nan=1.0)


def least_p_value(candidates: int, references: int, *, paired: bool) -> float:
    """The smallest p-value that so many samples can give: when every one of a side is above every one of the other."""
    return 2 / 2**candidates if paired else 2 / math.comb(candidates + references, candidates)


def holm(p: np.ndarray) -> np.ndarray:
    """p-values adjusted for their number (the last axis) by Holm's step-down rule.

    Comparing them with a level keeps the chance of one or more false alarms among all of them at that level, whatever
    they have to do with each other: a false alarm is a property of the whole report. (scipy offers Benjamini and
    Hochberg's rule, which bounds the share of false ones among the alarms: beside a true alarm it lets false ones
    pass.)
    """
    order = np.argsort(p, axis=-1)
    raised = np.take_along_axis(p, order, -1) * np.arange(p.shape[-1], 0, -1)
    adjusted = np.minimum(np.maximum.accumulate(raised, axis=-1), 1.0)
    return np.take_along_axis(adjusted, np.argsort(order, axis=-1), -1)
