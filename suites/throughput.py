"""How fast is the optimised step against the naive one? Alternating steps of both in one process group.

Both sides train their own copy of the same Megatron model on the same rows: forward, backward, gradient reduction and
optimizer step. Warm-up steps are not counted, raw times are kept, and the order of the two sides changes from pair to
pair. Tokens are counted where they enter the model, so padding that is computed is counted. Throughput is real tokens
(prompt and response, no padding) over the time of the slowest rank; planning is part of the optimised side's time. On a
CPU the processor time of all ranks together is kept beside it: other work on the machine disturbs it least.
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
        Series("micro_batches", side, "micro-batches", "none", [facts["micro_batches"]]),
        Series("loss", side, "1", "none", facts["losses"]),
    ]


def _processor(side: Side, seconds: list[float]) -> list[Series]:
    return [Series("step_processor_seconds", side, "s", "lower", seconds)] if seconds else []


@dataclass
class _Counter:
    """Counts what enters the first pipeline stage of one side."""

    tokens: int = 0
    calls: int = 0

    def attach(self, models: list[Any]) -> None:
        from megatron.core.utils import unwrap_model

        for model in models:
            bare = unwrap_model(model)
            if bare.pre_process:
                bare.register_forward_pre_hook(self._count)

    def _count(self, module: Any, args: tuple) -> None:
        self.tokens += args[0].numel()
        self.calls += 1


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
    sides = {"naive": _naive(cell, batch), "optimised": _optimised(cell, sample, batch)}
    for name, make in sides_of(cell).items():
        if name in sides:
            raise InputError(f"side {name}: a side has that name already: give it another")
        sides[name] = _own(make, cell, sample, batch)
    for _ in range(cell.warmup):
        for side in sides.values():
            side.step()
    gc.collect()
    counted = {name: (side.counter.tokens, side.counter.calls) for name, side in sides.items()}
    for pair in range(cell.pairs):
        order = list(sides.values())
        for side in order if pair % 2 == 0 else reversed(order):
            _take(side)
    facts = {name: _facts(side, counted[name], cell) for name, side in sides.items()}
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


def _facts(side: _Side, before: tuple[int, int], cell: Cell) -> dict[str, Any]:
    """Counts of one step over all ranks; times as rank 0 saw them, between two barriers."""
    import torch
    from megatron.core import parallel_state

    from suites.ranks import gather_to_all

    first = parallel_state.get_tensor_model_parallel_rank() == 0 and parallel_state.is_pipeline_first_stage()
    tokens = (side.counter.tokens - before[0]) // cell.pairs
    calls = (side.counter.calls - before[1]) // cell.pairs
    everywhere = gather_to_all((tokens if first else 0, calls if first else 0))
    losses = gather_to_all(side.losses)
    # On CUDA the host mostly waits: its processor time says nothing about the step.
    on_cpu = torch.cuda.current_device() == torch.device("cpu")
    processor = gather_to_all(side.processor_seconds)
    return {
        "seconds": side.seconds,
        "processor_seconds": [sum(ranks) for ranks in zip(*processor, strict=True)] if on_cpu else [],
        "computed_tokens": sum(tokens for tokens, _ in everywhere),
        "micro_batches": max(calls for _, calls in everywhere),
        # Stages that do not know the loss report 0.
        "losses": [max(at_step, key=abs) for at_step in zip(*losses, strict=True)],
    }


def _build(cell: Cell) -> tuple[list[Any], Any]:
    from megatron.core import tensor_parallel

    from steelyard.model.build import build_model, build_optimizer
    from suites.ranks import DTYPES

    # Every side starts from the same weights.
    tensor_parallel.model_parallel_cuda_manual_seed(cell.seed)
    models = build_model(
        cell.model.shape(), cell.layout.parallel(), dtype=DTYPES[cell.dtype], value_head=cell.role == "critic"
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
        multiple = layout.tp if layout.sequence_parallel else 1
        loss = fixed_split.step(mine, cell.role, models, optimizer, cell.micro_batch_size, multiple_of=multiple)
        mean = torch.tensor([loss], device=torch.cuda.current_device())
        dist.all_reduce(mean, group=parallel_state.get_data_parallel_group())
        return float(mean) / layout.dp

    return _Side(step, counter)


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
    # By default as many tokens as the naive side's largest micro-batch may hold: both need about the same memory.
    budget = cell.max_tokens or cell.micro_batch_size * int(sample.totals.max())
    settings = StepSettings(max_tokens=budget, layout=layout, cost=cost)
    worker = (Critic if cell.role == "critic" else Actor)(models, settings, optimizer)
    rank = parallel_state.get_data_parallel_rank()
    loss_name = "critic/vf_loss" if cell.role == "critic" else "actor/pg_loss"

    def step() -> float:
        plan = plan_step(
            settings.slots(sample.totals), settings.budget, layout.dp, cost=cost, pipeline=settings.pipeline()
        )[rank]
        return worker.update(take_rows(batch, plan.rows), indices=plan)[loss_name]

    return _Side(step, counter)
