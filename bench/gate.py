"""The gate: a run against the reference results of its platform, in both directions.

Reference results are committed under ``results/reference/<platform>/<matrix>.json``: the samples that verdicts need,
and the commit that made them. A run that got worse is stopped; so is one that got better, until it is explained and its
samples become the new reference results, since otherwise the next one may lose the gain unseen.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import to_json

from bench.compare import Report, Verdict, compare
from bench.environment import ROOT
from bench.judging import judging
from bench.platforms import platform_name
from bench.record import Environment, OutcomeRecord, Records, SeriesRecord
from steelyard.errors import InputError
from suites.measure import Direction, Side, Source

REFERENCE = ROOT / "results" / "reference"
RUN_NAME = re.compile(r"\d{8}T\d{6}Z-(?P<matrix>.+)-(?:[0-9a-f]{7}|nogit)(?:-\d+)?")


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="strings")


class _Series(_Strict):
    metric: str
    side: Side
    variant: str = ""
    unit: str
    direction: Direction
    source: Source
    limit: float | None = None
    values: tuple[float, ...]


class _Cell(_Strict):
    case: dict[str, Any]
    environment: Environment
    series: tuple[_Series, ...]


class Reference(_Strict):
    """The samples of a run that verdicts need.

    Attributes:
        run, commit: what made them.
        cells: by id.
    """

    schema_version: Literal[1] = 1
    run: str
    commit: str
    cells: dict[str, _Cell]

    @classmethod
    def of(cls, records: Records) -> Reference:
        """The samples of ``records``.

        Raises:
            InputError: they do not belong to a commit, or a cell did not pass.
        """
        first = records.lines[0]
        environment = first.environment
        if environment.commit is None or environment.dirty:
            raise InputError(
                f"run {first.run} was made with changes that no commit has: commit them, run again, then record"
            )
        cells: dict[str, _Cell] = {}
        for record in records.lines:
            if isinstance(record, OutcomeRecord):
                if record.status != "passed":
                    raise InputError(f"cell {record.cell} did not pass ({record.reason}): only a whole run is recorded")
                continue
            cell = cells.get(record.cell) or _Cell(case=record.case, environment=record.environment, series=())
            fields = {name: getattr(record, name) for name in _Series.model_fields}
            series = (*cell.series, _Series(**fields)) if _is_needed(record) else cell.series
            cells[record.cell] = cell.model_copy(update={"series": series})
        return cls(run=first.run, commit=environment.commit, cells=cells)

    def records(self) -> Records:
        """The samples as records."""
        lines: list[SeriesRecord | OutcomeRecord] = []
        for name, cell in self.cells.items():
            common = {"run": self.run, "cell": name, "case": cell.case, "environment": cell.environment, "seconds": 0.0}
            lines += [SeriesRecord(**common, **vars(one)) for one in cell.series]
            lines.append(OutcomeRecord(**common, status="passed"))
        return Records(tuple(lines))


def _is_needed(record: SeriesRecord) -> bool:
    rules = judging()
    return not rules.is_ignored(record) and (rules.is_exact(record) or record.direction != "none")


@dataclass(frozen=True)
class Gate:
    """What the gate found. ``commit``: of the reference results."""

    report: Report
    file: Path
    commit: str

    @property
    def exit_code(self) -> int:
        """As ``Report.exit_code``, and 1 for an improvement too: it asks for new reference results."""
        return 1 if self.report.verdict == Verdict.improved else self.report.exit_code

    @property
    def asks_to_record(self) -> bool:
        return bool(self.report.counts[Verdict.improved] or self.report.counts[Verdict.missing])


def reference_file(records: Records, folder: Path = REFERENCE) -> Path:
    """Where the reference results for a run are, or would be.

    Raises:
        InputError: the run was not made by a matrix.
    """
    run = records.lines[0].run
    match = RUN_NAME.fullmatch(run)
    if match is None:
        raise InputError(f"run {run!r} does not say its matrix: give a folder that 'python -m bench run' made")
    # A run on GPUs also has cells that were computed on the processor.
    environments = [record.environment for record in records.lines]
    whole = next((one for one in environments if one.device == "cuda"), environments[0])
    return folder / platform_name(whole) / f"{match['matrix']}.json"


def check(records: Records, *, exact_only: bool = False, folder: Path = REFERENCE) -> Gate | None:
    """Judge a run by the reference results of its platform; None where there are none.

    Args:
        exact_only: judge only what is not timed, by the results of any platform that has some.

    Raises:
        InputError: reference results cannot be read.
    """
    file = reference_file(records, folder)
    if exact_only and not file.exists():
        file = next(iter(sorted(folder.glob(f"*/{file.name}"))), file)
    if not file.exists():
        return None
    reference = read_reference(file)
    return Gate(compare(reference.records(), records, exact_only=exact_only), file, reference.commit)


def read_reference(file: Path) -> Reference:
    try:
        return Reference.model_validate_json(file.read_bytes())
    except (OSError, ValidationError) as error:
        why = str(error).splitlines()[0]
        raise InputError(f"reference results {file}: cannot be read ({why}): record them again") from None


def record_reference(records: Records, folder: Path = REFERENCE) -> Path:
    """Make the samples of a run the reference results of its platform and matrix; returns the file.

    Raises:
        InputError: they do not belong to a commit, or a cell did not pass.
    """
    file = reference_file(records, folder)
    reference = Reference.of(records)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(to_json(reference.model_dump(exclude_defaults=True), indent=1, inf_nan_mode="strings") + b"\n")
    return file
