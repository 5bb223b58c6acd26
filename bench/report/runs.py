"""Several runs as one: the records of all, each with a number of its own, and where it is on the disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.compare import Report, compare
from bench.gate import REFERENCE, read_reference, reference_file
from bench.record import FILE_NAME, OutcomeRecord, Records, SeriesRecord, read_records
from bench.summary import Summary
from steelyard.errors import InputError

Line = SeriesRecord | OutcomeRecord


@dataclass(frozen=True)
class Source:
    """A records file.

    Attributes:
        file: its path.
        run: its id.
        before: how many records of other files come before its own; number ``before + n`` is its line n.
        records: as they are in the file.
    """

    file: Path
    run: str
    before: int
    records: Records


@dataclass(frozen=True)
class Runs:
    """What one page is about.

    Attributes:
        sources: the files, in the order in which the runs started.
        lines: all records; ``line`` is their number over all files.
    """

    sources: tuple[Source, ...]
    lines: tuple[Line, ...]

    @classmethod
    def read(cls, paths: Sequence[Path]) -> Runs:
        """Read the records of run folders or files.

        Raises:
            InputError: there are none, or a line is no record.
        """
        files = [path / FILE_NAME if path.is_dir() else path for path in paths]
        return cls.of(list(zip(files, map(read_records, files), strict=True)))

    @classmethod
    def of(cls, found: Sequence[tuple[Path, Records]]) -> Runs:
        runs = [records.lines[0].run for _, records in found]
        for run in runs:
            if runs.count(run) > 1:
                raise InputError(f"run {run}: is named twice: name each run once")
        sources: list[Source] = []
        lines: list[Line] = []
        for file, records in sorted(found, key=lambda one: one[1].lines[0].time):
            sources.append(Source(file, records.lines[0].run, len(lines), records))
            lines += [one.model_copy(update={"line": len(lines) + at}) for at, one in enumerate(records.lines, 1)]
        return cls(tuple(sources), tuple(lines))

    @property
    def summary(self) -> Summary:
        """All cells; of a cell that is in several runs, its last one."""
        return Summary.of(self.latest)

    @property
    def latest(self) -> tuple[Line, ...]:
        last = {record.cell: record.run for record in self.lines}
        return tuple(record for record in self.lines if last[record.cell] == record.run)

    @property
    def dropped(self) -> str:
        return "; ".join(source.records.dropped for source in self.sources if source.records.dropped)

    def place(self, number: int) -> tuple[Source, int]:
        """The file and the line in it of record ``number``."""
        source = next(one for one in reversed(self.sources) if one.before < number)
        return source, number - source.before

    def against(self, reference: Path) -> Against:
        """These runs judged by reference results.

        Args:
            reference: a run folder or its records, a file of reference results, or a folder of such files
                (``results/reference`` or one platform's).

        Raises:
            InputError: there is nothing to compare with.
        """
        before = [line for source in self.sources for line in _reference_of(source, reference).lines]
        unique = {(one.cell, one.kind, *_name(one)): one for one in before}.values()
        records = tuple(one.model_copy(update={"line": at}) for at, one in enumerate(unique, 1))
        return Against(reference, records, compare(Records(records), Records(self.latest)))


@dataclass(frozen=True)
class Against:
    """Reference results and the verdicts by them.

    Attributes:
        name: where they are.
        records: ``line`` is their number on the page.
    """

    name: Path
    records: tuple[Line, ...]
    report: Report

    @property
    def numbers(self) -> dict[tuple[str, str, str, str], int]:
        """The number of each series, by cell, metric, side and variant."""
        return {(one.cell, *_name(one)): one.line for one in self.records if isinstance(one, SeriesRecord)}

    @property
    def commits(self) -> str:
        """The commits that made them, short."""
        return ", ".join(dict.fromkeys((one.environment.commit or "no commit")[:7] for one in self.records))


def _name(record: Line) -> tuple[str, ...]:
    return (record.metric, record.side, record.variant) if isinstance(record, SeriesRecord) else ()


def _reference_of(source: Source, reference: Path) -> Records:
    if reference.suffix == ".json":
        return read_reference(reference).records()
    if not reference.is_dir() or (reference / FILE_NAME).exists():
        return read_records(reference)
    file = reference_file(source.records, REFERENCE)
    candidates = (reference / file.name, reference / file.parent.name / file.name)
    found = next((one for one in candidates if one.exists()), None)
    if found is None:
        raise InputError(
            f"--against {reference}: has no {FILE_NAME}, nor reference results {candidates[1]} for run {source.run}: "
            f"name a run, or record reference results with 'python -m bench gate {source.file.parent} --record'"
        )
    return read_reference(found).records()
