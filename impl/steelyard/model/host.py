"""Where megatron-core runs: on CUDA as it is, or on a CPU after a few adaptions.

megatron-core asks ``torch.cuda`` for the current device, streams and random states, and writes ``device="cuda"`` in
places. ``running_on("cpu")`` answers those questions for the CPU while the context is held, and puts everything back
when it is left. No file of megatron-core is edited, ``torch.cuda.is_available()`` still tells the truth, and what is
adapted is the table ``ADAPTIONS`` below plus the literals that ``_CudaLiterals`` rewrites. The device that was asked
for decides, not the device that exists: on a machine with a GPU, ``running_on("cpu")`` runs on the CPU.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import distributed_c10d
from torch.overrides import TorchFunctionMode

from steelyard.errors import InputError

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Adaption:
    """One symbol that is replaced while megatron-core runs on a CPU."""

    module: str
    name: str
    value: Any
    reason: str


class _NoStream:
    """A CUDA stream or event on a device that runs everything in order: nothing to wait for."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __enter__(self) -> _NoStream:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def _nothing(self, *args: object) -> None:
        pass

    wait_stream = wait_event = wait = record = synchronize = _nothing

    def record_event(self, *args: object) -> _NoStream:
        return self

    def query(self) -> bool:
        return True


_RANDOM = "megatron.core.tensor_parallel.random"
_DISPATCHER = "megatron.core.transformer.moe.token_dispatcher"


def _on_the_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """What megatron-core's ``maybe_move_tensor_to_cpu`` makes of a tensor on CUDA."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _all_gather(outputs: list[torch.Tensor], mine: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
    """gloo gathers equal shapes only: where they differ along the first dimension, send to each rank instead."""
    if len({output.shape for output in outputs}) == 1:
        return distributed_c10d.all_gather(outputs, mine, group, async_op)
    rows = [len(output) for output in outputs]
    everything = mine.new_empty((sum(rows), *mine.shape[1:]))
    to_each = mine.repeat(len(rows), *[1] * (mine.dim() - 1))
    distributed_c10d.all_to_all_single(everything, to_each, rows, [len(mine)] * len(rows), group)
    for output, part in zip(outputs, everything.split(rows), strict=True):
        output.copy_(part)
    return None


def _reduce_scatter(
    mine: torch.Tensor,
    inputs: list[torch.Tensor],
    op: Any = distributed_c10d.ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """Likewise for its counterpart."""
    if len({part.shape for part in inputs}) == 1:
        return distributed_c10d.reduce_scatter(mine, inputs, op, group, async_op)
    received = mine.new_empty((len(mine) * len(inputs), *mine.shape[1:]))
    rows = [len(part) for part in inputs]
    distributed_c10d.all_to_all_single(received, torch.cat(inputs), [len(mine)] * len(rows), rows, group)
    mine.copy_(received.unflatten(0, (len(rows), len(mine))).sum(0))
    return None


class _NoEvent(_NoStream):
    """Likewise for an event."""


# A torch.device stands wherever megatron-core puts the index of the current device. Every entry is an object of its
# own: torch._dynamo, which megatron-core's imports wake, indexes functions by identity and refuses one under two names.
ADAPTIONS: tuple[Adaption, ...] = (
    Adaption("torch.cuda", "current_device", lambda: CPU, "layers, mappings, transfers and RoPE allocate on it"),
    Adaption("torch.cuda", "set_device", lambda device: None, "launchers select a device"),
    Adaption(
        "torch.cuda", "synchronize", lambda device=None: None, "transfers and gradient buffers wait for the device"
    ),
    Adaption("torch.cuda", "empty_cache", lambda: None, "the optimizer and buffers give memory back"),
    Adaption("torch.cuda", "manual_seed", lambda seed: torch.manual_seed(seed), "the random tracker seeds the device"),
    Adaption(
        "torch.cuda", "get_rng_state", lambda *_: torch.get_rng_state(), "the random tracker saves the device's state"
    ),
    Adaption("torch.cuda", "Stream", _NoStream, "overlapped gradient reduction makes a communication stream"),
    Adaption("torch.cuda", "Event", _NoEvent, "combined schedules order streams by events"),
    Adaption("torch.cuda", "current_stream", lambda device=None: _NoStream(), "streams wait for the current one"),
    Adaption("torch.cuda", "default_stream", lambda device=None: _NoStream(), "gradient buffers wait for it"),
    Adaption("torch.cuda", "stream", lambda stream: _NoStream(), "a context around communication"),
    Adaption(_RANDOM, "_get_cuda_rng_state", lambda *_, **__: torch.get_rng_state(), "forks save the device's state"),
    Adaption(
        _RANDOM, "_set_cuda_rng_state", lambda s, *_, **__: torch.set_rng_state(s), "forks restore the device's state"
    ),
    Adaption(
        _DISPATCHER,
        "maybe_move_tensor_to_cpu",
        _on_the_host,
        "experts' token counts go to collectives as numpy arrays, which only CUDA tensors were made into",
    ),
    Adaption("torch.distributed", "all_gather", _all_gather, "ranks that share an expert hold unequal tokens"),
    Adaption("torch.distributed", "reduce_scatter", _reduce_scatter, "and get unequal tokens back"),
)


def _is_cuda(device: object) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.startswith("cuda")


class _CudaLiterals(TorchFunctionMode):
    """Rewrites the CUDA literals in megatron-core's calls of torch functions.

    ``device="cuda"`` becomes the CPU (schedules, gradient clipping, optimizers), pinned memory becomes ordinary memory,
    ``Tensor.cuda()`` returns the tensor, and ``Tensor.type()`` answers with the CUDA name, since the optimizers sort
    parameters by comparing it with ``torch.cuda.FloatTensor`` and its like.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if kwargs:
            if _is_cuda(kwargs.get("device")):
                kwargs = {**kwargs, "device": CPU}
            if kwargs.get("pin_memory"):
                kwargs = {**kwargs, "pin_memory": False}
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if func is torch.Tensor.cuda or func is torch.Tensor.pin_memory:
            return args[0]
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], CPU, *args[2:])
        return func(*args, **(kwargs or {}))


def _expected_on_cpu(record: logging.LogRecord) -> bool:
    # On a CPU the model's generator is the CPU's, so it must change inside a fork.
    return "CPU RNG state changed within GPU RNG context" not in record.getMessage()


def pick_device(name: str | None = None, rank: int = 0, world: int = 1) -> torch.device:
    """The device of one rank of this machine: as named, or CUDA where there is a device for every rank, else the CPU.

    Raises:
        InputError: ``cuda`` was asked for and there are fewer devices than ranks, or the name is neither.
    """
    if name not in (None, "cpu", "cuda"):
        raise InputError(f"device {name!r} is unknown: use 'cpu' or 'cuda'")
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "cuda" and there < world:
        raise InputError(
            f"device 'cuda' needs one GPU per rank: {there} found for {world} ranks; use 'cpu' or fewer ranks"
        )
    if name == "cpu" or there < world:
        return CPU
    return torch.device("cuda", rank)


_depth = 0


@contextlib.contextmanager
def running_on(device: torch.device | str) -> Iterator[torch.device]:
    """Hold this while building and running Megatron models on ``device``; it nests, and restores everything at the end.

    The rewriting of literals belongs to the calling thread, as all of torch's modes do.
    """
    global _depth
    device = torch.device(device)
    with contextlib.ExitStack() as stack:
        if device.type == "cuda":
            stack.enter_context(torch.cuda.device(device))
            yield device
            return
        if _depth == 0:
            # All imports come first: megatron-core's make torch._dynamo index the functions of torch.cuda as they are.
            owners = [importlib.import_module(adaption.module) for adaption in ADAPTIONS]
            for owner, adaption in zip(owners, ADAPTIONS, strict=True):
                stack.callback(setattr, owner, adaption.name, getattr(owner, adaption.name))
                setattr(owner, adaption.name, adaption.value)
            logger = logging.getLogger(_RANDOM)
            logger.addFilter(_expected_on_cpu)
            stack.callback(logger.removeFilter, _expected_on_cpu)
            stack.enter_context(_CudaLiterals())
        _depth += 1
        try:
            yield device
        finally:
            _depth -= 1
