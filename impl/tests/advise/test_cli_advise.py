"""The command ``steelyard advise``: what it prints, keeps, draws and refuses."""

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from steelyard.cli import app

LENGTHS = ["--max-prompt", "1024", "--max-response", "8192"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of the cache that the tests of this module share."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def call(folder, config_file):
    def invoke(*arguments, gpus="2"):
        model = [] if "--model" in arguments else ["--model", str(config_file)]
        given = ["advise", *model, "--gpus", gpus, "--cache-folder", str(folder), "--processes", "1", *LENGTHS]
        return CliRunner().invoke(app, [*given, *arguments])

    return invoke


def test_a_ranked_table_a_picture_overrides_and_one_json_object(call, tmp_path, folder):
    picture = tmp_path / "memory.png"
    result = call("--top", "3", "--json", "--emit", "verl", "--picture", str(picture))
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    words = " ".join(result.stdout.split())
    for text in ("predicted, not verified on a GPU", "(assumed)", "scaled to responses of at most 8192", "tokens/s"):
        assert text in words
    table = lines[: next(at for at, line in enumerate(lines) if line.startswith("GiB: "))]
    assert max(map(len, table)) <= 100
    found = json.loads(lines[-1])
    assert (found["kind"], found["verified_on_gpu"]) == ("predicted", False)
    assert len(found["settings"]) == 3
    assert all(one["fits"] and not one["extrapolated"] for one in found["settings"])
    best = found["settings"][0]["layout"]
    assert f"actor_rollout_ref.actor.megatron.tensor_model_parallel_size={best['tp']}" in lines
    assert picture.read_bytes()[:4] == b"\x89PNG"
    kept = sorted(folder.iterdir())
    assert json.loads(call("--top", "3", "--json").stdout.splitlines()[-1])["settings"] == found["settings"]
    assert sorted(folder.iterdir()) == kept, "the second time nothing is predicted"


def test_own_settings_that_do_not_fit_and_what_to_change(call):
    own = ["--dp", "2", "--max-token-len", "32768", "--no-chunked-logits", "--gpu-memory", "12"]
    result = call(*own, "--nodes-to", "1", "--json")
    assert result.exit_code == 0, result.output
    words = " ".join(result.stdout.split())
    assert "does not fit (predicted, not verified on a GPU)" in words
    assert "One change at a time" in words
    assert "More nodes as data-parallel ranks of your settings: " in words
    found = json.loads(result.stdout.splitlines()[-1])
    assert not found["setting"]["fits"]
    assert found["changes"][0]["fits"]
    assert found["nodes"]["answer"].startswith("not to fit: ")


def test_settings_of_a_file_under_verls_names(call, tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(
        "[data]\nmax_prompt_length = 1024\nmax_response_length = 8192\n[trainer]\nnnodes = 1\nn_gpus_per_node = 2\n"
        "[actor_rollout_ref.actor]\nuse_dynamic_bsz = true\nppo_max_token_len_per_gpu = 20000\n"
        "[algorithm]\nadv_estimator = 'grpo'\n"
    )
    result = call("--settings", str(file), "--json")
    assert result.exit_code == 0, result.output
    setting = json.loads(result.stdout.splitlines()[-1])["setting"]
    assert (setting["max_tokens"], setting["layout"]["dp"]) == (20000, 2)


def test_ctrl_c_shows_and_keeps_what_was_found(call, monkeypatch):
    from steelyard.advise import rank

    every = rank.ranked

    def interrupted(*arguments):
        yield next(every(*arguments))
        raise KeyboardInterrupt

    monkeypatch.setattr(rank, "ranked", interrupted)
    result = call("--json")
    assert result.exit_code == 130
    assert "interrupted: 1 of 10 settings" in result.stderr
    assert len(json.loads(result.stdout.splitlines()[-1])["settings"]) == 1


def test_nothing_fits_is_an_answer(call):
    result = call("--gpu-memory", "4.2")
    assert result.exit_code == 0
    assert "nothing fits 0.2 GiB on 2 GPUs: at least" in " ".join(result.stdout.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "qwen2.5-7"], "unknown model preset 'qwen2.5-7' (did you mean qwen2.5-7b"),
        (["--gpu", "h10"], "unknown GPU 'h10' (did you mean h100"),
        (["--gpus", "0"], "gpus=0 must be a whole number of at least 1"),
        (["--gpu-memory", "0"], "gib=0.0 must be a number above 0"),
        (["--max-response", "40000"], "above the 32768 positions of"),
        (["--roles", "actor,critc"], "unknown role 'critc' (did you mean critic"),
        (["--roles", "reward"], "at least one of actor and critic"),
        (["--response-workload", "rl-code-16k"], "did you mean rl-code-16k-cap"),
        (["--lengths", "no.csv"], "no.csv: cannot be read"),
        (["--lengths", "no.csv", "--response-workload", "rl-code-16k-cap"], "contradict each other"),
        (["--tp", "16", "--gpus", "16"], "tp=16 does not divide the model's 8 attention heads"),
        (["--tp", "4"], "tp*pp*cp=4 does not divide 2 GPUs"),
        (["--tp", "2", "--dp", "2"], "needs 4 ranks"),
        (["--micro-batch-size", "2", "--max-token-len", "10000"], "18432 tokens per GPU of the longest rows, above"),
        (["--micro-batch-size", "0"], "micro_batch_size=0 must be"),
        (["--max-token-len", "0"], "max_tokens=0 must be"),
        (["--settings", "no.toml"], "no.toml: cannot be read"),
        (["--calibration", "no.json"], "no.json: cannot be read"),
        (["--reserve", "90"], "reserve_gib=90.0 must be"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(call, arguments, message):
    result = call(*arguments)
    assert result.exit_code == 2, result.output
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("error: ")
    assert message in lines[0]


def test_a_missing_option_is_named():
    result = CliRunner().invoke(app, ["advise", "--model", "qwen2.5-7b", "--gpus", "8"])
    assert result.exit_code == 2
    assert result.stderr == "error: --max-prompt is missing: give it, or a --settings file that says it\n"


def test_help_imports_no_torch():
    code = "import sys; from typer.testing import CliRunner; from steelyard.cli import app\n"
    code += "assert CliRunner().invoke(app, ['advise', '--help']).exit_code == 0; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
