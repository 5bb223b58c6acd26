"""Records survive the way to the disk and back, and a run that was cut off."""

from __future__ import annotations

import json
import math
import os
from datetime import timedelta
from pathlib import Path

import pytest

from bench.environment import capture
from bench.record import FILE_NAME, DiskFull, OutcomeRecord, RecordWriter, SeriesRecord, new_run_folder, read_records
from bench.tests.made_up import make_cell, throughput_series
from steelyard.errors import InputError


def common() -> dict:
    cell = make_cell("throughput")
    return {
        "run": "r1",
        "cell": cell.id,
        "case": cell.model_dump(),
        "seconds": 1.5,
        "environment": capture("cpu"),
    }


def records() -> list[SeriesRecord | OutcomeRecord]:
    series = [SeriesRecord(**common(), **vars(one)) for one in throughput_series()]
    return [*series, OutcomeRecord(**common(), status="failed", reason="why", detail="Traceback\n  line")]


def write(path: Path, lines: list[SeriesRecord | OutcomeRecord]) -> Path:
    with RecordWriter(path) as writer:
        for record in lines:
            writer.write(record)
    return path


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    written = records()
    back = read_records(write(tmp_path / FILE_NAME, written))
    assert [record.model_dump() for record in back.lines] == [record.model_dump() for record in written]
    assert [record.line for record in back.lines] == list(range(1, len(written) + 1))
    assert back.dropped == ""
    assert read_records(tmp_path).lines == back.lines


def test_a_line_has_everything_a_reader_needs(tmp_path: Path) -> None:
    first = json.loads(write(tmp_path / FILE_NAME, records()).read_text().splitlines()[0])
    assert first["schema_version"] == 2
    assert first["kind"] == "series"
    assert first["case"]["model"]["hidden"] == 64
    assert first["case"]["scale"] == 400.0
    assert first["values"] == [100.0, 103.0, 98.0, 101.0, 100.5]
    assert (first["metric"], first["side"], first["unit"], first["direction"], first["source"]) == (
        "tokens_per_second",
        "naive",
        "tokens/s",
        "higher",
        "measured",
    )
    assert first["environment"].keys() >= {"device", "cores", "threads_per_rank", "torch", "megatron_core", "commit"}
    assert "line" not in first


def test_times_are_in_utc() -> None:
    assert records()[0].time.utcoffset() == timedelta(0)


def test_numbers_that_json_lacks_survive(tmp_path: Path) -> None:
    record = SeriesRecord(
        **common(),
        metric="m",
        side="both",
        unit="1",
        direction="lower",
        source="measured",
        values=(math.nan, math.inf, -math.inf),
    )
    path = write(tmp_path / FILE_NAME, [record])
    json.loads(path.read_text(), parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    values = read_records(path).lines[0].values
    assert math.isnan(values[0])
    assert values[1:] == (math.inf, -math.inf)


@pytest.mark.parametrize("kept", [1, 40, -2, -1])
def test_half_a_last_line_is_dropped_with_a_word(tmp_path: Path, kept: int) -> None:
    written = records()
    path = write(tmp_path / FILE_NAME, written)
    *_, last = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(path.read_bytes()[: -len(last)] + last[:kept])
    back = read_records(path)
    assert len(back.lines) == len(written) - 1
    assert "half a record" in back.dropped


def test_a_broken_line_inside_is_bad_input_that_names_the_line(tmp_path: Path) -> None:
    path = write(tmp_path / FILE_NAME, records())
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([lines[0], '{"kind": "series"}\n', *lines[1:]]))
    with pytest.raises(InputError, match="line 2"):
        read_records(path)


def test_a_later_schema_is_bad_input(tmp_path: Path) -> None:
    path = write(tmp_path / FILE_NAME, records()[:1])
    path.write_text(path.read_text().replace('"schema_version":2', '"schema_version":3'))
    with pytest.raises(InputError, match="schema version 2"):
        read_records(path)


def test_a_write_that_fails_leaves_only_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / FILE_NAME
    with RecordWriter(path) as writer:
        writer.write(records()[0])

        def no_space(descriptor: int) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", no_space)
            with pytest.raises(DiskFull, match="no room left"):
                writer.write(records()[1])
        writer.write(records()[2])
    back = read_records(path)
    assert [(record.metric, record.side) for record in back.lines] == [
        ("tokens_per_second", "naive"),
        ("step_seconds", "naive"),
    ]
    assert back.dropped == ""


@pytest.mark.parametrize(
    ("direction", "values", "keeps"),
    [
        ("lower", (1e-6, 1e-5), True),
        ("lower", (1e-6, 1.1e-5), False),
        ("lower", (1e-6, math.nan), False),
        ("lower", (math.nan, 1e-6), False),
        ("higher", (1e-5, 1e-4), True),
        ("higher", (1e-6, 1e-4), False),
    ],
)
def test_a_limit_holds_for_every_value(direction: str, values: tuple[float, ...], keeps: bool) -> None:
    record = SeriesRecord(
        **common(), metric="m", side="both", unit="1", direction=direction, values=values, source="measured", limit=1e-5
    )
    assert record.keeps_limit is keeps


def test_two_runs_in_one_second_get_folders_of_their_own(tmp_path: Path) -> None:
    folders = {new_run_folder(tmp_path / "runs", "smoke", "0123456789") for _ in range(3)}
    assert len(folders) == 3
    assert all("-smoke-0123456" in folder.name for folder in folders)


def test_environment_is_known_without_git(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    environment = capture("cpu")
    assert environment.commit is None
    assert environment.dirty is None
    assert environment.cores >= 1
