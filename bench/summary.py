"""What the records of a run say: a row per cell, and the verdict. Tables, plots, report and ``--json`` read this."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from bench.bubbles import Bubbles, bubbles_text
from bench.handover import Handover, handover_text
from bench.oom import Oom, oom_text
from bench.overrides import Override, overrides_of, overrides_text
from bench.packing import Packing
from bench.record import OutcomeRecord, SeriesRecord, Status
from bench.scoreboard import Scoreboard
from bench.stats import Ratio, median, ratio_of_medians
from suites.measure import Side, Source


@dataclass(frozen=True)
class CellRecords:
    """The records of one cell; a run that was cut off may have left its outcome out."""

    series: tuple[SeriesRecord, ...]
    outcome: OutcomeRecord | None

    @property
    def first(self) -> SeriesRecord | OutcomeRecord:
        return self.series[0] if self.series else self.outcome

    @property
    def id(self) -> str:
        return self.first.cell

    @property
    def suite(self) -> str:
        return self.first.case["suite"]

    @property
    def label(self) -> tuple[str, str, str]:
        """Workload, parallel layout, and role (or rows, where plans are weighed), as tables and plots show them."""
        workload, layout, what = self.id.split("/")[1:]
        return workload, "1 rank" if layout == "1" else layout, what.replace("-", " ")

    @property
    def status(self) -> Status:
        return self.outcome.status if self.outcome else "not_run"

    @property
    def reason(self) -> str:
        return self.outcome.reason if self.outcome else "the run was cut off before this cell ended"

    @property
    def lines(self) -> tuple[int, int]:
        """First and last line of these records in their file."""
        numbers = [record.line for record in (*self.series, self.outcome) if record]
        return min(numbers), max(numbers)

    def find(self, metric: str, side: Side | None = None) -> SeriesRecord | None:
        """The samples of a metric; of whatever side when ``side`` is None."""
        return next((one for one in self.series if one.metric == metric and side in (None, one.side)), None)

    def median(self, metric: str, side: Side | None = None) -> float | None:
        series = self.find(metric, side)
        return median(series.values) if series else None


@dataclass(frozen=True)
class Throughput:
    """Naive against optimised step of one cell; None where the cell has no such samples.

    Attributes:
        naive, optimised: tokens/s, medians; only real tokens count.
        ratio: optimised over naive.
        real: tokens of the batch, without padding.
        naive_computed, optimised_computed: tokens that went through the model, padding included.
        padding_ratio: naive_computed over real: the gain from leaving out all padding if every token cost the same.
        padding_removed: share of the naive side's padding that the optimised side leaves out; None without padding.
        naive_micro_batches, optimised_micro_batches: per step.
        loss_difference: largest absolute difference of the two sides' losses at the same step.
    """

    cell: str
    status: Status
    source: Source
    naive: float | None
    optimised: float | None
    ratio: Ratio | None
    real: float | None
    naive_computed: float | None
    optimised_computed: float | None
    padding_ratio: float | None
    padding_removed: float | None
    naive_micro_batches: float | None
    optimised_micro_batches: float | None
    loss_difference: float | None

    @classmethod
    def of(cls, cell: CellRecords) -> Throughput:
        speed = {side: cell.find("tokens_per_second", side) for side in ("naive", "optimised")}
        loss = {side: cell.find("loss", side) for side in ("naive", "optimised")}
        real = cell.median("real_tokens")
        naive_computed = cell.median("computed_tokens", "naive")
        optimised_computed = cell.median("computed_tokens", "optimised")
        padding_ratio = padding_removed = None
        if real and naive_computed:
            padding_ratio = naive_computed / real
            if optimised_computed and naive_computed > real:
                padding_removed = (naive_computed - optimised_computed) / (naive_computed - real)
        return cls(
            cell=cell.id,
            status=cell.status,
            source=speed["optimised"].source if speed["optimised"] else "measured",
            naive=cell.median("tokens_per_second", "naive"),
            optimised=cell.median("tokens_per_second", "optimised"),
            ratio=ratio_of_medians(speed["optimised"].values, speed["naive"].values) if all(speed.values()) else None,
            real=real,
            naive_computed=naive_computed,
            optimised_computed=optimised_computed,
            padding_ratio=padding_ratio,
            padding_removed=padding_removed,
            naive_micro_batches=cell.median("micro_batches", "naive"),
            optimised_micro_batches=cell.median("micro_batches", "optimised"),
            loss_difference=_largest_difference(loss["naive"].values, loss["optimised"].values)
            if all(loss.values())
            else None,
        )


@dataclass(frozen=True)
class Parity:
    """How far one cell is from the judge; None where the cell has no such samples. ``where``: what was worst."""

    cell: str
    status: Status
    source: Source
    error: float | None
    limit: float | None
    keeps_limit: bool | None
    where: str

    @classmethod
    def of(cls, cell: CellRecords) -> Parity:
        series = cell.find("parity_max_error")
        notes = series.notes if series else {}
        return cls(
            cell=cell.id,
            status=cell.status,
            source=series.source if series else "measured",
            error=series.worst if series else None,
            limit=series.limit if series else None,
            keeps_limit=series.keeps_limit if series else None,
            where=" of ".join(str(notes[key]) for key in ("kind", "worst") if key in notes),
        )


@dataclass(frozen=True)
class Summary:
    """All cells of a run, in the order they ran."""

    cells: tuple[CellRecords, ...]

    @classmethod
    def of(cls, records: Iterable[SeriesRecord | OutcomeRecord]) -> Summary:
        by_cell: dict[str, list[SeriesRecord | OutcomeRecord]] = {}
        for record in records:
            by_cell.setdefault(record.cell, []).append(record)
        return cls(
            tuple(
                CellRecords(
                    series=tuple(record for record in cell if isinstance(record, SeriesRecord)),
                    outcome=next((record for record in cell if isinstance(record, OutcomeRecord)), None),
                )
                for cell in by_cell.values()
            )
        )

    @property
    def throughput(self) -> list[tuple[CellRecords, Throughput]]:
        return [
            (cell, Throughput.of(cell))
            for cell in self.cells
            if cell.suite == "throughput" or cell.find("tokens_per_second", "optimised")
        ]

    @property
    def parity(self) -> list[tuple[CellRecords, Parity]]:
        return [
            (cell, Parity.of(cell)) for cell in self.cells if cell.suite == "parity" or cell.find("parity_max_error")
        ]

    @property
    def planning(self) -> list[tuple[CellRecords, Scoreboard]]:
        return [
            (cell, Scoreboard.of(cell))
            for cell in self.cells
            if cell.suite == "planning" or cell.find("micro_batch_bound")
        ]

    @property
    def packing(self) -> list[tuple[CellRecords, Packing]]:
        return [
            (cell, Packing.of(cell))
            for cell in self.cells
            if cell.suite == "packing" or cell.find("packing_ms", "optimised")
        ]

    @property
    def bubbles(self) -> list[tuple[CellRecords, Bubbles]]:
        return [
            (cell, Bubbles.of(cell))
            for cell in self.cells
            if cell.suite == "bubbles" or cell.find("makespan", "optimised")
        ]

    @property
    def handover(self) -> list[tuple[CellRecords, Handover]]:
        return [(cell, Handover.of(cell)) for cell in self.cells if cell.suite == "handover" or cell.find("engine_gib")]

    @property
    def oom(self) -> list[tuple[CellRecords, Oom]]:
        return [(cell, Oom.of(cell)) for cell in self.cells if cell.suite == "oom" or cell.find("threshold_tokens")]

    @property
    def overrides(self) -> list[Override]:
        """The cases of all override cells together, a row for each."""
        return overrides_of(self.cells)

    @property
    def counts(self) -> dict[Status, int]:
        counts = Counter(cell.status for cell in self.cells)
        return {status: counts[status] for status in ("passed", "failed", "lost", "not_run")}

    @property
    def busy(self) -> dict[str, str]:
        """Cells whose figures are doubtful because other work ran on the machine, and what it was."""
        return {
            cell.id: cell.first.conditions.busy
            for cell in self.cells
            if cell.first.conditions and cell.first.conditions.busy
        }

    @property
    def verdict(self) -> str:
        """``passed``, ``failed`` when some cell failed, or ``incomplete`` when none failed but some did not end."""
        if self.counts["failed"]:
            return "failed"
        return "incomplete" if self.counts["not_run"] or self.counts["lost"] else "passed"

    @property
    def sentence(self) -> str:
        """The verdict and the figures behind it, in one line."""
        parts = [f"{self.counts['passed']} of {len(self.cells)} cells passed"]
        parts += [
            f"{count} {word}"
            for count, word in (
                (self.counts["failed"], "failed"),
                (self.counts["lost"], "lost with their machine"),
                (self.counts["not_run"], "did not run"),
                (len(self.busy), "on a busy machine"),
            )
            if count
        ]
        text = f"{self.verdict.capitalize()}: {', '.join(parts)}"
        ratios = [row.ratio.value for _, row in self.throughput if row.ratio]
        if ratios:
            low, high = f"{min(ratios):.2f}", f"{max(ratios):.2f}"
            text += (
                f"; the optimised step is {low if low == high else f'{low} to {high}'} times as fast as the naive one"
            )
        errors = [(row.error, row.limit) for _, row in self.parity if row.error is not None]
        if errors:
            # Not-a-number must win, which max() alone would not see to.
            error, limit = max(errors, key=lambda pair: math.inf if math.isnan(pair[0]) else pair[0])
            text += f"; worst parity error {error_text(error)}" + (f" (limit {limit:.0e})" if limit is not None else "")
        plans = [row.time_ratio for _, row in self.planning if row.time_ratio is not None]
        if plans:
            text += f"; predicted time of the plans at worst {max(plans):.3f} of the best other planner's"
        packing = [row.ratio.value for _, row in self.packing if row.ratio]
        if packing:
            low, high = f"{min(packing):.1f}", f"{max(packing):.1f}"
            text += f"; packing is {low if low == high else f'{low} to {high}'} times as fast as with host reads"
        text += bubbles_text([row for _, row in self.bubbles]) + handover_text([row for _, row in self.handover])
        text += oom_text([row for _, row in self.oom])
        return text + overrides_text(self.overrides)


def error_text(error: float) -> str:
    return "not a number" if math.isnan(error) else f"{error:.1e}"


def _largest_difference(one: Iterable[float], other: Iterable[float]) -> float:
    differences = [abs(a - b) for a, b in zip(one, other, strict=True)]
    return math.nan if any(map(math.isnan, differences)) else max(differences)
