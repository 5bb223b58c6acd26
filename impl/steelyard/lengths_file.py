"""Reads columns of lengths out of a user's CSV or JSONL file, and says in one line what is wrong with it."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from steelyard.errors import LengthsError
from steelyard.hints import did_you_mean

# cu_seqlens are 32-bit integers: no longer sequence can be packed, and int64 sums over any batch stay exact.
LONGEST = 2**31 - 1

_DELIMITERS = {".csv": ",", ".tsv": "\t"}
_JSON_LINES = (".jsonl", ".ndjson", ".json")

Record = tuple[int, dict[str, Any]]  # line number, and the values by column


def read_columns(path: Path, columns: list[str]) -> list[list[int]]:
    """The wanted columns of ``path`` as lists of ints, one list per column, rows in the file's order."""
    suffix = path.suffix.lower()
    if suffix not in _DELIMITERS and suffix not in _JSON_LINES:
        kinds = ", ".join([*_DELIMITERS, *_JSON_LINES])
        raise LengthsError(f"{path}: suffix {suffix!r} does not say which format the file has: use one of {kinds}")

    try:
        # utf-8-sig: spreadsheets put a byte-order mark in front of the first column's name.
        with path.open(encoding="utf-8-sig", newline="") as file:
            if suffix in _DELIMITERS:
                records = _csv_records(path, file, columns, _DELIMITERS[suffix])
            else:
                records = _json_records(path, file, columns)
            rows = [_lengths(path, record, columns) for record in records]
    except OSError as error:
        raise LengthsError(f"{path}: cannot be read ({error.strerror or error}): check the path") from None
    except UnicodeDecodeError as error:
        raise LengthsError(f"{path}: not a text file ({error.reason}): save it as UTF-8") from None
    if not rows:
        raise LengthsError(f"{path}: has no rows: give a file with at least one row of lengths")
    return [list(column) for column in zip(*rows, strict=True)]


def _csv_records(path: Path, file: TextIO, columns: list[str], delimiter: str) -> Iterator[Record]:
    # strict: a quote that is never closed is an error, not one long cell.
    lines = csv.reader(file, delimiter=delimiter, strict=True)
    try:
        header = next((line for line in lines if any(cell.strip() for cell in line)), None)
        if header is None:
            raise LengthsError(f"{path}: is empty: give a file with a header and at least one row")
        header = [name.strip() for name in header]
        for column in columns:
            if column not in header:
                raise _missing(path, column, header)
            if header.count(column) > 1:
                raise LengthsError(f"{path}: has {header.count(column)} columns named {column!r}: rename or remove one")
        at = {column: header.index(column) for column in columns}
        for line in lines:
            if any(cell.strip() for cell in line):
                yield lines.line_num, {name: line[i].strip() if i < len(line) else "" for name, i in at.items()}
    except csv.Error as error:
        raise LengthsError(f"{path}, line {lines.line_num}: not valid CSV ({error}): correct the line") from None


def _json_records(path: Path, file: TextIO, columns: list[str]) -> Iterator[Record]:
    blank = True
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        blank = False
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            reason = error.msg if isinstance(error, json.JSONDecodeError) else type(error).__name__
            raise LengthsError(
                f"{path}, line {number}: not valid JSON ({reason}): every line must be one object, not part of a list"
            ) from None
        if not isinstance(record, dict):
            raise LengthsError(
                f"{path}, line {number}: holds a {type(record).__name__}, {_short(repr(record))}: every line must be "
                f"one object with a field per column"
            )
        for column in columns:
            if column not in record:
                raise _missing(f"{path}, line {number}", column, list(record))
        yield number, record
    if blank:
        raise LengthsError(f"{path}: is empty: give a file with one JSON object per line")


def _missing(where: str | Path, column: str, there: list[str]) -> LengthsError:
    shown = _short(", ".join(there) or "none", 300)
    return LengthsError(f"{where}: no column {column!r}{did_you_mean(column, there)}; the columns there are: {shown}")


def _lengths(path: Path, record: Record, columns: list[str]) -> list[int]:
    number, values = record
    lengths = [_length(path, number, column, values[column]) for column in columns]
    # A lone response of 0 is a row all the same: its prompt has a fixed length.
    if len(lengths) > 1 and not any(lengths):
        names = " and ".join(repr(column) for column in columns)
        raise LengthsError(f"{path}, line {number}: {names} are 0, so the row has no token: remove the row")
    return lengths


def _length(path: Path, number: int, column: str, value: Any) -> int:
    """One cell as a length; text comes from CSV when it has only digits, numbers come from JSON."""
    length = None
    if isinstance(value, str):
        # CSV is text throughout; a JSON string that holds digits is taken for a mistake of the writer.
        digits = value[1:] if value[:1] in ("-", "+") else value
        if path.suffix.lower() in _DELIMITERS and digits.isascii() and digits.isdigit() and len(digits) < 20:
            length = int(value)
    elif isinstance(value, int) and not isinstance(value, bool):
        length = value
    elif isinstance(value, float) and value.is_integer():
        length = int(value)
    where = f"{path}, line {number}, column {column!r}"
    if length is None:
        raise LengthsError(f"{where}: {_short(repr(value))} is not a whole number of tokens: correct or remove the row")
    if length < 0:
        raise LengthsError(
            f"{where}: {_short(repr(value))} is negative: a length is 0 or more, correct or remove the row"
        )
    if length > LONGEST:
        raise LengthsError(f"{where}: {_short(repr(value))} is above {LONGEST} tokens: correct or remove the row")
    return length


def _short(text: str, most: int = 60) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
