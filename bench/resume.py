"""What a run is made of, kept beside its records, so that it can go on after whatever ended it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from bench.record import FILE_NAME, read_records
from steelyard.errors import InputError
from suites.matrix import Cell

PLAN_NAME = "run.json"


class Plan(BaseModel):
    """What was asked for: the cells as they were, whatever became of their matrix file since."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: Literal[1] = 1
    matrix: str
    commit: str | None
    device: Literal["cpu", "cuda"] | None
    on: Literal["here", "ray"]
    cells: tuple[Cell, ...]

    def save(self, folder: Path) -> None:
        replace_file(folder / PLAN_NAME, self.model_dump_json(indent=1).encode())

    @classmethod
    def load(cls, folder: Path) -> Plan:
        """Read the plan of a run folder.

        Raises:
            InputError: there is none, or it is of another version of the harness.
        """
        file = folder / PLAN_NAME
        try:
            return cls.model_validate_json(file.read_bytes())
        except OSError as error:
            raise InputError(
                f"--resume {folder}: {PLAN_NAME} cannot be read ({error.strerror}): give a folder that "
                f"'python -m bench run' made"
            ) from None
        except ValidationError as error:
            first = error.errors()[0]
            raise InputError(
                f"{file}: {'.'.join(map(str, first['loc']))}: {first['msg']}: resume it with the commit that wrote it"
            ) from None


def drop_unfinished(folder: Path) -> tuple[set[str], str]:
    """Keep only the records of cells that passed or failed; all others are to be run (again).

    Returns:
        Ids of the cells that are kept, and a word on half a line at the end of the file, or nothing.
    """
    file = folder / FILE_NAME
    if not file.exists() or b"\n" not in (content := file.read_bytes()):
        file.unlink(missing_ok=True)
        return set(), ""
    records = read_records(file)
    done = {one.cell for one in records.lines if one.kind == "outcome" and one.status in ("passed", "failed")}
    lines = content.splitlines(keepends=True)
    replace_file(file, b"".join(lines[one.line - 1] for one in records.lines if one.cell in done))
    return done, records.dropped


def replace_file(file: Path, content: bytes) -> None:
    """Write ``content`` in the place of ``file``: at every moment the old or the new one is whole."""
    part = file.with_name(f"{file.name}.part")
    with part.open("wb") as writing:
        writing.write(content)
        writing.flush()
        os.fsync(writing.fileno())
    part.replace(file)
    folder = os.open(file.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
