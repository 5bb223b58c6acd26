"""How fast is the optimised step against the naive one? Alternating steps of both in one process group.

Both sides train their own copy of the same Megatron model on the same rows: forward, backward, gradient reduction and
optimizer step. Warm-up steps are not counted, raw times are kept, and the order of the two sides changes from pair to
pair. Tokens are counted where they enter the model, so padding that is computed is counted. Throughput is real tokens
(prompt and response, no padding) over the time of the slowest rank; planning is part of the optimised side's time. On a
CPU the processor time of all ranks together is kept beside it: other work on the machine disturbs it least.

Where there are pipeline stages, one more step of ours and of the naive side is traced: ``pipeline_overhead`` is that of
its slowest pipeline. Ranks that share a core wait for it, which counts too.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from steelyard.errors import InputError
from suites.launch.local import run_ranks
from suites.matrix import Cell
from suites.measure import Series, Side
from suites.sides import StepSetup, sides_of
from suites.turns import wait_for_turn


def measure(cell: Cell, device: str | None = None) -> list[Series]:
    """Run the cell on its own ranks and return the samples of both sides.

    Raises:
        RanksFailed: a rank died or hung.
    """
    layout = cell.layout.parallel()
    result = run_ranks(
        "suites.throughput:on_rank", layout.world, cell.model_dump(), time_limit=cell.time_limit, device=device
    )
    real = result["real_tokens"]
    series = [Series("real_tokens", "both", "tokens", "none", [real])]
    for name, facts in result["sides"].items():
        # A user's own side is a variant of what people run today.
        side, variant = ("naive", name) if name in cell.sides else (name, "")
        series += [replace(one, variant=variant) for one in _series(side, facts, real)]
    return series


def _series(side: Side, facts: dict[str, Any], real: int) -> list[Series]:
    seconds = facts["seconds"]
    return [
        Series("tokens_per_second", side, "tokens/s", "higher", [real / second for second in seconds]),
        Series("step_seconds", side, "s", "lower", seconds),
        *_processor(side, facts["processor_seconds"]),
        Series("computed_tokens", side, "tokens", "lower", [facts["computed_tokens"]]),
        Series("micro_batches", side, "micro-batches", "none", [facts["micro_batches"]], notes=facts["load"]),
        Series("loss", side, "1", "none", facts["losses"]),
        *(Series("pipeline_overhead", side, "1", "lower", [one]) for one in facts["overheads"]),
    ]


def _processor(side: Side, of_ranks: list[list[float]]) -> list[Series]:
    if not of_ranks:
        return []
    seconds = [sum(ranks) for ranks in zip(*of_ranks, strict=True)]
    return [Series("step_processor_seconds", side, "s", "lower", seconds, notes={"of_ranks": of_ranks})]


@dataclass
class _Counter:
    """The tokens of every micro-batch that entered the first pipeline stage of one side."""

    tokens: list[int] = field(default_factory=list)

    def attach(self, models: list[Any]) -> None:
        from megatron.core.utils import unwrap_model

        for model in models:
            bare = unwrap_model(model)
            if bare.pre_process:
                bare.register_forward_pre_hook(self._count)

    def _count(self, module: Any, args: tuple) -> None:
        self.tokens.append(args[0].numel())


@dataclass
class _Side:
    """One side of the comparison: how it takes a step, and what was seen."""

    step: Callable[[], float]
    counter: _Counter
    seconds: list[float] = field(default_factory=list)
    processor_seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)


def on_rank(payload: dict[str, Any]) -> dict[str, Any]:
    """What every rank runs; rank 0's result holds the samples of both sides."""
    from suites.ranks import parallel_groups

    cell = Cell.model_validate(payload)
    with parallel_groups(cell.layout.parallel(), cell.seed):
        return _weigh(cell)


def _weigh(cell: Cell) -> dict[str, Any]:
    from suites.workloads import make_batch

    sample = cell.draw()
    batch = make_batch(sample, cell.model.vocab, cell.seed)
    # The naive code had no context parallelism; on such layouts ours is weighed alone, or against a side of the user's.
    sides = {"naive": _naive(cell, batch)} if cell.layout.cp == 1 else {}
    sides["optimised"] = _optimised(cell, sample, batch)
    for name, make in sides_of(cell).items():
        if name in ("naive", "optimised"):
            raise InputError(f"side {name}: a side has that name already: give it another")
        sides[name] = _own(make, cell, sample, batch)
    for _ in range(cell.warmup):
        for side in sides.values():
            side.step()
    gc.collect()
    warmed_up = {name: len(side.counter.tokens) for name, side in sides.items()}
    for pair in range(cell.pairs):
        order = list(sides.values())
        for side in order if pair % 2 == 0 else reversed(order):
            _take(side)
    facts = {name: _facts(side, warmed_up[name], cell) for name, side in sides.items()}
    for name, fact in facts.items():
        fact["load"]["cap"] = _budget(cell, sample)
        fact["overheads"] = [_pipeline_overhead(sides[name])] if cell.layout.pp > 1 and name not in cell.sides else []
    return {"real_tokens": int(sample.totals.sum()), "sides": facts}


def _take(side: _Side) -> None:
    import torch
    import torch.distributed as dist

    if dist.get_rank() == 0:
        wait_for_turn()
    dist.barrier()
    torch.cuda.synchronize()
    start, processor = time.perf_counter(), time.process_time()
    loss = side.step()
    torch.cuda.synchronize()
    dist.barrier()
    side.seconds.append(time.perf_counter() - start)
    side.processor_seconds.append(time.process_time() - processor)
    side.losses.append(loss)


def _pipeline_overhead(side: _Side) -> float:
    """Of the slowest pipeline in one more step."""
    from steelyard.pipeline.trace import gather_timeline, trace_passes
    from suites.ranks import gather_to_all

    with trace_passes() as trace:
        side.step()
    timeline = gather_timeline(trace)
    return max(gather_to_all((timeline.makespan, timeline.overhead)))[1]


def _facts(side: _Side, warmed_up: int, cell: Cell) -> dict[str, Any]:
    """Counts of one step over all ranks; times as rank 0 saw them, between two barriers.

    Args:
        warmed_up: how many micro-batches came before the first counted step.
    """
    import torch
    from megatron.core import parallel_state

    from suites.ranks import gather_to_all

    first = parallel_state.get_tensor_model_parallel_rank() == 0 and parallel_state.is_pipeline_first_stage()
    tokens = side.counter.tokens[warmed_up:]
    everywhere = [one for one in gather_to_all(tokens if first else []) if one]
    losses = gather_to_all(side.losses)
    # On CUDA the host mostly waits: its processor time says nothing about the step.
    on_cpu = torch.cuda.current_device() == torch.device("cpu")
    processor = gather_to_all(side.processor_seconds)
    return {
        "seconds": side.seconds,
        "processor_seconds": processor if on_cpu else [],
        "computed_tokens": sum(map(sum, everywhere)) // cell.pairs,
        "micro_batches": max(map(len, everywhere)) // cell.pairs,
        # Of the first counted step, by rank: every step plans the same rows.
        "load": {"tokens": [one[: len(one) // cell.pairs] for one in everywhere]},
        # Stages that do not know the loss report 0.
        "losses": [max(at_step, key=abs) for at_step in zip(*losses, strict=True)],
    }


def _build(cell: Cell) -> tuple[list[Any], Any]:
    from megatron.core import tensor_parallel

    from steelyard.memory.predict import RECOMPUTE
    from steelyard.model.build import build_model, build_optimizer
    from suites.ranks import DTYPES

    # Every side starts from the same weights.
    tensor_parallel.model_parallel_cuda_manual_seed(cell.seed)
    models = build_model(
        cell.model.shape(),
        cell.layout.parallel(),
        dtype=DTYPES[cell.dtype],
        value_head=cell.role == "critic",
        override_transformer_config=RECOMPUTE[cell.recompute],
    )
    return models, build_optimizer(models, lr=1e-5)


def _naive(cell: Cell, batch: dict[str, Any]) -> _Side:
    import torch.distributed as dist
    from megatron.core import parallel_state

    from suites.baselines import fixed_split
    from suites.workloads import take_rows

    layout = cell.layout.parallel()
    models, optimizer = _build(cell)
    counter = _Counter()
    counter.attach(models)
    rows = len(batch["input_ids"])
    each = rows // layout.dp
    rank = parallel_state.get_data_parallel_rank()

    def step() -> float:
        import torch

        mine = take_rows(batch, list(range(rank * each, (rank + 1) * each)))
        multiple = layout.tokens_split_over_tp
        loss = fixed_split.step(mine, cell.role, models, optimizer, cell.micro_batch_size, multiple_of=multiple)
        mean = torch.tensor([loss], device=torch.cuda.current_device())
        dist.all_reduce(mean, group=parallel_state.get_data_parallel_group())
        return float(mean) / layout.dp

    return _Side(step, counter)


def _budget(cell: Cell, sample: Any) -> int:
    """By default as many tokens as the naive side's largest micro-batch may hold: both need about the same memory."""
    return cell.max_tokens or cell.micro_batch_size * int(sample.totals.max())


def _own(make: Callable[[StepSetup], Callable[[], float]], cell: Cell, sample: Any, batch: dict[str, Any]) -> _Side:
    """A user's own step, on a model of its own."""
    models, optimizer = _build(cell)
    counter = _Counter()
    counter.attach(models)
    return _Side(make(StepSetup(cell, models, optimizer, batch, sample)), counter)


def _optimised(cell: Cell, sample: Any, batch: dict[str, Any]) -> _Side:
    from megatron.core import parallel_state

    from steelyard.balance import plan_step
    from steelyard.cost import SequenceCost
    from steelyard.step import Actor, Critic, StepSettings
    from suites.workloads import take_rows

    layout = cell.layout.parallel()
    models, optimizer = _build(cell)
    counter = _Counter()
    counter.attach(models)
    cost = SequenceCost(cell.model.shape(), value_head=cell.role == "critic")
    settings = StepSettings(max_tokens=_budget(cell, sample), layout=layout, cost=cost)
    worker = (Critic if cell.role == "critic" else Actor)(models, settings, optimizer)
    rank = parallel_state.get_data_parallel_rank()
    loss_name = "critic/vf_loss" if cell.role == "critic" else "actor/pg_loss"

    def step() -> float:
        plan = plan_step(
            settings.slots(sample.totals), settings.budget, layout.dp, cost=cost, pipeline=settings.pipeline()
        )[rank]
        return worker.update(take_rows(batch, plan.rows), indices=plan)[loss_name]

    return _Side(step, counter)
