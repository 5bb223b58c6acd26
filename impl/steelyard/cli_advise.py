"""``steelyard advise``: which settings fit, how fast they are, and what one change would do."""

from __future__ import annotations

import contextlib
import itertools
import json
import tomllib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from steelyard.cli_options import CpKind, Recompute, bad_input_in_one_line, shape_of
from steelyard.errors import InputError

if TYPE_CHECKING:
    from steelyard.advise.job import Job
    from steelyard.advise.predictions import Predictions
    from steelyard.advise.rank import Advice
    from steelyard.advise.setting import Setting
    from steelyard.advise.speed import Clock
    from steelyard.advise.verl_settings import VerlSettings

INTERRUPTED = 130


class Emit(StrEnum):
    verl = "verl"


def advise(
    model: Annotated[
        str | None, typer.Option(metavar="PRESET|FILE", help="A shipped shape, or a Hugging Face config.json.")
    ] = None,
    gpus: Annotated[int | None, typer.Option(help="GPUs of the trainer.")] = None,
    gpu: Annotated[str, typer.Option(metavar="NAME", help="a100, h100, h200 or b200.")] = "h100",
    gpu_memory: Annotated[float | None, typer.Option(metavar="GIB", help="Instead of what the GPU has.")] = None,
    gpus_per_node: Annotated[int | None, typer.Option(help="GPUs that NVLink connects; by default 8.")] = None,
    max_prompt: Annotated[int | None, typer.Option(help="Longest prompt in tokens.")] = None,
    max_response: Annotated[int | None, typer.Option(help="Longest response in tokens.")] = None,
    max_positions: Annotated[int | None, typer.Option(help="Instead of the model's own.")] = None,
    rows: Annotated[int | None, typer.Option(help="Rows of a mini-batch, over all ranks; by default 128.")] = None,
    roles: Annotated[
        str | None, typer.Option(help="Models that share the GPUs: actor, critic, reference, reward.")
    ] = None,
    rollout_memory: Annotated[
        float, typer.Option(metavar="GIB", help="What the rollout engine keeps while training.")
    ] = 0.0,
    rollout_share: Annotated[
        float | None, typer.Option(metavar="SHARE", help="Of a GPU, that the rollout engine takes to generate.")
    ] = None,
    reserve: Annotated[float, typer.Option(metavar="GIB", help="What is left free of a GPU.")] = 4.0,
    response_workload: Annotated[
        str | None, typer.Option(metavar="NAME", help="Lengths shipped with Steelyard.")
    ] = None,
    lengths: Annotated[Path | None, typer.Option(metavar="FILE", help="Your own lengths, CSV or JSONL.")] = None,
    prompt_column: Annotated[str | None, typer.Option(help="Column of the prompts in that file.")] = None,
    response_column: Annotated[str, typer.Option(help="Column of the responses in that file.")] = "response_tokens",
    calibration: Annotated[Path | None, typer.Option(metavar="FILE", help="Measured speed; see speed.py.")] = None,
    settings: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Your own settings under verl's names, YAML or TOML.")
    ] = None,
    tp: Annotated[int | None, typer.Option(help="Your own settings: tensor-parallel size.")] = None,
    sp: Annotated[bool | None, typer.Option(help="Sequence parallelism; by default on with tp.")] = None,
    pp: Annotated[int | None, typer.Option(help="Pipeline stages.")] = None,
    vpp: Annotated[int | None, typer.Option(help="Virtual stages per pipeline stage.")] = None,
    cp: Annotated[int | None, typer.Option(help="Context-parallel size.")] = None,
    cp_kind: Annotated[CpKind | None, typer.Option(help="How context-parallel ranks share keys.")] = None,
    dp: Annotated[int | None, typer.Option(help="Data-parallel size; by default what is left.")] = None,
    ep: Annotated[int | None, typer.Option(help="Expert-parallel size.")] = None,
    max_token_len: Annotated[int | None, typer.Option(help="Token budget of a micro-batch per GPU.")] = None,
    micro_batch_size: Annotated[int | None, typer.Option(help="Rows of fixed micro-batches.")] = None,
    recompute: Annotated[Recompute | None, typer.Option(help="Activations computed again backwards.")] = None,
    offload: Annotated[bool | None, typer.Option(help="Roles leave the GPU while another one works.")] = None,
    chunked_logits: Annotated[bool | None, typer.Option(help="Log-probabilities in chunks of tokens.")] = None,
    optimizer_on_host: Annotated[
        bool | None, typer.Option(help="Optimizer state and step in the host's memory.")
    ] = None,
    nodes_to: Annotated[int | None, typer.Option(min=1, metavar="N", help="Would up to N nodes help?")] = None,
    top: Annotated[int, typer.Option(min=1, help="Settings that are shown.")] = 10,
    emit: Annotated[Emit | None, typer.Option(help="Print the setting as overrides of a trainer.")] = None,
    picture: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw memory against response length.")] = None,
    cache_folder: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Where predictions are kept.")] = None,
    processes: Annotated[int | None, typer.Option(min=1, help="By default one per core.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on the last line.")] = False,
) -> None:
    """Which settings fit, fastest first; with settings of your own, whether they fit and what to change."""
    given = dict(locals())  # by the names of the options, which messages and a settings file share
    with bad_input_in_one_line():
        # megatron-core's imports warn of everything that it could use and does not find.
        warnings.simplefilter("ignore")
        from steelyard.advise.cache import Cache
        from steelyard.advise.predictions import Predictions, usual_workers

        with Predictions(Cache(cache_folder), processes or usual_workers()) as predictions:
            answer = _Answer.of(given, predictions)
            data = answer.own_settings() if answer.setting is not None else answer.ranking(top)
            if nodes_to is not None and not answer.interrupted:
                data["nodes"] = answer.more_nodes(nodes_to)
            if emit is not None:
                data["overrides"] = answer.overrides()
            if picture is not None:
                from steelyard.advise.picture import draw

                draw(answer.job, answer.shown, predictions, picture)
    if as_json:
        typer.echo(json.dumps(data))
    if answer.interrupted:
        raise typer.Exit(INTERRUPTED)


_LAYOUT = ("tp", "sp", "pp", "vpp", "cp", "cp_kind", "dp", "ep")
_SETTING = {
    "max_token_len": "max_tokens",
    "micro_batch_size": "micro_batch_size",
    "recompute": "recompute",
    "offload": "offload",
    "chunked_logits": "chunked_logits",
    "optimizer_on_host": "optimizer_on_host",
}


@dataclass
class _Answer:
    """What is printed, one question after the other.

    Attributes:
        job, setting: what was asked; without settings of one's own, ``setting`` is None.
        shown: settings that were printed as fitting, or one's own: those of a picture, the first for overrides.
        interrupted: Ctrl-C ended the search.
    """

    job: Job
    setting: Setting | None
    clock: Clock
    predictions: Predictions
    shown: list[Setting]
    interrupted: bool = False

    @classmethod
    def of(cls, given: dict[str, Any], predictions: Predictions) -> _Answer:
        from steelyard.advise.speed import calibrated, stated

        read = _from_file(given["settings"])
        facts = {} if read is None else read.facts
        job = _job({**facts, **{name: value for name, value in given.items() if value is not None}})
        setting = _setting(job, given, None if read is None else read.setting)
        for line in () if read is None else read.assumed:
            typer.echo(f"note: {line}", err=True)
        if read is not None and read.ignored:
            typer.echo(f"note: nothing to memory: {', '.join(read.ignored)}", err=True)
        file = given["calibration"]
        clock = stated(job.shape, job.gpu) if file is None else calibrated(job.shape, file)
        return cls(job, setting, clock, predictions, [])

    def ranking(self, top: int) -> dict[str, Any]:
        """The fastest settings that fit."""
        from steelyard.advise.memory import least_gib
        from steelyard.advise.rank import candidates, ranked
        from steelyard.advise.table import in_words, job_data, setting_data, settings_table

        found: list[Advice] = []
        with self._progress(f"settings for {self.job.gpus} GPUs", top) as advance:
            try:
                for advice in itertools.islice(ranked(self.job, self.predictions, self.clock), top):
                    found.append(advice)
                    advance()
            except KeyboardInterrupt:
                self.interrupted = True
        _print(in_words(self.job), settings_table(found))
        if self.interrupted:
            typer.echo(f"interrupted: {len(found)} of {top} settings; the predictions made so far are kept", err=True)
        elif not found:
            least = min((least_gib(self.job, setting) for setting in candidates(self.job)), default=0.0)
            words = f"at least {least:.1f} GiB are needed" if least else "Megatron can build no layout"
            typer.echo(f"nothing fits {self.job.available_gib:g} GiB on {self.job.gpus} GPUs: {words}")
        self._assumptions()
        self.shown = [advice.setting for advice in found]
        return {
            **job_data(self.job, self.clock),
            "settings": [setting_data(advice.fit, advice.speed) for advice in found],
            "interrupted": self.interrupted,
        }

    def own_settings(self) -> dict[str, Any]:
        """Whether they fit, and single changes."""
        from steelyard.advise.changes import changes
        from steelyard.advise.memory import check
        from steelyard.advise.speed import speed
        from steelyard.advise.table import change_data, changes_table, job_data, setting_data, verdict

        assert self.setting is not None
        with self._progress("your settings and single changes", None):
            fit = check(self.job, self.setting, self.predictions)
            found = changes(self.job, self.setting, self.predictions, self.clock)
        time = None
        with contextlib.suppress(InputError):
            time = speed(self.job, self.setting, self.clock)
        typer.echo(verdict(self.job, self.setting, fit, time))
        if found:
            _print("One change at a time", changes_table(found))
        self._assumptions()
        fitting = [change.setting for change in found if change.fit.fits and change.job == self.job]
        self.shown = [self.setting, *fitting] if fit.fits else [*fitting, self.setting]
        return {
            **job_data(self.job, self.clock),
            "setting": setting_data(fit, time),
            "changes": [change_data(change) for change in found],
        }

    def more_nodes(self, up_to: int) -> dict[str, Any]:
        """What so many nodes would give, and whether they help."""
        from steelyard.advise.changes import whether_nodes_help, whether_ranks_help, with_more_nodes
        from steelyard.advise.table import nodes_table, setting_data

        with self._progress(f"up to {up_to} nodes", None):
            nodes = with_more_nodes(self.job, up_to, self.predictions, self.clock)
            own = self.setting and whether_ranks_help(self.job, self.setting, self.predictions)
        _print("More nodes", nodes_table(nodes))
        answer = whether_nodes_help(self.job, nodes)
        if own is not None:
            typer.echo(f"More nodes as data-parallel ranks of your settings: {own}.")
        typer.echo(f"More nodes in the best layout: {answer}.")
        best = [{"gpus": one.gpus, "best": one.best and setting_data(one.best.fit, one.best.speed)} for one in nodes]
        return {"answer": answer, "own_settings": own, "best": best}

    def overrides(self) -> dict[str, Any]:
        """The first setting under verl's names, printed as overrides of its command line."""
        from steelyard.advise.verl_settings import command_line, to_verl

        if not self.shown:
            raise InputError("--emit verl: there is no setting that fits")
        found = to_verl(self.shown[0], self.job)
        for line in command_line(found):
            typer.echo(line)
        return found

    def _assumptions(self) -> None:
        from steelyard.advise.table import assumptions

        for line in assumptions(self.job, self.clock):
            typer.echo(line)

    @contextlib.contextmanager
    def _progress(self, what: str, total: int | None) -> Iterator[Any]:
        """A bar on a terminal's stderr that is gone at the end; yields what moves it on."""
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        console = Console(stderr=True)
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
            task = bar.add_task(what, total=total)
            self.predictions.told = lambda: bar.update(
                task, description=f"{what} ({self.predictions.runs} predictions)"
            )
            yield lambda: bar.advance(task)


def _print(title: str, table: Any) -> None:
    from rich.console import Console

    from steelyard.advise.table import NOT_VERIFIED

    typer.echo(f"{title}: {NOT_VERIFIED}")
    # A narrower terminal wraps its lines, which cuts no figure off.
    console = Console(highlight=False)
    Console(highlight=False, width=max(console.width, 100)).print(table)


def _from_file(path: Path | None) -> VerlSettings | None:
    """One's own setting and facts of the job out of a file under verl's names."""
    if path is None:
        return None
    from steelyard.advise.verl_settings import from_verl

    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"--settings {path}: cannot be read ({error.strerror}): check the path") from None
    try:
        values = tomllib.loads(text) if path.suffix == ".toml" else _yaml(text)
    except ValueError as error:
        raise InputError(f"--settings {path}: cannot be understood ({error})") from None
    if not isinstance(values, dict):
        raise InputError(f"--settings {path}: holds a {type(values).__name__}: give names and values")
    return from_verl(values)


def _yaml(text: str) -> Any:
    try:
        import yaml
    except ImportError:
        raise InputError("YAML needs pyyaml: pip install pyyaml, or write the settings as a .toml file") from None
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(error) from None


def _job(given: dict[str, Any]) -> Job:
    from steelyard.advise import Job, gpu_named

    for name in ("model", "gpus", "max_prompt", "max_response"):
        if given.get(name) is None:
            raise InputError(f"--{name.replace('_', '-')} is missing: give it, or a --settings file that says it")
    machine = gpu_named(given["gpu"])
    if given.get("gpu_memory") is not None:
        machine = replace(machine, gib=given["gpu_memory"])
    roles = given.get("roles", "actor")
    rows = given.get("rows", 128)
    return Job(
        shape_of(_preset(given["model"]), given.get("max_positions")),
        given["gpus"],
        machine,
        given["max_prompt"],
        given["max_response"],
        roles=tuple(roles.replace(" ", "").split(",")) if isinstance(roles, str) else tuple(roles),
        lengths=_lengths(given, rows),
        rows=rows,
        gpus_per_node=given.get("gpus_per_node", 8),
        reserve_gib=given["reserve"],
        rollout_gib=given["rollout_memory"],
        rollout_share=given.get("rollout_share", 0.0),
    )


def _preset(name: str) -> str:
    """``Qwen/Qwen2.5-7B-Instruct``, which a settings file may say, as the preset of its sizes."""
    from steelyard.cost import presets

    short = name.rpartition("/")[2].casefold().removesuffix("-instruct").removesuffix("-base")
    return short if short in presets() and not Path(name).exists() else name


def _lengths(given: dict[str, Any], rows: int) -> Any:
    """Drawn rows, or None where nothing is said of lengths."""
    from steelyard.lengths import read_lengths, workload

    name, file = given.get("response_workload"), given.get("lengths")
    if name is not None and file is not None:
        raise InputError("--response-workload and --lengths contradict each other: give one of them")
    if name is not None:
        return workload(name).draw(rows, 0)
    if file is not None:
        return read_lengths(file, given.get("prompt_column"), given["response_column"]).draw(rows, 0)
    return None


def _setting(job: Job, given: dict[str, Any], from_file: Setting | None) -> Setting | None:
    """One's own settings, from the file and from options, which win; None where there are neither."""
    from steelyard.advise.memory import row_tokens
    from steelyard.advise.setting import Setting
    from steelyard.parallel import ParallelLayout

    sizes = {name: given[name] for name in _LAYOUT if given[name] is not None}
    more = {ours: given[option] for option, ours in _SETTING.items() if given[option] is not None}
    if not sizes and not more:
        return from_file
    if from_file is not None:
        same = {name: getattr(from_file.layout, name) for name in ("tp", "pp", "vpp", "cp", "cp_kind", "ep")}
        sizes = {**same, **sizes}
    ranks = sizes.get("tp", 1) * sizes.get("pp", 1) * sizes.get("cp", 1)
    if "dp" not in sizes:
        if ranks < 1 or job.gpus % ranks:
            raise InputError(f"tp*pp*cp={ranks} does not divide {job.gpus} GPUs: use sizes whose product does")
        sizes["dp"] = job.gpus // ranks
    if "recompute" in more:
        more["recompute"] = more["recompute"].value
    if "cp_kind" in sizes:
        sizes["cp_kind"] = getattr(sizes["cp_kind"], "value", sizes["cp_kind"])
    layout = ParallelLayout(**sizes)
    layout.check(job.shape)
    layout.check_world(job.gpus)
    if given["max_token_len"] is not None and given["micro_batch_size"] is not None:
        width = given["micro_batch_size"] * row_tokens(layout, job.longest)
        if width > given["max_token_len"]:
            raise InputError(
                f"--micro-batch-size {given['micro_batch_size']} makes {width} tokens per GPU of the longest rows, "
                f"above --max-token-len {given['max_token_len']}: give one of the two"
            )
    base = from_file or Setting(layout, row_tokens(layout, job.longest))
    return replace(base, layout=layout, **more)
