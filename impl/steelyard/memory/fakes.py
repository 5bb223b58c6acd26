"""One rank of a parallel layout alone in a process, on fake tensors: what megatron-core then finds in other places.

``fake_rank`` holds a fake process group of any size, in which this process is the rank that was asked for, with
megatron-core's groups over it. Everything that is replaced for that time stands in ``STAND_INS``, beside what
``running_on("cpu")`` adapts; the stand-ins of CUDA kernels are in ``kernels.py``.
"""

from __future__ import annotations

import contextlib
import functools
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._tools.fake_collectives  # makes collectives accept fake tensors
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from steelyard.errors import InputError
from steelyard.memory import kernels
from steelyard.memory.kernels import Kernels
from steelyard.memory.record import DEVICE, Recorder
from steelyard.model.build import initialize_parallel
from steelyard.model.host import running_on
from steelyard.parallel import ParallelLayout


@dataclass(frozen=True)
class StandIn:
    """One symbol that is replaced during a prediction.

    Attributes:
        owner: ``module`` or ``module:Class``.
        name: of its attribute.
        make: the replacement, from the original.
        reason: why the original cannot run, or what the replacement counts better.
    """

    owner: str
    name: str
    make: Callable[[Any], Any]
    reason: str


def _like_me(objects: list, value: object, group: object = None) -> None:
    objects[:] = [value] * len(objects)


def _balanced(routing: Callable[..., Any]) -> Callable[..., Any]:
    """Every expert gets as many tokens as every other: real booleans, since their sums become the sizes of tensors."""

    @functools.wraps(routing)
    def balanced(self: Any, *inputs: Any, **settings: Any) -> tuple[torch.Tensor, torch.Tensor]:
        weights, chosen = routing(self, *inputs, **settings)
        tokens, experts = chosen.shape
        first = torch.arange(tokens, device=DEVICE) * self.topk
        places = (first.unsqueeze(1) + torch.arange(self.topk, device=DEVICE)) % experts
        marks = torch.zeros((tokens, experts), dtype=torch.bool, device=DEVICE)
        return weights, marks.scatter_(1, places, True)

    return balanced


def _few_chunks(parts: Callable[..., Iterator[slice]]) -> Callable[..., list[slice]]:
    """The first chunk, the second, which finds the first one's tensors, and the last: the others repeat the second."""

    def few(count: int, size: int) -> list[slice]:
        every = list(parts(count, size))
        return [*every[:2], *every[2:][-1:]]

    return few


def _norm(chunk: int, overflow: object, tensors: list, per_tensor: bool = False) -> tuple[torch.Tensor, None]:
    return torch.ones(1, device=DEVICE), None


_ATTENTION = "steelyard.model.attention"
_SWIGLU = "megatron.core.fusions.fused_bias_swiglu"

STAND_INS: tuple[StandIn, ...] = (
    StandIn("steelyard.model.host", "CPU", lambda _: DEVICE, "tells moves to the device from work on the host"),
    StandIn(
        "torch.nn:Module",
        "_apply",
        lambda _: lambda self, fn, recurse=True: self,
        "parameters are made in their type and place, and fake ones cannot be exchanged",
    ),
    StandIn("torch.distributed", "all_gather_object", lambda _: _like_me, "nobody is there to answer"),
    StandIn(
        "megatron.core.parallel_state",
        "initialize_model_parallel",
        lambda original: functools.partial(original, create_gloo_process_groups=False),
        "gloo would wait for the other ranks",
    ),
    StandIn(
        "steelyard.model.build",
        "get_megatron_optimizer",
        lambda original: functools.partial(original, use_gloo_process_groups=False),
        "the same",
    ),
    StandIn(
        "megatron.core.optimizer.clip_grads",
        "l2_norm_impl",
        lambda _: _norm,
        "without TransformerEngine it builds a tensor from Python numbers, which fake ones are not",
    ),
    StandIn(
        "steelyard.step.logprobs",
        "_parts",
        _few_chunks,
        "1,200 chunks of 128k tokens would take most of the time, and each frees what it makes",
    ),
    StandIn(
        "megatron.core.transformer.moe.router:TopKRouter",
        "routing",
        _balanced,
        "the router's choice has no values: tokens are spread evenly over the experts",
    ),
)

FLASH = (
    StandIn(_ATTENTION, "_has_flash", lambda _: kernels.has_flash, "CUDA's answer, by type alone"),
    StandIn(f"{_ATTENTION}:PackedAttention", "_flash", lambda _: kernels.flash, "one kernel"),
    StandIn(
        f"{_ATTENTION}:PackedAttention",
        "_padded",
        lambda original: (
            lambda self, q, k, v: (
                kernels.flash_padded(self, q, k, v) if kernels.has_flash(q) else original(self, q, k, v)
            )
        ),
        "one kernel",
    ),
)
NORM = (StandIn("torch.nn.functional", "rms_norm", lambda _: kernels.rms_norm, "one kernel"),)
ROPE = (StandIn(_ATTENTION, "_rotate", lambda _: kernels.rotate, "one kernel"),)
SWIGLU = (
    StandIn(_SWIGLU, "swiglu", lambda _: kernels.swiglu, "compiled into one kernel"),
    StandIn(_SWIGLU, "swiglu_back", lambda _: kernels.swiglu_back, "compiled into one kernel"),
    StandIn(_SWIGLU, "weighted_swiglu", lambda _: kernels.weighted_swiglu, "compiled into one kernel"),
    StandIn(_SWIGLU, "weighted_swiglu_back", lambda _: kernels.weighted_swiglu_back, "compiled into one kernel"),
)


class _CudaCalls(TorchFunctionMode):
    """``Tensor.cuda()`` moves to the device (on a CPU it would return the tensor)."""

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.cuda:
            return args[0].to(DEVICE)
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def replaced(stand_ins: tuple[StandIn, ...]) -> Iterator[None]:
    """Put the stand-ins in place while this is held."""
    with contextlib.ExitStack() as stack:
        for one in stand_ins:
            owner = pkgutil.resolve_name(one.owner)
            original = getattr(owner, one.name)
            stack.callback(setattr, owner, one.name, original)
            setattr(owner, one.name, one.make(original))
        yield


@contextlib.contextmanager
def fake_rank(layout: ParallelLayout, rank: int, chosen: Kernels) -> Iterator[Recorder]:
    """While this is held, the process is ``rank`` of the layout, floating-point tensors are fake, and all are recorded.

    Raises:
        InputError: no such rank, or the process belongs to a process group already.
    """
    if not 0 <= rank < layout.world:
        raise InputError(f"rank={rank} is not one of the {layout.world} ranks of {layout}: 0 to {layout.world - 1}")
    if dist.is_initialized():
        raise InputError(
            "torch.distributed is initialised in this process, and a prediction needs a process group of its own: "
            "predict before it is initialised, or in another process"
        )
    used = STAND_INS + (
        FLASH * (chosen.attention == "flash")
        + NORM * (chosen.norm == "fused")
        + ROPE * (chosen.rope == "fused")
        + SWIGLU * (chosen.swiglu == "fused")
    )
    recorder = Recorder(FakeTensorMode(allow_non_fake_inputs=True))
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(running_on("cpu"))
        stack.enter_context(replaced(used))
        dist.init_process_group("fake", rank=rank, world_size=layout.world, store=FakeStore())
        stack.callback(dist.destroy_process_group)
        stack.callback(_forget)
        stack.enter_context(_CudaCalls())
        stack.enter_context(recorder)
        initialize_parallel(layout)
        yield recorder


def _forget() -> None:
    """Undo what megatron-core keeps beyond a model: its groups, buffers, and the rotary tables of all models."""
    parallel_state.destroy_model_parallel()
    RotaryEmbedding.forward.cache_clear()
