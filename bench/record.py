"""Records: the schema of a line of ``records.jsonl``, and how lines get on the disk and back.

A run folder ``results/runs/<UTC time>-<matrix>-<commit>/`` holds one ``records.jsonl``. Each line is one JSON object: a
``series`` (the raw samples of one metric on one side of one cell) or an ``outcome`` (how a cell ended, one per cell).
Every line stands alone: it has the whole case and the environment, so lines of many runs can be thrown together.

Numbers that JSON cannot write are the strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``.
"""

from __future__ import annotations

import itertools
import math
import os
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from steelyard.errors import InputError
from suites.measure import Direction, Side, Source

SCHEMA_VERSION = 1
FILE_NAME = "records.jsonl"

Status = Literal["passed", "failed", "not_run"]


class _Schema(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="strings")


class Environment(_Schema):
    """The machine and the software that produced a record. None: not known.

    Attributes:
        device, device_name: ``cpu`` or ``cuda``, and the name of that processor.
        driver: version of the GPU driver, on CUDA.
        device_memory_gib: memory of one GPU, on CUDA.
        cpu: model of the processor.
        cores: logical cores that this process may use.
        threads_per_rank: threads each rank computes with.
        memory_gib: main memory of the machine.
        commit, dirty: of the checkout; dirty when files differ from the commit.
        load_at_start: runnable processes on average over the minute before the run; above 0 something else was running.
    """

    device: Literal["cpu", "cuda"]
    device_name: str
    driver: str | None = None
    device_memory_gib: float | None = None
    cpu: str
    cores: int
    threads_per_rank: int
    memory_gib: float
    platform: str
    python: str
    torch: str | None
    megatron_core: str | None
    numpy: str | None
    commit: str | None
    dirty: bool | None
    load_at_start: float | None


class _Line(_Schema):
    """What every line has.

    Attributes:
        run: id of the run, the name of its folder.
        time: when the line was written.
        cell: id of the cell, unique within the run.
        case: everything needed to repeat the cell (``suites.matrix.Cell`` as plain data).
        seconds: how long the cell took.
        line: where the record stands in the file it was read from, counted from 1; not written.
    """

    schema_version: Literal[1] = SCHEMA_VERSION
    run: str
    time: AwareDatetime = Field(default_factory=lambda: datetime.now(UTC))
    cell: str
    case: dict[str, Any]
    seconds: float
    environment: Environment
    line: int = Field(default=0, exclude=True)


class SeriesRecord(_Line):
    """Raw samples of one metric; the fields are those of ``suites.measure.Series``."""

    kind: Literal["series"] = "series"
    metric: str
    side: Side
    unit: str
    direction: Direction
    values: tuple[float, ...] = Field(min_length=1)
    source: Source
    limit: float | None = None
    variant: str = ""
    notes: dict[str, Any] = {}

    @property
    def worst(self) -> float:
        """The value farthest to the bad side; not-a-number counts as the worst of all."""
        if any(map(math.isnan, self.values)):
            return math.nan
        return min(self.values) if self.direction == "higher" else max(self.values)

    @property
    def keeps_limit(self) -> bool:
        """Whether every value keeps the limit; true where there is none."""
        if self.limit is None:
            return True
        return self.worst >= self.limit if self.direction == "higher" else self.worst <= self.limit


class OutcomeRecord(_Line):
    """How a cell ended: ``reason`` is one line, ``detail`` the traceback; both empty when it passed."""

    kind: Literal["outcome"] = "outcome"
    status: Status
    reason: str = ""
    detail: str = ""


Record = Annotated[SeriesRecord | OutcomeRecord, Field(discriminator="kind")]
_RECORD: TypeAdapter[SeriesRecord | OutcomeRecord] = TypeAdapter(Record)


class RecordWriter:
    """Appends records to a file; each is on the disk, whole, when ``write`` returns."""

    def __init__(self, path: Path) -> None:
        # Unbuffered: a line reaches the file in one write or not at all, also when this process is killed.
        self._file = path.open("ab", buffering=0)

    def write(self, record: SeriesRecord | OutcomeRecord) -> None:
        line = record.model_dump_json().encode() + b"\n"
        start = self._file.tell()
        try:
            if self._file.write(line) != len(line):
                raise OSError(f"{self._file.name}: the disk took only a part of a record")
            os.fsync(self._file.fileno())
        except OSError:
            self._file.truncate(start)
            raise

    def __enter__(self) -> RecordWriter:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()


@dataclass(frozen=True)
class Records:
    """The lines of a file, in its order; ``dropped`` says what was left out, or is empty."""

    lines: tuple[SeriesRecord | OutcomeRecord, ...]
    dropped: str = ""


def read_records(path: Path) -> Records:
    """Read a records file, or the one in a run folder.

    Raises:
        InputError: no such file, no whole record in it, or a line that is not a record of this schema version.
    """
    path = path / FILE_NAME if path.is_dir() else path
    try:
        *whole, rest = path.read_bytes().split(b"\n")
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}): give a run folder with a {FILE_NAME}") from None
    # Every record ends with a newline, so what stands after the last one is the half line of a power cut.
    dropped = f"{path}: dropped half a record, {len(rest)} bytes, at its end: the run was cut off" if rest else ""
    if not whole:
        raise InputError(f"{path}: has no whole record: run the matrix again")
    return Records(tuple(_parse(path, number, line) for number, line in enumerate(whole, 1)), dropped)


def _parse(path: Path, number: int, line: bytes) -> SeriesRecord | OutcomeRecord:
    try:
        return _RECORD.validate_json(line).model_copy(update={"line": number})
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the line"
        raise InputError(
            f"{path}, line {number}: {where}: {first['msg']}: not a record of schema version {SCHEMA_VERSION}; "
            f"read it with the commit that wrote it, or remove the line"
        ) from None


def new_run_folder(out: Path, matrix: str, commit: str | None) -> Path:
    """Make ``out/<UTC time>-<matrix>-<commit>``; its name is the id of the run.

    Raises:
        InputError: the folder cannot be made.
    """
    name = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{matrix}-{commit[:7] if commit else 'nogit'}"
    for again in itertools.count(1):
        folder = out / (name if again == 1 else f"{name}-{again}")
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            if not folder.exists():
                raise InputError(f"--out {out}: is a file: name a folder") from None
        except OSError as error:
            raise InputError(
                f"--out {out}: cannot hold a run ({error.strerror}): name a folder you may write"
            ) from None
    raise AssertionError("unreachable")
