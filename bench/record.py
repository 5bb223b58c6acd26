"""Records: the schema of a line of ``records.jsonl``, and how lines get on the disk and back.

A run folder ``results/runs/<UTC time>-<matrix>-<commit>/`` holds one ``records.jsonl``. Each line is one JSON object: a
``series`` (the raw samples of one metric on one side of one cell) or an ``outcome`` (how a cell ended, one per cell).
Every line stands alone: it has the whole case and the environment, so lines of many runs can be thrown together.
A cell's lines are written together, its outcome last: a cell without one did not end.

Numbers that JSON cannot write are the strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import math
import os
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from steelyard.errors import InputError, SteelyardError
from suites.measure import Direction, Side, Source

SCHEMA_VERSION = 2
FILE_NAME = "records.jsonl"
# Room that is given back when the disk is full, so that how the run ended can still be written.
RESERVE_NAME = "records.reserve"
RESERVE_BYTES = 2**20

# ``lost``: the machine went away under the cell, twice. ``not_run`` says why in its reason.
Status = Literal["passed", "failed", "lost", "not_run"]


class _Schema(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="strings")


class Environment(_Schema):
    """The machine and the software that produced a record. None: not known.

    Attributes:
        device, device_name: ``cpu`` or ``cuda``, and the name of that processor.
        driver: version of the GPU driver, on CUDA.
        device_memory_gib, devices: memory of one GPU and their number, on CUDA.
        cpu: model of the processor.
        cores: logical cores that this process may use.
        threads_per_rank: threads each rank computes with.
        governor: how the system sets the frequency of the cores, e.g. ``performance``.
        memory_gib: main memory of the machine.
        libraries: versions of what else takes part where it is installed.
        commit, dirty: of the checkout; dirty when files differ from the commit.
    """

    device: Literal["cpu", "cuda"]
    device_name: str
    driver: str | None = None
    device_memory_gib: float | None = None
    devices: int | None = None
    cpu: str
    cores: int
    threads_per_rank: int
    governor: str | None
    memory_gib: float
    platform: str
    python: str
    torch: str | None
    megatron_core: str | None
    numpy: str | None
    libraries: dict[str, str] = {}
    commit: str | None
    dirty: bool | None


class GpuState(_Schema):
    """What one GPU did at a moment. None: the device does not tell.

    Attributes:
        sm_mhz, sm_most_mhz, memory_mhz: clocks, and the highest one of the multiprocessors.
        power_state: ``P0`` (fastest) to ``P15``.
        watts, limit_watts: power drawn and allowed.
        celsius: temperature.
        held_back: why the clocks are below what they could be, e.g. ``power cap``; idle is no reason.
        processes: processes that compute on it, ours included.
    """

    sm_mhz: int | None = None
    sm_most_mhz: int | None = None
    memory_mhz: int | None = None
    power_state: str | None = None
    watts: float | None = None
    limit_watts: float | None = None
    celsius: int | None = None
    held_back: tuple[str, ...] = ()
    processes: int | None = None


class Conditions(_Schema):
    """What else went on while a cell ran, on the machine of its rank 0.

    Attributes:
        load_at_start, load_at_end: runnable processes on average over the minute before; those of the run count too.
        others_cores: how many of the cores in ``Environment.cores`` other processes (and other guests of the host) kept
            busy, on average.
        gpus_at_start, gpus_at_end: of the GPUs, on CUDA; at the end just after the last step.
        busy: in words, what makes figures of this cell doubtful; empty on a quiet machine.
    """

    load_at_start: float
    load_at_end: float
    others_cores: float
    gpus_at_start: tuple[GpuState, ...] = ()
    gpus_at_end: tuple[GpuState, ...] = ()
    busy: str = ""


class _Line(_Schema):
    """What every line has.

    Attributes:
        run: id of the run, the name of its folder.
        time: when the line was written.
        cell: id of the cell, unique within the run.
        case: everything needed to repeat the cell (``suites.matrix.Cell`` as plain data).
        seconds: how long the cell took.
        conditions: what else went on; None where the cell did not live to tell.
        line: where the record stands in the file it was read from, counted from 1; not written.
    """

    schema_version: Literal[2] = SCHEMA_VERSION
    run: str
    time: AwareDatetime = Field(default_factory=lambda: datetime.now(UTC))
    cell: str
    case: dict[str, Any]
    seconds: float
    environment: Environment
    conditions: Conditions | None = None
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


FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class DiskFull(SteelyardError):  # noqa: N818 - the name says what happened
    """The records file cannot grow any more; ``written`` tells whether the records are in it all the same."""

    def __init__(self, file: str, *, written: bool) -> None:
        self.written = written
        super().__init__(f"no room left for {file}")


Record = Annotated[SeriesRecord | OutcomeRecord, Field(discriminator="kind")]
_RECORD: TypeAdapter[SeriesRecord | OutcomeRecord] = TypeAdapter(Record)


class RecordWriter:
    """Appends records to a file; what is handed to ``write`` is on the disk, whole, when it returns, or not at all.

    A reserve file beside it is given up when the disk is full, for the last records of the run.
    """

    def __init__(self, path: Path) -> None:
        # Unbuffered: lines reach the file in one write or not at all, also when this process is killed.
        self._file = path.open("ab", buffering=0)
        self._reserve = path.with_name(RESERVE_NAME)
        with contextlib.suppress(OSError):
            self._reserve.write_bytes(bytes(RESERVE_BYTES))

    def write(self, *records: SeriesRecord | OutcomeRecord) -> None:
        """Append all of ``records``.

        Raises:
            DiskFull: they did not fit. ``written`` says whether they did after the reserve was given up.
            OSError: the file cannot be written.
        """
        lines = b"".join(record.model_dump_json().encode() + b"\n" for record in records)
        try:
            self._append(lines)
        except OSError as error:
            if error.errno not in FULL:
                raise
            self._reserve.unlink(missing_ok=True)
            try:
                self._append(lines)
            except OSError:
                raise DiskFull(self._file.name, written=False) from None
            raise DiskFull(self._file.name, written=True) from None

    def _append(self, lines: bytes) -> None:
        start = os.fstat(self._file.fileno()).st_size
        try:
            # A disk that fills up takes a part first, and says so at the next write.
            written = 0
            while written < len(lines):
                written += self._file.write(lines[written:])
            os.fsync(self._file.fileno())
        except OSError:
            self._file.truncate(start)
            raise

    def __enter__(self) -> RecordWriter:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()
        self._reserve.unlink(missing_ok=True)


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
