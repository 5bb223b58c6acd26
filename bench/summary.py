"""What the records of a run say: a row per cell, and the verdict. Tables, plots, report and ``--json`` read this.

``KINDS`` is where a suite says what its cells are read by; its tables are named in ``tables.py``, its pictures in
``report/plots.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from bench import bubbles, handover, memory, oom, overrides, packing, parity, scoreboard, throughput
from bench.record import OutcomeRecord, SeriesRecord, Status
from bench.stats import median
from suites.measure import Side


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
    def kind(self) -> str:
        """The kind in ``KINDS`` that reads it; empty if none does. Another suite may have the metrics of a kind."""
        if self.suite in KINDS:
            return self.suite
        return next((name for name, kind in KINDS.items() if self.find(*kind.sign)), "")

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
class Kind:
    """What reads the cells of a suite.

    Attributes:
        row: makes a cell's row.
        text: the part of a run's sentence, from all rows.
        metrics: those that stand in tables of their own.
        sign: a metric that only cells of this kind have, and on which side (None: any).
        compared: metrics that are shown side against side, the one by which the kind is known first.
    """

    row: Callable[[CellRecords], Any]
    text: Callable[[list[Any]], str]
    metrics: tuple[str, ...]
    sign: tuple[str, Side | None]
    compared: tuple[str, ...]


KINDS = {
    "throughput": Kind(
        throughput.Throughput.of, throughput.throughput_text, throughput.METRICS, ("tokens_per_second", "optimised"),
        ("tokens_per_second", "computed_tokens"),
    ),
    "parity": Kind(
        parity.Parity.of, parity.parity_text, parity.METRICS, ("parity_max_error", None), ("parity_max_error",)
    ),
    "planning": Kind(
        scoreboard.Scoreboard.of, scoreboard.planning_text, scoreboard.SHOWN, ("micro_batch_bound", None),
        ("time_over_best_other", "overhead_over_best_other", "count_above_best_other"),
    ),
    "packing": Kind(
        packing.Packing.of, packing.packing_text, packing.METRICS, ("packing_ms", "optimised"),
        ("packing_ms", "log_probs_ms"),
    ),
    "bubbles": Kind(
        bubbles.Bubbles.of, bubbles.bubbles_text, bubbles.METRICS, ("makespan", "optimised"),
        ("makespan", "prediction_error"),
    ),
    "handover": Kind(
        handover.Handover.of, handover.handover_text, handover.METRICS, ("engine_gib", None),
        ("engine_gib", "device_free_gib", "loss_difference"),
    ),
    "oom": Kind(
        oom.Oom.of, oom.oom_text, oom.METRICS, ("threshold_tokens", None),
        ("threshold_tokens", "peak_growth", "threshold_error"),
    ),
    "memory": Kind(
        memory.Memory.of, memory.memory_text, memory.METRICS, ("predicted_peak_gib", None), ("peak_error",)
    ),
}  # fmt: skip


def _rows(name: str) -> property:
    """The cells of a kind, each with its row."""
    return property(lambda self: [(cell, KINDS[name].row(cell)) for cell in self.cells if cell.kind == name])


@dataclass(frozen=True)
class Summary:
    """All cells of a run, in the order they ran; rows of a kind are pairs of a cell and what ``KINDS`` makes of it."""

    cells: tuple[CellRecords, ...]

    throughput = _rows("throughput")
    parity = _rows("parity")
    planning = _rows("planning")
    packing = _rows("packing")
    bubbles = _rows("bubbles")
    handover = _rows("handover")
    memory = _rows("memory")
    oom = _rows("oom")

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
    def overrides(self) -> list[overrides.Override]:
        """The cases of all override cells together, a row for each."""
        return overrides.overrides_of(self.cells)

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
        for name, kind in KINDS.items():
            text += kind.text([row for _, row in getattr(self, name)])
        return text + overrides.overrides_text(self.overrides)
