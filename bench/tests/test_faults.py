"""Whatever ends a cell or the run: the file is whole, says what happened, and the run goes on without repeating."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from bench import session
from bench.cells import Machine, Task
from bench.environment import commit
from bench.record import FILE_NAME, DiskFull, OutcomeRecord, RecordWriter, read_records
from bench.resume import Plan
from bench.run import Stop
from bench.tests import faulty
from bench.tests.made_up import make_cell
from bench.tests.test_record import records
from suites.launch.alone import run_here
from suites.matrix import Cell
from suites.measure import Series

ROOT = Path(__file__).resolve().parents[2]
MARK = "STEELYARD_TEST_MARK"


class Runs:
    """``python -m bench`` with faulty cells, in a process of its own; knows every process that came from it."""

    def __init__(self, folder: Path) -> None:
        self.out, self._visits, self._mark = folder / "runs", folder / "visits", str(uuid.uuid4())
        self._visits.touch()
        self._matrix = folder / "faults.toml"

    def new(self, *does: Callable) -> subprocess.Popen:
        hangs = faulty.DOES.index(faulty.hangs)
        short = f"override = [{{ when = {{ seed = {hangs} }}, settings = {{ time_limit = 9 }} }}]"
        seeds, more = [faulty.DOES.index(one) for one in does], short if faulty.hangs in does else ""
        self._matrix.write_text(faulty.MATRIX.format(seeds=seeds, more=more))
        return self._start("--matrix", str(self._matrix), "--out", str(self.out), "--device", "cpu")

    def resume(self) -> subprocess.Popen:
        return self._start("--resume", str(self.folder))

    def _start(self, *arguments: str) -> subprocess.Popen:
        environment = {**os.environ, MARK: self._mark, faulty.VISITS: str(self._visits)}
        command = [sys.executable, "-m", "bench.tests.faulty", "run", *arguments]
        return subprocess.Popen(
            command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    @property
    def folder(self) -> Path:
        (folder,) = self.out.iterdir()
        return folder

    @property
    def visits(self) -> list[str]:
        return self._visits.read_text().split()

    def outcomes(self) -> dict[str, OutcomeRecord]:
        """By what the cell does, in the order of the file; reading fails if a line is not whole."""
        back = read_records(self.folder)
        assert back.dropped == ""
        lines = [one for one in back.lines if isinstance(one, OutcomeRecord)]
        found = {faulty.DOES[one.case["seed"]].__name__: one for one in lines}
        assert len(found) == len(lines), "a cell has one outcome"
        return found

    def left_behind(self) -> list[psutil.Process]:
        """Processes that carry the mark, after a moment in which they may end."""
        for _ in range(50):
            alive = [process for process in psutil.process_iter() if self._is_ours(process)]
            if not alive:
                return []
            time.sleep(0.1)
        return alive

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get(MARK) == self._mark and process.status() != psutil.STATUS_ZOMBIE
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            return False


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    there = Runs(tmp_path)
    yield there
    for process in there.left_behind():  # a test that failed leaves nothing either
        process.kill()


def finish(process: subprocess.Popen, code: int) -> str:
    out, error = process.communicate(timeout=120)
    assert process.returncode == code, out + error
    assert "Traceback" not in error, error
    return out + error


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 90
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_every_fault_is_the_outcome_of_its_cell_alone(runs: Runs) -> None:
    does = [faulty.crashes, faulty.hangs, faulty.loses_a_rank, faulty.runs_out_of_memory, faulty.fills_the_disk,
            faulty.passes]  # fmt: skip
    finish(runs.new(*does), 1)
    assert runs.left_behind() == []
    found = runs.outcomes()
    line = next(at for at, text in enumerate(Path(faulty.__file__).read_text().splitlines(), 1) if "# here" in text)
    assert {name: (one.status, one.reason) for name, one in found.items()} == {
        "crashes": ("failed", "the cell was ended by signal SIGSEGV"),
        "hangs": ("failed", f"did not end within 10 s: the cell stood at bench/tests/faulty.py:{line} in hangs"),
        "loses_a_rank": ("failed", "rank 1 was ended by signal SIGKILL"),
        "runs_out_of_memory": ("failed", found["runs_out_of_memory"].reason),
        "fills_the_disk": ("failed", "OSError: [Errno 28] No space left on device"),
        "passes": ("passed", ""),
    }
    assert found["runs_out_of_memory"].reason.startswith("rank 1 failed: out of memory: RuntimeError")
    assert found["passes"].conditions is not None

    finish(runs.resume(), 1)
    assert runs.visits == [one.__name__ for one in does], "a cell that failed has its result and is not repeated"
    assert runs.outcomes().keys() == found.keys()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_run_that_is_ended_goes_on_where_it_was(runs: Runs, number: signal.Signals) -> None:
    process = runs.new(faulty.passes, faulty.takes_long, faulty.passes_too)
    wait_for(lambda: "takes_long" in runs.visits)
    if number is signal.SIGINT:
        assert "another process is running it" in finish(runs.resume(), 2)
    process.send_signal(number)
    if number is signal.SIGKILL:
        process.wait()
        assert list(runs.outcomes()) == ["passes"]
    else:
        said = finish(process, 130)
        assert f"go on with --resume {runs.folder}" in said
        statuses = {name: (one.status, one.reason) for name, one in runs.outcomes().items()}
        stopped = ("not_run", "interrupted by the user")
        assert statuses == {"passes": ("passed", ""), "takes_long": stopped, "passes_too": stopped}
    assert runs.left_behind() == []

    with (runs.folder / FILE_NAME).open("a") as file:
        file.write('{"kind": "series", "metr')
    said = finish(runs.resume(), 0)
    assert "dropped half a record, 24 bytes" in said
    assert runs.visits == ["passes", "takes_long", "takes_long", "passes_too"]
    assert [one.status for one in runs.outcomes().values()] == ["passed"] * 3
    assert runs.left_behind() == []


def test_a_file_that_cannot_grow_keeps_whole_cells_and_the_run_goes_on(tmp_path: Path, add_suite) -> None:
    add_suite("much", lambda cell, device: [Series("samples", "both", "1", "none", [1 / 3] * 10 ** (cell.seed + 2))])
    cells = [make_cell("much", "rl-math-short", seed=seed, axis=str(seed)) for seed in (0, 2)]
    plan = Plan(matrix="much", commit=commit(), device=None, on="here", cells=tuple(cells))
    tasks = [Task.of(cell, Machine("a machine", cores=2, gpus=0)) for cell in cells]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
    try:
        folder, stop = session.Session(tasks, plan, run_here).run(tmp_path, None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert stop is Stop.disk
    ends = [(one.status, one.reason) for one in read_records(folder).lines if one.kind == "outcome"]
    assert ends == [("passed", ""), ("not_run", "the disk is full")]
    with session.resumed(folder) as rest:
        assert [task.cell for task in rest.tasks] == cells[1:]
        assert rest.run(tmp_path, None) == (folder, None)
    lines = read_records(folder).lines
    assert [(one.kind, one.cell) for one in lines] == [
        (kind, cell.id) for cell in cells for kind in ("series", "outcome")
    ]
    assert {path.name for path in folder.iterdir()} == {"run.json", FILE_NAME}


def test_a_polite_request_to_end_counts_as_an_interruption(tmp_path: Path, add_suite) -> None:
    def measure(cell: Cell, device: str | None) -> list[Series]:
        os.kill(runner, signal.SIGTERM)
        time.sleep(60)
        return []

    runner = os.getpid()
    add_suite("slow", measure)
    cell = make_cell("slow")
    plan = Plan(matrix="slow", commit=None, device=None, on="here", cells=(cell,))
    task = Task.of(cell, Machine("a machine", cores=2, gpus=0))
    folder, stop = session.Session([task], plan, run_here).run(tmp_path, None)
    assert stop is Stop.interrupted
    (outcome,) = read_records(folder).lines
    assert (outcome.status, outcome.reason) == ("not_run", "interrupted by the user")


def test_a_full_disk_still_takes_the_last_records(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "small", disk], capture_output=True).returncode:
        pytest.skip("a small disk can be mounted by root alone; the limit on the file's size above needs nobody")
    first, *rest = records()
    try:
        with RecordWriter(disk / FILE_NAME) as writer:
            writer.write(first)
            with (disk / "other").open("wb", buffering=0) as other, contextlib.suppress(OSError):
                while True:
                    other.write(bytes(4096))
            # What is left of the last page is taken first.
            with pytest.raises(DiskFull) as full:
                writer.write(*[rest[0]] * 10)
            assert full.value.written
            writer.write(rest[-1])
        lines = read_records(disk).lines
        assert lines[0].metric == first.metric
        assert lines[-1].kind == "outcome"
    finally:
        subprocess.run(["umount", disk], check=True)
