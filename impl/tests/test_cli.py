"""The command ``steelyard predict``: what it prints, draws and refuses."""

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from steelyard.cli import app

SMALL = ["predict", "--model", "qwen2.5-0.5b", "--tokens", "2048", "--extrapolate"]


def call(*arguments):
    return CliRunner().invoke(app, list(arguments))


def test_a_table_by_stage_and_one_json_object_on_the_last_line(tmp_path):
    picture = tmp_path / "peak.png"
    result = call(*SMALL, "--pp", "4", "--json", "--picture", str(picture), "--capacity", "24")
    assert result.exit_code == 0, result.output
    assert "predicted, not verified on a GPU" in " ".join(result.stdout.split())
    for text in ("first stage", "middle stage", "last stage", "activations", "peak of optimizer", "fits"):
        assert text in result.stdout
    found = json.loads(result.stdout.splitlines()[-1])
    assert (found["kind"], found["verified_on_gpu"], found["layout"]) == ("predicted", False, "pp4")
    assert list(found["stages"]) == ["first", "middle", "last"]
    assert [one["rank"] for one in found["stages"].values()] == [0, 1, 3]
    for one in found["stages"].values():
        assert one["extrapolated"]
        assert one["peak_bytes"] == pytest.approx(sum(one["parts"].values()), rel=1e-6)
        assert one["peak_bytes"] == max(one["phases"].values())
    assert picture.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "qwen2.5-7"], "unknown model preset 'qwen2.5-7' (did you mean qwen2.5-7b"),
        (
            ["--tp", "3"],
            "attention heads: use a divisor of them (nearest possible: --tp 2)",
        ),
        (
            ["--pp", "5"],
            "pp and vpp whose product does (nearest possible: --pp 6)",
        ),
        (["--vpp", "2"], "vpp=2 needs pp > 1"),
        (["--tokens", "40000"], "above the 32768 positions of model qwen2.5-0.5b: use at most 32768"),
        (["--capacity", "6"], "parameters, gradients and optimizer alone take"),
        (["--ddp", "overlap=true"], "did you mean overlap_grad_reduce"),
        (["--ddp", "overlap_grad_reduce"], "write FIELD=VALUE"),
        (["--pp", "2", "--vpp", "2", "--micro-batches", "3"], "the next one is 4"),
        (["--picture", "/no/such/folder/a.png"], "cannot be written"),
        (["--picture", "a.word"], "cannot be written"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, message):
    result = call(*SMALL, *arguments)
    assert result.exit_code == 2
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("error: ")
    assert message in lines[0]


def test_help_imports_no_torch():
    code = "import sys; from typer.testing import CliRunner; from steelyard.cli import app\n"
    code += "assert CliRunner().invoke(app, ['predict', '--help']).exit_code == 0; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
