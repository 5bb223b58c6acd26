"""How long a step takes: the planner's own micro-batches, the simulator's pipeline, and what travels over links.

Work is counted by ``SequenceCost``. Its seconds come from a range of efficiencies, or from a user's calibration; so
every time is a range, from kernels and links at their best with the data-parallel traffic hidden behind the backward
pass, to both at their worst with nothing hidden. Not in it: that small matrix products are slower, imbalance of
experts, and the rollout.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from steelyard.advise.job import TRAINED, Job
from steelyard.advise.machine import Gpu
from steelyard.advise.memory import micro_batch_tokens, rank_parameters, row_tokens
from steelyard.advise.setting import Setting
from steelyard.balance import plan_step
from steelyard.balance.plan import summarize_step
from steelyard.cost import Calibration, ModelShape, SequenceCost
from steelyard.errors import InputError
from steelyard.hints import did_you_mean
from steelyard.pipeline import Pipeline, simulate
from steelyard.pipeline.schedule import check_count

EFFICIENCY = (0.35, 0.5)
"""Share of the bfloat16 peak that large matrix products and attention of a training step reach, assumed."""
LINKS = (0.6, 0.9)
"""Share of a link's rate that collectives reach, assumed."""
# Seconds to launch the forward kernels of one layer: about a dozen at 5 microseconds.
LAUNCH = 6e-5
# Bytes that an optimizer step reads and writes per parameter of its share: float32 weight and two moments both ways,
# float32 gradient in, bfloat16 weight out.
ADAM_BYTES = 30
# Bytes per second of the host's memory for one of the GPUs of a node, assumed: eight share some 400 GB/s.
HOST_MEMORY = 50e9

_CALIBRATION = ("fixed", "per_linear", "per_attention", "max_error")


@dataclass(frozen=True)
class Clock:
    """Seconds of work on one GPU, and how far they may be off.

    Attributes:
        per_gpu: seconds of a micro-batch on one GPU.
        low, high: factors that make the best and the worst case of them.
        source: in words.
    """

    per_gpu: Calibration
    low: float
    high: float
    source: str


def stated(shape: ModelShape, gpu: Gpu) -> Clock:
    """The range of efficiencies, around the speed whose seconds are halfway between its ends."""
    low, high = EFFICIENCY
    middle = 2 / (1 / low + 1 / high)
    per_flop = 1 / (middle * gpu.tflops * 1e12)
    calibration = _calibration(shape, LAUNCH * shape.layers, per_flop, per_flop)
    words = f"{low:.0%} to {high:.0%} of {gpu.name}'s {gpu.tflops:g} TFLOP/s (assumed)"
    return Clock(calibration, middle / high, middle / low, words)


def calibrated(shape: ModelShape, file: Path) -> Clock:
    """A user's measurement: a JSON object with ``fixed`` (seconds of a micro-batch), ``per_linear`` and
    ``per_attention`` (seconds per FLOP on one GPU) and ``max_error`` (a share), as ``SequenceCost.fit`` finds them.
    """
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"calibration {file}: cannot be read as JSON ({error})") from None
    if not isinstance(values, dict):
        raise InputError(f"calibration {file}: holds a {type(values).__name__}: give an object")
    for name in values:
        if name not in _CALIBRATION:
            raise InputError(f"calibration {file}: unknown field {name!r}{did_you_mean(name, _CALIBRATION)}")
    for name in _CALIBRATION:
        value = values.get(name)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 1:
            raise InputError(f"calibration {file}: {name}={value!r} must be a number from 0 to below 1")
    off = values["max_error"]
    fixed, linear, attention = (values[name] for name in _CALIBRATION[:3])
    one = _calibration(shape, fixed, linear, attention)
    return Clock(one, 1 - off, 1 + off, f"calibration {file.name}, ±{off:.0%}")


def _calibration(shape: ModelShape, fixed: float, linear: float, attention: float) -> Calibration:
    """Coefficients that this module did not fit itself."""
    cost = SequenceCost(shape)
    return Calibration(cost, fixed, linear, attention, samples=0, r_squared=0.0, median_error=0.0, max_error=0.0)


@dataclass(frozen=True)
class Speed:
    """What a step takes; predicted.

    Attributes:
        seconds: best and worst case of one step of all roles.
        tokens_per_gpu: tokens per second per GPU, worst and best; real ones, without padding.
        micro_batches: of the rank with most.
        overhead: of the slowest rank's pipeline: its time over its mean stage's busy time, less 1; 0 without stages.
        imbalance: greatest over mean work of data-parallel ranks.
        links: seconds of traffic by kind, at the links' stated rates.
    """

    seconds: tuple[float, float]
    tokens_per_gpu: tuple[float, float]
    micro_batches: int
    overhead: float
    imbalance: float
    links: dict[str, float]

    @property
    def middle(self) -> float:
        """Seconds by which settings are compared."""
        return sum(self.seconds) / 2


@dataclass(frozen=True)
class _Split:
    """The micro-batches of every data-parallel rank.

    Attributes:
        works: seconds of each one's forward pass through the whole model, by rank and execution order.
        tokens: that the busiest rank computes, padding included.
        imbalance: greatest over mean work of ranks.
    """

    works: list[list[float]]
    tokens: int
    imbalance: float


def speed(job: Job, setting: Setting, clock: Clock) -> Speed:
    """Time of one step.

    Raises:
        PlanError: fixed micro-batches in a number that Megatron's schedule refuses.
    """
    pipeline = _pipeline(job, setting, clock)
    split = (
        _fixed(job, setting, clock, pipeline) if setting.micro_batch_size else _dynamic(job, setting, clock, pipeline)
    )
    trained, frozen = _roles(job)
    slowest, overhead = 0.0, 0.0
    for work in split.works:
        update, ideal = _time(work, pipeline, _backward(job, setting))
        seconds = trained * update + (frozen * _time(work, pipeline, 0.0)[0] if frozen else 0.0)
        if seconds > slowest:
            slowest, overhead = seconds, update / ideal - 1 if ideal else 0.0
    links = traffic(job, setting, split.tokens)
    seconds_range = _range(job, setting, slowest, links, clock)
    per_gpu = float(job.sample.totals.sum()) / job.gpus
    return Speed(
        seconds=seconds_range,
        tokens_per_gpu=(per_gpu / seconds_range[1], per_gpu / seconds_range[0]),
        micro_batches=max(map(len, split.works)),
        overhead=overhead,
        imbalance=split.imbalance,
        links=links,
    )


def least_seconds(job: Job, setting: Setting, clock: Clock) -> float:
    """``Speed.middle`` of a setting whose ranks and stages are all equally busy all the time: no plan is faster."""
    layout = setting.layout
    trained, frozen = _roles(job)
    work = math.fsum(_on_group(clock, layout.tp * layout.cp)(job.sample.totals)) / (layout.dp * layout.pp)
    busy = work * (trained * (1 + _backward(job, setting)) + frozen)
    tokens = int(job.sample.totals.sum()) // layout.dp
    return sum(_range(job, setting, busy, traffic(job, setting, tokens), clock)) / 2


def _roles(job: Job) -> tuple[int, int]:
    """How many are trained, and how many compute forward only."""
    trained = sum(role in TRAINED for role in job.roles)
    return trained, len(job.roles) - trained


def _on_group(clock: Clock, ranks: int) -> Calibration:
    """Seconds on so many tensor- and context-parallel ranks, which share a micro-batch."""
    one = clock.per_gpu
    return dataclasses.replace(one, per_linear=one.per_linear / ranks, per_attention=one.per_attention / ranks)


def _shares(job: Job) -> dict[str, float]:
    """Share of each part of the model in the work."""
    parts = {name: float(work.sum()) for name, work in SequenceCost(job.shape).parts(job.sample.totals).items()}
    return {name: work / sum(parts.values()) for name, work in parts.items()}


def _backward(job: Job, setting: Setting) -> float:
    """Backward over forward work."""
    again = {"none": 0.0, "selective": _shares(job)["attention"], "full": 1.0}
    return 2.0 + again[setting.recompute]


def _pipeline(job: Job, setting: Setting, clock: Clock) -> Pipeline | None:
    """The stages, of which the last one also makes the logits."""
    layout = setting.layout
    if layout.pp == 1:
        return None
    chunks = layout.pp * layout.vpp
    output = _shares(job)["output"]
    stage_cost = [(1 - output) / chunks] * chunks
    stage_cost[-1] += output
    size = 2 * job.shape.hidden * row_tokens(layout, job.longest) / layout.tokens_split_over_tp
    p2p = size / _rate(job, layout.world) * sum(1 / share for share in LINKS) / 2
    return Pipeline.of(layout, backward=_backward(job, setting), p2p=p2p, stage_cost=stage_cost)


def _dynamic(job: Job, setting: Setting, clock: Clock, pipeline: Pipeline | None) -> _Split:
    """What ``plan_step`` plans for the drawn rows."""
    layout = setting.layout
    budget = micro_batch_tokens(job, setting) * layout.cp
    return _planned(job, clock, layout.tp * layout.cp, layout.row_alignment, budget, layout.dp, pipeline)


@functools.lru_cache(maxsize=1024)
def _planned(
    job: Job, clock: Clock, sharing: int, alignment: int, budget: int, ranks: int, pipeline: Pipeline | None
) -> _Split:
    """The plan of a step, from all that it depends on: many settings have the same one."""
    plans = plan_step(slots_of(job, alignment), budget, ranks, cost=_on_group(clock, sharing), pipeline=pipeline)
    tokens = max(sum(plan.tokens) for plan in plans)
    return _Split([plan.work for plan in plans], tokens, summarize_step(plans).imbalance)


def slots_of(job: Job, alignment: int) -> np.ndarray:
    """Tokens that the drawn rows take of a budget, [rows]."""
    return -(-job.sample.totals // alignment) * alignment


def _fixed(job: Job, setting: Setting, clock: Clock, pipeline: Pipeline | None) -> _Split:
    """Equal numbers of rows at full width, as many on every rank as on the fullest one."""
    layout, size = setting.layout, setting.micro_batch_size or 1
    width = row_tokens(layout, job.longest) * layout.cp
    count = -(-len(job.sample) // (layout.dp * size))
    if pipeline is not None:
        check_count(count, pipeline)
    work = _on_group(clock, layout.tp * layout.cp).micro_batch([width] * size)
    return _Split([[work] * count], width * size * count, 1.0)


def _time(work: list[float], pipeline: Pipeline | None, backward: float) -> tuple[float, float]:
    """Seconds of a pass over all micro-batches, and what they would be if no stage ever waited."""
    if pipeline is None:
        busy = math.fsum(work) * (1 + backward)
        return busy, busy
    line = simulate(work, dataclasses.replace(pipeline, backward=backward))
    return line.makespan, line.ideal


def _rate(job: Job, ranks: int) -> float:
    """Bytes per second of a rank in a group that spans so many neighbouring ranks."""
    return 1e9 * (job.gpu.nvlink if ranks <= job.gpus_per_node else job.gpu.network)


def traffic(job: Job, setting: Setting, tokens: int) -> dict[str, float]:
    """Seconds that a rank's data travel in one step of all roles, at the links' stated rates.

    Volumes are those of ring collectives, of bfloat16 activations unless said otherwise. Ranks lie in Megatron's order
    (tensor, context, data, pipeline parallel), so a group is inside a node where all that it spans is.

    Args:
        tokens: of all micro-batches of one data-parallel rank, over its context-parallel ranks.
    """
    shape, layout = job.shape, setting.layout
    trained, frozen = _roles(job)
    forward = trained * (2 if setting.recompute == "full" else 1) + frozen
    local, layers = tokens / layout.cp, shape.layers / layout.pp

    def seconds(size: float, ranks: int, span: int) -> float:
        return size * (ranks - 1) / ranks / _rate(job, span)

    # Two all-reduces per layer and pass; with sequence parallelism the backward pass gathers both inputs once more.
    passes = 4 * (forward + trained) + (2 * trained if layout.sequence_parallel else 0)
    found = {"tp": seconds(2 * shape.hidden * local * layers * passes, layout.tp, layout.tp)}
    heads, kv_heads = shape.heads / layout.tp, max(1.0, shape.kv_heads / layout.tp)
    # Keys and values of all ranks, and their gradients back; or queries, keys, values and outputs to other ranks.
    moved = 2 * kv_heads * tokens if layout.cp_kind == "all_gather" else 2 * (heads + kv_heads) * local
    size = 2 * shape.head_dim * moved * layers * (forward + trained)
    found["cp"] = seconds(size, layout.cp, layout.tp * layout.cp)
    # Tokens to their experts and back.
    spread = local / layout.tokens_split_over_tp * shape.experts_per_token
    size = 4 * shape.hidden * spread * shape.moe_layers / layout.pp * (forward + trained)
    found["ep"] = seconds(size, layout.ep, layout.ep * layout.expert_tensor_parallel)
    # Gradients in float32 to the rank that owns them, weights in bfloat16 back.
    found["dp"] = sum(
        trained * seconds(6 * count, shards, layout.stage_ranks) for count, shards in rank_parameters(shape, layout)
    )
    return {kind: time for kind, time in found.items() if time}


def _rest(job: Job, setting: Setting) -> float:
    """Seconds of the optimizers, and of what is offloaded and fetched again."""
    trained, frozen = _roles(job)
    parameters = rank_parameters(job.shape, setting.layout)
    own = sum(count / shards for count, shards in parameters)
    pcie = 1e9 * job.gpu.pcie
    if setting.optimizer_on_host:
        # Gradients in float32 there, weights in bfloat16 back, and the step at the speed of the host's memory.
        seconds = trained * own * (6 / pcie + ADAM_BYTES / HOST_MEMORY)
        state = 0.0
    else:
        seconds = trained * ADAM_BYTES * own / (1e9 * job.gpu.hbm)
        state = 12 * own
    if setting.offload:
        # Weights and optimizer state both ways; gradients are dropped, and frozen weights stay on the host.
        weights = 2 * sum(count for count, _ in parameters)
        seconds += (2 * trained * (weights + state) + frozen * weights) / pcie
    return seconds


def _range(job: Job, setting: Setting, compute: float, links: dict[str, float], clock: Clock) -> tuple[float, float]:
    """Best and worst case of a step's seconds."""
    rest = _rest(job, setting)
    shown = sum(time for kind, time in links.items() if kind != "dp")
    best = compute * clock.low + shown / LINKS[1] + rest
    worst = compute * clock.high + sum(links.values()) / LINKS[0] + rest
    return best, worst
