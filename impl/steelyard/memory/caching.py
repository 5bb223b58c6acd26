"""The rules of PyTorch's CUDA caching allocator (c10/cuda/CUDACachingAllocator.cpp, torch 2.13), without a device.

What is kept: a request is rounded to 512 bytes and goes to the pool of small blocks (up to 1 MiB) or of large ones.
The smallest free block of its stream that fits serves it, the lowest address first, and what is left over is split off
as a free block where it is worth one. A freed block merges with free neighbours. Where nothing fits, a new segment is
asked from the device: 2 MiB for small requests, 20 MiB for those below 10 MiB, else the size rounded to 2 MiB. When
the device has no more, cached segments that are wholly free are given back and the request is tried again.

What is simpler here: addresses grow from segment to segment and are never used twice, so ties between equal blocks of
different segments may fall otherwise than on a device; a block is reusable as soon as it is freed, so one that another
stream still uses must be freed when that stream is done; memory pools of CUDA graphs are left out.
"""

from __future__ import annotations

import sys
from bisect import bisect_left, insort
from collections.abc import Iterable
from typing import NamedTuple

from steelyard.memory.allocator_settings import MIB, AllocatorSettings

LEAST_BLOCK = 512
SMALL_REQUEST = MIB
SMALL_SEGMENT = 2 * MIB
OWN_SEGMENT = 10 * MIB  # a request from here on gets a segment of its own size
SEGMENT_STEP = 2 * MIB
UNLIMITED = sys.maxsize


class Block:
    """A stretch of addresses that is in use, free, or (in expandable segments) without memory behind it."""

    __slots__ = ("address", "allocated", "expandable", "mapped", "next", "prev", "searches", "size", "small", "stream")

    def __init__(self, address: int, size: int, stream: int, small: bool, expandable: Expandable | None = None) -> None:
        self.address, self.size, self.stream, self.small, self.expandable = address, size, stream, small, expandable
        self.allocated, self.mapped = False, True
        self.prev: Block | None = None
        self.next: Block | None = None
        self.searches = 0  # of the pool, when this block became free: its age for the garbage collection


class Expandable(NamedTuple):
    """Address space that is filled with pages as it is needed."""

    start: int
    page: int


class Segment(NamedTuple):
    """Memory that was asked from the device in one piece, or one contiguous stretch of an expandable segment."""

    address: int
    size: int
    allocated: int
    largest_free: int
    small: bool
    stream: int


class _Pool:
    """Free blocks of one kind, ordered as the search wants them: by stream, size, address."""

    def __init__(self, small: bool) -> None:
        self.small = small
        self.free: list[tuple[int, int, int, Block]] = []
        self.unmapped: list[tuple[int, int, Block]] = []  # by stream, address
        self.searches = 0

    def add(self, block: Block) -> None:
        if block.mapped:
            block.searches = self.searches
            insort(self.free, (block.stream, block.size, block.address, block))
        else:
            insort(self.unmapped, (block.stream, block.address, block))

    def remove(self, block: Block) -> None:
        if block.mapped:
            del self.free[bisect_left(self.free, (block.stream, block.size, block.address))]
        else:
            del self.unmapped[bisect_left(self.unmapped, (block.stream, block.address))]


class CachingAllocator:
    """One device's allocator.

    Attributes:
        allocated: bytes in blocks that are in use.
        reserved: bytes asked from the device and not given back.
        retries: how often a request found the device full and cached segments were given back for it.
    """

    def __init__(self, settings: AllocatorSettings, capacity: int | None = None, device: int | None = None) -> None:
        """
        Args:
            settings: the allocator's settings.
            capacity: bytes that may be reserved; None for no limit.
            device: bytes of the whole device, of which a memory fraction is a share; None is ``capacity``.
        """
        self.allocated = self.reserved = self.retries = 0
        self._capacity = UNLIMITED if capacity is None else capacity
        self._device = self._capacity if device is None else device
        fraction = settings.per_process_memory_fraction
        self._allowed = UNLIMITED if fraction is None else int(fraction * self._device)
        self._expands = settings.expandable_segments
        self._page = settings.large_segment_size_mb * MIB
        self._max_split = UNLIMITED if settings.max_split_size_mb is None else settings.max_split_size_mb * MIB
        self._rounding = settings.max_non_split_rounding_mb * MIB
        self._divisions = settings.divisions()
        self._threshold = (
            None
            if fraction is None or not settings.garbage_collection_threshold
            else int(settings.garbage_collection_threshold * self._allowed)
        )
        self._small, self._large = _Pool(True), _Pool(False)
        self._next_address = SEGMENT_STEP

    def malloc(self, size: int, stream: int = 0) -> Block | None:
        """A block for ``size`` bytes, or None where the device has no room even after all cached segments are gone."""
        size = self.rounded(size)
        pool = self._small if size <= SMALL_REQUEST else self._large
        block = self._best_fit(pool, size, stream) or self._from_device(pool, size, stream)
        if block is None:
            return None
        left = block.size - size
        if left >= LEAST_BLOCK if pool.small or self._expands else size < self._max_split and left > SMALL_REQUEST:
            self._split(pool, block, size)
        block.allocated = True
        self.allocated += block.size
        return block

    def free(self, block: Block) -> None:
        """Make a block free and one with its free neighbours."""
        pool = self._small if block.small else self._large
        block.allocated = False
        self.allocated -= block.size
        _merge(pool, block)
        pool.add(block)

    def release_cached(self) -> None:
        """Give back every segment, and every page of expandable ones, that is wholly free."""
        for pool in (self._large, self._small):
            for *_, block in list(pool.free):
                if block.expandable is not None:
                    self._unmap(pool, block)
                elif block.prev is None and block.next is None:
                    self._release(pool, block)

    def rounded(self, size: int) -> int:
        """The size of the block that serves a request of ``size`` bytes."""
        if size < LEAST_BLOCK:
            return LEAST_BLOCK
        divisions = self._divisions[min(max(size.bit_length() - 21, 0), len(self._divisions) - 1)]
        if divisions > 1 and size > LEAST_BLOCK * divisions:
            step = (1 << (size.bit_length() - 1)) // divisions
            return -(-size // step) * step
        return -(-size // LEAST_BLOCK) * LEAST_BLOCK

    def segments(self, held: Iterable[Block]) -> list[Segment]:
        """All segments by address, from the blocks in use and the free ones."""
        blocks = [*held, *(entry[-1] for pool in (self._small, self._large) for entry in pool.free)]
        segments = []
        for head in sorted(blocks, key=lambda one: one.address):
            if head.prev is not None and head.prev.mapped:
                continue
            size = allocated = largest = 0
            block: Block | None = head
            while block is not None and block.mapped:
                size += block.size
                allocated += block.size if block.allocated else 0
                largest = max(largest, 0 if block.allocated else block.size)
                block = block.next
            segments.append(Segment(head.address, size, allocated, largest, head.small, head.stream))
        return segments

    def _best_fit(self, pool: _Pool, size: int, stream: int) -> Block | None:
        """Take the smallest free block of the stream that fits out of the pool."""
        free = pool.free
        if self._threshold is not None:
            pool.searches += 1
        at = bisect_left(free, (stream, size))
        if at == len(free) or free[at][0] != stream:
            return None
        if self._expands:
            # A block at the growing end counts as large as it can grow, so that one between others is preferred.
            while at + 1 < len(free) and free[at + 1][0] == stream and _reach(free[at + 1][-1]) < _reach(free[at][-1]):
                at += 1
        block = free[at][-1]
        # Blocks that may not be split serve only requests of about their size.
        if block.size >= self._max_split if size < self._max_split else block.size >= size + self._rounding:
            return None
        del free[at]
        return block

    def _split(self, pool: _Pool, block: Block, size: int) -> None:
        """Cut a block down to ``size``; the rest is free."""
        rest = Block(block.address + size, block.size - size, block.stream, pool.small, block.expandable)
        block.size = size
        _link(block, rest, block.next)
        pool.add(rest)

    def _from_device(self, pool: _Pool, size: int, stream: int) -> Block | None:
        """A block of new memory; where the device is full, of memory that the cache gives back for it."""
        if pool.small:
            segment = SMALL_SEGMENT
        elif size < OWN_SEGMENT:
            segment = self._page
        else:
            segment = -(-size // SEGMENT_STEP) * SEGMENT_STEP
        if self._threshold is not None:
            self._collect_garbage(self._threshold)
        block = self._new(pool, size, stream, segment)
        if block is None and self._release_oversize(pool, size, stream):
            block = self._new(pool, size, stream, segment)
        if block is None:
            self.release_cached()
            self.retries += 1
            block = self._new(pool, size, stream, segment)
        return block

    def _new(self, pool: _Pool, size: int, stream: int, segment: int) -> Block | None:
        if self.reserved + segment > self._allowed:
            return None
        if self._expands:
            return self._expand(pool, size, stream)
        if self.reserved + segment > self._capacity:
            return None
        self.reserved += segment
        return Block(self._addresses(segment), segment, stream, pool.small)

    def _addresses(self, size: int) -> int:
        start = self._next_address
        self._next_address += -(-size // SEGMENT_STEP) * SEGMENT_STEP
        return start

    def _release(self, pool: _Pool, block: Block) -> None:
        pool.remove(block)
        self.reserved -= block.size

    def _release_oversize(self, pool: _Pool, size: int, stream: int) -> bool:
        """Under ``max_split_size_mb``: give back one free block as large as needed, or several from the largest on."""
        if self._max_split == UNLIMITED:
            return False
        needed = max(size, self._max_split)
        at = bisect_left(pool.free, (stream, needed))
        if at < len(pool.free) and pool.free[at][0] == stream:
            block = pool.free[at][-1]
            if block.expandable is None:
                self._release(pool, block)
            return True
        released = 0
        while released < needed and at > 0:
            at -= 1
            block = pool.free[at][-1]
            if block.stream != stream or block.size < self._max_split:
                break
            if block.expandable is None:
                self._release(pool, block)
                released += block.size
        return released >= needed

    def _collect_garbage(self, threshold: int) -> None:
        """Give back large segments that were free for longer than the mean, until the threshold is met."""
        excess = self.reserved - threshold
        whole = [
            block
            for *_, block in self._large.free
            if block.prev is None and block.next is None and block.expandable is None
        ]
        while excess > 0 and whole:
            # The age of a block is the number of searches since it became free; the fewer it had then, the older it is.
            mean = sum(block.searches for block in whole) / len(whole)
            for block in whole:
                if block.searches <= mean:
                    self._release(self._large, block)
                    excess -= block.size
            whole = [block for block in whole if block.searches > mean]

    # Expandable segments

    def _expand(self, pool: _Pool, size: int, stream: int) -> Block | None:
        """A block that begins at the lowest address with room, filled with pages up to ``size``."""
        block = self._room(pool, size, stream)
        if not block.mapped and not self._map(pool, block, size):
            return None
        while block.size < size:
            following = block.next
            assert following is not None
            if not self._map(pool, following, size - block.size):
                return None
            block = following  # it is one with the block before it now
        pool.remove(block)
        return block

    def _room(self, pool: _Pool, size: int, stream: int) -> Block:
        """The first block of a run of free and unmapped blocks with ``size`` bytes, in a new segment if need be."""
        at = bisect_left(pool.unmapped, (stream,))
        while at < len(pool.unmapped) and pool.unmapped[at][0] == stream:
            start = pool.unmapped[at][-1]
            if start.prev is not None and not start.prev.allocated:
                start = start.prev
            room, block = 0, start
            while room < size and block is not None and not block.allocated:
                room, block = room + block.size, block.next  # type: ignore[assignment]
            if room >= size:
                return start
            at += 1
        page = SMALL_SEGMENT if pool.small else self._page
        # An eighth more than the device has, so that pages can move to the end.
        space = 2**46 if self._device == UNLIMITED else self._device + self._device // 8
        space = -(-space // page) * page
        segment = Expandable(self._addresses(space), page)
        start = Block(segment.start, space, stream, pool.small, segment)
        start.mapped = False
        pool.add(start)
        return start

    def _map(self, pool: _Pool, block: Block, size: int) -> bool:
        """Put pages behind the first ``size`` bytes of an unmapped block; False where the device has too few."""
        page = block.expandable.page  # type: ignore[union-attr]
        wanted = -(-min(size, block.size) // page) * page
        if self.reserved + wanted > self._capacity:
            return False
        pool.remove(block)
        if wanted < block.size:
            rest = Block(block.address + wanted, block.size - wanted, block.stream, block.small, block.expandable)
            rest.mapped = False
            block.size = wanted
            _link(block, rest, block.next)
            pool.add(rest)
        block.mapped = True
        _merge(pool, block)
        pool.add(block)
        self.reserved += wanted
        return True

    def _unmap(self, pool: _Pool, block: Block) -> None:
        """Give back the pages that lie wholly inside a free block; a segment without pages goes too."""
        assert block.expandable is not None
        start, page = block.expandable
        first = start + -(-(block.address - start) // page) * page
        last = start + (block.address + block.size - start) // page * page
        if first >= last:
            return
        pool.remove(block)
        before, after = first - block.address, block.address + block.size - last
        if before:
            part = Block(block.address, before, block.stream, block.small, block.expandable)
            _link(block.prev, part, block)
            pool.add(part)
        if after:
            part = Block(last, after, block.stream, block.small, block.expandable)
            _link(block, part, block.next)
            pool.add(part)
        block.address, block.size, block.mapped = first, last - first, False
        self.reserved -= block.size
        _merge(pool, block)
        if block.prev is not None or block.next is not None:
            pool.add(block)


def _reach(block: Block) -> int:
    """Bytes that a free block has, with those it could grow by."""
    return block.size + (block.next.size if block.next is not None and not block.next.mapped else 0)


def _link(before: Block | None, block: Block, after: Block | None) -> None:
    """Put a block between two neighbours."""
    block.prev, block.next = before, after
    if before is not None:
        before.next = block
    if after is not None:
        after.prev = block


def _merge(pool: _Pool, block: Block) -> None:
    """Make a block that is in no list one with free neighbours of its kind."""
    before, after = block.prev, block.next
    if before is not None and not before.allocated and before.mapped == block.mapped:
        pool.remove(before)
        block.address, block.size, block.prev = before.address, block.size + before.size, before.prev
        if block.prev is not None:
            block.prev.next = block
    if after is not None and not after.allocated and after.mapped == block.mapped:
        pool.remove(after)
        block.size, block.next = block.size + after.size, after.next
        if block.next is not None:
            block.next.prev = block
