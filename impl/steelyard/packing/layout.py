"""Where every token of a packed micro-batch comes from: host integers only, no device is asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from steelyard.errors import BatchError

if TYPE_CHECKING:
    import torch
    from megatron.core.packed_seq_params import PackedSeqParams


@dataclass(frozen=True, eq=False)
class PackedLayout:
    """Offsets of B rows that are laid one after the other, each padded to a multiple of ``alignment``.

    Build it with ``PackedLayout.of``. All arrays are int64.

    Attributes:
        lengths: [B] real tokens of each row.
        starts: [B] column of each row's first token in the padded batch it comes from.
        alignment: every row takes a multiple of this many slots.
    """

    lengths: np.ndarray
    starts: np.ndarray
    alignment: int = 1

    @classmethod
    def of(
        cls, lengths: Sequence[int] | np.ndarray, *, starts: Sequence[int] | np.ndarray | None = None, tp: int = 1
    ) -> PackedLayout:
        """The layout of rows with these lengths.

        Args:
            lengths: real tokens of each row; 0 is a row without tokens.
            starts: first column of each row (left-padded prompts); None means column 0.
            tp: tensor-parallel size. Sequence parallelism splits the packed tokens over these ranks, so each row is
                padded to a multiple of it.

        Raises:
            BatchError: no rows, a negative length or start, or as many starts as there are not rows.
        """
        rows = np.asarray(lengths, dtype=np.int64)
        if rows.ndim != 1 or rows.size == 0:
            raise BatchError(f"lengths must be a list of at least one whole number; got an array of shape {rows.shape}")
        first = np.zeros_like(rows) if starts is None else np.asarray(starts, dtype=np.int64)
        if first.shape != rows.shape:
            raise BatchError(f"{first.size} starts do not match {rows.size} lengths: give one start for each row")
        for name, values in (("length", rows), ("start", first)):
            if (values < 0).any():
                row = int(np.argmax(values < 0))
                raise BatchError(f"row {row} has the negative {name} {int(values[row])}")
        return cls(rows, first, tp)

    @cached_property
    def padded_lengths(self) -> np.ndarray:
        """[B] slots that each row takes."""
        return -(-self.lengths // self.alignment) * self.alignment

    @cached_property
    def cu_seqlens(self) -> np.ndarray:
        """[B + 1] offsets of the real tokens, as if there were no padding."""
        return np.concatenate(([0], np.cumsum(self.lengths)))

    @cached_property
    def cu_seqlens_padded(self) -> np.ndarray:
        """[B + 1] first slot of each row; the last entry is the number of slots."""
        return np.concatenate(([0], np.cumsum(self.padded_lengths)))

    @property
    def max_seqlen(self) -> int:
        """Slots of the longest row. Never the total of several rows: megatron-core would not restart positions."""
        return int(self.padded_lengths.max())

    @property
    def total(self) -> int:
        """Slots of the packed sequence: the tokens that are computed."""
        return int(self.cu_seqlens_padded[-1])

    @property
    def padding(self) -> float:
        """Share of the slots that hold no token."""
        return 1.0 - int(self.cu_seqlens[-1]) / self.total if self.total else 0.0

    @cached_property
    def token_rows(self) -> np.ndarray:
        """[N] the row of each real token, row after row."""
        return np.repeat(np.arange(self.lengths.size), self.lengths)

    @cached_property
    def token_positions(self) -> np.ndarray:
        """[N] the position of each real token in its row; it restarts at every row."""
        return np.arange(int(self.cu_seqlens[-1])) - np.repeat(self.cu_seqlens[:-1], self.lengths)

    @cached_property
    def token_slots(self) -> np.ndarray:
        """[N] the slot of each real token."""
        return self.cu_seqlens_padded[self.token_rows] + self.token_positions

    @cached_property
    def token_columns(self) -> np.ndarray:
        """[N] the column of each real token in the padded batch."""
        return self.starts[self.token_rows] + self.token_positions

    @cached_property
    def slot_positions(self) -> np.ndarray:
        """[T] the position of each slot in its row, padding included."""
        return np.arange(self.total) - np.repeat(self.cu_seqlens_padded[:-1], self.padded_lengths)

    def packed_seq_params(self, device: torch.device | str) -> PackedSeqParams:
        """What megatron-core's attention and RoPE take, in the THD format; one copy to the device."""
        import torch
        from megatron.core.packed_seq_params import PackedSeqParams

        offsets = np.stack((self.cu_seqlens, self.cu_seqlens_padded)).astype(np.int32)
        real, padded = torch.from_numpy(offsets).to(device, non_blocking=True)
        return PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=real,
            cu_seqlens_kv=real,
            cu_seqlens_q_padded=padded,
            cu_seqlens_kv_padded=padded,
            max_seqlen_q=self.max_seqlen,
            max_seqlen_kv=self.max_seqlen,
        )
