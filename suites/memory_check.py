"""Is the predicted memory of a training step what the device counts? One rank, predicted against measured.

The step is that of the workload's plan, on the handover suite's ``Case``. It is predicted on fake tensors, then taken
twice for real; the second is measured, since the first makes the optimizer's state.

- ``peak_gib``: the most bytes allocated at one moment of the step; ``peak_error``: how far the prediction is from it.
  On a CPU, storages are counted as they are born and die, and the two must agree within 2 %. On CUDA it is
  ``max_memory_allocated``, within 5 %: workspaces of matrix products are not predicted.
- ``reserved_gib``, on CUDA: ``max_memory_reserved`` over both steps, against the predicted trace replayed by the rules
  of the caching allocator; ``reserved_error`` says how far apart they are, without a limit.
- ``replay_error``, on CUDA: the allocator's own history of the same steps, replayed, against the reserved bytes that it
  recorded: what the rules alone get wrong.

Not verified on a GPU.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch

from steelyard.errors import InputError
from steelyard.memory import MemoryPrediction, compare_snapshot, replay
from steelyard.memory.predict import GIB, predict_peak
from steelyard.memory.record import Recorder
from steelyard.model import host
from steelyard.step import ActorRole, CriticRole
from suites.handover import Case
from suites.launch.local import run_ranks
from suites.matrix import Cell
from suites.measure import Series
from suites.ranks import DTYPES

CPU_LIMIT, CUDA_LIMIT, REPLAY_LIMIT = 0.02, 0.05, 0.05
HISTORY = 10_000_000  # entries of the allocator's history, which must reach back to the first tensor


class Cuda(Protocol):
    """The part of ``torch.cuda`` that is used here; tests put another in its place."""

    memory: Any

    def reset_peak_memory_stats(self) -> None: ...
    def max_memory_allocated(self) -> int: ...
    def max_memory_reserved(self) -> int: ...


@dataclass(frozen=True)
class Counted:
    """What was measured, in bytes.

    Attributes:
        allocated: the most of the second step.
        reserved: the most of both steps; None on a CPU.
        replay_error: of the replayed history, relative; None on a CPU.
    """

    allocated: int
    reserved: int | None = None
    replay_error: float | None = None


def measure(cell: Cell, device: str | None = None) -> list[Series]:
    """Predict the step, take it, and compare.

    Raises:
        InputError: the layout has several ranks, or CUDA was asked for and there is none.
        RanksFailed: the rank died or hung.
    """
    case = Case.of(cell)
    if case.settings.layout.world > 1:
        raise InputError(
            f"layout {case.settings.layout} has several ranks: the memory suite measures one, give it {{}}"
        )
    chosen = host.pick_device(device)
    prediction = predicted(case, chosen.type)
    found = run_ranks(
        "suites.memory_check:on_rank", 1, cell.model_dump(), time_limit=cell.time_limit, device=chosen.type
    )
    return compared(prediction, Counted(**found))


def predicted(case: Case, device: str) -> MemoryPrediction:
    """The step on fake tensors, with the kernels of the device."""
    cell = case.cell
    return predict_peak(
        cell.model.shape(),
        case.settings.layout,
        case.micro_batches,
        step=lambda _, models, optimizer: case.train(models, optimizer),
        role=CriticRole() if cell.role == "critic" else ActorRole(),
        dtype=DTYPES[cell.dtype],
        recompute=cell.recompute,
        kernels=device,
        trace=device == "cuda",
    )


def on_rank(payload: dict[str, Any]) -> dict[str, Any]:
    """What the one rank runs; the fields of ``Counted``."""
    case = Case.of(Cell.model_validate(payload))
    on_cuda = torch.cuda.current_device() != torch.device("cpu")
    return asdict(counted_by_cuda(case, torch.cuda) if on_cuda else counted_by_storage(case))


def counted_by_storage(case: Case) -> Counted:
    """Two steps on a CPU."""
    recorder = Recorder()
    # Predictions on a CPU count what is not compiled.
    with torch.compiler.set_stance("force_eager"), recorder, _two_steps(case) as second:
        since = recorder.count
        second()
    return Counted(recorder.peaks(since)["build"].bytes)


def counted_by_cuda(case: Case, cuda: Cuda) -> Counted:
    """Two steps on CUDA, whose allocator counts; nothing may be on the device yet."""
    cuda.memory._record_memory_history(max_entries=HISTORY, stacks="python", context=None)
    try:
        with _two_steps(case) as second:
            # What is reserved now stays so, and counts as the peak of reserved bytes from here on.
            cuda.reset_peak_memory_stats()
            second()
            snapshot = cuda.memory._snapshot()
            allocated, reserved = cuda.max_memory_allocated(), cuda.max_memory_reserved()
    finally:
        cuda.memory._record_memory_history(enabled=None)
    return Counted(allocated, reserved, compare_snapshot(snapshot).peak_error)


@contextmanager
def _two_steps(case: Case) -> Iterator[Any]:
    """The first step is done; what is handed out takes the second."""
    with case.groups():
        models, optimizer = case.build()
        case.train(models, optimizer)
        gc.collect()
        yield lambda: case.train(models, optimizer)


def compared(prediction: MemoryPrediction, counted: Counted) -> list[Series]:
    """Both figures, and the error of the predicted one."""
    on_cuda = counted.reserved is not None
    series = _pair(
        "peak", prediction.peak_bytes, counted.allocated, CUDA_LIMIT if on_cuda else CPU_LIMIT,
        {"phase": prediction.phase, "parts_gib": {name: size / GIB for name, size in prediction.parts.items()}},
    )  # fmt: skip
    if on_cuda:
        series += _pair("reserved", replay(prediction.events).peak_reserved, counted.reserved, None, {})
        series.append(
            Series("replay_error", "both", "1", "lower", [abs(counted.replay_error or 0.0)], limit=REPLAY_LIMIT)
        )
    return series


def _pair(name: str, foretold: int, counted: int, limit: float | None, notes: dict[str, Any]) -> list[Series]:
    error = foretold / counted - 1
    return [
        Series(f"predicted_{name}_gib", "both", "GiB", "none", [foretold / GIB], "predicted", notes=notes),
        Series(f"{name}_gib", "both", "GiB", "none", [counted / GIB]),
        Series(f"{name}_error", "both", "1", "lower", [abs(error)], limit=limit, notes={"signed": error}),
    ]
