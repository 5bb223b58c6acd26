"""The command line: bad input ends with one line, exit code 2 and nothing written; good input with a run folder."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from bench import session
from bench.cli import app
from bench.record import read_records
from bench.tests.made_up import parity_series, throughput_series
from suites.measure import Series

ROOT = Path(__file__).resolve().parents[2]
MODEL = "[model]\nlayers = 4\nhidden = 64\nffn = 96\nheads = 4\nkv_heads = 2\nhead_dim = 16\nvocab = 128\n"
SUITE = '[[suite]]\nname = "throughput"\nworkloads = ["rl-code-16k-cap"]\n'
SMALL = 'description = "of a test"\n' + MODEL + SUITE + "settings = { rows = 4, scale = 400.0 }\n"


def bench(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def matrix(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    return path


def file(folder: Path, name: str, text: str) -> Path:
    (folder / name).write_text(text)
    return folder / name


BAD_INPUT = {
    "unknown matrix": (["--matrix", "smokey"], "did you mean smoke?"),
    "unknown suite": (["--only", "througput"], "did you mean throughput?"),
    "suite the matrix lacks": (["--matrix", "SMALL", "--suite", "parity"], "no cell of suite parity"),
    "pattern of no cell": (["--matrix", "SMALL", "--only", "throughput/*/dp8/*"], "no cell has such a name"),
    "time budget of no time": (["--time-budget", "soon"], "give a time such as 90s"),
    "side of no module": (["--side", "mine=nowhere.at:all"], "module nowhere.at cannot be imported"),
    "side without a function": (["--side", "mine=suites.sides"], "write it as NAME=MODULE:FUNCTION"),
    "side of an unknown name": (["--side", "mine=suites.sides:planer"], "did you mean planner"),
    "side without a mark": (["--side", "mine=suites.planning:measure"], "put @planner, @packing or @step"),
    "side that nothing weighs": (
        ["--matrix", "SMALL", "--side", "mine=suites.tests.own_sides:plan"],
        "a planner is weighed by suite planning",
    ),
    "resume with a matrix": (["--resume", "nowhere", "--matrix", "SMALL"], "--matrix cannot be given with --resume"),
    "resume of no run": (["--resume", "nowhere"], "run.json cannot be read"),
    "missing file": (["--lengths", "nowhere.csv"], "nowhere.csv"),
    "empty file": (["--lengths", "EMPTY"], "is empty"),
    "missing column": (["--lengths", "CSV", "--response-column", "respons"], "did you mean response?"),
    "missing prompt column": (
        ["--lengths", "CSV", "--response-column", "response", "--prompt-column", "p"],
        "no column 'p'",
    ),
    "negative length": (["--lengths", "NEGATIVE", "--response-column", "response"], "'-5'"),
    "fraction as length": (["--lengths", "FRACTION", "--response-column", "response"], "'2.5'"),
    "columns without a file": (["--response-column", "response"], "add --lengths"),
    "unknown workload": (["--matrix", "WORKLOAD"], "did you mean rl-code-16k-cap"),
    "heads not divisible": (["--matrix", "HEADS"], "tp=3 does not divide"),
    "unknown key": (["--matrix", "KEY"], "rowz"),
    "not TOML": (["--matrix", "CSV_AS_TOML"], "not valid TOML"),
    "more GPUs than there are": (["--matrix", "MANY", "--device", "cuda"], "GPU"),
    "a file as folder": (["--matrix", "SMALL", "--out", "EMPTY"], "--out"),
}


@pytest.mark.parametrize("name", BAD_INPUT)
def test_bad_input_is_one_line_and_leaves_nothing(tmp_path: Path, matrix: Path, name: str) -> None:
    files = {
        "SMALL": matrix,
        "EMPTY": file(tmp_path, "empty.csv", ""),
        "CSV": file(tmp_path, "lengths.csv", "prompt,response\n3,4\n"),
        "NEGATIVE": file(tmp_path, "negative.csv", "response\n4\n-5\n"),
        "FRACTION": file(tmp_path, "fraction.csv", "response\n4\n2.5\n"),
        "WORKLOAD": file(tmp_path, "workload.toml", SMALL.replace("rl-code-16k-cap", "rl-code-16k")),
        "HEADS": file(tmp_path, "heads.toml", SMALL + "layouts = [{ tp = 3 }]\n"),
        "KEY": file(tmp_path, "key.toml", SMALL.replace("rows", "rowz")),
        "MANY": file(tmp_path, "many.toml", SMALL.replace("rows = 4", "rows = 4096") + "layouts = [{ dp = 4096 }]\n"),
        "CSV_AS_TOML": file(tmp_path, "lengths.toml", "prompt,response\n3,4\n"),
    }
    arguments, word = BAD_INPUT[name]
    out = tmp_path / "runs"
    given = [files.get(argument, argument) for argument in arguments]
    result = bench("run", *([] if "--resume" in given else ["--out", out]), *given)
    assert result.exit_code == 2, result.output
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("error: ")
    assert word in result.stderr
    assert result.stdout == ""
    assert not out.exists()


@pytest.mark.parametrize("arguments", [("run", "--device", "tpu"), ("run", "--no-such-option"), ("weigh",)])
def test_wrong_usage_exits_with_2_and_no_traceback(arguments: tuple[str, ...]) -> None:
    result = bench(*arguments)
    assert result.exit_code == 2
    assert "Traceback" not in result.output


def test_report_of_no_run_is_bad_input(tmp_path: Path) -> None:
    for folder in (tmp_path / "absent", tmp_path):
        result = bench("report", folder)
        assert result.exit_code == 2
        assert result.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_the_process_itself_exits_with_2_and_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench", "run", "--matrix", "nothing", "--out", str(tmp_path / "runs")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: matrix 'nothing' does not exist")
    assert done.stderr.count("\n") == 1


def test_help_does_not_load_torch() -> None:
    code = (
        "import sys\n"
        "from bench.cli import app\n"
        "try:\n"
        "    app(['run', '--help'])\n"
        "except SystemExit:\n"
        "    pass\n"
        "print(sorted({'torch', 'megatron', 'matplotlib', 'scipy'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_run_leaves_records_report_and_pictures(tmp_path: Path, matrix: Path, add_suite) -> None:
    add_suite("throughput", lambda cell, device: throughput_series())
    result = bench("run", "--matrix", matrix, "--out", tmp_path / "runs", "--device", "cpu", "--json")
    assert result.exit_code == 0, result.output
    (folder,) = (tmp_path / "runs").iterdir()
    files = {"run.json", "records.jsonl", "report.md", "report.html", "report.json"}
    assert {path.name for path in folder.iterdir()} == {*files, "ratio.png", "tokens.png", "cap.png"}
    assert {record.run for record in read_records(folder).lines} == {folder.name}
    said = json.loads(result.stdout.splitlines()[-1])
    assert said["verdict"] == "passed"
    assert said["run"] == str(folder)
    assert said["throughput"][0]["ratio"]["pairs"] == 5
    assert "2.01 [" in result.stdout
    assert "[1/1] throughput/rl-code-16k-cap/1/actor: passed" in result.stderr


def test_a_failed_cell_exits_with_1(tmp_path: Path, matrix: Path, add_suite) -> None:
    add_suite("throughput", lambda cell, device: parity_series(error=1.0))
    result = bench("run", "--matrix", matrix, "--out", tmp_path / "runs", "--device", "cpu")
    assert result.exit_code == 1
    assert "above its limit" in result.stdout


def test_cells_that_cannot_run_here_are_no_pass(tmp_path: Path, add_suite) -> None:
    add_suite("throughput", lambda cell, device: throughput_series())
    text = SMALL + "layouts = [{}, { dp = 2 }]\noverride = [{ when = { layout = { dp = 2 } }, settings = GPU }]\n"
    path = file(tmp_path, "mixed.toml", text.replace("GPU", '{ device = "cuda" }'))
    result = bench("run", "--matrix", path, "--out", tmp_path / "runs")
    assert result.exit_code == 3
    assert "it needs 2 GPUs" in result.stderr
    assert "1 of 2 cells passed, 1 did not run" in result.stdout


def test_only_keeps_cells_by_pattern_and_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    out = tmp_path / "runs"
    only = ("--only", "parity/*/dp2/*", "--only", "planning", "--out", out)
    result = bench("run", "--matrix", "smoke", *only, "--dry-run", "--json")
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout.splitlines()[-1])
    assert said["cells"] == {
        "parity/rl-code-16k-cap/dp2/actor": "measured on the CPU, 2 ranks",
        "parity/rl-code-16k-cap/dp2/critic": "measured on the CPU, 2 ranks",
        "planning/rl-code-16k-cap/pp4-dp4/128-rows": "computed on the CPU",
        "planning/rl-math-long-mixture/pp4-dp4/128-rows": "computed on the CPU",
    }
    assert not out.exists()


@pytest.mark.parametrize(("text", "seconds"), [("90", 90), ("90s", 90), ("20m", 1200), ("1.5h", 5400)])
def test_times_have_units(text: str, seconds: float) -> None:
    assert session.seconds(text) == seconds


def test_own_lengths_reach_the_suite_and_the_records(tmp_path: Path, matrix: Path, add_suite) -> None:
    def measure(cell, device):
        totals = sorted(cell.draw().totals.tolist())
        return [Series("lengths", "both", "tokens", "none", totals)]

    add_suite("throughput", measure)
    lengths = file(tmp_path, "mine.csv", "p,r\n400,800\n800,1200\n1200,400\n400,400\n")
    columns = ("--prompt-column", "p", "--response-column", "r")
    result = bench(
        "run", "--matrix", matrix, "--lengths", lengths, *columns, "--out", tmp_path / "o", "--device", "cpu"
    )
    assert result.exit_code == 0, result.output
    (folder,) = (tmp_path / "o").iterdir()
    assert read_records(folder).lines[0].values == (2, 3, 4, 5)
    assert read_records(folder).lines[0].case["lengths_file"]["path"] == str(lengths)


def test_report_writes_the_page_of_an_earlier_run_again(tmp_path: Path, matrix: Path, add_suite) -> None:
    add_suite("throughput", lambda cell, device: throughput_series())
    bench("run", "--matrix", matrix, "--out", tmp_path / "runs", "--device", "cpu")
    (folder,) = (tmp_path / "runs").iterdir()
    before = (folder / "report.md").read_text()
    (folder / "report.md").unlink()
    result = bench("report", folder, "--json")
    assert result.exit_code == 0
    assert (folder / "report.md").read_text() == before
    assert json.loads(result.stdout.splitlines()[-1])["verdict"] == "passed"


def test_list_shows_suites_workloads_and_cells() -> None:
    result = bench("list", "--json")
    said = json.loads(result.stdout.splitlines()[-1])
    assert "throughput" in said["suites"]
    assert "rl-code-16k-cap" in said["workloads"]
    assert said["suites"]["parity"].startswith("Does the optimised step compute what the judge computes?")
    cells = said["matrices"]["smoke"]["cells"]
    assert cells["throughput/rl-code-16k-cap/dp2/actor"] == "measured on the CPU, 2 ranks"
