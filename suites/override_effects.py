"""What an override does to a built model and to a step with it. Runs on ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from megatron.core import parallel_state
from megatron.core.utils import unwrap_model

from steelyard.model.build import build_optimizer
from steelyard.model.ddp_report import ddp_report
from steelyard.model.ddp_watch import watch_ddp
from steelyard.step import Actor, StepSettings
from suites.workloads import make_batch, take_rows

if TYPE_CHECKING:
    from suites.matrix import Cell
    from suites.overrides import Case


@dataclass(frozen=True)
class Effect:
    """``seen``: whether what was asked shows, None where this rank shows nothing; ``others``: what contradicts it."""

    observed: str
    seen: bool | None
    others: list[str] = field(default_factory=list)


def of_ddp(cell: Cell, case: Case, chunks: list[Any]) -> Effect:
    """From the report on a second step; in the first, Megatron learns the order of gradients."""
    optimizer, step = _training(cell, chunks)
    step()
    with watch_ddp(chunks) as watch:
        step()
    report = ddp_report(chunks, optimizer, asked=case.asked, watch=watch)
    finding = next(one for one in report.findings if one.field == case.field)
    others = [f"{one.field}: {one.observed}" for one in report.findings if one.agrees is False and one != finding]
    return Effect(finding.observed, finding.agrees, others)


def of_transformer(cell: Cell, case: Case, chunks: list[Any]) -> Effect:
    """From the layers, or from what runs in a step."""
    layers = [layer for chunk in chunks for layer in unwrap_model(chunk).decoder.layers]
    asked = case.asked[case.field]
    if case.field == "num_layers_in_first_pipeline_stage":
        first = parallel_state.is_pipeline_first_stage()
        return Effect(f"{len(layers)} layers on the first stage", len(layers) == asked if first else None)
    if case.field == "init_method_std":
        std = float(layers[0].self_attention.linear_qkv.weight.float().std())
        return Effect(f"weights with a deviation of {std:.2f}", abs(std / asked - 1) < 0.1)
    if case.field == "layernorm_epsilon":
        found = {one.eps for layer in layers for one in layer.modules() if hasattr(one, "eps")}
        return Effect(f"norms with epsilon {', '.join(map(str, sorted(found)))}", found == {asked})
    runs = _runs(cell, chunks, layers[0])
    text = f"layer runs {runs[0]:g} times, attention {runs[1]:g} times in a micro-batch"
    return Effect(text, runs == ((2, 2) if case.field == "recompute_granularity" else (1, 2)))


def _training(cell: Cell, chunks: list[Any]) -> tuple[Any, Callable[[], Any]]:
    """An optimizer, and a function that takes a step on this rank's rows."""
    layout = cell.layout.parallel()
    batch = make_batch(cell.draw(), cell.model.vocab, cell.seed)
    rows = list(range(parallel_state.get_data_parallel_rank(), cell.rows, layout.dp))
    optimizer = build_optimizer(chunks, lr=1e-4)
    actor = Actor(chunks, StepSettings(micro_batch_size=cell.micro_batch_size, layout=layout), optimizer)
    return optimizer, lambda: actor.update(take_rows(batch, rows))


def _runs(cell: Cell, chunks: list[Any], layer: Any) -> tuple[float, float]:
    """How often a layer and its attention run in a micro-batch."""
    watched = {"chunk": chunks[0], "layer": layer, "attention": layer.self_attention.core_attention}
    counts = dict.fromkeys(watched, 0)

    def count(name: str) -> Callable[..., None]:
        def hook(*unused: Any) -> None:
            counts[name] += 1

        return hook

    hooks = [module.register_forward_hook(count(name)) for name, module in watched.items()]
    _, step = _training(cell, chunks)
    step()
    for hook in hooks:
        hook.remove()
    return counts["layer"] / counts["chunk"], counts["attention"] / counts["chunk"]
