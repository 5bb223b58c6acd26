"""Peak memory of every pipeline stage as a function of tokens and data-parallel ranks, and whether a setting fits.

Two fake runs of each kind of stage give, for every phase of a step, a straight line over the tokens of a micro-batch.
Data-parallel ranks change one thing only: Megatron's distributed optimizer divides its state (float32 weights and
moments, and what its step makes of them) over them, so one number of ranks tells all others. Roles that share a GPU
hold what they hold between steps, unless it is offloaded.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from steelyard.advise.cache import Cache
from steelyard.advise.job import TRAINED, Job
from steelyard.advise.predictions import Answer, Predictions, Question, stages
from steelyard.advise.setting import Setting
from steelyard.cost import ModelShape
from steelyard.parallel import ParallelLayout

GIB = 2**30
# Tokens of a micro-batch on one rank, between which lines are drawn.
PROBES = (4096, 32768)
SHARDED = ("master weights", "Adam")
STATIC = ("parameters", "gradients", *SHARDED)
# torch's Adam makes two tensors of the size of what it updates, at most all of a rank's share.
ADAM_TEMPORARY = 2


@dataclass(frozen=True)
class Moment:
    """The highest moment of a stage: its phase, its bytes, and what they are held for."""

    phase: str
    bytes: float
    parts: Mapping[str, float]

    def of(self, parts: Iterable[str]) -> float:
        return sum(self.parts.get(part, 0.0) for part in parts)


@dataclass(frozen=True)
class StageLine:
    """One role on one kind of stage.

    Attributes:
        near, far: answers at the two numbers of tokens in ``PROBES``.
        dp: data-parallel ranks they were made with.
    """

    near: Answer
    far: Answer
    dp: int

    def at(self, tokens: float, dp: int) -> list[Moment]:
        """The highest moment of each phase with micro-batches of ``tokens`` on a rank; ``dp=0`` stands for an optimizer
        state that lies elsewhere.
        """
        share = (tokens - PROBES[0]) / (PROBES[1] - PROBES[0])
        found = []
        for phase, near in self.near.phases.items():
            near_parts, far_parts = self.near.parts[phase], self.far.parts[phase]
            parts = {
                name: _between(near_parts.get(name, 0), far_parts.get(name, 0), share)
                for name in {**near_parts, **far_parts}
            }
            total = _between(near, self.far.phases[phase], share)
            for name in SHARDED:
                held = parts.get(name, 0.0)
                parts[name] = held * self.dp / dp if dp else 0.0
                total += parts[name] - held
            if phase == "optimizer":
                held = parts.get("temporary", 0.0)
                parts["temporary"] = min(held, ADAM_TEMPORARY * parts["master weights"])
                total += parts["temporary"] - held
            found.append(Moment(phase, total, parts))
        return found

    def peak(self, tokens: float, dp: int) -> Moment:
        return max(self.at(tokens, dp), key=lambda moment: moment.bytes)

    def between_steps(self, dp: int) -> Moment:
        """A moment at which all that stays between steps is there."""
        return next(moment for moment in self.at(0, dp) if moment.phase == "forward")

    def longest(self, available: float, dp: int) -> float:
        """Tokens of a micro-batch on a rank up to which ``available`` bytes suffice; 0 if they never do."""
        most = math.inf
        for low, high in zip(self.at(0, dp), self.at(1, dp), strict=True):
            slope = high.bytes - low.bytes
            if low.bytes > available:
                return 0.0
            if slope > 0:
                most = min(most, (available - low.bytes) / slope)
        return most


def _between(near: float, far: float, share: float) -> float:
    return near + share * (far - near)


@dataclass(frozen=True)
class Fit:
    """Whether a setting's step fits the GPUs of a job; all of it predicted.

    Attributes:
        setting: the setting.
        fits: whether every stage does.
        peak_gib: highest moment of each kind of pipeline stage, with what the other roles keep there.
        available_gib: the GPU's memory less the reserve and the rollout engine's.
        short_gib: what the worst stage lacks; 0 when it fits.
        largest_response: longest response that fits when a micro-batch holds no more than such a row (dynamic), or its
            fixed number of rows; within the model's positions, 0 when none fits.
        stage, phase: where the highest moment is.
        parts_gib: what it is held for, ``other roles`` among it.
        tokens: of the largest micro-batch, on one context-parallel rank.
        extrapolated: whether layers were continued from shallower models.
    """

    setting: Setting
    fits: bool
    peak_gib: dict[str, float]
    available_gib: float
    short_gib: float
    largest_response: int
    stage: str
    phase: str
    parts_gib: dict[str, float]
    tokens: int
    extrapolated: bool

    @property
    def why(self) -> str:
        """In one sentence."""
        peak = self.peak_gib[self.stage]
        where = "" if self.stage == "only" else f" on the {self.stage} stage"
        held = sorted(self.parts_gib.items(), key=lambda item: -item[1])[:3]
        parts = ", ".join(f"{name} {size:.1f}" for name, size in held)
        lacks = f", {self.short_gib:.1f} too many" if not self.fits else ""
        return f"{peak:.1f} of {self.available_gib:.1f} GiB{where} ({self.phase}){lacks}: {parts}"


def row_tokens(layout: ParallelLayout, row: int) -> int:
    """Tokens that a row of ``row`` tokens takes on one context-parallel rank."""
    alignment = layout.row_alignment
    return -(-row // alignment) * alignment // layout.cp


def micro_batch_tokens(job: Job, setting: Setting) -> int:
    """Tokens of the largest micro-batch on one context-parallel rank.

    A fixed one holds its rows at full width, prompt and response; a dynamic one fills its budget, or holds one longest
    row.
    """
    row = row_tokens(setting.layout, job.longest)
    return max(row, setting.max_tokens) if setting.micro_batch_size is None else setting.micro_batch_size * row


def _sharing(setting: Setting) -> int:
    """Ranks over which the optimizer's state is divided; 0 when it is not on the GPU."""
    return 0 if setting.optimizer_on_host else setting.layout.dp


def least_dp(layout: ParallelLayout) -> int:
    """Fewest data-parallel ranks over which the experts can still be spread."""
    experts = layout.expert_tensor_parallel * layout.ep
    return experts // math.gcd(experts, layout.tp * layout.cp)


def questions(job: Job, setting: Setting) -> list[Question]:
    """What must be known to judge a setting."""
    layout = setting.layout
    smallest = dataclasses.replace(layout, dp=least_dp(layout))
    return [
        Question(job.shape, smallest, stage, role, setting.recompute, setting.chunked_logits or role != "actor", tokens)
        for stage in stages(layout)
        for role in TRAINED
        if role in job.roles
        for tokens in PROBES
    ]


def check(job: Job, setting: Setting, predictions: Predictions | None = None) -> Fit:
    """Whether ``setting`` fits the job's GPUs.

    Args:
        job, setting: what is judged.
        predictions: None runs in this process and keeps answers in the user's cache folder.

    Raises:
        InputError: Megatron cannot build the layout, or it needs another number of GPUs.
    """
    setting.layout.check(job.shape)
    setting.layout.check_world(job.gpus)
    answers = (predictions or _of_this_process()).answers(questions(job, setting))
    lines = _lines(answers, setting.layout)
    tokens, dp = micro_batch_tokens(job, setting), _sharing(setting)
    peaks: dict[str, tuple[Moment, float]] = {}
    longest = math.inf
    for stage, roles in lines.items():
        engine, kept = _while_generating(job), _kept_by_others(job, setting, roles)
        held = [(engine, kept)]
        if engine.bytes + kept > job.available_gib * GIB:
            longest = 0.0
        for role, line in roles.items():
            kept = _kept_by_others(job, setting, roles, role)
            held.append((line.peak(tokens, dp), kept))
            longest = min(longest, line.longest(job.available_gib * GIB - kept, dp))
        peaks[stage] = max(held, key=lambda each: each[0].bytes + each[1])
    peak_gib = {stage: (moment.bytes + kept) / GIB for stage, (moment, kept) in peaks.items()}
    worst = max(peak_gib, key=lambda stage: peak_gib[stage])
    moment, kept = peaks[worst]
    parts = {name: size / GIB for name, size in {**moment.parts, "other roles": kept}.items() if size > 0}
    return Fit(
        setting=setting,
        fits=peak_gib[worst] <= job.available_gib,
        peak_gib=peak_gib,
        available_gib=job.available_gib,
        short_gib=max(0.0, peak_gib[worst] - job.available_gib),
        largest_response=_response(job, setting, longest),
        stage=worst,
        phase=moment.phase,
        parts_gib=parts,
        tokens=tokens,
        extrapolated=any(answer.extrapolated for answer in answers.values()),
    )


@functools.cache
def _of_this_process() -> Predictions:
    return Predictions(Cache())


def _lines(answers: Mapping[Question, Answer], layout: ParallelLayout) -> dict[str, dict[str, StageLine]]:
    """Lines by stage and role."""
    found: dict[tuple[str, str], dict[int, Answer]] = {}
    for question, answer in answers.items():
        found.setdefault((question.stage, question.role), {})[question.tokens] = answer
    lines: dict[str, dict[str, StageLine]] = {}
    for (stage, role), by_tokens in found.items():
        near, far = (by_tokens[tokens] for tokens in PROBES)
        lines.setdefault(stage, {})[role] = StageLine(near, far, least_dp(layout))
    return lines


def _while_generating(job: Job) -> Moment:
    """What the rollout engine takes more than while it sleeps."""
    taken = max(0.0, job.rollout_share * job.gpu.gib - job.rollout_gib) * GIB
    return Moment("rollout", taken, {"rollout engine": taken})


def _kept_by_others(job: Job, setting: Setting, lines: Mapping[str, StageLine], at_work: str | None = None) -> float:
    """Bytes that the roles not at work keep on this stage: all they hold between steps; frozen ones their parameters.

    A frozen role has the parameters of the trained one, or fewer. It is never the one with the highest peak: it
    computes forward only, beside what the trained ones keep.
    """
    if setting.offload:
        return 0.0
    static = {role: line.between_steps(_sharing(setting)) for role, line in lines.items()}
    parameters = max(moment.of(["parameters"]) for moment in static.values())
    return sum(static[role].of(STATIC) if role in TRAINED else parameters for role in job.roles if role != at_work)


def _response(job: Job, setting: Setting, tokens: float) -> int:
    """The longest response with at most ``tokens`` in a micro-batch on one rank."""
    layout = setting.layout
    most = job.shape.max_positions
    if math.isfinite(tokens):
        alignment = layout.row_alignment
        row = tokens * layout.cp / (setting.micro_batch_size or 1)
        most = min(most, math.floor(row / alignment) * alignment)
    return max(0, most - job.max_prompt)


def rank_parameters(shape: ModelShape, layout: ParallelLayout) -> list[tuple[float, int]]:
    """Parameters on a rank of the mean stage, and the ranks that share their optimizer state: dense ones, experts."""
    experts = shape.moe_layers * shape.experts * 3 * shape.hidden * shape.moe_ffn
    dense_ranks, expert_ranks = layout.tp * layout.pp, layout.ep * layout.expert_tensor_parallel * layout.pp
    each = ((shape.parameters - experts, dense_ranks), (experts, expert_ranks))
    return [(count / ranks, layout.world // ranks) for count, ranks in each]


def least_gib(job: Job, setting: Setting) -> float:
    """What the fullest stage holds at least, in closed form: what cannot fit need not be predicted.

    Parameters and their gradients (2 + 4 bytes each) and the optimizer's state (12 bytes, over the ranks that share
    it), of the mean stage; and the inputs of the matrix products that every layer keeps for the backward pass, for as
    many micro-batches as the first stage holds at once.
    """
    shape, layout = job.shape, setting.layout
    state = 0 if setting.optimizer_on_host else 12
    static = sum(count * (6 + state / shards) for count, shards in rank_parameters(shape, layout))
    if shape.dense_layers:
        return static / GIB  # the first stage has fewer experts than the mean one
    passes = layout.pp if layout.vpp == 1 else 2 * (layout.pp - 1) + (layout.vpp - 1) * layout.pp + 1
    layers = shape.layers / (layout.pp * layout.vpp) * passes
    # What every tensor-parallel rank holds unless sequence parallelism splits it, and what they share in any case.
    whole, shared = 1.0 * shape.hidden, 0.0
    if setting.recompute != "full":
        wide = max(layout.expert_tensor_parallel, layout.tp) / layout.tp
        forward = shape.experts_per_token * shape.moe_ffn / wide if shape.experts else shape.ffn
        whole *= 4
        shared = (shape.heads + 2 * shape.kv_heads) * shape.head_dim + 3 * forward
    kept = whole / layout.tokens_split_over_tp + shared / layout.tp
    return (static + 2 * kept * layers * micro_batch_tokens(job, setting)) / GIB
