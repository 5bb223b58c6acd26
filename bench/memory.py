"""What the records of a memory cell say: the predicted peak beside what the step really took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bench.summary import CellRecords

METRICS = (
    "predicted_peak_gib", "peak_gib", "peak_error", "predicted_reserved_gib", "reserved_gib", "reserved_error",
    "replay_error",
)  # fmt: skip


@dataclass(frozen=True)
class Memory:
    """Of one cell: (predicted, counted) GiB of tensors and of what the allocator reserved, None where not counted."""

    peak: tuple[float | None, float | None]
    reserved: tuple[float | None, float | None]
    error: float | None
    limit: float | None
    replay_error: float | None

    @classmethod
    def of(cls, cell: CellRecords) -> Memory:
        error = cell.find("peak_error")
        return cls(
            peak=(cell.median("predicted_peak_gib"), cell.median("peak_gib")),
            reserved=(cell.median("predicted_reserved_gib"), cell.median("reserved_gib")),
            error=error.worst if error else None,
            limit=error.limit if error else None,
            replay_error=cell.median("replay_error"),
        )


def memory_text(rows: Sequence[Memory]) -> str:
    """The part of a run's sentence: empty without figures."""
    errors = [row.error for row in rows if row.error is not None]
    return f"; predicted peaks of memory at most {max(errors):.1%} from what the step took" if errors else ""
