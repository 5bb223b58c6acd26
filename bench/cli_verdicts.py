"""The commands that judge: ``compare``, ``gate``, ``ab`` and ``selftest``.

Exit codes: 0 fine, 1 regressed (``gate``: or improved), 2 bad input, 3 something could not be compared.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bench.cli_parts import AsJson, DeviceName, print_json
from steelyard.cli import bad_input_in_one_line

if TYPE_CHECKING:
    from bench.compare import Report
    from bench.record import Records

# A verdict and its reason are the widest column there is.
WIDTH = 180
NO_REFERENCE = 3

RunFile = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, or its records.jsonl.")]


def register(app: typer.Typer) -> None:
    """Add the commands to the program."""
    for command in (compare, gate, ab, selftest):
        app.command()(command)


def compare(
    reference: Annotated[Path, typer.Argument(metavar="REFERENCE", help="A run folder, or its records.jsonl.")],
    candidate: Annotated[Path, typer.Argument(metavar="CANDIDATE", help="The run that is judged.")],
    as_json: AsJson = False,
) -> None:
    """Judge one run against another."""
    with bad_input_in_one_line():
        from bench.compare import compare as judge

        report = judge(_read(reference), _read(candidate))
    _show(report, as_json, {"reference": str(reference), "candidate": str(candidate)})
    raise typer.Exit(report.exit_code)


def gate(
    run: RunFile,
    record: Annotated[
        bool, typer.Option("--record", help="Make this run the reference results of its platform and matrix.")
    ] = False,
    exact: Annotated[
        bool, typer.Option("--exact", help="Judge only what is not timed, by the results of any platform.")
    ] = False,
    folder: Annotated[
        Path | None, typer.Option("--reference", metavar="FOLDER", help="Instead of results/reference.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Judge a run by the reference results of its platform."""
    with bad_input_in_one_line():
        from bench import gate as gates

        where = folder or gates.REFERENCE
        records = _read(run)
        command = f"python -m bench gate {run} --record"
        if record:
            file = gates.record_reference(records, where)
            typer.echo(f"recorded {file}: commit it")
            if as_json:
                print_json({"recorded": str(file)})
            return
        found = gates.check(records, exact_only=exact, folder=where)
        if found is None:
            file = gates.reference_file(records, where)
            typer.echo(f"not comparable: there are no reference results {file}: record some with '{command}'")
            if as_json:
                print_json({"verdict": "not comparable", "exit_code": NO_REFERENCE, "reference": None})
            raise typer.Exit(NO_REFERENCE)
    typer.echo(f"reference results: {found.file}, made by commit {found.commit}")
    if found.asks_to_record:
        typer.echo(f"better than the reference results, or not in them: explain it, then record new ones: {command}")
    _show(found.report, as_json, {"reference": str(found.file), "run": str(run)}, found.exit_code)
    raise typer.Exit(found.exit_code)


def ab(
    reference: Annotated[str, typer.Argument(metavar="REV_A", help="The commit to compare with.")],
    candidate: Annotated[str, typer.Argument(metavar="REV_B", help="The commit that is judged.")],
    matrix: Annotated[str, typer.Option(metavar="NAME|FILE", help="What to measure.")] = "smoke",
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="SUITE|PATTERN", help="Only these suites or cells.")
    ] = None,
    pairs: Annotated[
        str, typer.Option(metavar="N|auto", help="Pairs of each cell; auto: as many as the self-test found enough.")
    ] = "auto",
    rounds: Annotated[int, typer.Option(min=1, help="How often both sides are started anew.")] = 2,
    device: Annotated[DeviceName | None, typer.Option(help="Default: as 'run' chooses.")] = None,
    repository: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where the commits are, if not in this checkout.")
    ] = None,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Folder that gets a folder for this run.")] = Path(
        "results/runs"
    ),
    as_json: AsJson = False,
) -> None:
    """Weigh one commit against another, both in turns on every cell."""
    with bad_input_in_one_line():
        from bench import worktrees
        from bench.ab import NAMES, run_ab
        from bench.cells import Machine, choose
        from bench.compare import compare as judge
        from bench.environment import ROOT
        from bench.record import new_run_folder
        from bench.selftest import with_pairs

        root = repository or ROOT
        name = device and device.value
        tasks = choose(matrix, Machine.this(), only or (), None, name)
        cells = with_pairs([task.cell for task in tasks if not task.reason], pairs, name)
        commits = [worktrees.resolve(root, revision) for revision in (reference, candidate)]
        folder = new_run_folder(out, f"ab-{Path(matrix).stem}", commits[1])
        run_ab(commits, cells, folder, device=name, rounds=rounds, root=root, note=_note)
        report = judge(*(_read(folder / side) for side in NAMES))
    typer.echo(f"A: {commits[0]}\nB: {commits[1]}\nrecords: {folder}")
    _show(report, as_json, {"run": str(folder), "A": commits[0], "B": commits[1]})
    raise typer.Exit(report.exit_code)


def selftest(
    seconds: Annotated[float, typer.Option(min=1, help="About how long to record steps.")] = 180.0,
    device: Annotated[DeviceName | None, typer.Option(help="Where the step runs (default: cpu).")] = None,
    folder: Annotated[
        Path | None, typer.Option("--reference", metavar="FOLDER", help="Instead of results/reference.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure on this machine how often verdicts are false, and how many pairs they need."""
    with bad_input_in_one_line():
        from bench import gate as gates
        from bench import selftest as tests

        result = tests.run_selftest(seconds, device=(device or DeviceName.cpu).value, note=_note)
        file = tests.store(result, folder or gates.REFERENCE)
    typer.echo(tests.text(result))
    typer.echo(f"stored: {file}")
    if as_json:
        print_json({**result.model_dump(mode="json"), "enough": result.enough, "file": str(file)})


def _read(path: Path) -> Records:
    from bench.record import read_records

    records = read_records(path)
    if records.dropped:
        typer.echo(f"warning: {records.dropped}", err=True)
    return records


def _note(text: str) -> None:
    typer.echo(text, err=True)


def _show(report: Report, as_json: bool, facts: dict[str, Any], exit_code: int | None = None) -> None:
    from rich.console import Console

    from bench.weigh_tables import verdict_table

    console = Console()
    console.width = max(console.width, WIDTH)
    table = verdict_table(report)
    if table.rows:
        console.print(table.rich())
    typer.echo(report.sentence)
    if as_json:
        print_json(
            {
                **facts,
                "verdict": report.verdict,
                "exit_code": report.exit_code if exit_code is None else exit_code,
                "counts": report.counts,
                "comparisons": report.comparisons,
            }
        )
