"""What the records of an oom cell say: the longest response of each way, what holds the bytes, and real failures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bench.stats import median
from bench.table import range_text

if TYPE_CHECKING:
    from bench.record import Status
    from bench.summary import CellRecords
    from suites.measure import Side

METRICS = ("threshold_tokens", "real_threshold_tokens", "threshold_error", "peak_growth")
# As in ``suites.oom``; and what tables and pictures call them.
WAYS: tuple[tuple[Side, str], ...] = (
    ("naive", ""),
    ("naive", "whole logits"),
    ("naive", "outputs with graph"),
    ("optimised", "fixed micro-batches"),
    ("optimised", ""),
)
NAMES = ("N1 + N5", "N7", "N14", "optimised, fixed micro-batches", "optimised")
PADDED, WHOLE, _, FIXED, OPTIMISED = range(len(WAYS))
ASKED = 16384


@dataclass(frozen=True)
class Real:
    """A threshold that was found by failing.

    Attributes:
        tokens: the most that ran.
        failure: in words.
        error: of the prediction, relative.
        limit: of the error; None where nothing is claimed.
    """

    tokens: float
    failure: str
    error: float | None
    limit: float | None


@dataclass(frozen=True)
class Growth:
    """What more micro-batches cost.

    Attributes:
        counts: of micro-batches, few and many.
        peaks: GiB of each.
        share: by which the peak rises.
    """

    counts: tuple[int, ...]
    peaks: tuple[float, ...]
    share: float


@dataclass(frozen=True)
class Oom:
    """One cell.

    Attributes:
        case: its settings.
        model: layers and width of the model.
        capacity: GiB of a GPU, or of the limit under which the step ran for real.
        reserve: GiB of it that are left free.
        thresholds: tokens, predicted, in the order of ``WAYS``; None where a way cannot run, 0 where nothing fits.
        curves: GiB by length in tokens, of the ways that have one.
        ran_at: lengths of each curve that were run; the others lie on the line between them.
        extrapolated: whether these figures were continued from two depths of the model.
        breaks_first: what no longer fits on the optimised side.
        parts: GiB by what they are held for, optimised, at 16k.
        batch: GiB of the whole padded batch of a rank, at 16k.
        growth: with the number of micro-batches, by (side, ``log-probs`` or ``training``).
        real: thresholds found by failing, by side.
    """

    cell: str
    status: Status
    case: Mapping[str, Any]
    model: str
    capacity: float | None
    reserve: float | None
    thresholds: tuple[float | None, ...]
    curves: Mapping[str, Mapping[int, float]]
    ran_at: Mapping[str, tuple[int, ...]]
    extrapolated: bool
    breaks_first: str
    parts: Mapping[str, float]
    batch: float | None
    growth: Mapping[tuple[Side, str], Growth]
    real: Mapping[Side, Real]

    @classmethod
    def of(cls, cell: CellRecords) -> Oom:
        found = {(one.side, one.variant): one for one in cell.series if one.metric == "threshold_tokens"}
        named = [(name, found[way]) for way, name in zip(WAYS, NAMES, strict=True) if way in found]
        notes: dict[str, Any] = found[WAYS[OPTIMISED]].notes if WAYS[OPTIMISED] in found else {}
        case = cell.first.case
        return cls(
            cell=cell.id,
            status=cell.status,
            case=case,
            model=f"{case['model']['layers']} layers of {case['model']['hidden']:,}",
            capacity=notes.get("capacity_gib"),
            reserve=notes.get("reserve_gib"),
            thresholds=tuple(median(found[way].values) if way in found else None for way in WAYS),
            curves={
                name: {int(tokens): peak for tokens, peak in one.notes["peak_gib"].items()}
                for name, one in named
                if "peak_gib" in one.notes
            },
            ran_at={name: tuple(one.notes["ran_at"]) for name, one in named if "ran_at" in one.notes},
            extrapolated=notes.get("extrapolated", False),
            breaks_first=notes.get("breaks_first") or notes.get("does_not_fit", ""),
            parts=notes.get("parts_gib", {}),
            batch=notes.get("batch_gib"),
            growth={
                (one.side, one.variant): Growth(
                    tuple(one.notes["micro_batches"]), tuple(one.notes["peak_gib"]), median(one.values)
                )
                for one in cell.series
                if one.metric == "peak_growth"
            },
            real=_real(cell),
        )

    @property
    def activations(self) -> tuple[float, float] | None:
        """GiB at 16k of (activations and what a pass makes on its way, logits and loss), optimised."""
        if not self.parts:
            return None
        passing = ("activations", "temporary", "communication")
        return sum(self.parts.get(part, 0.0) for part in passing), self.parts.get("logits and loss", 0.0)

    def peak(self, way: int, tokens: int = ASKED) -> float | None:
        """GiB of the way with that number in ``WAYS``."""
        return self.curves.get(NAMES[way], {}).get(tokens)

    @property
    def gain(self) -> float | None:
        """Longest optimised response over the naive one."""
        naive, optimised = self.thresholds[PADDED], self.thresholds[OPTIMISED]
        return optimised / naive if naive and optimised else None


def _real(cell: CellRecords) -> dict[Side, Real]:
    errors = {one.side: one for one in cell.series if one.metric == "threshold_error"}
    return {
        one.side: Real(
            median(one.values),
            one.notes.get("failure", ""),
            median(errors[one.side].values) if one.side in errors else None,
            errors[one.side].limit if one.side in errors else None,
        )
        for one in cell.series
        if one.metric == "real_threshold_tokens"
    }


def oom_text(rows: list[Oom]) -> str:
    """What a run found about thresholds, as a part of its sentence; empty without such cells."""
    gains = [row.gain for row in rows if row.gain is not None]
    text = ""
    if gains:
        text = f"; responses {range_text(gains, 1)} times as long fit (predicted)"
    grown = [one.share for row in rows for (side, _), one in row.growth.items() if side == "optimised"]
    if grown:
        text += f"; more micro-batches raise the optimised peak by at most {max(grown):.1%} (predicted)"
    errors = [real.error for row in rows for real in row.real.values() if real.error is not None]
    if errors:
        text += f"; real failures at worst {max(errors):.1%} from their prediction"
    return text
