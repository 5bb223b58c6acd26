"""The runner: what a suite returns or raises becomes records, and one bad cell ends only itself."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.cells import Machine, Task, choose
from bench.record import OutcomeRecord, SeriesRecord, read_records
from bench.tests.made_up import make_cell, parity_series, throughput_series
from steelyard.errors import InputError
from suites import PACED, SUITES, WITHOUT_RANKS
from suites.launch.local import run_ranks
from suites.matrix import Cell, Layout
from suites.measure import Series


def outcomes(folder: Path) -> list[OutcomeRecord]:
    return [record for record in read_records(folder).lines if isinstance(record, OutcomeRecord)]


def sum_of_ranks(payload: dict) -> list[float]:
    """Runs in every rank of the cell below."""
    import torch
    import torch.distributed as dist

    if dist.get_rank() == payload["dies"]:
        os.kill(os.getpid(), signal.SIGKILL)
    total = torch.ones(1)
    dist.all_reduce(total)
    return total.tolist()


def rank_suite(dies: int | None) -> Callable[[Cell, str | None], list[Series]]:
    def measure(cell: Cell, device: str | None = None) -> list[Series]:
        values = run_ranks(
            "bench.tests.test_run:sum_of_ranks",
            cell.layout.parallel().world,
            {"dies": dies},
            time_limit=60,
            device=device,
        )
        return [Series("ranks", "both", "1", "none", values)]

    return measure


def test_a_cell_on_real_ranks_leaves_its_samples(add_suite, weigh) -> None:
    add_suite("ranks", rank_suite(dies=None))
    cell = make_cell("ranks", layout=Layout(dp=2))
    series, outcome = read_records(weigh(cell)).lines
    assert isinstance(series, SeriesRecord)
    assert series.values == (2.0,)
    assert series.case == cell.model_dump(mode="json")
    assert series.environment.device == "cpu"
    assert series.seconds > 0
    assert outcome.status == "passed"


def test_a_rank_that_dies_fails_its_cell_and_the_run_goes_on(add_suite, weigh) -> None:
    add_suite("dying", rank_suite(dies=1))
    add_suite("fine", lambda cell, device: throughput_series())
    dead, fine = outcomes(weigh(make_cell("dying", layout=Layout(dp=2)), make_cell("fine")))
    assert (dead.status, dead.reason) == ("failed", "rank 1 was ended by signal SIGKILL")
    assert "rank 1" in dead.detail
    assert fine.status == "passed"


def test_an_error_is_kept_with_its_traceback(add_suite, weigh) -> None:
    def broken(cell: Cell, device: str | None) -> list[Series]:
        raise ZeroDivisionError("of a test")

    add_suite("broken", broken)
    (outcome,) = outcomes(weigh(make_cell("broken")))
    assert (outcome.status, outcome.reason) == ("failed", "ZeroDivisionError: of a test")
    assert "Traceback" in outcome.detail


def test_bad_input_inside_a_cell_is_kept_as_its_message(add_suite, weigh) -> None:
    def refuses(cell: Cell, device: str | None) -> list[Series]:
        raise InputError("max_tokens=3 is too small: raise it")

    add_suite("refuses", refuses)
    (outcome,) = outcomes(weigh(make_cell("refuses")))
    assert (outcome.status, outcome.reason) == ("failed", "max_tokens=3 is too small: raise it")


def test_a_broken_limit_fails_the_cell_and_keeps_its_samples(add_suite, weigh) -> None:
    add_suite("parity", lambda cell, device: parity_series(error=4e-4))
    lines = read_records(weigh(make_cell("parity"))).lines
    assert lines[0].values == (2e-4, 4e-4)
    assert lines[-1].status == "failed"
    assert "parity_max_error is 0.0004" in lines[-1].reason
    assert "above its limit 1e-05" in lines[-1].reason


def test_sides_with_unequal_numbers_of_samples_fail(add_suite, weigh) -> None:
    def unequal(cell: Cell, device: str | None) -> list[Series]:
        return [
            Series("tokens_per_second", "naive", "tokens/s", "higher", [1.0, 2.0]),
            Series("tokens_per_second", "optimised", "tokens/s", "higher", [1.0]),
        ]

    add_suite("unequal", unequal)
    (outcome,) = read_records(weigh(make_cell("unequal"))).lines
    assert "unequal numbers" in outcome.reason


def test_variants_of_a_side_stand_beside_each_other_and_must_have_as_many_samples(add_suite, weigh) -> None:
    def variants(cell: Cell, device: str | None) -> list[Series]:
        names = ("one", "two")
        return [Series("ms", "naive", "ms", "lower", [1.0] * cell.pairs, variant=name) for name in names] + [
            Series("ms", "optimised", "ms", "lower", [1.0] * 5)
        ]

    add_suite("variants", variants)
    lines = read_records(weigh(make_cell("variants"), make_cell("variants", "rl-math-short", pairs=4))).lines
    assert [line.variant for line in lines if isinstance(line, SeriesRecord)] == ["one", "two", ""]
    passed, failed = (line for line in lines if isinstance(line, OutcomeRecord))
    assert passed.status == "passed"
    assert "naive two" in failed.reason


ONE_GPU = Machine("a machine", cores=8, gpus=1)


def test_a_cell_takes_a_gpu_for_every_rank_or_the_cpu() -> None:
    assert Task.of(make_cell("throughput"), ONE_GPU).how == "measured on CUDA, 1 rank"
    assert Task.of(make_cell("throughput", layout=Layout(dp=2)), ONE_GPU).how == "measured on the CPU, 2 ranks"
    assert Task.of(make_cell("throughput"), ONE_GPU, "cpu").device == "cpu"
    assert Task.of(make_cell("packing", layout=Layout(cp=4)), ONE_GPU).device == "cuda", "it takes one rank's part"


def test_what_starts_no_ranks_is_weighed_on_the_cpu_whatever_its_layout() -> None:
    task = Task.of(make_cell("planning", layout=Layout(dp=64)), ONE_GPU, "cuda")
    assert (task.device, task.reason) == ("cpu", "")


def test_a_cell_for_more_gpus_than_there_are_says_so_and_did_not_run(add_suite, weigh) -> None:
    add_suite("throughput", lambda cell, device: throughput_series())
    (outcome,) = outcomes(weigh(make_cell("throughput", layout=Layout(dp=2), device="cuda")))
    assert outcome.status == "not_run"
    assert outcome.reason == "it needs 2 GPUs, and a machine has 0"


def test_what_is_only_predicted_takes_no_times_and_may_share_a_machine() -> None:
    timed = {
        (suite, dp): Task.of(make_cell(suite, layout=Layout(dp=dp)), ONE_GPU).job().timed
        for suite in ("oom", "handover", "memory", "parity", "planning", "throughput")
        for dp in (1, 2)
    }
    assert {suite for (suite, dp), one in timed.items() if one and dp == 2} == {"planning", "throughput"}
    assert {suite for (suite, dp), one in timed.items() if one and dp == 1} == {
        "oom", "handover", "planning", "throughput",
    }  # fmt: skip


HARDWARE = {"cpu": 0, "predicted": 0, "h200x1": 1, "h100x8": 8, "h100x64": 64}


@pytest.mark.parametrize(("name", "gpus"), HARDWARE.items())
def test_a_matrix_for_some_hardware_runs_on_it_whole(name: str, gpus: int) -> None:
    tasks = choose(name, Machine("this hardware", cores=2, gpus=gpus))
    assert not [task.reason for task in tasks if task.reason]
    if not gpus:
        return
    on_gpus = [task for task in tasks if task.cell.suite not in WITHOUT_RANKS | PACED]
    # Packing takes one rank's part, whatever the layout.
    worlds = {task.cell.layout.parallel().world for task in on_gpus if task.cell.suite != "packing"}
    assert worlds == {gpus}
    assert {task.cell.suite for task in on_gpus if task.device == "cuda" and task.cell.device} >= {
        "parity",
        "throughput",
    }


@pytest.mark.parametrize("name", [name for name, gpus in HARDWARE.items() if gpus])
def test_a_machine_without_gpus_shows_such_a_matrix_and_says_what_it_cannot_fill(name: str) -> None:
    tasks = choose(name, Machine("a laptop", cores=2, gpus=0))
    for task in tasks:
        asked_for_gpus = task.cell.device == "cuda" and task.cell.suite not in WITHOUT_RANKS
        assert task.how.startswith("cannot run: it needs" if asked_for_gpus else ("predicted", "paced", "computed"))


def test_the_cpu_matrix_has_every_suite() -> None:
    assert {task.cell.suite for task in choose("cpu", Machine("a laptop", cores=2, gpus=0))} == set(SUITES)


def test_the_largest_predicted_layout_has_1024_gpus() -> None:
    worlds = {task.cell.layout.parallel().world for task in choose("predicted", Machine("a laptop", 2, 0))}
    assert max(worlds) == 1024


def test_a_cluster_must_have_a_core_for_every_rank() -> None:
    cluster = Machine("the Ray cluster", cores=2, gpus=0, slots=2)
    assert Task.of(make_cell("parity", layout=Layout(dp=2)), cluster).reason == ""
    assert "it needs 4 CPUs" in Task.of(make_cell("parity", layout=Layout(dp=4)), cluster).reason


def test_a_time_budget_ends_the_cell_that_runs_and_leaves_out_the_rest(add_suite, weigh) -> None:
    def slow(cell: Cell, device: str | None) -> list[Series]:
        time.sleep(60 * (cell.workload != "rl-code-16k-cap"))
        return throughput_series()

    add_suite("slow", slow)
    cells = [make_cell("slow", name) for name in ("rl-code-16k-cap", "rl-math-short", "azure-code")]
    ends = outcomes(weigh(*cells, budget=3.0))
    assert [one.status for one in ends] == ["passed", "not_run", "not_run"]
    assert {one.reason for one in ends[1:]} == {"the time budget was used up"}


def test_a_suite_without_samples_fails(add_suite, weigh) -> None:
    add_suite("empty", lambda cell, device: [])
    (outcome,) = outcomes(weigh(make_cell("empty")))
    assert (outcome.status, outcome.reason) == ("failed", "the suite returned no samples")


def test_a_slice_of_the_predicted_matrix_runs(weigh) -> None:
    """A cell of each suite, of the widest layout, with two layers: nothing else makes a large model slow."""
    tasks = choose("predicted", Machine("a laptop", cores=2, gpus=0))
    slices = []
    for suite in ("oom", "handover", "planning"):
        cell = max(
            (task.cell for task in tasks if task.cell.suite == suite and task.cell.layout.pp == 1),
            key=lambda one: one.layout.parallel().world,
        )
        slices.append(cell.model_copy(update={"model": cell.model.model_copy(update={"layers": 2}), "pairs": 1}))
    records = read_records(weigh(*slices)).lines
    assert [one.status for one in records if isinstance(one, OutcomeRecord)] == ["passed"] * 3
    series = [one for one in records if isinstance(one, SeriesRecord)]
    thresholds = [one.values[0] for one in series if one.metric == "threshold_tokens"]
    assert all(tokens > 16384 for tokens in thresholds), "two layers of 32B leave room"
