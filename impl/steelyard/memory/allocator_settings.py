"""Settings of PyTorch's CUDA caching allocator, and what holds device memory beside it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from steelyard.errors import InputError

MIB = 2**20
GIB = 2**30

# Sizes from 1 MiB to 64 GiB have a number of divisions each, one per power of two.
_INTERVALS = 16
# Valid in PYTORCH_CUDA_ALLOC_CONF, and without effect on which device memory is reserved.
_NO_EFFECT = re.compile(
    r"pinned_\w+|release_lock_on_\w+|throw_on_\w+|graph_capture_\w+|expandable_segments_handle_type"
)


@dataclass(frozen=True)
class AllocatorSettings:
    """What ``PYTORCH_CUDA_ALLOC_CONF`` sets, under the names it has there; the defaults are PyTorch's.

    Attributes:
        expandable_segments: one segment per stream and pool that grows by pages, in place of many fixed ones.
        max_split_size_mb: blocks of this many MiB and more are never split; None splits all.
        max_non_split_rounding_mb: a block that may not be split serves a request that is less than this smaller.
        roundup_power2_divisions: sizes are rounded up to this many steps between powers of two. A mapping gives the
            divisions from a size in MiB on, and for ``">"`` those above the last one named; 0 and 1 round nothing.
        garbage_collection_threshold: share of the allowed memory above which old cached blocks are given back before a
            new segment is asked for. As in PyTorch it acts only together with ``per_process_memory_fraction``.
        per_process_memory_fraction: share of the device's memory that may be reserved; None sets no limit.
        large_segment_size_mb: segment for requests above 1 MiB and below 10 MiB, and page of expandable segments.

    Raises:
        InputError: a value that PyTorch refuses too.
    """

    expandable_segments: bool = False
    max_split_size_mb: int | None = None
    max_non_split_rounding_mb: int = 20
    roundup_power2_divisions: int | Mapping[int | str, int] = 0
    garbage_collection_threshold: float = 0.0
    per_process_memory_fraction: float | None = None
    large_segment_size_mb: int = 20

    def __post_init__(self) -> None:
        least = self.large_segment_size_mb
        if self.max_split_size_mb is not None and self.max_split_size_mb <= least:
            raise InputError(f"max_split_size_mb={self.max_split_size_mb} is too small: use more than {least} MiB")
        if not 0 <= self.garbage_collection_threshold < 1:
            raise InputError(
                f"garbage_collection_threshold={self.garbage_collection_threshold} is no share: use 0 (off) to below 1"
            )
        fraction = self.per_process_memory_fraction
        if fraction is not None and not 0 < fraction <= 1:
            raise InputError(f"per_process_memory_fraction={fraction} is no share: use above 0 to 1, or None")
        if self.large_segment_size_mb < 20 or self.large_segment_size_mb % 2:
            raise InputError(f"large_segment_size_mb={self.large_segment_size_mb}: use an even number, 20 or more")
        self.divisions()

    @classmethod
    def of(cls, conf: str) -> AllocatorSettings:
        """Settings from a text as in ``PYTORCH_CUDA_ALLOC_CONF``, such as ``"expandable_segments:True"``.

        Raises:
            InputError: an unknown key, another backend than the native one, or a value of the wrong kind.
        """
        values: dict[str, object] = {}
        for item in re.findall(r"[^,\[\]]+:\[[^\]]*\]|[^,]+", conf.replace(" ", "")):
            key, _, text = item.partition(":")
            if item == "backend:native" or _NO_EFFECT.fullmatch(key):
                continue
            values[key] = _value(key, text, conf)
        return cls(**values)  # type: ignore[arg-type]

    def divisions(self) -> tuple[int, ...]:
        """Divisions for sizes from 1, 2, 4 ... MiB on; the first also for smaller, the last also for larger ones."""
        given = self.roundup_power2_divisions
        pairs = given if isinstance(given, Mapping) else {">": given}
        table, last = [0] * _INTERVALS, -1
        for start, count in pairs.items():
            if count < 0 or count & (count - 1):
                raise InputError(f"roundup_power2_divisions has {count} divisions: use a power of two, or 0 for none")
            if start == ">":
                table[last + 1 :] = [count] * (_INTERVALS - last - 1)
                continue
            size = int(start)
            if size < 1 or size & (size - 1):
                raise InputError(f"roundup_power2_divisions starts at {size} MiB: use a power of two")
            index = min(size.bit_length() - 1, _INTERVALS - 1)
            if last < 0:
                table[:index] = [count] * index
            table[index], last = count, index
        return tuple(table)


def _value(key: str, text: str, conf: str) -> object:
    """The value of one key of ``PYTORCH_CUDA_ALLOC_CONF``, in the type that its field has."""
    try:
        match key:
            case "expandable_segments":
                return {"True": True, "False": False}[text]
            case "max_split_size_mb" | "max_non_split_rounding_mb" | "large_segment_size_mb":
                return int(text)
            case "garbage_collection_threshold" | "per_process_memory_fraction":
                return float(text)
            case "roundup_power2_divisions" if text.startswith("["):
                pairs = [pair.split(":") for pair in text.strip("[]").split(",")]
                return {start if start == ">" else int(start): int(count) for start, count in pairs}
            case "roundup_power2_divisions":
                return int(text)
    except (KeyError, ValueError) as error:
        raise InputError(
            f"PYTORCH_CUDA_ALLOC_CONF={conf!r} has {key}:{text}, which cannot be read ({error})"
        ) from error
    known = ", ".join(AllocatorSettings.__dataclass_fields__)
    raise InputError(f"PYTORCH_CUDA_ALLOC_CONF={conf!r} has {key}:{text}, which is not replayed: {known} are")


@dataclass(frozen=True)
class Allowances:
    """Bytes that a training process holds beside the tensors of its step. All are estimates that a user may replace.

    None of the defaults was measured here; ``Allowances()`` is what to assume on an 80 GB device of a node of 8.

    Attributes:
        context: CUDA context and loaded kernels, outside the allocator. 0.5 GiB is usual on H100 with lazy loading.
        nccl: buffers of all communicators, outside the allocator: 0.5 to 2 GiB where many groups are used, so 1 GiB.
        cublas: workspace of cuBLAS, inside the allocator from the first matrix product on: 32 MiB on Hopper, 8.125 MiB
            before (PyTorch, aten/src/ATen/cuda/CublasHandlePool.cpp).
        attention: workspace of the attention kernel's backward, inside the allocator. Flash attention keeps the
            gradient of the queries in float32: tokens * heads * head_dim * 4 bytes; 0 where a trace has it already.
    """

    context: int = GIB // 2
    nccl: int = GIB
    cublas: int = 32 * MIB
    attention: int = 0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 0:
                raise InputError(f"allowance {name}={value} is negative: use bytes, 0 or more")

    @property
    def outside(self) -> int:
        """Bytes of the device that the allocator can never get."""
        return self.context + self.nccl

    @property
    def inside(self) -> tuple[int, ...]:
        """Requests to the allocator that come first and stay."""
        return tuple(size for size in (self.cublas, self.attention) if size)


NO_ALLOWANCES = Allowances(context=0, nccl=0, cublas=0, attention=0)
