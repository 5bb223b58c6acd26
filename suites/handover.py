"""What a rollout engine can get of a GPU after a training step: N10 and N11 against Steelyard's ``hand_over``.

The step is that of the workload's plan. Then four ways give memory back, and what is left is the engine's (for its
key-value cache, say): N10 alone, N10 with N11, ``hand_over`` that keeps parameters, and ``hand_over`` of everything.
The second and third leave the same on the device but for the gradients: both suit an engine that needs the weights.

- ``engine_gib``, predicted: the real step on fake tensors, its trace replayed by the rules of the CUDA caching
  allocator, the way's frees and emptyings at its end. It is ``capacity_gib`` less what is then reserved and less
  estimates for CUDA context and NCCL, on the pipeline stage where least is left. The engine's own context is not in it.
- ``step_reserved_gib``: reserved at the end of the step, on that stage of N10.
- ``device_free_gib``, measured on CUDA: what the driver says is free when the way is done.
- ``out_ms``, ``back_ms``, measured: time of the way out and back, without sending weights. On a CPU these are copies
  from host memory to host memory: they tell what is moved, and nothing of a GPU.
- ``step_ms``, measured on CUDA: a step with the cache emptied before every micro-batch (naive), and without.
- ``loss_difference``: of the first step after a hand-over, against training without one. It must be 0.

What is measured runs on one rank, on CUDA or, for small models, on the CPU. Not verified on a GPU.
"""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from steelyard.balance import plan_step
from steelyard.balance.plan import MicroBatchPlan
from steelyard.cost import SequenceCost
from steelyard.errors import InputError
from steelyard.memory import Allowances, Event, Offloader, Replay, hand_over, memory_info, replay
from steelyard.memory.cache import CUDA, DeviceApi
from steelyard.memory.offload import GRADS, OPTIMIZER, PARAMS, PIECES
from steelyard.memory.predict import RECOMPUTE, predict_peak, stage_ranks
from steelyard.memory.record import DEVICE
from steelyard.model import host
from steelyard.model.build import build_model, build_optimizer
from steelyard.step import Actor, ActorRole, Critic, CriticRole, StepSettings
from suites.baselines import rollout_memory
from suites.launch.local import run_ranks
from suites.matrix import Cell
from suites.measure import Series, Side
from suites.ranks import DTYPES, parallel_groups
from suites.turns import wait_for_turn
from suites.workloads import make_batch, take_rows

GIB = 2**30
KEPT, ALONE = "parameters kept", "N10 alone"
# Side and variant of each way; the first of a side is the one that its figures are known by.
WAYS: tuple[tuple[Side, str], ...] = (("naive", ""), ("naive", ALONE), ("optimised", ""), ("optimised", KEPT))
# What each piece of the training state is called in a trace.
PARTS = {PARAMS: ("parameters",), GRADS: ("gradients",), OPTIMIZER: ("master weights", "Adam")}
# Bytes of a storage that marks the end of the step in a trace: odd, so no tensor of a step has as many.
MARK = 786_433
# With more parameters, gradients and optimizer state than this, a CPU only predicts.
CPU_STATE_GIB = 1.0


@dataclass(frozen=True)
class Case:
    """The training step of a cell on data-parallel rank 0: its rows, on the host, in the micro-batches of a plan."""

    cell: Cell
    settings: StepSettings
    batch: dict[str, torch.Tensor]
    plan: MicroBatchPlan

    @classmethod
    def of(cls, cell: Cell) -> Case:
        layout, sample = cell.layout.parallel(), cell.draw()
        cost = SequenceCost(cell.model.shape(), value_head=cell.role == "critic")
        budget = cell.max_tokens or cell.micro_batch_size * int(sample.totals.max())
        settings = StepSettings(max_tokens=budget, layout=layout, cost=cost)
        plan = plan_step(
            settings.slots(sample.totals), settings.budget, layout.dp, cost=cost, pipeline=settings.pipeline()
        )[0]
        batch = take_rows(make_batch(sample, cell.model.vocab, cell.seed), list(plan.rows))
        return cls(cell, settings, batch, plan)

    @property
    def micro_batches(self) -> list[list[int]]:
        lengths = self.batch["attention_mask"].sum(1).tolist()
        place = {row: at for at, row in enumerate(self.plan.rows)}
        return [[lengths[place[row]] for row in rows] for rows in self.plan.indices]

    def groups(self) -> AbstractContextManager[None]:
        """Megatron's groups, and its random states from the cell's seed: the first model built inside is the same."""
        return parallel_groups(self.settings.layout, self.cell.seed)

    def build(self) -> tuple[list[Any], Any]:
        """Model chunks and their optimizer."""
        models = build_model(
            self.cell.model.shape(),
            self.settings.layout,
            dtype=DTYPES[self.cell.dtype],
            value_head=self.cell.role == "critic",
            override_transformer_config=RECOMPUTE[self.cell.recompute],
        )
        return models, build_optimizer(models, lr=1e-4)

    def train(self, models: list[Any], optimizer: Any) -> float:
        """One step; returns its loss."""
        worker = (Critic if self.cell.role == "critic" else Actor)(models, self.settings, optimizer)
        metrics = worker.update(self.batch, indices=self.plan)
        return metrics["critic/vf_loss" if self.cell.role == "critic" else "actor/pg_loss"]


def measure(cell: Cell, device: str | None = None) -> list[Series]:
    """Predict, and where the cell has one rank measure as well.

    Raises:
        InputError: the step itself does not fit the cell's capacity, or CUDA was asked for and there is none.
        RanksFailed: the rank died or hung.
    """
    case = Case.of(cell)
    series = predicted(case)
    chosen = host.pick_device(device)
    held = next(one.notes["held_gib"] for one in series if one.variant == ALONE)
    state = sum(held[piece] for piece in PIECES)
    if case.settings.layout.world > 1 or (chosen.type == "cpu" and state > CPU_STATE_GIB):
        return series
    found = run_ranks("suites.handover:on_rank", 1, cell.model_dump(), time_limit=cell.time_limit, device=chosen.type)
    return series + [Series(**one) for one in found]


# Predicted


@dataclass(frozen=True)
class Trace:
    """What a step asked of the allocator.

    Attributes:
        stage: name of its pipeline stage.
        events: from the first tensor to the end of the step.
        collected: storages that a garbage collection then ends.
    """

    stage: str
    events: Sequence[Event]
    collected: Sequence[Event]

    @classmethod
    def of(cls, case: Case, stage: str, rank: int) -> Trace:
        def step(_: object, models: list[Any], optimizer: Any) -> None:
            case.train(models, optimizer)
            torch.empty(MARK, dtype=torch.uint8, device=DEVICE)
            gc.collect()

        prediction = predict_peak(
            case.cell.model.shape(),
            case.settings.layout,
            case.micro_batches,
            step=step,
            rank=rank,
            role=CriticRole() if case.cell.role == "critic" else ActorRole(),
            dtype=DTYPES[case.cell.dtype],
            recompute=case.cell.recompute,
            trace=True,
        )
        events = prediction.events
        end = max(at for at, event in enumerate(events) if event.size == MARK and event.kind == "alloc")
        return cls(stage, events[:end], [event for event in events[end + 2 :] if event.kind == "free"])

    def live(self, *pieces: str) -> list[Event]:
        """The births of what is alive at the end of the step and belongs to some of the pieces."""
        parts = {part for piece in pieces for part in PARTS[piece]}
        return [event for event in _alive(self.events) if event.tag in parts]

    def way(self, side: Side, variant: str) -> list[Event]:
        """What the allocator is asked for after the step."""
        empty = Event("empty_cache")
        if (side, variant) == ("naive", ALONE):
            return [empty]
        leaving = [piece for piece in PIECES if not (variant == KEPT and piece == PARAMS)]
        out = [*_frees(self.live(*leaving)), *self.collected, empty]
        if side == "optimised":
            return out
        first = 1 + max(event.block for event in self.events)
        back = [Event("alloc", first + at, event.size, event.tag) for at, event in enumerate(self.live(PARAMS, GRADS))]
        return [*out, *back, empty]


def _alive(events: Iterable[Event]) -> list[Event]:
    """The births of what is alive at the end."""
    alive = {}
    for event in events:
        if event.kind == "alloc":
            alive[event.block] = event
        elif event.kind == "free":
            alive.pop(event.block)
    return list(alive.values())


def _frees(births: Iterable[Event]) -> list[Event]:
    return [Event("free", event.block) for event in births]


def predicted(case: Case) -> list[Series]:
    """Bytes for the engine by each way, on the stage where they are fewest."""
    traces = [Trace.of(case, stage, rank) for stage, rank in stage_ranks(case.settings.layout).items()]
    allowances = Allowances()
    capacity = int(case.cell.capacity_gib * GIB)
    found: dict[tuple[Side, str], tuple[float, dict[str, Any]]] = {}
    reserved_after = 0
    for side, variant in WAYS:
        least, notes = capacity, {}
        for trace in traces:
            events = [*trace.events, *trace.way(side, variant)]
            replayed = _fitting(replay(events, capacity=capacity, allowances=allowances), case, trace.stage)
            left = capacity - allowances.outside - int(replayed.reserved[-1])
            if left < least:
                least, notes = left, _notes(trace, events, replayed)
                if variant == ALONE:
                    reserved_after = int(replayed.reserved[len(trace.events) - 1])
        found[side, variant] = least / GIB, {**notes, "capacity_gib": case.cell.capacity_gib}
    best_naive = max(left for (side, _), (left, _) in found.items() if side == "naive")
    return [
        *(
            Series(
                "engine_gib",
                side,
                "GiB",
                "higher",
                [left],
                "predicted",
                best_naive if side == "optimised" else None,
                variant,
                notes,
            )
            for (side, variant), (left, notes) in found.items()
        ),
        Series("step_reserved_gib", "both", "GiB", "none", [reserved_after / GIB], "predicted"),
    ]


def _fitting(replayed: Replay, case: Case, stage: str) -> Replay:
    failed = replayed.out_of_memory
    if failed is not None:
        raise InputError(
            f"capacity_gib={case.cell.capacity_gib:g} does not hold the training step on the {stage} stage: "
            f"{failed.event.size / GIB:.2f} GiB were asked for when {failed.reserved / GIB:.2f} were reserved; "
            f"raise it, or lower max_tokens={case.settings.max_tokens}"
        )
    return replayed


def _notes(trace: Trace, events: Sequence[Event], replayed: Replay) -> dict[str, Any]:
    """The stage, and what holds the bytes that the engine does not get, in GiB."""
    held: Counter[str] = Counter()
    pieces = {part: piece for piece, parts in PARTS.items() for part in parts}
    for event in _alive(events):
        held[pieces.get(event.tag, "other tensors")] += event.size
    held["unused"] = int(replayed.reserved[-1] - replayed.allocated[-1])
    return {"stage": trace.stage, "held_gib": {name: size / GIB for name, size in held.items() if size}}


# Measured


def on_rank(payload: dict[str, Any]) -> list[dict[str, Any]]:
    """What the one rank runs; returns series as plain data."""
    return [vars(one) for one in measured(Case.of(Cell.model_validate(payload)))]


def measured(case: Case, api: DeviceApi = CUDA) -> list[Series]:
    """Times and bytes of every way after real steps. ``api`` stands for ``torch.cuda``."""
    with case.groups():
        expected = _next_loss(case, *case.build())
    gc.collect()
    with case.groups():
        return _weigh(case, expected, api)


def _weigh(case: Case, expected: float, api: DeviceApi) -> list[Series]:
    models, optimizer = case.build()
    offloader = Offloader(models, optimizer)
    loss = _next_loss(case, models, optimizer, lambda: hand_over(offloader, discard_grads=True, api=api))
    series = [Series("loss_difference", "both", "1", "lower", [abs(loss - expected)], limit=0.0)]
    on_cuda = memory_info(api=api).device is not None
    ways: dict[tuple[Side, str], Way] = {
        ("naive", ""): lambda: rollout_memory.loaded_for_rollout(models, optimizer, api),
        ("naive", ALONE): lambda: rollout_memory.plain_empty_cache(api),
        ("optimised", ""): lambda: hand_over(offloader, discard_grads=True, api=api),
        ("optimised", KEPT): lambda: hand_over(offloader, keep=[PARAMS], discard_grads=True, api=api),
    }
    taken = _take(case, models, optimizer, ways, api)
    notes = {} if on_cuda else {"copies": "from host memory to host memory"}
    for (side, variant), samples in taken.items():
        out, back, free = zip(*samples, strict=True)
        series += [
            Series("out_ms", side, "ms", "lower", out, variant=variant, notes=notes),
            Series("back_ms", side, "ms", "lower", back, variant=variant, notes=notes),
        ]
        if on_cuda:
            series.append(
                Series("device_free_gib", side, "GiB", "higher", [one / GIB for one in free], variant=variant)
            )
    return series + (_often(case, models, optimizer, api) if on_cuda else [])


Way = Callable[[], AbstractContextManager[Any]]


def _next_loss(case: Case, models: list[Any], optimizer: Any, way: Way | None = None) -> float:
    """Loss of the second step, with or without a way between the two."""
    with _repeatable():
        case.train(models, optimizer)
        if way is not None:
            with way():
                pass
        return case.train(models, optimizer)


@contextmanager
def _repeatable() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def _take(
    case: Case, models: list[Any], optimizer: Any, ways: dict[tuple[Side, str], Way], api: DeviceApi
) -> dict[tuple[Side, str], list[tuple[float, float, int]]]:
    """(ms out, ms back, bytes free between) of every way in every round; the order turns round by round."""
    taken: dict[tuple[Side, str], list[tuple[float, float, int]]] = {key: [] for key in ways}
    for number in range(-case.cell.warmup, case.cell.pairs):
        for key in list(ways) if number % 2 == 0 else reversed(list(ways)):
            case.train(models, optimizer)
            wait_for_turn()
            marks = [_now()]
            with ways[key]():
                marks.append(_now())
                free = memory_info(api=api).free
                marks.append(_now())
            marks.append(_now())
            if number >= 0:
                taken[key].append((1000 * (marks[1] - marks[0]), 1000 * (marks[3] - marks[2]), free))
    return taken


def _often(case: Case, models: list[Any], optimizer: Any, api: DeviceApi) -> list[Series]:
    """Steps with the cache emptied before every forward pass, in pairs with steps that leave it alone."""
    times: dict[Side, list[float]] = {"naive": [], "optimised": []}
    for pair in range(-case.cell.warmup, case.cell.pairs):
        for side in ("naive", "optimised") if pair % 2 == 0 else ("optimised", "naive"):
            emptied = [model.register_forward_pre_hook(lambda *_: api.empty_cache()) for model in models]
            for hook in emptied if side == "optimised" else ():
                hook.remove()
            wait_for_turn()
            start = _now()
            case.train(models, optimizer)
            end = _now()
            for hook in emptied:
                hook.remove()
            if pair >= 0:
                times[side].append(1000 * (end - start))
    return [Series("step_ms", side, "ms", "lower", values) for side, values in times.items()]


def _now() -> float:
    """The clock, once the device has done all it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
