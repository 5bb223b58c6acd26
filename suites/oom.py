"""The longest response that fits a GPU, of the naive and of the optimised step; and a real one, found by failing.

Rows of one length T (prompt and response together) stand for the longest of a step. What is asked is the largest T:

- naive: fixed micro-batches of ``micro_batch_size`` rows, padded to the longest (N1, N5, N13). Without context
  parallelism, which that code did not have.
- naive, ``whole logits`` (N7): one row to a micro-batch, packed; its logits are restored to the padded layout, in
  float32. Rows of one length have no padding, so this is what N7 costs by itself.
- naive, ``outputs with graph`` (N14): log-probabilities of all rows of a rank, one row to a micro-batch, graphs kept.
  One tensor-parallel rank, one stage.
- optimised: Steelyard's step, one such row to a micro-batch, which a dynamic budget of T tokens gives. A larger
  ``max_tokens`` fills every micro-batch to it, so that shorter rows then need as much memory as it does.
- optimised, ``fixed micro-batches``: the same step with ``micro_batch_size`` rows in each. Computed, not run: a packed
  micro-batch of k rows holds what one row of k times the tokens does.

Beside them stands what more micro-batches cost: the optimised side's peaks must not grow with their number, neither of
log-probabilities nor of training; N14's does.

On layouts of many ranks everything is predicted: the real step on fake tensors, continued from two depths of the model
(``extrapolated`` in the notes) and, between lengths, in the straight line of each phase. Every threshold was run.

On one rank, if the capacity is small or a GPU is there, the step also runs for real under a limit on its memory, until
it fails; the prediction must stand within 5 % of that on a CPU. A failure is a figure here ("out of memory at N
tokens"), no crash. On CUDA the limit is a memory fraction. Not verified on a GPU.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch

from steelyard.errors import CapacityError
from steelyard.lengths import LengthSample
from steelyard.memory import Offloader
from steelyard.memory.predict import GIB, RECOMPUTE, predict_peak, stage_ranks
from steelyard.memory.threshold import RESERVE_GIB, Threshold, largest_response, usual_micro_batches
from steelyard.model import host
from steelyard.model.build import build_model, build_optimizer
from steelyard.pipeline import legal_count
from steelyard.step import Actor, RolloutBatch, StepSettings
from suites import memory_limit
from suites.baselines import fixed_split, graph_outputs, whole_logits
from suites.launch.local import run_ranks
from suites.matrix import Cell
from suites.measure import Series, Side
from suites.ranks import DTYPES, parallel_groups
from suites.workloads import make_batch

LENGTHS = tuple(1024 * thousands for thousands in (8, 16, 32, 64, 128))
ASKED = 16384  # the length at which parts are told
# Longest row that is asked for. Memory does not depend on how the model's positions were stretched to it.
POSITIONS = LENGTHS[-1]
GRAPHS, WHOLE, FIXED = "outputs with graph", "whole logits", "fixed micro-batches"
NODE = 8
"""GPUs of one."""
TIMES = 4
"""So many times the usual number of micro-batches show what more of them cost."""
GROWTH = 0.01
"""The most by which that may raise the optimised side's peak: a few numbers of each micro-batch are kept."""
CPU_CAPACITY_GIB = 4.0
"""Above it, a CPU only predicts: it would have to fill so much memory."""
TOLERANCE = 0.05

MicroBatches = Sequence[Sequence[int]]
Step = Callable[[dict[str, torch.Tensor], list[Any], Any], object]


@dataclass(frozen=True)
class Way:
    """One implementation of a step.

    Attributes:
        side, variant: as in ``Series``.
        micro_batches: for a longest row of so many tokens.
        step: as ``predict_peak`` takes it; None is the engine's own.
        forward_only: log-probabilities are computed, nothing is trained.
    """

    side: Side
    variant: str
    micro_batches: Callable[[int], MicroBatches]
    step: Step | None = None
    forward_only: bool = False


@dataclass(frozen=True)
class Case:
    """A cell, and the device that its figures are for."""

    cell: Cell
    device: torch.device

    @cached_property
    def shape(self) -> Any:
        return dataclasses.replace(self.cell.model.shape(), max_positions=POSITIONS)

    @cached_property
    def layout(self) -> Any:
        return self.cell.layout.parallel()

    @cached_property
    def step_settings(self) -> StepSettings:
        return StepSettings(max_tokens=1, layout=self.layout)

    @property
    def real(self) -> bool:
        """Whether the step also runs on this device until it fails."""
        small = self.cell.capacity_gib <= CPU_CAPACITY_GIB
        return self.layout.world == 1 and (small or self.device.type == "cuda")

    @property
    def keeps_graphs(self) -> bool:
        """Whether N14 ran on such a layout."""
        return self.layout.model_ranks == 1 and not self.real

    @property
    def settings(self) -> dict[str, Any]:
        """Of every prediction."""
        return {
            "dtype": DTYPES[self.cell.dtype],
            "recompute": self.cell.recompute,
            "kernels": "cpu" if self.real and self.device.type == "cpu" else "cuda",
            "extrapolate": not self.real,
        }

    @property
    def reserve_gib(self) -> float:
        """Nothing is left free of a limit that counts nothing but the step."""
        return 0.0 if self.real else RESERVE_GIB

    def ways(self) -> list[Way]:
        """The optimised one, and the naive ones that this layout can run."""
        rows, layout = self.cell.micro_batch_size, self.layout
        multiple = self.layout.tokens_split_over_tp

        def one_row(tokens: int) -> MicroBatches:
            return usual_micro_batches(layout, tokens)

        def fixed(tokens: int) -> MicroBatches:
            return [[tokens] * rows for _ in usual_micro_batches(layout, tokens)]

        def padded(batch: dict[str, torch.Tensor], models: list[Any], optimizer: Any) -> None:
            fixed_split.step(batch, "actor", models, optimizer, rows, multiple_of=multiple)

        def whole(batch: dict[str, torch.Tensor], models: list[Any], optimizer: Any) -> None:
            whole_logits.step(batch, models, optimizer, multiple_of=multiple)

        ways = [Way("optimised", "", one_row)]
        if layout.cp == 1:
            ways += [Way("naive", "", fixed, padded), Way("naive", WHOLE, one_row, whole)]
        if self.keeps_graphs:
            ways.append(with_graphs(self.cell.rows // layout.dp))
        return ways


def with_graphs(count: int) -> Way:
    """N14 over so many micro-batches of one row each."""
    return Way("naive", GRAPHS, lambda tokens: [[tokens]] * count, _log_probs_with_graphs, forward_only=True)


def _log_probs_with_graphs(batch: dict[str, torch.Tensor], models: list[Any], optimizer: Any) -> None:
    rollouts = RolloutBatch.of(batch)
    graph_outputs.compute_log_prob(rollouts, models, [[row] for row in range(rollouts.rows)])


def measure(cell: Cell, device: str | None = None) -> list[Series]:
    """Thresholds of every way, what more micro-batches cost, and on one rank real thresholds.

    Raises:
        InputError: CUDA was asked for and there is none.
        RanksFailed: the rank died or hung.
    """
    case = Case(cell, host.pick_device(device))
    series = [found for way in case.ways() for found in thresholds(case, way)]
    if not case.real:
        # More nodes change nothing of what more micro-batches cost.
        return [*series, *growth(case)] if case.layout.world <= NODE else series
    start = {one.side: int(one.values[0]) // 2 for one in series if not one.variant}
    found = run_ranks(
        "suites.oom:on_rank",
        1,
        {"cell": cell.model_dump(), "device": case.device.type, "start": start},
        time_limit=cell.time_limit,
        device=case.device.type,
    )
    return [*series, *(one for side, tried in found.items() for one in compared(case, side, tried, series))]


# Predicted


def thresholds(case: Case, way: Way) -> list[Series]:
    """The threshold of a way; for the optimised one also that of its step with fixed micro-batches."""
    cell = case.cell
    notes: dict[str, Any] = {"capacity_gib": cell.capacity_gib, "reserve_gib": case.reserve_gib}
    try:
        found = largest_response(
            case.shape,
            case.layout,
            cell.capacity_gib,
            reserve_gib=case.reserve_gib,
            micro_batches=way.micro_batches,
            step=way.step,
            forward_only=way.forward_only,
            **case.settings,
        )
    except CapacityError as error:
        return [_threshold(way.side, way.variant, 0, notes | {"does_not_fit": str(error)})]
    # A budget fills micro-batches of shorter rows.
    least = (cell.max_tokens or 0) * case.layout.cp if way.side == "optimised" else 0
    parts = found.peak_at(max(ASKED, least)).parts
    tokens, breaks_first = found.tokens, found.breaks_first
    if least > tokens:
        tokens, filled = 0, found.peak_at(least).bytes / GIB
        breaks_first = f"micro-batches filled to {least} tokens, which need {filled:.1f} GiB"
    notes |= {
        "limit": found.limit,
        "breaks_first": breaks_first,
        "stage": found.stage,
        "extrapolated": found.prediction.extrapolated,
        "ran_at": [one.longest for one in found.tried],
        "peak_gib": curve(found, sorted({*LENGTHS, *(one.longest for one in found.tried)}), least=least),
        "parts_gib": {part: size / GIB for part, size in parts.items()},
        "batch_gib": batch_bytes(cell, ASKED) / GIB,
    }
    series = [_threshold(way.side, way.variant, tokens, notes)]
    if way.side == "optimised" and not case.real:
        # Nothing but the rows of a micro-batch differs: see the head of this file.
        rows, alignment = cell.micro_batch_size, case.step_settings.alignment
        fixed = found.tokens // rows // alignment * alignment
        more = {"computed": f"{found.tokens} tokens over the rows", "peak_gib": curve(found, LENGTHS, rows=rows)}
        series.append(_threshold("optimised", FIXED, fixed, more))
    return series


def _threshold(side: Side, variant: str, tokens: int, notes: dict[str, Any]) -> Series:
    return Series("threshold_tokens", side, "tokens", "higher", [tokens], "predicted", None, variant, notes)


def curve(found: Threshold, lengths: Sequence[int], *, rows: int = 1, least: int = 0) -> dict[str, float]:
    """Peak by length, on the stage that breaks first, with so many packed rows and at least so many tokens."""
    return {str(tokens): found.peak_at(max(rows * tokens, least)).bytes / GIB for tokens in lengths}


def batch_bytes(cell: Cell, tokens: int) -> int:
    """All fields of a data-parallel rank's padded rows: what a batch takes that is moved before it is split (N9)."""
    row = make_batch(even_rows(1, tokens), cell.model.vocab, cell.seed)
    return sum(value.nbytes for value in row.values()) * (cell.rows // cell.layout.dp)


def growth(case: Case) -> list[Series]:
    """Peaks at 16k of a few micro-batches and of many, and by how much more of them raise each side's.

    Log-probabilities of both sides, training of the optimised one; on the last stage, which keeps the outputs.
    """
    few = len(usual_micro_batches(case.layout, 1))
    counts = few, legal_count(TIMES * few, case.step_settings.pipeline())
    passes: list[tuple[Side, str, Step | None]] = [("optimised", "log-probs", None), ("optimised", "training", None)]
    if case.keeps_graphs:
        passes.append(("naive", "log-probs", _log_probs_with_graphs))
    series = []
    for side, what, step in passes:
        found = [
            predict_peak(
                case.shape,
                case.layout,
                [[ASKED]] * count,
                rank=list(stage_ranks(case.layout).values())[-1],
                step=step,
                forward_only=what == "log-probs",
                **case.settings,
            ).phases
            for count in counts
        ]
        # Only these phases see micro-batches; building the model may need more than they do.
        peaks = [max(one[name].bytes for name in ("forward", "backward") if name in one) / GIB for one in found]
        notes = {"tokens": ASKED, "micro_batches": counts, "peak_gib": peaks}
        limit = GROWTH if side == "optimised" else None
        series.append(
            Series("peak_growth", side, "1", "lower", [peaks[1] / peaks[0] - 1], "predicted", limit, what, notes)
        )
    return series


# Measured


def even_rows(rows: int, tokens: int) -> LengthSample:
    """Rows of one length, with a prompt of one token as predictions have it."""
    return LengthSample(np.full(rows, 1), np.full(rows, tokens - 1), "even", "rows of equal length")


def on_rank(payload: dict[str, Any]) -> dict[str, Any]:
    """What the one rank runs: by side, what ``until_it_fails`` found."""
    cell = Cell.model_validate(payload["cell"])
    case = Case(cell, torch.device(payload["device"]))
    if case.device.type == "cpu":
        memory_limit.follow_tensors()
    with parallel_groups(case.layout, cell.seed):
        models = build_model(
            case.shape, case.layout, dtype=DTYPES[cell.dtype], override_transformer_config=RECOMPUTE[cell.recompute]
        )
        optimizer = build_optimizer(models, lr=1e-6)
        found = {}
        for side, start in payload["start"].items():
            step = partial(_real_step, case, side, models, optimizer)
            # The first step makes the optimizer's state and everything that a process makes once.
            step(min(start, 64))
            state = sum(piece.device_bytes for piece in Offloader(models, optimizer).state.values())
            with memory_limit.limited(int(cell.capacity_gib * GIB), state, case.device):
                found[side] = dataclasses.asdict(memory_limit.until_it_fails(step, start))
    return found


def _real_step(case: Case, side: str, models: list[Any], optimizer: Any, tokens: int) -> None:
    way = next(one for one in case.ways() if (one.side, one.variant) == (side, ""))
    parts = way.micro_batches(tokens)
    batch = make_batch(even_rows(sum(map(len, parts)), tokens), case.cell.model.vocab, case.cell.seed)
    if way.step is not None:
        way.step(batch, models, optimizer)
        return
    settings = StepSettings(max_tokens=tokens, layout=case.layout)
    Actor(models, settings, optimizer).update(batch, indices=[[row] for row in range(len(parts))])


def compared(case: Case, side: Side, tried: dict[str, Any], series: Sequence[Series]) -> list[Series]:
    """The real threshold of a side, and how far the predicted one is from it."""
    predicted = next(one for one in series if (one.metric, one.side, one.variant) == ("threshold_tokens", side, ""))
    on_cpu = case.device.type == "cpu"
    notes = {
        "failure": f"out of memory at {tried['failed']} tokens",
        "message": tried["message"],
        "steps": tried["steps"],
        "limit": "address space" if on_cpu else "memory fraction, not verified",
    }
    error = abs(predicted.values[0] / tried["passed"] - 1)
    return [
        Series("real_threshold_tokens", side, "tokens", "higher", [tried["passed"]], notes=notes),
        # What the CUDA allocator reserves beyond tensors is not in this prediction, so nothing is claimed there.
        Series("threshold_error", side, "1", "lower", [error], limit=TOLERANCE if on_cpu else None),
    ]
