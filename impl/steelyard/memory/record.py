"""Records when storages are born and die, on fake tensors and on real ones: the bytes a step holds, and what they are.

On fake tensors the recorder also says what is fake. A *host* tensor is real and does not count; ``.to(device)`` with
``DEVICE`` makes a *device* tensor of it, which counts. Integer and boolean tensors on the device stay real, because
code that reads them (lengths, masks, token counts of experts) then reads true values; floating-point ones are fake.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._C._distributed_c10d import FakeWork, Work
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from steelyard.memory.allocator import Event
from steelyard.memory.live import rounded

# Operations see this as cpu:0, and every tensor on a CPU reports plain cpu: so moving a tensor here is always a copy
# that can be told from work on the host.
DEVICE = torch.device("cpu", 0)
CPU = torch.device("cpu")

PARTS = (
    "parameters",
    "gradients",
    "master weights",
    "Adam",
    "activations",
    "logits and loss",
    "inputs",
    "communication",
    "temporary",
)
"""What bytes are held for.

- parameters, gradients, master weights (the optimizer's float32 copy), Adam (its moments): what stays between steps.
- activations: born in a forward pass of the model and kept for the backward pass.
- logits and loss: born from the output layer on, and in the backward pass until the gradient has left it.
- inputs: copied from the host.
- communication: what transfers between stages and gathers over ranks fill.
- temporary: born and freed in the same pass, among them the gradients of activations and what is recomputed.
"""

STATIC_PARTS = PARTS[:4]

_aten, _c10d = torch.ops.aten, torch.ops.c10d
_GATHERS = {_c10d._allgather_base_.default, _c10d.allgather_.default, _c10d.recv_.default}
# Without a rule for fake tensors in torch.distributed._tools.fake_collectives.
_COALESCED = {
    _c10d.reduce_scatter_tensor_coalesced_.default,
    _c10d.allgather_into_tensor_coalesced_.default,
    _c10d.allreduce_coalesced_.default,
}


@dataclass(slots=True)
class _Block:
    size: int
    tag: str
    born: int
    died: int | None = None


@dataclass(frozen=True)
class Holding:
    """Bytes held at one moment.

    Attributes:
        bytes: all of them, in blocks of the CUDA allocator.
        parts: what they are held for, by the names of ``PARTS``; those without a byte are left out.
    """

    bytes: int
    parts: dict[str, int]


@dataclass(eq=False)
class Recorder(TorchDispatchMode):
    """Hold it around work whose storages are to be recorded.

    Attributes:
        fake: where floating-point tensors are made; None records real tensors, and leaves them alone.
        tag: part that a newly born storage belongs to.
    """

    fake: FakeTensorMode | None = None
    tag: str = "temporary"
    _blocks: list[_Block] = field(default_factory=list)
    # i: block i is born; ~i: it dies.
    _events: list[int] = field(default_factory=list)
    # (section, number of its first event)
    _spans: list[tuple[str, int]] = field(default_factory=lambda: [("build", 0)])
    _pass: int = 0
    _alive: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__()
        self._before: weakref.WeakSet[Any] = weakref.WeakSet()

    def enter(self, phase: str, tag: str) -> None:
        """A pass begins: from now on the work belongs to ``phase``, and new storages to the part ``tag``."""
        self._pass += 1
        self.go_on(phase, tag)

    def go_on(self, section: str, tag: str) -> None:
        """The same pass comes to another section of its phase, named ``phase: what``."""
        self._spans.append((section, len(self._events)))
        self.tag = tag

    @property
    def phase(self) -> str:
        return phase_of(self._spans[-1][0])

    def retag(self, tensor: torch.Tensor, tag: str) -> None:
        """Say what an already recorded storage is held for."""
        index = self._alive.get(tensor.untyped_storage()._cdata)
        if index is not None:
            self._blocks[index].tag = tag

    def retag_alive(self, old: str, new: str) -> None:
        """The same for every living storage of a part."""
        for index in self._alive.values():
            if self._blocks[index].tag == old:
                self._blocks[index].tag = new

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: object, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = list(_tensors((args, kwargs)))
        if self.fake is None:
            self._before.update(tensor.untyped_storage() for tensor in given)
            result = func(*args, **kwargs)
            made = [each for each in _tensors(result) if each.untyped_storage() not in self._before]
        else:
            result = self._run(func, args, kwargs, given)
            made = list(_tensors(result)) if self._on_device(given, kwargs) else []
        tag = "inputs" if self.fake and func is _aten._to_copy.default and not self._is_known(given[0]) else self.tag
        for tensor in made:
            self._born(tensor.untyped_storage(), tag)
        if func in _GATHERS:
            for tensor in _tensors(args[0]):
                self._filled_by_others(tensor)
        return result

    def _run(self, func: Callable[..., Any], args: tuple, kwargs: dict[str, Any], given: list[torch.Tensor]) -> Any:
        assert self.fake is not None
        device = kwargs.get("device")
        if device is not None:
            kwargs = {**kwargs, "device": CPU}
            if func is _aten._to_copy.default and _keeps_type(args[0], kwargs) and self._is_known(args[0]):
                # Already there: what .to() returns then is the tensor.
                return args[0].detach()
        if any(isinstance(tensor, FakeTensor) for tensor in given):
            if func is _aten._local_scalar_dense.default:
                # A norm, a loss, a sum for a metric: any number will do where only memory counts.
                return 0.0 if args[0].is_floating_point() else 0
            if func in _COALESCED:
                return Work.boxed(FakeWork())
            if func is _aten.masked_select.default and not isinstance(args[1], FakeTensor):
                return args[0].new_empty(int(args[1].sum()))
            # Outside the fake mode, in which a real mask could not say how many it chooses either.
            args = _with_known_sizes(func, args)
            with self.fake:
                return func(*args, **kwargs)
        if not given and _makes_floats(args, kwargs):
            with self.fake:
                return func(*args, **kwargs)
        if func is _c10d._allgather_base_.default:
            # The fake group moves nothing: every rank is taken to hold what this one does.
            args[0].view(-1, args[1].numel()).copy_(args[1].flatten().expand(args[0].numel() // args[1].numel(), -1))
        return func(*args, **kwargs)

    def _on_device(self, given: list[torch.Tensor], kwargs: dict[str, Any]) -> bool:
        return not given or kwargs.get("device") == DEVICE or any(self._is_known(tensor) for tensor in given)

    def _is_known(self, tensor: torch.Tensor) -> bool:
        return isinstance(tensor, FakeTensor) or tensor.untyped_storage()._cdata in self._alive

    def _born(self, storage: Any, tag: str) -> None:
        key = storage._cdata
        if key in self._alive:
            return
        index = len(self._blocks)
        self._blocks.append(_Block(storage.nbytes(), tag, self._pass))
        self._alive[key] = index
        self._events.append(index)
        weakref.finalize(storage, self._dies, key, index).atexit = False

    def _dies(self, key: int, index: int) -> None:
        del self._alive[key]
        self._blocks[index].died = self._pass
        self._events.append(~index)

    def _filled_by_others(self, tensor: torch.Tensor) -> None:
        index = self._alive.get(tensor.untyped_storage()._cdata)
        if index is not None and self._blocks[index].tag in ("activations", "temporary"):
            self._blocks[index].tag = "communication"

    def _part(self, block: _Block) -> str:
        return "temporary" if block.tag == "activations" and block.died == block.born else block.tag

    def peaks(self, since: int = 0) -> dict[str, Holding]:
        """The highest moment of each section, from the event with number ``since`` on."""
        sizes = (self._blocks[event if event >= 0 else ~event].size for event in self._events)
        levels = list(
            itertools.accumulate(
                rounded(size) * (1 if event >= 0 else -1) for size, event in zip(sizes, self._events, strict=True)
            )
        )
        best: dict[str, tuple[int, int]] = {}
        for (section, first), (_, end) in itertools.pairwise([*self._spans, ("", len(levels))]):
            if first < since and end <= since:
                continue
            # What a section finds counts too: it may bring nothing of its own.
            for number in range(max(first, since, 1) - 1, end):
                if levels[number] > best.get(section, (0, 0))[0]:
                    best[section] = (levels[number], number)
        return {section: Holding(most, self._parts_at(number)) for section, (most, number) in best.items()}

    def _parts_at(self, number: int) -> dict[str, int]:
        held = dict.fromkeys(PARTS, 0)
        for event in self._events[: number + 1]:
            block = self._blocks[event if event >= 0 else ~event]
            held[self._part(block)] += rounded(block.size) if event >= 0 else -rounded(block.size)
        return {part: size for part, size in held.items() if size}

    @property
    def count(self) -> int:
        """Events so far."""
        return len(self._events)

    def events(self) -> list[Event]:
        """Births and deaths in program order, for the replay of the allocator."""
        found = []
        for event in self._events:
            index = event if event >= 0 else ~event
            block = self._blocks[index]
            found.append(Event("alloc" if event >= 0 else "free", index, block.size, self._part(block)))
        return found


def phase_of(section: str) -> str:
    """``backward: loss`` is a section of ``backward``."""
    return section.partition(":")[0]


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, dict):
        for each in value.values():
            yield from _tensors(each)


def _with_known_sizes(func: Callable[..., Any], args: tuple) -> tuple:
    """Real masks that choose among fake values, as indices: how many they choose is known only from the real ones."""
    if func is not _aten.index.Tensor:
        return args
    indices: list[torch.Tensor | None] = []
    for each in args[1]:
        masks = each is not None and each.dtype == torch.bool and not isinstance(each, FakeTensor)
        indices += list(each.nonzero().unbind(1)) if masks else [each]
    return (args[0], indices)


def _keeps_type(tensor: torch.Tensor, kwargs: dict[str, Any]) -> bool:
    return kwargs.get("dtype") in (None, tensor.dtype)


def _makes_floats(args: tuple, kwargs: dict[str, Any]) -> bool:
    dtype = kwargs.get("dtype")
    if dtype is not None:
        return bool(dtype.is_floating_point)
    # Without a type, ranges of whole numbers are whole numbers, and everything else has the default type.
    return not args or not all(isinstance(each, int) for each in args)
