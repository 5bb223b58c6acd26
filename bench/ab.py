"""Commit against commit: both are installed, and take turns on every cell, sample by sample.

The harness of this checkout (suites, baselines, this file) measures the package ``steelyard`` of each commit, so a
change of the measurement is never taken for a change of what is measured. Both sides are started anew for every round,
since a process keeps what chance gave it (addresses, hash seeds) for its life.

A run folder holds ``A/records.jsonl`` and ``B/records.jsonl`` with one run id: ``compare`` then reads samples with the
same index as pairs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench import worktrees
from bench.cells import Device, Machine, Task
from bench.environment import ROOT, capture
from bench.interleave import sides, take_turns
from bench.record import FILE_NAME, Environment, OutcomeRecord, RecordWriter, SeriesRecord
from steelyard.errors import InputError
from suites.matrix import Cell

NAMES = ("A", "B")
_SERIES = ("metric", "side", "variant")


def run_ab(
    revisions: Sequence[str],
    cells: Sequence[Cell],
    folder: Path,
    *,
    device: Device | None = None,
    rounds: int = 2,
    root: Path = ROOT,
    note: Callable[[str], None] = lambda text: None,
) -> None:
    """Weigh two commits of the repository ``root`` and write the records of both under ``folder``.

    Args:
        revisions: reference and candidate.
        cells: what to measure; ``pairs`` of each is divided over the rounds.
        rounds: how often both sides are started anew.
        note: told what happens.

    Raises:
        InputError: a revision is no commit, or cannot be installed here.
        SideFailed: a side's process ended.
    """
    commits = dict(zip(NAMES, (worktrees.resolve(root, revision) for revision in revisions), strict=True))
    with ExitStack() as stack:
        place = Path(stack.enter_context(TemporaryDirectory(prefix="steelyard-ab-")))
        pythons = {}
        for name, commit in commits.items():
            note(f"{name}: installing {commit[:7]}")
            pythons[name] = stack.enter_context(worktrees.installed(root, commit, place / name)).python
        answers = weigh(pythons, cells, device=device, rounds=rounds, note=note, own_package=place)
    for name, commit in commits.items():
        _write(folder / name, commit, cells, device, {cell: both[name] for cell, both in answers.items()})


def weigh(
    pythons: Mapping[str, Path],
    cells: Sequence[Cell],
    *,
    device: Device | None,
    rounds: int,
    first_round: int = 0,
    note: Callable[[str], None] = lambda text: None,
    own_package: Path | None = None,
) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """The answers of both sides for every cell: ``answers[cell][side]`` has one for each round.

    Args:
        own_package: where the package of each side must lie; None lets both use this checkout's.
    """
    answers: dict[str, dict[str, list[dict[str, Any]]]] = {cell.id: defaultdict(list) for cell in cells}
    for turn in range(first_round, first_round + rounds):
        with sides(dict(pythons), ROOT) as both:
            for side in both:
                package = Path(side.first_words()["steelyard"])
                if own_package is not None and not package.is_relative_to(own_package / side.name):
                    raise InputError(f"side {side.name} would measure {package}: its own package was not installed")
            for cell in cells:
                if any(answer["reason"] for side in answers[cell.id].values() for answer in side):
                    continue
                note(f"round {turn + 1}: {cell.id}")
                share = cell.model_copy(update={"pairs": -(-cell.pairs // rounds)})
                order = both if turn % 2 == 0 else both[::-1]
                for side, answer in zip(order, take_turns(*order, share.model_dump(), device, seed=turn), strict=True):
                    answers[cell.id][side.name].append(answer)
    return answers


def merge(answers: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The series of all rounds, samples of one after those of the other."""
    merged: dict[tuple, dict[str, Any]] = {}
    for answer in answers:
        for series in answer["series"]:
            key = tuple(series[name] for name in _SERIES)
            values = merged[key]["values"] if key in merged else []
            merged[key] = {**series, "values": [*values, *series["values"]]}
    return list(merged.values())


def _write(
    folder: Path,
    commit: str,
    cells: Sequence[Cell],
    device: Device | None,
    answers: Mapping[str, list[dict[str, Any]]],
) -> None:
    folder.mkdir()
    with RecordWriter(folder / FILE_NAME) as writer:
        for cell in cells:
            rounds = answers[cell.id]
            failed = next((answer for answer in rounds if answer["reason"]), None)
            known = next((answer["environment"] for answer in rounds if "environment" in answer), None)
            if known is None:
                known = capture(Task.of(cell, Machine.this(), device).device).model_dump()
            common = {
                "run": folder.parent.name,
                "cell": cell.id,
                "case": cell.model_dump(),
                "seconds": sum(answer.get("seconds", 0.0) for answer in rounds),
                "environment": Environment(**{**known, "commit": commit, "dirty": False}),
            }
            series = [] if failed else merge(rounds)
            for one in series:
                writer.write(SeriesRecord(**common, **one))
            status = "failed" if failed else "passed"
            reason, detail = (failed["reason"], failed["detail"]) if failed else ("", "")
            writer.write(OutcomeRecord(**common, status=status, reason=" ".join(reason.split()), detail=detail))
