"""A dated report to commit: ``results/[model]_[hardware]_[date].md``, and a folder of its pictures and records.

The figures are those of the records, which stand beside it, compressed. It says every setting of every cell, and the
commands that repeat it.
"""

from __future__ import annotations

import json
import lzma
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench.gate import RUN_NAME
from bench.platforms import platform_name
from bench.report.markdown import LENGTHS, render
from bench.report.page import Page
from bench.report.runs import Against, Runs, Source
from bench.resume import PLAN_NAME, Plan
from bench.summary import Summary
from steelyard.cost import ModelShape, presets
from steelyard.errors import InputError
from suites import SUITES, matrix


def publish(folder: Path, runs: Runs, against: Against | None = None) -> Path:
    """Write the dated report of ``runs`` into ``folder``; returns its path.

    Raises:
        InputError: ``folder`` is a file.
    """
    if folder.exists() and not folder.is_dir():
        raise InputError(f"--publish {folder}: is a file: name a folder, such as results")
    name = report_name(runs)
    beside = folder / name
    beside.mkdir(parents=True, exist_ok=True)
    page = Page.draw(beside, runs, against, traces=False)
    for source in runs.sources:
        (folder / _packed(name, source)).write_bytes(lzma.compress(source.file.read_bytes()))
    text = render(
        page, LENGTHS[0], "dated.md.j2",
        pictures=f"{name}/", file=lambda source: _packed(name, source), link=lambda lines: _numbers(runs, lines),
        commands=[line for source in runs.sources for line in commands_of(source)], settings=settings_of(page.summary),
    )  # fmt: skip
    path = folder / f"{name}.md"
    path.write_text(text, encoding="utf-8")
    return path


def _packed(name: str, source: Source) -> str:
    return f"{name}/{source.run}.jsonl.xz"


def _numbers(runs: Runs, lines: tuple[int, int]) -> str:
    """Lines in a file that is not text where it stands; of several runs, with the run's name."""
    if not lines[0]:
        return "-"
    (source, first), (_, last) = map(runs.place, lines)
    numbers = str(first) if first == last else f"{first}-{last}"
    match = RUN_NAME.fullmatch(source.run)
    return numbers if len(runs.sources) == 1 else f"{match['matrix'] if match else source.run} {numbers}"


def report_name(runs: Runs) -> str:
    """``[model]_[hardware]_[date]`` of the last run."""
    models = list(dict.fromkeys(model_name(record.case["model"]) for record in runs.lines))
    environments = [record.environment for record in runs.lines]
    whole = next((one for one in environments if one.device == "cuda"), environments[-1])
    model = models[0] if len(models) == 1 else f"{len(models)}-models"
    return f"{model}_{platform_name(whole)}_{runs.sources[-1].records.lines[0].time:%Y-%m-%d}"


def model_name(sizes: dict[str, Any]) -> str:
    """The preset with these sizes, else layers and width."""
    for name in presets():
        preset = ModelShape.preset(name)
        if all(getattr(preset, key) == value for key, value in sizes.items()):
            return name
    return f"gpt-{sizes['layers']}x{sizes['hidden']}"


def settings_of(summary: Summary) -> dict[str, tuple[dict[str, str], dict[str, str]]]:
    """For every suite: what all its cells share, by setting, and what they do not, by cell."""
    suites: dict[str, dict[str, dict[str, str]]] = {}
    for cell in summary.cells:
        case = {name: _text(value) for name, value in cell.first.case.items() if name != "suite"}
        suites.setdefault(cell.suite, {})[cell.id] = case
    return {suite: _split(cases) for suite, cases in suites.items()}


def _split(cases: dict[str, dict[str, str]]) -> tuple[dict[str, str], dict[str, str]]:
    first = next(iter(cases.values()))
    common = {name: text for name, text in first.items() if all(case.get(name) == text for case in cases.values())}
    return common, {
        id: ", ".join(f"{name} = {text}" for name, text in case.items() if name not in common)
        for id, case in cases.items()
    }


def _text(value: object) -> str:
    if isinstance(value, dict):
        return " ".join(f"{key}={_text(one)}" for key, one in value.items() if one is not None) or "-"
    return json.dumps(value)


def commands_of(source: Source) -> Iterable[str]:
    """The commit, and what to run at it."""
    first = source.records.lines[0]
    plan_file = source.file.with_name(PLAN_NAME)
    plan = Plan.load(plan_file.parent) if plan_file.exists() else None
    match = RUN_NAME.fullmatch(source.run)
    name = plan.matrix if plan else match["matrix"] if match else ""
    if first.environment.commit:
        changed = "  # and changes that no commit has" if first.environment.dirty else ""
        yield f"git checkout {first.environment.commit}{changed}"
    words = ["python", "-m", "bench", "run", "--matrix", name]
    if plan and plan.device:
        words += ["--device", plan.device]
    for pattern in _only(name, list(dict.fromkeys(record.cell for record in source.records.lines))):
        words += ["--only", pattern]
    yield shlex.join(words)


def _only(name: str, ran: list[str]) -> list[str]:
    """What keeps the cells that ran, of a matrix that has more of them: suites where that is enough, else cells."""
    try:
        every = [cell.id for cell in matrix.load(name, list(SUITES)).cells()]
    except InputError:
        return []
    if not set(ran) < set(every):
        return []
    suites = list(dict.fromkeys(id.partition("/")[0] for id in ran))
    return suites if {id for id in every if id.partition("/")[0] in suites} == set(ran) else ran
