"""Moves parameters, gradients and optimizer state to host memory and back, to the bit.

Megatron's DDP keeps parameters and gradients in flat buffers of which every parameter is a view, and its optimizer
keeps float32 shards that may be views of them too. So what moves is the storage: its bytes are copied to the host and
the storage is resized to nothing, which keeps every view of it valid (as megatron-core's ``_ParamAndGradBuffer`` does).
Host copies are pinned where the device is a CUDA device; PyTorch caches pinned memory, so it is pinned once.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from steelyard.errors import InputError

Storage = torch.UntypedStorage

PARAMS, GRADS, OPTIMIZER = PIECES = ("params", "grads", "optimizer")


class PieceState(NamedTuple):
    """Where one piece is.

    Attributes:
        where: ``device``, or ``host`` from ``offload`` until ``onload``.
        device_bytes: bytes of it on the device now. On the host only what came into being since then is there.
        host_bytes: bytes of it on the host.
    """

    where: str
    device_bytes: int
    host_bytes: int


class Moved(NamedTuple):
    """What one call of ``offload`` or ``onload`` did.

    Attributes:
        bytes: of each piece that was asked for, the bytes that left the device or came back to it.
        seconds: time it took, with the copies.
    """

    bytes: dict[str, int]
    seconds: float

    @property
    def total(self) -> int:
        """Bytes of all pieces together."""
        return sum(self.bytes.values())


@dataclass
class _Piece:
    """One piece's storages that are away: each with its size and its copy (None where the contents were let go)."""

    away: bool = False
    kept: list[tuple[Storage, int, torch.Tensor | None]] = field(default_factory=list)


class Offloader:
    """Moves the state of model chunks and their optimizer, whole or in part.

    Every call may come at any time and any number of times: a piece that is where it should be stays there. What came
    into being since the last ``offload``, such as optimizer state from a loaded checkpoint, leaves with the next one.
    A storage that holds several pieces belongs to the first in the order parameters, gradients, optimizer: so float32
    parameters that the distributed optimizer updates in place leave with the parameters.

    A forward pass of a model whose parameters are away is refused, and with gradients enabled also one whose gradients
    are away; so are ``zero_grad_buffer`` and the optimizer's ``step`` without what they write. Nothing else is guarded:
    do not touch tensors that are on the host.
    """

    def __init__(self, models: Sequence[torch.nn.Module], optimizer: Any = None) -> None:
        """
        Args:
            models: model chunks, wrapped in Megatron's DDP or not (a reference model has no gradients to move).
            optimizer: Megatron's optimizer over them, chained or not; None where there is none.

        Raises:
            InputError: the models have no parameters, or their buffers are registered with NCCL and cannot move.
        """
        self.models, self.optimizer = list(models), optimizer
        first = next((parameter for model in self.models for parameter in model.parameters()), None)
        if first is None:
            raise InputError(f"the {len(self.models)} models have no parameters: give the chunks of build_model")
        if any(getattr(buffer, "nccl_ub", False) for buffer in self._buffers()):
            raise InputError("DDP buffers with nccl_ub=True are registered with NCCL and cannot move: set it to False")
        self.device = first.device
        self._pieces = {name: _Piece() for name in PIECES}
        for model in self.models:
            model.register_forward_pre_hook(self._check_forward, prepend=True)
            self._guard(model, "zero_grad_buffer", GRADS)
        self._guard(self.optimizer, "step", *PIECES)

    @property
    def state(self) -> dict[str, PieceState]:
        """Where each piece is, and how many bytes of it are on the device and on the host."""
        there = self._storages()
        return {
            name: PieceState(
                "host" if piece.away else "device",
                sum(storage.nbytes() for storage in there[name]),
                sum(copy.numel() for _, _, copy in piece.kept if copy is not None),
            )
            for name, piece in self._pieces.items()
        }

    def offload(self, *pieces: str, discard: bool = False) -> Moved:
        """Copy pieces to the host and release their memory on the device; without names, all of them.

        Args:
            pieces: of ``params``, ``grads`` and ``optimizer``.
            discard: let gradients go without a copy; ``onload`` then brings zeros. Right between steps, where the
                next step zeroes them anyway.

        Raises:
            InputError: an unknown piece, something else than gradients is to be discarded, or gradients are still being
                reduced.
        """
        names = known_pieces(pieces)
        if discard and names != [GRADS]:
            raise InputError(f"discard=True with {', '.join(names)}: only 'grads' can be let go without a copy")
        self._settle(names)
        start = time.perf_counter()
        there = self._storages()
        # All copies are made before anything is released: where the host has no room, nothing has changed.
        copies = {name: [None if discard else self._copied(storage) for storage in there[name]] for name in names}
        self._wait()
        moved = {}
        for name in names:
            piece, moved[name] = self._pieces[name], 0
            piece.away = True
            for storage, copy in zip(there[name], copies[name], strict=True):
                piece.kept.append((storage, storage.nbytes(), copy))
                moved[name] += storage.nbytes()
                storage.resize_(0)
        return Moved(moved, time.perf_counter() - start)

    def onload(self, *pieces: str) -> Moved:
        """Bring pieces back to the device as they were; without names, all of them.

        Raises:
            InputError: an unknown piece.
        """
        names = known_pieces(pieces)
        start = time.perf_counter()
        moved = {}
        for name in names:
            piece, moved[name] = self._pieces[name], 0
            while piece.kept:  # one by one: where the device has no room, what came back is back
                storage, size, copy = piece.kept[-1]
                storage.resize_(size)
                target = self._contents(storage)
                if copy is None:
                    target.zero_()
                else:
                    target.copy_(copy, non_blocking=True)
                piece.kept.pop()
                moved[name] += size
            piece.away = False
        self._wait()
        return Moved(moved, time.perf_counter() - start)

    def require(self, *pieces: str) -> None:
        """Check that pieces are on the device; without names, all of them.

        Raises:
            InputError: one is on the host, or unknown.
        """
        for name in known_pieces(pieces):
            if self._pieces[name].away:
                raise InputError(f"{name} are on the host: call onload({name!r}) first")

    def _check_forward(self, *_: object) -> None:
        self.require(PARAMS)
        if torch.is_grad_enabled():
            self.require(GRADS)

    def _guard(self, owner: Any, name: str, *pieces: str) -> None:
        """Let a method of ``owner``, where it has it, begin with a check that pieces are there."""
        method = getattr(owner, name, None)
        if method is None:
            return

        @functools.wraps(method)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            self.require(*pieces)
            return method(*args, **kwargs)

        setattr(owner, name, guarded)

    def _buffers(self) -> Iterator[Any]:
        """The flat buffers of Megatron's DDP; a bare module's ``buffers`` is a method, and it has none."""
        for model in self.models:
            for name in ("buffers", "expert_parallel_buffers"):
                found = getattr(model, name, None)
                if isinstance(found, list):
                    yield from found

    def _settle(self, names: list[str]) -> None:
        """Wait for gathers of parameters that Megatron overlaps; gradients cannot leave in the middle of a step."""
        for model in self.models:
            for group in (*getattr(model, "bucket_groups", ()), *getattr(model, "expert_parallel_bucket_groups", ())):
                if PARAMS in names and group.param_gather_handle is not None:
                    group.param_gather_handle.wait()
                    group.param_gather_handle = None
                if GRADS in names and group.grad_reduce_handle is not None:
                    raise InputError("gradients are still being reduced: offload them after the step, not inside it")

    def _storages(self) -> dict[str, list[Storage]]:
        """The storages of each piece that are on the device now, each under one piece only."""
        parameters = [parameter for model in self.models for parameter in model.parameters()]
        buffers = list(self._buffers())
        inner = [one.optimizer for one in _flat(self.optimizer) if getattr(one, "optimizer", None) is not None]
        shards = [shard for one in inner for group in one.param_groups for shard in group["params"]]
        tensors = {
            PARAMS: [*parameters, *(buffer.param_data for buffer in buffers)],
            GRADS: [
                *(buffer.grad_data for buffer in buffers),
                *(getattr(one, name, None) for one in (*parameters, *shards) for name in ("grad", "decoupled_grad")),
            ],
            OPTIMIZER: [*shards, *tree_leaves([list(one.state.values()) for one in inner])],
        }
        seen: set[int] = set()
        found: dict[str, list[Storage]] = {name: [] for name in PIECES}
        for name in PIECES:
            for tensor in tensors[name]:
                if not isinstance(tensor, torch.Tensor) or tensor.device != self.device:
                    continue
                storage = tensor.untyped_storage()
                if storage.nbytes() and storage._cdata not in seen:
                    seen.add(storage._cdata)
                    found[name].append(storage)
        return found

    def _contents(self, storage: Storage) -> torch.Tensor:
        """All bytes of a storage, as a tensor that shares them."""
        return torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)

    def _copied(self, storage: Storage) -> torch.Tensor:
        copy = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        return copy.copy_(self._contents(storage), non_blocking=True)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def known_pieces(pieces: Sequence[str]) -> list[str]:
    """The pieces that are meant, each once, in their order."""
    for name in pieces:
        if name not in PIECES:
            raise InputError(f"piece {name!r} is unknown: use {', '.join(map(repr, PIECES))}, or none for all of them")
    return [name for name in PIECES if name in pieces or not pieces]


def _flat(optimizer: Any) -> list[Any]:
    """The optimizers of a chain, which may hold chains."""
    if optimizer is None:
        return []
    chained = getattr(optimizer, "chained_optimizers", None)
    return [optimizer] if chained is None else [one for part in chained for one in _flat(part)]
