"""What the records of a handover cell say: what each way leaves to the rollout engine, and what it costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bench.stats import median
from bench.table import range_text

if TYPE_CHECKING:
    from bench.record import Status
    from bench.summary import CellRecords
    from suites.measure import Side

METRICS = (
    "engine_gib", "step_reserved_gib", "device_free_gib", "out_ms", "back_ms", "step_ms", "loss_difference",
)  # fmt: skip
# As in ``suites.handover``, from the naive to the optimised; and what tables and pictures call them.
WAYS: tuple[tuple[Side, str], ...] = (
    ("naive", "N10 alone"),
    ("naive", ""),
    ("optimised", "parameters kept"),
    ("optimised", ""),
)
NAMES = ("N10 alone", "N10 + N11", "hand_over, parameters kept", "hand_over")
Four = tuple[float | None, ...]


@dataclass(frozen=True)
class Handover:
    """One cell; four figures are in the order of ``WAYS``, and None stands for samples that the cell does not have.

    Attributes:
        capacity: GiB of the GPU that is predicted for.
        state: GiB of parameters, gradients and optimizer on that GPU; empty where they are not known.
        reserved: GiB reserved at the end of the step, predicted.
        predicted: GiB left to the engine.
        measured: GiB free on the device, on CUDA.
        out, back: milliseconds, measured, medians.
        on_cuda: whether they are those of a GPU; else copies went from host memory to host memory.
        step: milliseconds of a step, (with the cache emptied before every micro-batch, without).
        loss_difference: of the step after a hand-over.
    """

    cell: str
    status: Status
    capacity: float | None
    state: tuple[float, ...]
    reserved: float | None
    predicted: Four
    measured: Four
    out: Four
    back: Four
    on_cuda: bool
    step: tuple[float | None, float | None]
    loss_difference: float | None

    @classmethod
    def of(cls, cell: CellRecords) -> Handover:
        def four(metric: str) -> Four:
            found = {(one.side, one.variant): one for one in cell.series if one.metric == metric}
            return tuple(median(found[way].values) if way in found else None for way in WAYS)

        engine, out = cell.find("engine_gib"), cell.find("out_ms")
        whole = [one for one in cell.series if (one.metric, one.side, one.variant) == ("engine_gib", *WAYS[0])]
        held = whole[0].notes["held_gib"] if whole else {}
        return cls(
            cell=cell.id,
            status=cell.status,
            capacity=engine.notes.get("capacity_gib") if engine else None,
            state=tuple(held[piece] for piece in ("params", "grads", "optimizer") if piece in held),
            reserved=cell.median("step_reserved_gib"),
            predicted=four("engine_gib"),
            measured=four("device_free_gib"),
            out=four("out_ms"),
            back=four("back_ms"),
            on_cuda=bool(out) and "copies" not in out.notes,
            step=(cell.median("step_ms", "naive"), cell.median("step_ms", "optimised")),
            loss_difference=cell.median("loss_difference"),
        )

    @property
    def gain(self) -> float | None:
        """GiB that ``hand_over`` leaves the engine beyond N10 with N11, predicted."""
        return _less(self.predicted[3], self.predicted[1])

    @property
    def measured_gain(self) -> float | None:
        """The same as the device tells it."""
        return _less(self.measured[3], self.measured[1])


def _less(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one - other


def handover_text(rows: list[Handover]) -> str:
    """What a run found about hand-overs, as a part of its sentence; empty without such cells."""
    gains = [row.gain for row in rows if row.gain is not None]
    if not gains:
        return ""
    text = f"; a hand-over leaves the rollout engine {range_text(gains, 2)} GiB more (predicted)"
    measured = [row.measured_gain for row in rows if row.measured_gain is not None]
    if measured:
        text += f", {range_text(measured, 2)} GiB more (measured)"
    return text
