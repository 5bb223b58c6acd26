"""Counts the bytes of tensors that are alive, on any device and on fake tensors: what a step needs of memory."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# The CUDA allocator hands out whole blocks of this many bytes.
BLOCK = 512


def rounded(size: int) -> int:
    """Bytes that the CUDA allocator sets aside for ``size``."""
    return -(-size // BLOCK) * BLOCK


@contextlib.contextmanager
def only_new_garbage() -> Iterator[None]:
    """Collections of garbage leave out what is there already: of a whole megatron-core, that takes a third of a second.

    Where somebody else has set objects aside in the same way, nothing is done.
    """
    mine = gc.get_freeze_count() == 0
    if mine:
        gc.freeze()
    try:
        yield
    finally:
        if mine:
            gc.unfreeze()


class LiveBytes(TorchDispatchMode):
    """While it is held, every storage that an operation makes counts from its birth to its end.

    Storages that existed before do not count. Sizes are rounded up to blocks, as the CUDA allocator does.

    Attributes:
        now: bytes alive at this moment.
        peak: the most that were alive at one moment.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: object, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # What an operation is given was there before, or is known already: only new storages of the result count.
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, torch.Tensor):
                self._known.add(tensor.untyped_storage())
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: Any) -> None:
        if storage in self._known:
            return
        self._known.add(storage)
        size = rounded(storage.nbytes())
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._end, size)

    def _end(self, size: int) -> None:
        self.now -= size
