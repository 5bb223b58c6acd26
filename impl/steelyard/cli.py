"""The command line of the wheel: ``steelyard predict`` and ``steelyard advise``.

Exit codes: 0 fine, 2 bad input (one line on stderr says what, and what to do instead). What needs torch is imported in
the commands, so that ``--help`` is quick.
"""

from __future__ import annotations

import contextlib
import json
import warnings
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from steelyard.cli_advise import advise
from steelyard.cli_options import CpKind, Recompute, bad_input_in_one_line, shape_of
from steelyard.errors import InputError

if TYPE_CHECKING:
    from steelyard.cost import ModelShape
    from steelyard.memory.predict import MemoryPrediction
    from steelyard.parallel import ParallelLayout

NOT_VERIFIED = "predicted, not verified on a GPU"

__all__ = ["app", "bad_input_in_one_line"]

app = typer.Typer(
    help="What a Megatron reinforcement-learning step needs, before it runs.",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    add_completion=False,
    no_args_is_help=True,
)
app.command()(advise)


class KernelSet(StrEnum):
    cuda = "cuda"
    fused = "fused"
    cpu = "cpu"


class DType(StrEnum):
    bfloat16 = "bfloat16"
    float32 = "float32"


class RoleName(StrEnum):
    actor = "actor"
    critic = "critic"
    reward = "reward"


@app.callback()
def steelyard() -> None:
    """What a Megatron reinforcement-learning step needs, before it runs."""


@app.command()
def predict(
    model: Annotated[str, typer.Option(metavar="PRESET|FILE", help="A shipped shape, or a Hugging Face config.json.")],
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of the row in each micro-batch, prompt and response.")],
    tp: Annotated[int, typer.Option(help="Tensor-parallel size.")] = 1,
    sp: Annotated[bool | None, typer.Option(help="Sequence parallelism; by default on with tp.")] = None,
    pp: Annotated[int, typer.Option(help="Pipeline stages.")] = 1,
    vpp: Annotated[int, typer.Option(help="Virtual stages per pipeline stage.")] = 1,
    cp: Annotated[int, typer.Option(help="Context-parallel size.")] = 1,
    cp_kind: Annotated[CpKind, typer.Option(help="How context-parallel ranks share keys.")] = CpKind.all_gather,
    dp: Annotated[int, typer.Option(help="Data-parallel size.")] = 1,
    ep: Annotated[int, typer.Option(help="Expert-parallel size.")] = 1,
    etp: Annotated[int | None, typer.Option(help="Tensor-parallel size within an expert; by default tp.")] = None,
    micro_batches: Annotated[int | None, typer.Option(min=1, help="Their number; by default stages + 1.")] = None,
    recompute: Annotated[Recompute, typer.Option(help="Activations computed again backwards.")] = Recompute.none,
    kernels: Annotated[KernelSet, typer.Option(help="Whose memory is counted; see kernels.py.")] = KernelSet.cuda,
    dtype: Annotated[DType, typer.Option(help="Of parameters and activations.")] = DType.bfloat16,
    role: Annotated[RoleName, typer.Option(help="A reward model is evaluated only.")] = RoleName.actor,
    ddp: Annotated[
        list[str] | None,
        typer.Option(metavar="FIELD=VALUE", help="A field of Megatron's DDP configuration; can be repeated."),
    ] = None,
    max_positions: Annotated[int | None, typer.Option(min=1, help="Instead of the model's own.")] = None,
    capacity: Annotated[
        float | None, typer.Option(metavar="GIB", help="Say whether a GPU of this size holds it.")
    ] = None,
    reserve: Annotated[float, typer.Option(metavar="GIB", help="What is left free of the capacity.")] = 4.0,
    extrapolate: Annotated[bool, typer.Option(help="Run two and three layers per chunk, not all.")] = False,
    picture: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw what fills the peak.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on the last line.")] = False,
) -> None:
    """Peak memory of one optimizer step on every kind of pipeline stage, and what holds it."""
    with bad_input_in_one_line():
        # megatron-core's imports warn of everything that it could use and does not find.
        warnings.simplefilter("ignore")
        shape = shape_of(model, max_positions)
        sizes = {"tp": tp, "sp": sp, "pp": pp, "vpp": vpp, "cp": cp, "dp": dp, "ep": ep, "etp": etp}
        layout = _layout(shape, {**sizes, "cp_kind": cp_kind.value})
        overrides = _fields(ddp or [])

        import torch
        from rich.console import Console

        from steelyard.memory.predict import predict_peak, stage_ranks
        from steelyard.memory.threshold import too_small, usual_micro_batches
        from steelyard.step import ActorRole, CriticRole, RewardRole

        roles: dict[str, Any] = {"actor": ActorRole, "critic": CriticRole, "reward": RewardRole}
        parts = usual_micro_batches(layout, tokens) if micro_batches is None else [[tokens]] * micro_batches
        stages = {}
        for name, rank in stage_ranks(layout).items():
            # Seen on a terminal only, and gone at the end.
            with Console(stderr=True).status(f"predicting the {name} stage (rank {rank})"):
                stages[name] = predict_peak(
                    shape,
                    layout,
                    parts,
                    rank=rank,
                    role=roles[role.value](),
                    dtype=getattr(torch, dtype.value),
                    recompute=recompute.value,
                    kernels=kernels.value,
                    override_ddp_config=overrides,
                    extrapolate=extrapolate,
                )
            if capacity is not None and stages[name].static_bytes > (capacity - reserve) * 2**30:
                raise too_small(shape, layout, name, stages[name], capacity, reserve)
        title = f"{shape.name} on {layout}, {len(parts)} micro-batches of {tokens} tokens: {NOT_VERIFIED}"
        if picture is not None:
            from steelyard.memory.waterfall import draw

            draw(stages, picture, title, capacity)
    _show(stages, title, capacity, reserve)
    if as_json:
        typer.echo(json.dumps(_record(shape, layout, tokens, len(parts), recompute.value, kernels.value, stages)))


def _layout(shape: ModelShape, sizes: dict[str, Any]) -> ParallelLayout:
    """The layout, or an error with the nearest one that differs in a single size and can be built."""
    from steelyard.parallel import ParallelLayout

    try:
        layout = ParallelLayout(**sizes)
        layout.check(shape)
    except InputError as error:
        nearest = _nearest(shape, sizes)
        raise InputError(f"{error}" + (f" (nearest possible: --{nearest})" if nearest else "")) from None
    return layout


def _nearest(shape: ModelShape, sizes: dict[str, Any]) -> str | None:
    from steelyard.parallel import ParallelLayout

    found = []
    for name in ("tp", "pp", "vpp", "cp", "ep"):
        given = max(1, sizes[name])
        for value in range(1, 2 * given + 1):
            with contextlib.suppress(InputError):
                ParallelLayout(**{**sizes, name: value}).check(shape)
                found.append((max(value / given, given / value), f"{name} {value}"))
    return min(found)[1] if found else None


def _fields(given: list[str]) -> dict[str, Any]:
    """``FIELD=VALUE`` with VALUE as JSON: true, false, a number, null."""
    fields = {}
    for each in given:
        name, equals, text = each.partition("=")
        try:
            fields[name] = json.loads(text)
        except json.JSONDecodeError:
            equals = ""
        if not equals:
            raise InputError(f"--ddp {each}: write FIELD=VALUE with a JSON value, as in overlap_grad_reduce=true")
    return fields


def _show(stages: dict[str, MemoryPrediction], title: str, capacity: float | None, reserve: float) -> None:
    from rich.console import Console
    from rich.table import Table

    from steelyard.memory.record import PARTS

    table = Table(title=title, title_justify="left")
    table.add_column("GiB at the peak")
    for name in stages:
        table.add_column(f"{name} stage", justify="right")
    for part in PARTS:
        if any(part in one.parts for one in stages.values()):
            table.add_row(part, *(f"{one.parts.get(part, 0) / 2**30:.2f}" for one in stages.values()))
    table.add_section()
    table.add_row("peak", *(f"{one.peak_gib:.2f}" for one in stages.values()), style="bold")
    table.add_row("in phase", *(one.phase for one in stages.values()))
    phases = list(dict.fromkeys(phase for one in stages.values() for phase in one.phases))
    table.add_section()
    for phase in phases:
        values = (f"{one.phases[phase].bytes / 2**30:.2f}" if phase in one.phases else "" for one in stages.values())
        table.add_row(f"peak of {phase}", *values)
    table.add_section()
    table.add_row("parameters of a rank", *(f"{one.parameters:,}" for one in stages.values()))
    if capacity is not None:
        verdicts = ("fits" if one.peak_gib <= capacity - reserve else "does not fit" for one in stages.values())
        table.add_row(f"{capacity:g} GiB less {reserve:g}", *verdicts)
    # A narrower terminal wraps its lines, which cuts no figure off.
    console = Console(highlight=False)
    Console(highlight=False, width=max(console.width, 100)).print(table)


def _record(
    shape: ModelShape,
    layout: ParallelLayout,
    tokens: int,
    count: int,
    recompute: str,
    kernels: str,
    stages: dict[str, MemoryPrediction],
) -> dict[str, Any]:
    return {
        "kind": "predicted",
        "verified_on_gpu": False,
        "model": shape.name,
        "layout": str(layout),
        "tokens": tokens,
        "micro_batches": count,
        "recompute": recompute,
        "kernels": kernels,
        "stages": {
            name: {
                "rank": one.rank,
                "stage": one.stage,
                "parameters": one.parameters,
                "peak_bytes": one.peak_bytes,
                "phase": one.phase,
                "parts": dict(one.parts),
                "phases": {phase: held.bytes for phase, held in one.phases.items()},
                "extrapolated": one.extrapolated,
                "seconds": round(one.seconds, 3),
            }
            for name, one in stages.items()
        },
    }
