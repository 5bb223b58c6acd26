"""Two runs against each other: a verdict for each metric of each cell, and one for the whole.

A metric is judged in one of these ways, the first that applies:

- ``exact``: predicted, or a count that follows from the case: any change is one. Nothing is timed, so it also holds
  between machines;
- ``limit``: it has an exact bound of its own: whether it keeps it, in one run and in the other;
- ``interleaved``: both runs have one id, so they took turns: their samples are pairs;
- ``apart``: two runs at different times, in which the naive side ran beside the optimised one: the ratio of the two,
  pair by pair, in one run and in the other. A slower machine slows both. So does a change in what both share, therefore
  also
- ``alone``: absolute values, with a threshold that lets the machine of another day pass.

Timed metrics have changed when they are certain to differ (``bench.stats``; 0.5 % for the whole report, corrected for
the number of metrics in it) and the median moved by more than the metric's threshold (``thresholds.toml``). The naive
side's times are the measure, and are not judged. The verdict counts in both directions.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import numpy as np

from bench.judging import Basis, judging
from bench.record import OutcomeRecord, Records, SeriesRecord
from bench.stats import Ratio, holm, least_p_value, median, p_values, ratio_of_medians

# Chance that a report on equal runs has a false alarm, if samples are independent. They are not quite: half of the 1 %
# that is promised is left for that.
ALPHA = 0.005
# Of two equal sums of doubles that were added in another order.
ROUNDING = 1e-12
# Settings of a cell that do not change what is measured.
OF_NO_INFLUENCE = {"pairs", "warmup", "time_limit"}
# What must be equal for figures to be compared: always, and where time is measured.
SOFTWARE = ("device", "torch", "megatron_core", "numpy")
MACHINE = ("device_name", "driver", "cpu", "cores", "threads_per_rank", "libraries")


class Verdict(StrEnum):
    regressed = "regressed"
    improved = "improved"
    neutral = "neutral"
    not_comparable = "not comparable"
    missing = "missing"
    too_few = "too few samples"


@dataclass(frozen=True)
class Comparison:
    """One metric of one cell in both runs.

    Attributes:
        basis: how it was judged; None where it could not be.
        reference, candidate: medians.
        ratio: candidate over reference with its interval; None where nothing was timed.
        p: probability of such a difference without a cause, corrected for the number of metrics.
        reason: what stands behind the verdict, where its name does not say it.
    """

    cell: str
    metric: str
    side: str
    variant: str
    unit: str
    basis: Basis | None
    verdict: Verdict
    reason: str = ""
    reference: float | None = None
    candidate: float | None = None
    ratio: Ratio | None = None
    p: float | None = None


@dataclass(frozen=True)
class Report:
    """All comparisons, in the order of the runs."""

    comparisons: tuple[Comparison, ...]

    @property
    def counts(self) -> dict[Verdict, int]:
        counts = Counter(one.verdict for one in self.comparisons)
        return {verdict: counts[verdict] for verdict in Verdict}

    @property
    def verdict(self) -> Verdict:
        """The one that matters most; neutral when all are."""
        # Improvement comes last: a report that is not complete must not end in praise.
        order = (Verdict.regressed, Verdict.not_comparable, Verdict.missing, Verdict.too_few, Verdict.improved)
        return next((verdict for verdict in order if self.counts[verdict]), Verdict.neutral)

    @property
    def exit_code(self) -> int:
        """0 fine, 1 regressed, 3 something could not be compared."""
        return {Verdict.regressed: 1, Verdict.improved: 0, Verdict.neutral: 0}.get(self.verdict, 3)

    @property
    def sentence(self) -> str:
        found = ", ".join(f"{count} {verdict}" for verdict, count in self.counts.items() if count)
        return f"{self.verdict.capitalize()}: {found or 'nothing to compare'}"


@dataclass(frozen=True)
class _Timed:
    """Samples of one metric, to be judged together with all others."""

    comparison: Comparison
    higher_is_better: bool
    candidate: tuple[float, ...]
    reference: tuple[float, ...]
    paired: bool
    threshold: float

    @property
    def least_p(self) -> float:
        return least_p_value(len(self.candidate), len(self.reference), paired=self.paired)


_Key = tuple[str, str, str, str]


class _Run:
    """The records of one run, by what they are of."""

    def __init__(self, records: Records) -> None:
        self.series: dict[_Key, SeriesRecord] = {}
        self.outcomes: dict[str, OutcomeRecord] = {}
        for record in records.lines:
            if isinstance(record, SeriesRecord):
                self.series[record.cell, record.metric, record.side, record.variant] = record
            else:
                self.outcomes[record.cell] = record

    def naive(self, series: SeriesRecord) -> SeriesRecord | None:
        """The naive side's samples that form pairs with an optimised series."""
        if series.side != "optimised":
            return None
        other = self.series.get((series.cell, series.metric, "naive", series.variant))
        return other if other and len(other.values) == len(series.values) else None

    def why_missing(self, cell: str) -> str:
        outcome = self.outcomes.get(cell)
        if outcome is None:
            return "the cell is not there"
        return f"the cell {outcome.status.replace('_', ' ')}: {outcome.reason}" if outcome.reason else "it is not there"


def compare(reference: Records, candidate: Records, *, exact_only: bool = False) -> Report:
    """Judge every metric of ``candidate`` against the same one of ``reference``.

    Args:
        exact_only: leave out what is timed, and so needs the same machine.
    """
    before, after = _Run(reference), _Run(candidate)
    keys = [key for key in {**before.series, **after.series} if not exact_only or not _is_timed(key, before, after)]
    found = [one for key in keys for one in _judge(key, before, after)] + _without_samples(before, after)
    timed = [one for one in found if isinstance(one, _Timed)]
    verdicts = iter(_verdicts(timed))
    return Report(tuple(next(verdicts) if isinstance(one, _Timed) else one for one in found))


def _without_samples(before: _Run, after: _Run) -> list[Comparison | _Timed]:
    """Cells that left no samples in either run: nothing is known of them, which must not look like nothing changed."""
    with_samples = {key[0] for run in (before, after) for key in run.series}
    return [
        Comparison(cell, "all", "both", "", "", None, Verdict.missing, after.why_missing(cell))
        for cell in {**before.outcomes, **after.outcomes}
        if cell not in with_samples
    ]


def _is_timed(key: _Key, before: _Run, after: _Run) -> bool:
    one = before.series.get(key) or after.series[key]
    return one.limit is None and not judging().is_exact(one)


def _judge(key: _Key, before: _Run, after: _Run) -> list[Comparison | _Timed]:
    """What is to be said of one metric: finished, or samples that wait for the others, or nothing."""
    rules = judging()
    cell, metric, side, variant = key
    old, new = before.series.get(key), after.series.get(key)
    one = old or after.series[key]
    if rules.is_ignored(one) or _is_repeated(key, before, after):
        return []
    exact, timed = rules.is_exact(one), _is_timed(key, before, after)
    if timed and (side == "naive" or one.direction == "none"):
        return []
    blank = Comparison(cell, metric, side, variant, one.unit, None, Verdict.missing)
    if old is None or new is None:
        where, run = ("reference", before) if old is None else ("candidate", after)
        return [replace(blank, reason=f"in the {where} {run.why_missing(cell)}")]
    blank = replace(blank, reference=median(old.values), candidate=median(new.values))
    if obstacle := _obstacle(old, new, timed=timed):
        return [replace(blank, verdict=Verdict.not_comparable, reason=obstacle)]
    if exact:
        verdict, reason = _exact(old, new)
        return [replace(blank, basis="exact", verdict=verdict, reason=reason)]
    if one.limit is not None:
        return [replace(blank, basis="limit", verdict=_by_limit(old, new))]
    return _samples(blank, old, new, before, after)


def _is_repeated(key: _Key, before: _Run, after: _Run) -> bool:
    original = judging().repeats.get(key[1])
    return original is not None and any((key[0], original, *key[2:]) in run.series for run in (before, after))


def _obstacle(old: SeriesRecord, new: SeriesRecord, *, timed: bool) -> str:
    """Why two series cannot be compared: the first thing that differs; empty when they can."""
    for name in ("source", "unit", "direction"):
        if getattr(old, name) != getattr(new, name):
            return f"{name}: {getattr(old, name)} against {getattr(new, name)}"
    for name in {**old.case, **new.case}:
        if name not in OF_NO_INFLUENCE and old.case.get(name) != new.case.get(name):
            return f"case, {name}: {old.case.get(name)} against {new.case.get(name)}"
    for name in SOFTWARE + MACHINE if timed else SOFTWARE:
        one, other = getattr(old.environment, name), getattr(new.environment, name)
        if one != other:
            return f"{name}: {one} against {other}"
    return ""


def _exact(old: SeriesRecord, new: SeriesRecord) -> tuple[Verdict, str]:
    """By every sample that both have: with another number of pairs, a run has more or fewer of the same ones."""
    pairs = [(a, b) for a, b in zip(old.values, new.values, strict=False) if not _equal(a, b)]
    if not pairs:
        return Verdict.neutral, ""
    a, b = pairs[0]
    reason = f"{len(pairs)} of {min(len(old.values), len(new.values))} changed, the first from {a:.10g} to {b:.10g}"
    if old.direction == "none":
        return Verdict.regressed, f"{reason}; neither way is better, so any change must be explained"
    better = [b > a if old.direction == "higher" else b < a for a, b in pairs]
    return (Verdict.improved if all(better) else Verdict.regressed), reason


def _equal(a: float, b: float) -> bool:
    return a == b or math.isclose(a, b, rel_tol=ROUNDING) or (math.isnan(a) and math.isnan(b))


def _by_limit(old: SeriesRecord, new: SeriesRecord) -> Verdict:
    if old.keeps_limit == new.keeps_limit:
        return Verdict.neutral
    return Verdict.improved if new.keeps_limit else Verdict.regressed


def _samples(
    blank: Comparison, old: SeriesRecord, new: SeriesRecord, before: _Run, after: _Run
) -> list[Comparison | _Timed]:
    """The samples to be tested, for every basis that applies."""
    threshold = judging().threshold(old.metric)
    higher = old.direction == "higher"

    def timed(basis: Basis, new: Sequence[float], old: Sequence[float], limit: float, paired: bool) -> _Timed:
        fewest = min(len(new), len(old)) if paired else None
        return _Timed(replace(blank, basis=basis), higher, tuple(new)[:fewest], tuple(old)[:fewest], paired, limit)

    if old.run == new.run:
        return [timed("interleaved", new.values, old.values, threshold.interleaved, True)]
    found: list[Comparison | _Timed] = []
    naive = (before.naive(old), after.naive(new))
    if naive[0] and naive[1]:
        relative = [
            [ours / theirs for ours, theirs in zip(one.values, other.values, strict=True)]
            for one, other in ((new, naive[1]), (old, naive[0]))
        ]
        found.append(timed("apart", *relative, threshold.apart, False))
    return [*found, timed("alone", new.values, old.values, threshold.alone, threshold.by_index)]


def _verdicts(timed: list[_Timed]) -> list[Comparison]:
    if not timed:
        return []
    p = [float(p_values(np.array(one.candidate), np.array(one.reference), paired=one.paired)) for one in timed]
    adjusted = holm(np.array(p))
    return [_verdict(one, float(value), len(timed)) for one, value in zip(timed, adjusted, strict=True)]


def _verdict(one: _Timed, p: float, metrics: int) -> Comparison:
    ratio = ratio_of_medians(one.candidate, one.reference, paired=one.paired)
    judged = replace(one.comparison, ratio=ratio, p=p)
    if one.candidate == one.reference:
        return replace(judged, verdict=Verdict.neutral, reason="the same samples")
    if one.least_p > ALPHA / metrics:
        reason = f"{ratio.pairs} samples cannot be certain to {ALPHA:.1%} among {metrics} metrics"
        return replace(judged, verdict=Verdict.too_few, reason=reason)
    changed = changes(p, ratio.value, one.threshold)
    if not changed:
        return replace(judged, verdict=Verdict.neutral)
    better = (ratio.value > 1) == one.higher_is_better
    return replace(judged, verdict=Verdict.improved if better else Verdict.regressed)


def changes(p: Any, ratio: Any, threshold: Any) -> Any:
    """Whether a difference is certain (corrected ``p``) and large enough to matter; numbers or arrays of them."""
    return (np.asarray(p) <= ALPHA) & (np.abs(np.log(ratio)) > np.log1p(threshold))
