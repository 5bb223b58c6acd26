"""The gate: reference results by platform, in both directions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from bench.cli import app
from bench.compare import Verdict, compare
from bench.gate import check, read_reference, record_reference, reference_file
from bench.platforms import platform_name
from bench.record import FILE_NAME, Records, RecordWriter
from bench.tests.judged_runs import ENVIRONMENT, made_run, steps
from bench.tests.made_up import SIZES, make_cell
from steelyard.errors import InputError
from suites.measure import Series

NAME = "20261130T222556Z-smoke-0123456"
COUNT = Series("micro_batches", "optimised", "micro-batches", "lower", [20])
LOSS = Series("loss", "optimised", "1", "none", [0.5, 0.4])


def run(*series: Series, **facts: object) -> Records:
    return made_run(*(series or (*steps(), COUNT, LOSS)), **{"run": NAME, **facts})


def bench(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def on_disk(folder: Path, records: Records) -> Path:
    folder.mkdir()
    with RecordWriter(folder / FILE_NAME) as writer:
        writer.write(*records.lines)
    return folder


def test_reference_results_lie_by_platform_and_matrix_and_name_their_commit(tmp_path: Path) -> None:
    file = record_reference(run(), tmp_path)
    assert file == tmp_path / "cpu-a-processor-2-cores" / "smoke.json"
    assert read_reference(file).commit == ENVIRONMENT.commit


def test_a_gpu_and_its_processor_name_the_platform() -> None:
    environment = ENVIRONMENT.model_copy(update={"device": "cuda", "device_name": "NVIDIA H200"})
    assert platform_name(environment) == "cuda-nvidia-h200-a-processor-2-cores"


def test_the_same_samples_pass_and_what_no_verdict_needs_is_not_kept(tmp_path: Path) -> None:
    file = record_reference(run(), tmp_path)
    gate = check(run(), folder=tmp_path)
    assert gate.exit_code == 0
    assert not gate.asks_to_record
    assert "loss" not in file.read_text()
    assert compare(read_reference(file).records(), run()).verdict == Verdict.neutral


@pytest.mark.parametrize(("count", "verdict"), [(21, Verdict.regressed), (19, Verdict.improved)])
def test_a_changed_count_stops_the_gate_both_ways(tmp_path: Path, count: int, verdict: Verdict) -> None:
    record_reference(run(COUNT), tmp_path)
    gate = check(run(Series("micro_batches", "optimised", "micro-batches", "lower", [count])), folder=tmp_path)
    assert (gate.report.verdict, gate.exit_code) == (verdict, 1)
    assert gate.asks_to_record == (verdict == Verdict.improved)


def test_exact_results_of_another_platform_serve_where_nothing_is_timed(tmp_path: Path) -> None:
    record_reference(run(), tmp_path)
    elsewhere = {"cpu": "Another", "device_name": "Another"}
    assert check(run(**elsewhere), folder=tmp_path) is None
    assert check(run(**elsewhere), exact_only=True, folder=tmp_path).exit_code == 0


@pytest.mark.parametrize(
    ("records", "word"),
    [
        (run(dirty=True), "commit them"),
        (run(commit=None), "commit them"),
        (run(status="failed"), "did not pass"),
        (run(run="somewhere"), "does not say its matrix"),
    ],
    ids=["dirty", "no commit", "failed", "no matrix"],
)
def test_only_whole_runs_of_a_commit_are_recorded(tmp_path: Path, records: Records, word: str) -> None:
    with pytest.raises(InputError, match=word):
        record_reference(records, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_run_that_was_made_again_belongs_to_the_same_matrix(tmp_path: Path) -> None:
    assert reference_file(run(run=f"{NAME}-2"), tmp_path) == reference_file(run(), tmp_path)


def test_the_command_records_judges_and_tells_what_to_type(tmp_path: Path) -> None:
    reference = ("--reference", tmp_path / "reference")
    folder = on_disk(tmp_path / NAME, run())
    none_yet = bench("gate", folder, *reference)
    assert none_yet.exit_code == 3
    assert f"gate {folder} --record" in none_yet.output
    assert bench("gate", folder, "--record", *reference).exit_code == 0
    assert bench("gate", folder, *reference).exit_code == 0
    better = on_disk(tmp_path / "better", run(*steps(0.5, seed=1), COUNT, LOSS, run=f"{NAME}-2"))
    result = bench("gate", better, "--json", *reference)
    assert result.exit_code == 1
    assert f"gate {better} --record" in result.output
    answer = json.loads(result.stdout.splitlines()[-1])
    assert (answer["verdict"], answer["exit_code"], answer["counts"]["improved"]) == ("improved", 1, 2)


def test_the_compare_command_ends_with_the_verdicts_code(tmp_path: Path) -> None:
    fast, slow = on_disk(tmp_path / "fast", run()), on_disk(tmp_path / "slow", run(*steps(1.2), COUNT, LOSS))
    assert bench("compare", fast, fast / FILE_NAME).exit_code == 0
    result = bench("compare", fast, slow, "--json")
    assert result.exit_code == 1
    answer = json.loads(result.stdout.splitlines()[-1])
    one = next(one for one in answer["comparisons"] if one["verdict"] == "regressed")
    assert (one["metric"], one["basis"]) == ("tokens_per_second", "interleaved")
    other = on_disk(tmp_path / "other", run(cores=64))
    assert bench("compare", fast, other).exit_code == 3
    nowhere = bench("compare", fast, tmp_path / "nowhere")
    assert nowhere.exit_code == 2
    assert nowhere.stderr.count("\n") == 1


def test_a_planted_change_of_a_plans_counts_stops_the_gate_without_timing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from suites import planning

    cell = make_cell("planning", max_tokens=200, pairs=1, warmup=0, planners=["next-fit"])
    cell = cell.model_copy(update={"rows": 32})
    record_reference(run(*planning.measure(cell)), tmp_path)
    assert check(run(*planning.measure(cell)), exact_only=True, folder=tmp_path).exit_code == 0
    whole = planning.plan_step
    monkeypatch.setattr(planning, "plan_step", lambda rows, cap, *rest, **more: whole(rows, cap // 2, *rest, **more))
    gate = check(run(*planning.measure(cell)), exact_only=True, folder=tmp_path)
    assert gate.exit_code == 1
    bad = {(one.metric, one.variant) for one in gate.report.comparisons if one.verdict == Verdict.regressed}
    assert ("micro_batches", "Steelyard") in bad


def test_a_planted_change_of_predicted_bytes_stops_the_gate_without_timing(tmp_path: Path) -> None:
    from steelyard.memory.predict import predict_peak
    from steelyard.parallel import ParallelLayout

    def predicted(**fault: object) -> Series:
        found = predict_peak(SIZES.shape(), ParallelLayout(), [[64], [64]], **fault)
        return Series("peak_bytes", "optimised", "B", "lower", [found.peak_bytes], "predicted")

    record_reference(run(predicted()), tmp_path)
    assert check(run(predicted()), folder=tmp_path).exit_code == 0
    # A builder that loses the reduction of gradients in float32 needs fewer bytes: better, and wrong.
    assert check(run(predicted(override_ddp_config={"grad_reduce_in_fp32": False})), folder=tmp_path).exit_code == 1
