"""Hands the device over to a rollout engine and takes it back: the one place where the cache is emptied.

The order matters. What the rollout never needs leaves first, so that there is room for the engine's copy of the
weights; the weights are handed over while they are on the device; then they leave too, and only then the cache is
emptied, once. On the way back the cache is emptied first, of what the rollout left in it, and parameters return before
gradients and optimizer state.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from steelyard.memory.cache import CUDA, DeviceApi, EmptyCacheReport, MemoryInfo, aggressive_empty_cache, memory_info
from steelyard.memory.offload import GRADS, OPTIMIZER, PARAMS, PIECES, Moved, Offloader, known_pieces


@dataclass
class Way:
    """One direction of a hand-over.

    Attributes:
        moved: bytes of each piece that left the device (on the way out) or came back to it (on the way back).
        seconds: time of each part: ``params``, ``grads``, ``optimizer``, ``weights`` (handed to the engine), ``cache``.
        emptied: what emptying the cache brought.
        before: memory of the device before.
        after: memory of the device after; ``free`` is what another allocator can get.
    """

    moved: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    emptied: EmptyCacheReport = field(default_factory=EmptyCacheReport)
    before: MemoryInfo = field(default_factory=MemoryInfo)
    after: MemoryInfo = field(default_factory=MemoryInfo)

    @property
    def total_seconds(self) -> float:
        """Time of all parts together."""
        return sum(self.seconds.values())

    @property
    def freed(self) -> int:
        """Bytes of the device that became free for others: negative on the way back, 0 without CUDA."""
        return self.after.free - self.before.free

    def _add(self, did: Moved, sign: int = 1) -> None:
        for name, size in did.bytes.items():
            self.moved[name] = self.moved.get(name, 0) + sign * size
            self.seconds[name] = self.seconds.get(name, 0.0) + did.seconds

    def _empty(self, api: DeviceApi) -> None:
        self.emptied = aggressive_empty_cache(api=api)
        self.seconds["cache"] = self.emptied.seconds


@dataclass
class HandOver:
    """Both directions of a hand-over; ``back`` is filled when the context is left."""

    out: Way = field(default_factory=Way)
    back: Way = field(default_factory=Way)


@contextmanager
def hand_over(
    offloader: Offloader,
    send_weights: Callable[[], None] | None = None,
    *,
    keep: Sequence[str] = (),
    discard_grads: bool = False,
    api: DeviceApi = CUDA,
) -> Iterator[HandOver]:
    """Inside this context the device belongs to the rollout; training may go on when it is left, also after an error.

        with hand_over(offloader, send_weights=engine.load) as report:
            rollouts = engine.generate(prompts)

    Each piece returns to where it was before, so contexts nest, and pieces that were on the host stay there. All calls
    are local to the rank, but where Megatron overlaps the gather of parameters, all ranks must hand over together.

    Args:
        offloader: the training state.
        send_weights: called with all parameters on the device, whole and up to date; None where nobody needs them.
        keep: pieces that stay where they are, such as ``params`` for an engine that shares them.
        discard_grads: let gradients go without a copy, for they are zeroed before they are used again.
        api: stands for ``torch.cuda``.

    Raises:
        InputError: an unknown piece in ``keep``, or gradients are still being reduced.
    """
    leaving = [name for name in PIECES if name not in (known_pieces(keep) if keep else ())]
    places = {name: state.where for name, state in offloader.state.items()}
    report = HandOver()
    try:
        _leave(report.out, offloader, send_weights, leaving, discard_grads, api)
        yield report
    finally:
        _return(report.back, offloader, places, api)


def _leave(
    way: Way,
    offloader: Offloader,
    send_weights: Callable[[], None] | None,
    leaving: Sequence[str],
    discard_grads: bool,
    api: DeviceApi,
) -> None:
    """Everything on the way out, in its order."""
    way.before = memory_info(api=api)
    for name in (GRADS, OPTIMIZER):
        if name in leaving:
            way._add(offloader.offload(name, discard=discard_grads and name == GRADS))
    if send_weights is not None:
        way._add(offloader.onload(PARAMS), sign=-1)
        start = time.perf_counter()
        _gather_parameters(offloader)
        send_weights()
        way.seconds["weights"] = time.perf_counter() - start
    if PARAMS in leaving:
        way._add(offloader.offload(PARAMS))
    way._empty(api)
    way.after = memory_info(api=api)


def _return(way: Way, offloader: Offloader, places: dict[str, str], api: DeviceApi) -> None:
    """Everything on the way back, in its order: each piece to the place it had."""
    way.before = memory_info(api=api)
    way._empty(api)
    for name in PIECES:
        if places[name] == "device":
            way._add(offloader.onload(name))
        else:
            way._add(offloader.offload(name), sign=-1)
    way.after = memory_info(api=api)


def _gather_parameters(offloader: Offloader) -> None:
    """Complete the parameters: with ``overlap_param_gather`` Megatron gathers them only in the next forward pass."""
    for model in offloader.models:
        config = getattr(model, "ddp_config", None)
        if config is not None and config.overlap_param_gather:
            model.start_param_sync(force_sync=True)  # type: ignore[operator]
