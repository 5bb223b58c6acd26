"""The peak memory of a training step, predicted without a GPU: the real step, run on fake tensors.

The builder, engine, schedules, DDP and optimizer are those of a real step; only the values are missing, so any model
fits on any machine. What is alive is counted by storage, in blocks of the CUDA allocator. Not in it: the CUDA context,
buffers of NCCL, workspaces of matrix products, and what the allocator reserves beyond what is allocated
(``allocator.py`` replays that from ``MemoryPrediction.events``).
"""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from steelyard.cost import ModelShape
from steelyard.errors import BatchError, InputError, PlanError
from steelyard.hints import did_you_mean
from steelyard.memory.allocator import Event
from steelyard.memory.fakes import fake_rank
from steelyard.memory.kernels import KERNELS, Kernels
from steelyard.memory.live import only_new_garbage
from steelyard.memory.passes import Passes
from steelyard.memory.record import PARTS, STATIC_PARTS, Holding, Recorder, phase_of
from steelyard.model.build import build_model, build_optimizer
from steelyard.parallel import ParallelLayout
from steelyard.pipeline import legal_count
from steelyard.step import Actor, ActorRole, Critic, CriticRole, RewardRole, StepSettings, forward_backward_batch
from steelyard.step.roles import Role

Recompute = Literal["none", "selective", "full"]
RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}
PHASES = ("build", "forward", "backward", "gradient reduction", "optimizer")
GIB = 2**30

Batch = dict[str, torch.Tensor]
# Takes the batch (on the host), this rank's model chunks and their optimizer (None when only outputs are computed).
Step = Callable[[Batch, list[Any], Any], object]


@dataclass(frozen=True)
class MemoryPrediction:
    """What one rank needs.

    Attributes:
        peak_bytes: the most bytes allocated at one moment of a step (not the first, which makes the optimizer's state).
        phase: in which of ``PHASES`` that is.
        parts: what the bytes are held for at that moment, by the names of ``record.PARTS``.
        phases: the highest moment of each phase.
        sections: the same, with a phase's logits, loss and embedding apart from its layers (``backward: loss`` ...).
            Each has a highest moment of one kind, which grows in a straight line with tokens and with layers.
        parameters: number of parameters on the rank.
        rank: which rank of the layout.
        stage: its pipeline stage.
        longest: tokens of the longest row.
        events: births and deaths of storages in program order, when a trace was asked for.
        seconds: what the prediction took.
        extrapolated: whether it was continued from two shallower models.
    """

    peak_bytes: int
    phase: str
    parts: Mapping[str, int]
    phases: Mapping[str, Holding]
    parameters: int
    rank: int
    stage: int
    longest: int
    seconds: float
    events: Sequence[Event] = ()
    extrapolated: bool = False
    sections: Mapping[str, Holding] = dataclasses.field(default_factory=dict)

    @property
    def peak_gib(self) -> float:
        return self.peak_bytes / GIB

    @property
    def static_bytes(self) -> int:
        """Parameters, gradients and optimizer: what is there between steps."""
        return sum(self.parts.get(part, 0) for part in STATIC_PARTS)


@dataclass(frozen=True)
class _Setting:
    """What is predicted: the arguments of ``predict_peak``."""

    shape: ModelShape
    layout: ParallelLayout
    micro_batches: Sequence[Sequence[int]]
    step: Step | None
    rank: int
    role: Role
    forward_only: bool
    dtype: torch.dtype
    recompute: Recompute
    kernels: Kernels
    prompt_tokens: int
    override_ddp_config: Mapping[str, Any] | None
    override_transformer_config: Mapping[str, Any] | None
    trace: bool


def predict_peak(
    shape: ModelShape,
    layout: ParallelLayout,
    micro_batches: Sequence[Sequence[int]],
    *,
    step: Step | None = None,
    rank: int = 0,
    role: Role | None = None,
    forward_only: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    recompute: Recompute = "none",
    kernels: str | Kernels = "cuda",
    prompt_tokens: int = 1,
    override_ddp_config: Mapping[str, Any] | None = None,
    override_transformer_config: Mapping[str, Any] | None = None,
    trace: bool = False,
    extrapolate: bool = False,
) -> MemoryPrediction:
    """Peak memory of one rank in one optimizer step, and what holds it.

    The step runs twice, so it must repeat itself: the first time only to see its micro-batches and to make the
    optimizer's state (``passes.py``). The process must not belong to a process group.

    Args:
        shape, layout: the model, and how it is spread over ranks.
        micro_batches: lengths in tokens of the rows of each micro-batch of this rank, in the order in which they run;
            over all context-parallel ranks.
        step: what is predicted, called as ``step(batch, models, optimizer)`` with the rows of all micro-batches in
            their order; None is the engine's own step on exactly these micro-batches.
        rank: which rank of the layout; stage p begins at rank p·tp·cp·dp.
        role: of the engine's step; by default an actor. A critic or reward model has a value head.
        forward_only: the outputs are computed, and there is no optimizer. Reward models are never trained.
        dtype: of parameters and activations.
        recompute: activations computed again in the backward pass: none, of the attention (selective), of all layers.
        kernels: ``cuda``, ``fused`` or ``cpu`` (see ``kernels.py``), or kernels of your choice.
        prompt_tokens: leading tokens of each row that are not scored.
        override_ddp_config, override_transformer_config: as for ``build_model``.
        trace: keep the events.
        extrapolate: run models of two and of three layers per chunk instead, and continue each section in a straight
            line. Exact as long as the moment of the peak is the same one in both. Models that are no deeper, or whose
            leading layers are of another kind, are run in full.

    Raises:
        InputError: something that the builder, Megatron's schedules or the model's positions do not allow, or the
            process belongs to a process group.
    """
    role = role or ActorRole()
    setting = _Setting(
        shape=shape,
        layout=layout,
        micro_batches=[[int(length) for length in part] for part in micro_batches],
        step=step,
        rank=rank,
        role=role,
        forward_only=forward_only or isinstance(role, RewardRole),
        dtype=dtype,
        recompute=recompute,
        kernels=_kernels(kernels),
        prompt_tokens=prompt_tokens,
        override_ddp_config=override_ddp_config,
        override_transformer_config=override_transformer_config,
        trace=trace,
    )
    _check(setting)
    chunks = layout.pp * layout.vpp
    if extrapolate and shape.layers > 3 * chunks and not shape.dense_layers:
        return _extrapolated(setting, 2 * chunks, 3 * chunks)
    return _predict(setting)


def stage_ranks(layout: ParallelLayout) -> dict[str, int]:
    """A rank of each kind of pipeline stage. Of the stages in the middle, the second holds the most micro-batches."""
    stages = {"first": 0, "middle": 1, "last": layout.pp - 1}
    if layout.pp < 3:
        del stages["middle"]
    if layout.pp == 1:
        return {"only": 0}
    return {name: stage * layout.world // layout.pp for name, stage in stages.items()}


def _kernels(chosen: str | Kernels) -> Kernels:
    if isinstance(chosen, Kernels):
        return chosen
    if chosen not in KERNELS:
        raise InputError(
            f"kernels={chosen!r} is unknown{did_you_mean(chosen, KERNELS)}: use {', '.join(KERNELS)} or a Kernels"
        )
    return KERNELS[chosen]


def _check(setting: _Setting) -> None:
    shape, layout = setting.shape, setting.layout
    layout.check(shape)
    if setting.recompute not in RECOMPUTE:
        raise InputError(f"recompute={setting.recompute!r} is unknown: use one of {', '.join(RECOMPUTE)}")
    lengths = [length for part in setting.micro_batches for length in part]
    if not lengths or min(lengths) <= setting.prompt_tokens:
        raise BatchError(
            f"micro_batches={list(setting.micro_batches)}: rows of more than prompt_tokens={setting.prompt_tokens} "
            f"tokens are needed"
        )
    if max(lengths) > shape.max_positions:
        raise BatchError(
            f"a row of {max(lengths)} tokens is above the {shape.max_positions} positions of model {shape.name}: use "
            f"at most {shape.max_positions}, or a shape with a larger max_positions"
        )
    if setting.step is None:
        pipeline = StepSettings(max_tokens=1, layout=layout).pipeline()
        legal = legal_count(len(setting.micro_batches), pipeline)
        if legal != len(setting.micro_batches):
            raise PlanError(
                f"{len(setting.micro_batches)} micro-batches are not a count that Megatron's schedule runs on "
                f"{layout}: the next one is {legal}"
            )


def _predict(setting: _Setting) -> MemoryPrediction:
    start = time.perf_counter()
    layout, batch = setting.layout, _batch(setting)
    overrides = {
        "perform_initialization": False,
        "bias_activation_fusion": setting.kernels.swiglu == "fused",
        **RECOMPUTE[setting.recompute],
        **(setting.override_transformer_config or {}),
    }
    with only_new_garbage(), fake_rank(layout, setting.rank, setting.kernels) as recorder:
        recorder.tag = "parameters"
        models = build_model(
            setting.shape,
            layout,
            dtype=setting.dtype,
            value_head=isinstance(setting.role, (CriticRole, RewardRole)),
            override_ddp_config=setting.override_ddp_config,
            override_transformer_config=overrides,
        )
        optimizer = None if setting.forward_only else build_optimizer(models, lr=1e-6)
        _name_static(recorder, models)
        step = setting.step or _engine_step(setting)
        passes = Passes(recorder, layout, setting.shape.hidden)
        if optimizer is not None:
            _note_optimizer(recorder, optimizer)
        with passes.scouting():
            step(batch, models, optimizer)
        # What the first run left in cycles must not count as held by the second.
        gc.collect()
        if optimizer is not None:
            _name_adam(recorder, optimizer)
        since = recorder.count
        recorder.enter("forward", "temporary")
        with passes.running(models):
            step(batch, models, optimizer)
        parameters = sum(parameter.numel() for model in models for parameter in model.parameters())
        sections = {**recorder.peaks(since), "build": recorder.peaks(0)["build"]}
        events = recorder.events() if setting.trace else []
    return _prediction(
        sections,
        parameters,
        setting,
        time.perf_counter() - start,
        events=events,
    )


def _prediction(
    sections: Mapping[str, Holding], parameters: int, setting: _Setting, seconds: float, **more: Any
) -> MemoryPrediction:
    phases: dict[str, Holding] = {}
    for phase in PHASES:
        of_phase = [held for section, held in sections.items() if phase_of(section) == phase]
        if of_phase:
            phases[phase] = max(of_phase, key=lambda held: held.bytes)
    phase = max(phases, key=lambda name: phases[name].bytes)
    stage = setting.rank * setting.layout.pp // setting.layout.world
    held = phases[phase]
    longest = max(length for part in setting.micro_batches for length in part)
    return MemoryPrediction(
        held.bytes,
        phase,
        held.parts,
        phases,
        parameters,
        setting.rank,
        stage,
        longest,
        seconds,
        sections=sections,
        **more,
    )


def _extrapolated(setting: _Setting, shallow: int, deep: int) -> MemoryPrediction:
    """Every section and part continued from two depths."""
    shape = setting.shape
    start = time.perf_counter()
    one, two = (
        _predict(dataclasses.replace(setting, shape=dataclasses.replace(shape, layers=layers), trace=False))
        for layers in (shallow, deep)
    )
    far = (shape.layers - shallow) / (deep - shallow)

    def line(at_shallow: int, at_deep: int) -> int:
        return round(at_shallow + far * (at_deep - at_shallow))

    sections = {}
    for name in one.sections:
        near, next_ = one.sections[name], two.sections[name]
        parts = {part: line(near.parts.get(part, 0), next_.parts.get(part, 0)) for part in PARTS}
        sections[name] = Holding(line(near.bytes, next_.bytes), {part: size for part, size in parts.items() if size})
    return _prediction(
        sections,
        line(one.parameters, two.parameters),
        setting,
        time.perf_counter() - start,
        extrapolated=True,
    )


def _batch(setting: _Setting) -> Batch:
    """All rows as trainers shape them, real and on the host; only their shapes and masks matter."""
    lengths = torch.tensor([length for part in setting.micro_batches for length in part])
    prompt, responses = setting.prompt_tokens, lengths - setting.prompt_tokens
    width = int(responses.max())
    response_mask = (torch.arange(width) < responses[:, None]).float()
    mask = torch.cat((torch.ones(len(lengths), prompt), response_mask), dim=1).long()
    block = torch.zeros(len(lengths), width)
    names = {"old_log_probs", "advantages", "values", "returns", *setting.role.inputs}
    return {
        "input_ids": torch.zeros_like(mask),
        "attention_mask": mask,
        "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
        "responses": torch.zeros_like(mask[:, prompt:]),
        "response_mask": response_mask,
        **{name: block.clone() for name in sorted(names)},
    }


def _engine_step(setting: _Setting) -> Step:
    """The engine's own step on the given micro-batches."""
    sizes = [len(part) for part in setting.micro_batches]
    ends = torch.tensor(sizes).cumsum(0).tolist()
    indices = [list(range(end - size, end)) for size, end in zip(sizes, ends, strict=True)]
    most = max(sum(part) for part in setting.micro_batches)
    settings = StepSettings(max_tokens=most, layout=setting.layout)
    role = setting.role

    def compute(batch: Batch, models: list[Any], optimizer: Any) -> None:
        with torch.no_grad():
            forward_backward_batch(batch, role, models, settings, indices=indices, forward_only=True)

    def update(batch: Batch, models: list[Any], optimizer: Any) -> None:
        worker: Any = Critic if isinstance(role, CriticRole) else Actor
        worker(models, settings, optimizer, role).update(batch, indices=indices)

    return compute if setting.forward_only else update


def _name_static(recorder: Recorder, models: list[Any]) -> None:
    """Parameters and gradients by what they are; what the build left beside them belongs to the optimizer."""
    recorder.retag_alive("parameters", "master weights")
    for model in models:
        for tensor in (*model.parameters(), *torch.nn.Module.buffers(model)):
            recorder.retag(tensor, "parameters")
        for buffer in (*model.__dict__["buffers"], *model.expert_parallel_buffers):
            recorder.retag(buffer.grad_data, "gradients")


def _name_adam(recorder: Recorder, optimizer: Any) -> None:
    """The moments, once they are there."""
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        for state in one.optimizer.state.values():
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    recorder.retag(value, "Adam")


def _note_optimizer(recorder: Recorder, optimizer: Any) -> None:
    step = optimizer.step

    def noted(*args: Any, **kwargs: Any) -> Any:
        recorder.enter("optimizer", "temporary")
        return step(*args, **kwargs)

    optimizer.step = noted
