"""What the records of a packing cell say: N6 and N7 against Steelyard, medians and the ratios of pairs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bench.stats import Ratio, ratio_of_medians
from bench.table import range_text

if TYPE_CHECKING:
    from bench.record import Status
    from bench.summary import CellRecords

METRICS = (
    "packing_ms", "pack_ms", "labels_ms", "unpack_ms", "host_reads", "index_bytes", "staging_bytes", "packed_padding",
    "padded_padding", "logits_gib", "log_probs_ms",
)  # fmt: skip


@dataclass(frozen=True)
class Packing:
    """One cell; pairs are (naive, optimised), and None stands for samples that the cell does not have.

    Attributes:
        rows, cp: rows of the micro-batch, and context-parallel size.
        milliseconds: of pack, labels and unpack together.
        ratio: naive over optimised time of the three; stages: the same for each of ``pack``, ``labels``, ``unpack``.
        reads: how often the host waits for the device in the three.
        staging: bytes in temporary tensors, and of indices copied to the device.
        padding: share of the padded batch, and of the packed one.
        log_probs: naive over optimised time of the log-probabilities.
        logits: GiB of logits that exist at once.
    """

    cell: str
    status: Status
    rows: int
    cp: int
    milliseconds: tuple[float | None, float | None]
    ratio: Ratio | None
    stages: dict[str, Ratio | None]
    reads: tuple[float | None, float | None]
    staging: tuple[float | None, float | None]
    padding: tuple[float | None, float | None]
    log_probs: Ratio | None
    logits: tuple[float | None, float | None]

    @classmethod
    def of(cls, cell: CellRecords) -> Packing:
        def pair(metric: str) -> tuple[float | None, float | None]:
            return cell.median(metric, "naive"), cell.median(metric, "optimised")

        def ratio(metric: str) -> Ratio | None:
            naive, optimised = (cell.find(metric, side) for side in ("naive", "optimised"))
            return ratio_of_medians(naive.values, optimised.values) if naive and optimised else None

        staging = tuple(
            None if None in both else sum(both) for both in zip(pair("index_bytes"), pair("staging_bytes"), strict=True)
        )
        return cls(
            cell=cell.id,
            status=cell.status,
            rows=cell.first.case["rows"],
            cp=cell.first.case["layout"]["cp"],
            milliseconds=pair("packing_ms"),
            ratio=ratio("packing_ms"),
            stages={stage: ratio(f"{stage}_ms") for stage in ("pack", "labels", "unpack")},
            reads=pair("host_reads"),
            staging=staging,
            padding=(cell.median("padded_padding"), cell.median("packed_padding")),
            log_probs=ratio("log_probs_ms"),
            logits=pair("logits_gib"),
        )


def packing_text(rows: list[Packing]) -> str:
    """The part of a run's sentence: empty without ratios."""
    ratios = [row.ratio.value for row in rows if row.ratio]
    if not ratios:
        return ""
    return f"; packing is {range_text(ratios, 1)} times as fast as with host reads"
