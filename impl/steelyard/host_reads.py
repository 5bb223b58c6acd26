"""Counts the operations that make the host wait for the device, with the places they come from.

On CUDA such an operation empties the queue of kernels, and nothing is queued behind it until the host goes on. On a CPU
nothing waits, so there the operations that would are counted:

- scalars: ``item``, ``bool``, ``int``, ``float``, tensors as an index, a slice bound, a size or a fill value;
- ``tolist``, ``numpy``, ``cpu``, and ``to`` with the literal ``"cpu"`` unless it is non-blocking;
- shapes that depend on values: ``nonzero``, ``torch.where`` of a condition alone, ``masked_select``, ``unique``,
  ``bincount``, ``repeat_interleave`` without ``output_size``, reading or writing through a boolean mask;
- ``equal``, ``allclose``, and ``copy_`` from the device into a tensor of the host.

On a CPU all tensors are in one memory, so ``count_host_reads`` keeps track of which would be on the host: what is made
of Python or NumPy data without a device, what was read, the tensors named in ``on_host``, and what is computed from
nothing else. All others stand for tensors of the device, so that an unknown tensor counts. Writing a number through a
boolean mask does not wait on CUDA, and is not counted. The count belongs to the calling thread.

On CUDA the count is PyTorch's own (``torch.cuda.set_sync_debug_mode``), for the whole process; it also has blocking
copies to the device. That side was written to PyTorch's documentation and is not verified on a GPU yet.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.weak import WeakTensorKeyDictionary

aten = torch.ops.aten

_TORCH = str(Path(torch.__file__).parent) + os.sep
_MODES = ("__torch_function__", "__torch_dispatch__")
_HANDED_OUT = torch.device("cpu")
"""What a tensor of the host answers when asked for its device: told apart from other CPU devices by identity."""

_ALWAYS = {
    aten._local_scalar_dense: "item",
    aten.nonzero: "nonzero",
    aten.masked_select: "masked_select",
    aten._unique: "unique",
    aten._unique2: "unique",
    aten.unique_dim: "unique",
    aten.unique_consecutive: "unique_consecutive",
    aten.unique_dim_consecutive: "unique_consecutive",
    aten.bincount: "bincount",
    aten.equal: "equal",
    aten.allclose: "allclose",
}
_GATHERS = (aten.index, aten._unsafe_index)
_SCATTERS = (aten.index_put, aten.index_put_, aten._index_put_impl_, aten._unsafe_index_put)
# Read the memory of a CPU tensor without an operation that a dispatch mode could see.
_READS = {torch.Tensor.tolist: "tolist", torch.Tensor.numpy: "numpy", torch.Tensor.__array__: "numpy"}
_FROM_DATA = (torch.tensor, torch.as_tensor)
_MASKS = (torch.bool, torch.uint8)

_allowed = threading.local()


@dataclass(frozen=True)
class Place:
    """Where reads come from.

    Attributes:
        operation: what waits (``item``, ``tolist``, ``boolean index`` ...).
        file, line: the nearest caller outside PyTorch; for the backward pass, who called ``backward``.
        owner: ``ours``, ``megatron`` (a file of megatron-core), or ``allowed``.
        reason: what ``allowed`` was told, else empty.
    """

    operation: str
    file: str
    line: int
    owner: str
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.operation} at {self.file}:{self.line}" + (f" ({self.reason})" if self.reason else "")


@dataclass
class HostReads:
    """What was counted: ``places`` says how often each place made the host wait."""

    places: Counter[Place] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        """All of them."""
        return self.places.total()

    @property
    def ours(self) -> int:
        """Those that are neither megatron-core's nor allowed: what a budget is set for."""
        return self.of("ours").total()

    @property
    def megatron(self) -> int:
        """Those whose nearest caller is megatron-core."""
        return self.of("megatron").total()

    @property
    def allowed(self) -> int:
        """Those inside ``allowed``."""
        return self.of("allowed").total()

    def of(self, owner: str) -> Counter[Place]:
        """The places of one owner: ``ours``, ``megatron`` or ``allowed``."""
        return self._where(lambda place: place.owner == owner)

    def by(self, prefix: str) -> Counter[Place]:
        """The places in files whose path begins with ``prefix``."""
        return self._where(lambda place: place.file.startswith(prefix))

    def _where(self, chosen: Callable[[Place], bool]) -> Counter[Place]:
        return Counter({place: count for place, count in self.places.items() if chosen(place)})

    def __str__(self) -> str:
        head = f"{self.total} host reads: {self.ours} ours, {self.megatron} Megatron's, {self.allowed} allowed"
        return "\n".join([head, *(f"{count:6d} x {place}" for place, count in self.places.most_common())])

    def add(self, operation: str, count: int = 1) -> None:
        """Count an operation of the code that is running."""
        self.places[_place(operation)] += count


@contextlib.contextmanager
def allowed(reason: str) -> Iterator[None]:
    """Reads inside are reported apart, with the reason: for code that only stands in for what CUDA does otherwise."""
    outer = getattr(_allowed, "reason", "")
    _allowed.reason = reason
    try:
        yield
    finally:
        _allowed.reason = outer


@contextlib.contextmanager
def count_host_reads(*, on_host: Iterable[torch.Tensor] = ()) -> Iterator[HostReads]:
    """Count while the context is held; contexts nest, and each counts what happens inside it.

    Args:
        on_host: tensors that are on the host although nothing shows it on a CPU, such as a batch that moves to the
            device micro-batch by micro-batch. Not needed on CUDA.
    """
    reads = HostReads()
    # Inside ``running_on("cpu")`` the current device is the CPU on a machine with a GPU too.
    cuda = torch.cuda.is_available() and isinstance(torch.cuda.current_device(), int)
    with _on_cuda(reads) if cuda else _on_cpu(reads, on_host):
        yield reads


def _place(operation: str) -> Place:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_inside(frame):
        frame = frame.f_back
    file, line = (frame.f_code.co_filename, frame.f_lineno) if frame is not None else ("unknown", 0)
    if reason := getattr(_allowed, "reason", ""):
        return Place(operation, file, line, "allowed", reason)
    module = frame.f_globals.get("__name__", "") if frame is not None else ""
    return Place(operation, file, line, "megatron" if module.split(".")[0] == "megatron" else "ours")


def _is_inside(frame: FrameType) -> bool:
    """Whether a frame is PyTorch's, this module's, or that of a mode which only hands an operation on."""
    name = frame.f_code.co_filename
    inside = name == __file__ or name.startswith(_TORCH) or frame.f_code.co_name in _MODES
    return inside or frame.f_globals.get("__name__") in ("contextlib", "warnings")


@contextlib.contextmanager
def _on_cpu(reads: HostReads, on_host: Iterable[torch.Tensor]) -> Iterator[None]:
    host = _HostTensors()
    for tensor in on_host:
        host.mark(tensor)
    with _Operations(reads, host), _Functions(reads, host):
        yield


class _HostTensors:
    """Which tensors would be on the host if the others were on a CUDA device."""

    def __init__(self) -> None:
        self._known = WeakTensorKeyDictionary()

    def mark(self, tensor: torch.Tensor) -> None:
        self._known[tensor] = True

    def has(self, tensor: torch.Tensor) -> bool:
        return tensor in self._known

    def all(self, values: Any) -> bool | None:
        """Whether all tensors in a nest of values are on the host; None if there are none."""
        found = [self.has(value) for value in tree_iter(values) if isinstance(value, torch.Tensor)]
        return all(found) if found else None

    def moved(self, tensor: torch.Tensor, to_host: bool) -> torch.Tensor:
        """The tensor where it was moved to. On a CPU that is the same object, which must stay where it is."""
        if self.has(tensor) != to_host:
            tensor = aten.alias(tensor)
            if to_host:
                self.mark(tensor)
            else:
                self._known.pop(tensor, None)
        return tensor

    def goes_to_host(self, target: Any) -> bool | None:
        """Whether a target of ``to`` is the host; None if it is no target."""
        if isinstance(target, torch.Tensor):
            return self.has(target)
        if isinstance(target, str):
            return target == "cpu"
        if isinstance(target, torch.device):
            return target is _HANDED_OUT
        return False if isinstance(target, int) and not isinstance(target, bool) else None


class _Operations(TorchDispatchMode):
    """Counts what reaches PyTorch's kernels, and follows the tensors of the host through them."""

    def __init__(self, reads: HostReads, host: _HostTensors) -> None:
        super().__init__()
        self.reads, self.host = reads, host

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        on_host = func.overloadpacket is aten.lift_fresh or self.host.all((args, kwargs))
        if not on_host and (found := self._waits(func, args, kwargs)):
            self.reads.add(*found)
        result = func(*args, **kwargs)
        if on_host:
            for value in tree_iter(result):
                if isinstance(value, torch.Tensor):
                    self.host.mark(value)
        return result

    def _waits(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[str, int] | None:
        packet = func.overloadpacket
        if packet in _ALWAYS:
            return _ALWAYS[packet], 1
        if packet is aten.repeat_interleave and kwargs.get("output_size") is None and len(args) < 2:
            return "repeat_interleave", 1
        if packet in _GATHERS or packet in _SCATTERS:
            masks = sum(index is not None and index.dtype in _MASKS for index in args[1])
            name = "boolean index" if packet in _GATHERS else "boolean index assignment"
            return (name, masks) if masks and not self._fills(packet, args, masks) else None
        blocking = packet is aten.copy_ and not (args[2:] or [kwargs.get("non_blocking")])[0]
        return ("copy_", 1) if blocking and self.host.has(args[0]) else None

    def _fills(self, packet: Any, args: tuple, masks: int) -> bool:
        # On CUDA a number of the host written through one mask becomes masked_fill, which does not wait.
        if packet not in _SCATTERS or masks != 1 or (len(args) > 3 and args[3]):
            return False
        others = [index for index in args[1] if index is not None and index.dtype not in _MASKS]
        return not others and args[2].numel() == 1 and self.host.has(args[2])


class _Functions(TorchFunctionMode):
    """Counts what reads a CPU tensor's memory directly, and sees to which device a call asks to go."""

    def __init__(self, reads: HostReads, host: _HostTensors) -> None:
        super().__init__()
        self.reads, self.host = reads, host

    def __torch_function__(
        self, func: Any, types: object, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _READS and not self.host.has(args[0]):
            self.reads.add(_READS[func])
        elif func in _FROM_DATA and isinstance(args[0], list | tuple):
            # Each scalar of a list is read on its own.
            on_device = sum(isinstance(x, torch.Tensor) and not self.host.has(x) for x in tree_iter(args[0]))
            if on_device:
                self.reads.add("item", on_device)
        elif func is torch.Tensor.cpu:
            return self._move(func, args, kwargs, to_host=True)
        elif func is torch.Tensor.cuda:
            return self._move(func, args, kwargs, to_host=False)
        elif func is torch.Tensor.to:
            targets = (*args[1:2], *(kwargs[name] for name in ("device", "other") if name in kwargs))
            places = [place for target in targets if (place := self.host.goes_to_host(target)) is not None]
            if places:
                return self._move(func, args, kwargs, to_host=places[0])
        result = func(*args, **kwargs)
        if getattr(func, "__self__", None) is torch.Tensor.device:
            return _HANDED_OUT if self.host.has(args[0]) else result
        if isinstance(result, torch.Tensor):
            return self._placed(func, result, args, kwargs)
        return result

    def _move(self, func: Any, args: tuple, kwargs: dict[str, Any], to_host: bool) -> torch.Tensor:
        waits = not (kwargs.get("non_blocking") or (func is torch.Tensor.to and True in args[2:4]))
        if to_host and waits and not self.host.has(args[0]):
            self.reads.add("cpu")
        return self.host.moved(func(*args, **kwargs), to_host)

    def _placed(self, func: Any, result: torch.Tensor, args: tuple, kwargs: dict[str, Any]) -> torch.Tensor:
        """Where a new tensor is: on the device that was asked for, or on the host if there were no tensors."""
        if kwargs.get("device") is not None:
            return self.host.moved(result, bool(self.host.goes_to_host(kwargs["device"])))
        if func is torch.Tensor.new_tensor:
            return self.host.moved(result, self.host.has(args[0]))
        if self.host.all((args, kwargs)) is None:
            self.host.mark(result)
        return result


@contextlib.contextmanager
def _on_cuda(reads: HostReads) -> Iterator[None]:
    """PyTorch warns at every operation that waits; the warning appears while its caller is on the stack."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        shown = warnings.showwarning

        def count(message: Any, *rest: Any, **more: Any) -> None:
            if "synchronizing CUDA operation" not in str(message):
                shown(message, *rest, **more)
                return
            reads.add("synchronizing operation")
            if getattr(shown, "counts_host_reads", False):
                shown(message, *rest, **more)

        count.counts_host_reads = True  # type: ignore[attr-defined]
        warnings.showwarning = count
        warnings.filterwarnings("always", message=".*synchronizing CUDA operation")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)
