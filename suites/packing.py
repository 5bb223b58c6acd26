"""What packing costs: Steelyard's pack, labels and unpack against N6, and its log-probabilities against N7.

A cell is one micro-batch of ``rows`` rows on one rank (the first) of the layout's context-parallel group; no rank is
started. The exchange between context-parallel ranks is the same on both sides and left out: both get its result.

- ``packing_ms`` is the sum of ``pack_ms`` (ids, int64; Steelyard's layout is made in it), ``labels_ms`` and
  ``unpack_ms`` (float32), from interleaved pairs, after warm-up. N6 works everything out again in each call, as it did.
- ``host_reads``: how often the host would wait for the device in one round of the three.
- ``index_bytes``: copied from the host to the device; ``staging_bytes``: what passes through temporary tensors,
  computed from the shapes (for a boolean mask the positions that it becomes, 8 bytes a token).
- ``log_probs_ms``: log-probabilities of the responses from packed logits of ``LOGITS_VOCAB`` entries, on as many rows
  as fit; ``logits_gib``: logits that exist at once for all rows and the whole vocabulary of the cell's model, computed.

On a CPU no read waits, so times show the work of the host and the copies alone; on CUDA every read of N6 also waits
for what is queued on the device, which no figure here has.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import torch

from steelyard.host_reads import HostReads, count_host_reads
from steelyard.lengths import LengthSample
from steelyard.model import host
from steelyard.packing import PackedLayout, next_token_labels, pack, unpack, unpack_gathered
from steelyard.packing.segments import ZERO_ELEMENTS, Segments, flat_columns, from_all_ranks, to_local
from steelyard.step.logprobs import CHUNK_BYTES, token_log_probs
from suites.baselines import packing_syncs, whole_logits
from suites.launch.local import THREADS_PER_RANK
from suites.matrix import Cell
from suites.measure import Series
from suites.sides import sides_of
from suites.turns import wait_for_turn

SIDES = ("naive", "optimised")
STAGES = ("pack", "labels", "unpack")
LOGITS_VOCAB = 64
LOGITS_ELEMENTS = 2**24  # of the padded logits that are timed
LOG_PROBS_LIMIT = 1e-5
GIB = 2**30

Results = tuple[torch.Tensor, ...]


@dataclass(frozen=True, eq=False)
class Task:
    """A micro-batch on the device, and what the host knows of it.

    Attributes:
        sample: lengths of the rows.
        ids, mask, field: [B, S] int64, bool and float32; prompts end where responses begin, as trainers have it.
        tp, cp: parallel sizes; the part of context-parallel rank 0 is taken.
    """

    sample: LengthSample
    ids: torch.Tensor
    mask: torch.Tensor
    field: torch.Tensor
    tp: int
    cp: int

    @classmethod
    def of(cls, cell: Cell, device: torch.device, rows: int | None = None) -> Task:
        """The cell's micro-batch, or its first rows."""
        whole = cell.draw()
        sample = LengthSample(whole.prompts[:rows], whole.responses[:rows], whole.name, whole.source)
        generator = torch.Generator().manual_seed(cell.seed)
        width, columns = int(sample.prompts.max()), np.arange(sample.prompts.max() + sample.responses.max())
        host_mask = columns >= (width - sample.prompts)[:, None]
        host_mask &= columns < (width + sample.responses)[:, None]
        mask = torch.from_numpy(host_mask).to(device)
        ids = torch.randint(1, cell.model.vocab, mask.shape, generator=generator).to(device).mul_(mask)
        field = torch.rand(mask.shape, generator=generator).to(device).mul_(mask)
        return cls(sample, ids, mask, field, cell.layout.tp, cell.layout.cp)

    @property
    def width(self) -> int:
        return self.ids.size(1)

    @property
    def response_width(self) -> int:
        return int(self.sample.responses.max())

    def layout(self, rank: int = 0) -> PackedLayout:
        starts = self.width - self.response_width - self.sample.prompts
        return PackedLayout.of(self.sample.totals, starts=starts, tp=self.tp, cp=self.cp, cp_rank=rank)

    @cached_property
    def gathered(self) -> torch.Tensor:
        """[T] the field as packed by every rank, one after the other."""
        return torch.cat([pack(self.field, self.layout(rank)) for rank in range(self.cp)])


class Stopwatch:
    """Wall time of named stages; waits for the device before and after each."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.milliseconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        self._wait()
        start = time.perf_counter()
        yield
        self._wait()
        self.milliseconds[stage] = 1000 * (time.perf_counter() - start)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


Timed = Callable[[str], contextlib.AbstractContextManager]


def naive(task: Task, timed: Timed = contextlib.nullcontext) -> Results:
    """(packed ids, packed labels, unpacked field) by N6."""
    sizes = {"tp": task.tp, "cp": task.cp}
    with timed("pack"):
        packed, offsets = packing_syncs.pack(task.ids, task.mask, **sizes)
    with timed("labels"):
        labels, _ = packing_syncs.pack(packing_syncs.padded_labels(task.ids), task.mask, **sizes)
    parts = task.gathered.chunk(task.cp)
    with timed("unpack"):
        rows = packing_syncs.unpack(parts, offsets, task.mask)
    return packed, labels, rows


def optimised(task: Task, timed: Timed = contextlib.nullcontext) -> Results:
    """The same by Steelyard."""
    with timed("pack"):
        layout = task.layout()
        packed = pack(task.ids, layout)
    with timed("labels"):
        labels = next_token_labels(task.ids, layout)
    gathered = task.gathered
    with timed("unpack"):
        rows = unpack_gathered(gathered, layout, task.width)
    return packed, labels, rows


def naive_log_probs(task: Task, logits: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """[B, R] by N7, from the packed logits of all ranks [T, V] and the offsets that packing the ids left."""
    responses = task.ids[:, -task.response_width :]
    return whole_logits.log_probs(logits.chunk(task.cp), offsets, task.mask, responses)


def optimised_log_probs(task: Task, logits: torch.Tensor) -> torch.Tensor:
    """[B, R] by Steelyard, zero where this rank scores no response token."""
    layout = task.layout()
    prompts, responses = task.sample.prompts, task.sample.responses
    # A response token is scored at the position before it.
    first = layout.cu_seqlens_padded[:-1] + prompts - 1
    slots = np.arange(responses.sum()) + np.repeat(first - np.cumsum(responses) + responses, responses)
    local = layout.to_local(slots)
    index = torch.from_numpy(local[local >= 0]).to(logits.device, non_blocking=True)
    labels = next_token_labels(task.ids, layout).index_select(0, index)
    scores = token_log_probs(logits[: layout.local_total], labels, index=index)
    packed = scores.new_zeros(layout.local_total).index_copy(0, index, scores)
    return unpack(packed, layout, task.width)[:, -task.response_width - 1 : -1]


def measure(cell: Cell, device: str | None = None) -> list[Series]:
    """Weigh both sides on one device, with one thread.

    Raises:
        InputError: CUDA was asked for and there is none.
    """
    chosen = host.pick_device(device)
    threads = torch.get_num_threads()
    torch.set_num_threads(THREADS_PER_RANK)
    try:
        return _packing(cell, Task.of(cell, chosen), chosen) + _log_probs(cell, chosen)
    finally:
        torch.set_num_threads(threads)


def _packing(cell: Cell, task: Task, device: torch.device) -> list[Series]:
    own = sides_of(cell)
    runs = [naive, optimised, *own.values()]
    results, times = _pairs(cell, device, [partial(run, task) for run in runs])
    expected = (*results[0][:2], task.field)
    difference = max(float((a - b).abs().max()) for side in results[:2] for a, b in zip(side, expected, strict=True))
    layout = task.layout()
    series = [
        Series("packing_difference", "both", "1", "lower", [difference], limit=0.0),
        Series("packed_padding", "both", "1", "none", [layout.padding]),
        Series("padded_padding", "both", "1", "none", [1 - float(task.sample.totals.sum()) / task.ids.numel()]),
    ]
    costs = (_naive_bytes(task, layout), _optimised_bytes(task, layout))
    for side, run, taken, (index, staging) in zip(SIDES, runs[:2], times[:2], costs, strict=True):
        reads = _reads(run, task, device)
        operations = Counter()
        for place, count in reads.places.items():
            operations[place.operation] += count
        series += [
            Series("packing_ms", side, "ms", "lower", [sum(one.values()) for one in taken]),
            *(Series(f"{stage}_ms", side, "ms", "lower", [one[stage] for one in taken]) for stage in STAGES),
            Series("host_reads", side, "reads", "lower", [reads.total], limit=None if side == "naive" else 0.0,
                   notes=dict(operations)),
            Series("index_bytes", side, "B", "lower", [index]),
            Series("staging_bytes", side, "B", "lower", [staging]),
        ]  # fmt: skip
    for name, run, taken, result in zip(own, runs[2:], times[2:], results[2:], strict=True):
        series += _own_side(name, run, taken, result, task)
    return series


def _own_side(
    name: str, run: Callable[[Task, Timed], Results], taken: list[dict[str, float]], result: Results, task: Task
) -> list[Series]:
    """A user's own side: its packed form may be another, its unpacked field must be exact."""
    reads = _reads(lambda one: run(one, contextlib.nullcontext), task, task.field.device)
    difference = float((result[2] - task.field).abs().max())
    return [
        Series("packing_difference", "naive", "1", "lower", [difference], limit=0.0, variant=name),
        Series("packing_ms", "naive", "ms", "lower", [sum(one.values()) for one in taken], variant=name),
        *(
            Series(f"{stage}_ms", "naive", "ms", "lower", [one.get(stage, 0.0) for one in taken], variant=name)
            for stage in STAGES
        ),
        Series("host_reads", "naive", "reads", "lower", [reads.total], variant=name),
    ]


def _log_probs(cell: Cell, device: torch.device) -> list[Series]:
    whole = cell.draw()
    width, response_width = int(whole.prompts.max() + whole.responses.max()), int(whole.responses.max())
    rows = max(1, min(len(whole), LOGITS_ELEMENTS // (width * LOGITS_VOCAB)))
    small = cell.model_copy(update={"model": cell.model.model_copy(update={"vocab": LOGITS_VOCAB})})
    task = Task.of(small, device, rows)
    generator = torch.Generator().manual_seed(cell.seed)
    logits = torch.randn((task.layout().total, LOGITS_VOCAB), generator=generator).to(device)

    _, offsets = packing_syncs.pack(task.ids, task.mask, tp=task.tp, cp=task.cp)

    def plainly(timed: Timed) -> Results:
        with timed("log_probs"):
            return (naive_log_probs(task, logits, offsets),)

    def ours(timed: Timed) -> Results:
        with timed("log_probs"):
            return (optimised_log_probs(task, logits),)

    results, times = _pairs(cell, device, [plainly, ours])
    (theirs,), (scored,) = results
    # Of short rows this rank may score nothing at all.
    difference = float(torch.where(scored != 0, theirs - scored, 0.0).abs().max())
    layout = PackedLayout.of(whole.totals, tp=task.tp, cp=task.cp)
    row = 4 * cell.model.vocab  # float32, the type in which the last pipeline stage hands out logits
    chunks = 2 * min(CHUNK_BYTES, int(whole.responses.sum()) * row)
    restored = whole_logits.logits_bytes(len(whole), width, response_width, cell.model.vocab)
    sizes = (layout.total * row + restored, layout.local_total * row + chunks)
    series = [Series("log_probs_difference", "both", "1", "lower", [difference], limit=LOG_PROBS_LIMIT)]
    for side, taken, size in zip(SIDES, times, sizes, strict=True):
        notes = {"rows": task.ids.size(0), "vocab": LOGITS_VOCAB}
        series += [
            Series("log_probs_ms", side, "ms", "lower", [one["log_probs"] for one in taken], notes=notes),
            Series("logits_gib", side, "GiB", "lower", [size / GIB], notes={"vocab": cell.model.vocab}),
        ]
    return series


def _pairs(
    cell: Cell, device: torch.device, sides: list[Callable[[Timed], Results]]
) -> tuple[list[Results], list[list[dict[str, float]]]]:
    """What each side returned, and its times in every pair; the order of the sides changes from pair to pair."""
    results = [side(contextlib.nullcontext) for side in sides]
    for _ in range(cell.warmup - 1):
        for side in sides:
            side(contextlib.nullcontext)
    times: list[list[dict[str, float]]] = [[] for _ in sides]
    for pair in range(cell.pairs):
        for at in range(len(sides)) if pair % 2 == 0 else reversed(range(len(sides))):
            wait_for_turn()
            watch = Stopwatch(device)
            sides[at](watch)
            times[at].append(watch.milliseconds)
    return results, times


def _reads(run: Callable[[Task], Results], task: Task, device: torch.device) -> HostReads:
    # Not held while times are taken: what it does on a CPU costs every call of torch a little.
    with host.running_on(device), count_host_reads() as reads:
        run(task)
    return reads


def _naive_bytes(task: Task, layout: PackedLayout) -> tuple[int, int]:
    """(index, staging) bytes: the gathered tokens and positions of each row, labels, rows put together in float32."""
    tokens = int(task.sample.totals.sum())
    ids = 2 * tokens * (task.ids.itemsize + 8) + task.ids.nbytes
    return 0, ids + tokens * 8 + (layout.total * 4 if task.cp > 1 else 0)


def _optimised_bytes(task: Task, layout: PackedLayout) -> tuple[int, int]:
    """(index, staging) bytes: per token where stretches are short, else a block of zeros."""
    flat = flat_columns(layout, task.width)
    moves: list[tuple[Segments, int, int]] = [
        (to_local(layout, flat, rank=0), layout.local_total, task.ids.itemsize),
        (to_local(layout, flat, rank=0, ahead=1), layout.local_total, task.ids.itemsize),
        (from_all_ranks(layout, flat), task.ids.numel(), task.field.itemsize),
    ]
    index = staging = 0
    for segments, total, itemsize in moves:
        tokens = int(segments.sizes.sum())
        index += 16 * tokens if segments.by_token else 0
        staging += itemsize * (tokens if segments.by_token else min(ZERO_ELEMENTS, int(segments.gaps(total).max())))
    return index, staging
