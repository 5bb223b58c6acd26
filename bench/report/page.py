"""What a page is made of, before it is HTML, Markdown or JSON: sections of tables and pictures, links, environment."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.record import Environment, SeriesRecord
from bench.report.forest import verdict_forest
from bench.report.frame import Plot
from bench.report.history import Point, history, history_plot, history_text
from bench.report.plots import draw_all
from bench.report.runs import Against, Runs
from bench.report.traces import write_traces
from bench.stats import median
from bench.summary import KINDS, Summary
from bench.table import Table
from bench.tables import SECTIONS, other_table, problem_table
from bench.weigh_tables import verdict_tables, weigh_table
from bench.weighed import weigh_cell

TITLES = {
    "throughput": "Throughput", "parity": "Parity", "planning": "Planning", "packing": "Packing",
    "bubbles": "Pipeline bubbles", "handover": "Hand-over to the rollout engine", "oom": "Out of memory",
    "memory": "Memory: predicted and taken",
    "overrides": "Overrides",
}  # fmt: skip


@dataclass(frozen=True)
class Section:
    """Tables and pictures of one kind of cell; ``name`` is its anchor."""

    name: str
    title: str
    tables: tuple[Table, ...] = ()
    plots: tuple[Plot, ...] = ()
    text: str = ""


@dataclass(frozen=True)
class Page:
    """Everything that a page shows.

    Attributes:
        folder: where its files go.
        against: the reference results, where there are some.
        sections: in their order, none of them empty.
        traces: files within ``folder``.
    """

    folder: Path
    runs: Runs
    summary: Summary
    against: Against | None
    sections: tuple[Section, ...]
    traces: tuple[str, ...]

    @classmethod
    def draw(cls, folder: Path, runs: Runs, against: Against | None = None, *, traces: bool = True) -> Page:
        """Draw every picture of ``runs`` into ``folder``, and write the files of the traces."""
        summary = runs.summary
        return cls(
            folder=folder,
            runs=runs,
            summary=summary,
            against=against,
            sections=tuple(_sections(folder, summary, against, history(runs))),
            traces=tuple(write_traces(summary, folder) if traces else ()),
        )

    @property
    def verdict(self) -> str:
        return str(self.against.report.verdict) if self.against else self.summary.verdict

    @property
    def sentence(self) -> str:
        return sentence_of(self.summary, self.against)

    @property
    def is_good(self) -> bool:
        return self.verdict in ("passed", "neutral", "improved")

    @property
    def environment(self) -> dict[str, str]:
        """Machine and software by name; where runs differ, all that there was."""
        found: dict[str, dict[str, None]] = {}
        for environment in environments_of(self.runs):
            facts = {**environment.model_dump(exclude={"libraries"}), **environment.libraries}
            for name, value in facts.items():
                if value is not None:
                    found.setdefault(name.replace("_", " ").replace("gib", "GiB"), {})[str(value)] = None
        return {name: "; ".join(values) for name, values in found.items()}

    @property
    def plots(self) -> list[Plot]:
        return [plot for section in self.sections for plot in section.plots]


def report_data(runs: Runs, against: Against | None = None) -> dict[str, Any]:
    """What the records say, as plain data; ``--json`` prints it. Needs no picture."""
    summary = runs.summary
    data = {
        "runs": [source.run for source in runs.sources],
        "verdict": str(against.report.verdict) if against else summary.verdict,
        "sentence": sentence_of(summary, against),
        "cells": summary.counts,
        "busy": summary.busy,
        "environments": environments_of(runs),
        **{name: [row for _, row in getattr(summary, name)] for name in KINDS},
        "overrides": summary.overrides,
        "sides": [
            {
                "cell": cell.id, "metric": row.metric, "variant": row.first.variant, "source": row.first.source,
                "unit": row.first.unit, "naive": _figures(row.naive), "optimised": _figures(row.optimised),
                "better": row.better,
            }
            for cell in summary.cells if cell.kind
            for row in weigh_cell(cell, KINDS[cell.kind].compared)
        ],
        "problems": {cell.id: cell.reason for cell in summary.cells if cell.status != "passed"},
    }  # fmt: skip
    if against:
        data["against"] = {
            "reference": str(against.name), "commits": against.commits, "exit_code": against.report.exit_code,
            "counts": against.report.counts, "comparisons": against.report.comparisons,
        }  # fmt: skip
    return data


def sentence_of(summary: Summary, against: Against | None) -> str:
    """The first line: the verdict, and what it rests on."""
    if against is None:
        return summary.sentence
    return f"{against.report.sentence}, against {against.name} ({against.commits})"


def environments_of(runs: Runs) -> list[Environment]:
    """Those of all records, each once."""
    return list({record.environment.model_dump_json(): record.environment for record in runs.lines}.values())


def _figures(series: SeriesRecord | None) -> dict[str, Any] | None:
    if series is None:
        return None
    return {
        "median": median(series.values), "n": len(series.values), "limit": series.limit,
        "keeps_limit": series.keeps_limit, "record": series.line,
    }  # fmt: skip


def _sections(folder: Path, summary: Summary, against: Against | None, commits: list[Point]) -> list[Section]:
    """What failed first, then the verdicts, then every kind of cell, then what all have."""
    plots = draw_all(summary, folder)
    verdicts = verdict_tables(against.report, summary, against.numbers) if against else {}
    forest = verdict_forest(against.report, summary, folder) if against else None
    past = history_plot(commits, folder)
    sections = [
        Section("problems", "Problems", _with_rows([problem_table(summary)])),
        Section("verdicts", "Verdicts", _with_rows(verdicts.values()), tuple([forest] if forest else [])),
        *(
            Section(
                name,
                TITLES[name],
                _with_rows(
                    [*([weigh_table(summary, name)] if name in KINDS else []), *(make(summary) for make in makers)]
                ),
                tuple(plots.get(name, ())),
            )
            for name, makers in SECTIONS.items()
        ),
        Section("all", "All kinds together", (), tuple(plots[""])),
        Section("history", "History over commits", (), tuple([past] if past else []), history_text(commits)),
        Section("other", "Other metrics", _with_rows([other_table(summary)])),
    ]
    return [one for one in sections if one.tables or one.plots or one.text]


def _with_rows(tables: Any) -> tuple[Table, ...]:
    return tuple(table for table in tables if table.rows)
