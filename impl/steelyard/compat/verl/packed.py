"""What the functions that pack for verl share: the ranks, the rows of a mask on the host, and the way back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

from steelyard.errors import BatchError, InputError
from steelyard.packing import PackedLayout
from steelyard.packing.layout import FP8_MULTIPLES
from steelyard.packing.params import HostPackedSeqParams, to_device
from steelyard.packing.segments import flat_columns, from_all_ranks, move

Lengths = Sequence[int] | np.ndarray | None
RECIPE = "blockwise"  # the recipe that verl's FP8 padding is for


@dataclass(frozen=True)
class Ranks:
    """The ranks that share a micro-batch, and how its slots are divided over the context-parallel ones.

    Attributes:
        contiguous: each rank holds one piece of the packed sequence, not two chunks of every row. The layout is then
            that of the whole sequence (its ``cp`` is 1), and the piece is cut out of it.
    """

    tp: int
    cp: int
    cp_rank: int
    cp_group: dist.ProcessGroup | None
    contiguous: bool = False

    @classmethod
    def here(cls, local_cp_size: int | None = None, cp_layout: str = "zigzag", group: Any = None) -> Ranks:
        """Those of Megatron's parallel state.

        Args:
            local_cp_size: size of a dynamic context-parallel group, in the place of the static one.
            cp_layout: ``zigzag`` or ``contiguous``.
            group: the dynamic group, where the caller has it.

        Raises:
            InputError: another ``cp_layout``, or a feature that this megatron-core does not have.
        """
        if cp_layout not in ("zigzag", "contiguous"):
            raise InputError(f"cp_layout={cp_layout!r} is unknown: use 'zigzag' or 'contiguous'")
        tp = mpu.get_tensor_model_parallel_world_size()
        if local_cp_size is None:
            cp, rank = max(1, mpu.get_context_parallel_world_size()), mpu.get_context_parallel_rank()
            group = mpu.get_context_parallel_group() if cp > 1 else None
        else:
            cp, group = local_cp_size, group or _dynamic_group(local_cp_size)
            rank = dist.get_rank(group)
        return cls(tp, cp, rank, group, cp > 1 and cp_layout == "contiguous")

    @property
    def sizes(self) -> dict[str, Any]:
        """What ``PackedLayout.of`` takes."""
        if self.contiguous:
            return {"tp": self.tp * self.cp}
        return {"tp": self.tp, "cp": self.cp, "cp_rank": self.cp_rank}

    def alignment(self, fp8: bool) -> int:
        """What the slots of a whole micro-batch are a multiple of."""
        rows = self.tp * self.cp * (2 if self.cp > 1 and not self.contiguous else 1)
        return math.lcm(rows, FP8_MULTIPLES[RECIPE] * self.tp * self.cp) if fp8 else rows

    def local(self, slots: torch.Tensor) -> torch.Tensor:
        """This rank's piece of what ``pack`` made; all of it unless pieces are contiguous."""
        size = slots.size(0) // self.cp
        return slots.narrow(0, self.cp_rank * size, size) if self.contiguous else slots

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """[T/cp, ...] -> [T, ...], rank after rank; gradients go to this rank's part."""
        if self.cp == 1:
            return part
        return gather_from_sequence_parallel_region(part, tensor_parallel_output_grad=False, group=self.cp_group)


def _dynamic_group(size: int) -> dist.ProcessGroup:
    groups = getattr(mpu, "get_dynamic_data_context_parallel_groups", None)
    if groups is None:
        raise InputError(f"local_cp_size={size} needs a megatron-core with dynamic context parallelism: leave it None")
    return groups(group_size=size)


class VerlPackedSeqParams(HostPackedSeqParams):
    """``HostPackedSeqParams`` with verl's offsets: the padding of a row belongs to it in both pairs of them.

    It remembers the tensor that told where the tokens are (a mask, or the offsets of nested rows), so that the way
    back, which gets it too, need not read it again.
    """

    def __init__(self, layout: PackedLayout, device: torch.device, source: torch.Tensor, ranks: Ranks) -> None:
        super().__init__(layout, device)
        self.cu_seqlens_q = self.cu_seqlens_kv = self.cu_seqlens_q_padded
        self.positions = ranks.local(self.positions)
        self.source, self.version = source, _version(source)

    def is_of(self, source: torch.Tensor) -> bool:
        """Whether the layout was made from this tensor and nobody wrote into it since."""
        return self.source is source and self.version == _version(source)


def _version(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def takes_partition_mode() -> bool:
    """Whether this megatron-core's parameters can say that pieces are contiguous."""
    return "cp_partition_mode" in {one.name for one in fields(PackedSeqParams)}


def read(*tensors: torch.Tensor) -> list[np.ndarray]:
    """Tensors of whole numbers on the host, flat, with one read of the device."""
    whole = torch.cat([one.flatten().long() for one in tensors]).cpu().numpy()
    return np.split(whole, np.cumsum([one.numel() for one in tensors])[:-1])


def layouts_of_masks(
    masks: Sequence[torch.Tensor], also: Sequence[torch.Tensor] = (), **sizes: Any
) -> tuple[list[PackedLayout], list[np.ndarray]]:
    """Layouts of device masks [B, S], and what ``also`` holds, with one read; masks with holes take another.

    Nonzero is a token, whatever the dtype.
    """
    real = [mask != 0 for mask in masks]
    facts = read(*(_runs(one) for one in real), *also)
    runs = [one.reshape(3, -1) for one in facts[: len(masks)]]
    if any((count > 1).any() for _, _, count in runs):
        flat = read(*real)
        whole = [one.reshape(mask.shape) for one, mask in zip(flat, masks, strict=True)]
        return [PackedLayout.of(mask=one, **sizes) for one in whole], facts[len(masks) :]
    return [PackedLayout.of(lengths, starts=starts, **sizes) for lengths, starts, _ in runs], facts[len(masks) :]


def _runs(real: torch.Tensor) -> torch.Tensor:
    """[3, B]: tokens of each row, the column of its first, and how many runs of tokens without a hole it has."""
    if not real.size(1):
        return torch.zeros(3, real.size(0), dtype=torch.long, device=real.device)
    begins = real[:, 0] + (real[:, 1:] & ~real[:, :-1]).sum(1)
    return torch.stack((real.sum(1), real.to(torch.uint8).argmax(1), begins))


def layout_of_mask(mask: torch.Tensor, lengths: Lengths, starts: Lengths, **sizes: Any) -> PackedLayout:
    """The layout of a device mask, or of the host's lengths and starts, and then nothing is read."""
    if lengths is not None or starts is not None:
        return PackedLayout.of(lengths, starts=starts, **sizes)
    return layouts_of_masks([mask], **sizes)[0][0]


def offsets_of(rows: torch.Tensor) -> torch.Tensor:
    """[B + 1] on the device: where each row of a nested tensor begins, and the end."""
    return cast(Any, rows).offsets()


def layout_of_nested(rows: torch.Tensor, lengths: Lengths, **sizes: Any) -> PackedLayout:
    """The layout of nested rows, with one read of their offsets unless the host knows the lengths."""
    return PackedLayout.of(np.diff(read(offsets_of(rows))[0]) if lengths is None else lengths, **sizes)


def grown(layout: PackedLayout, multiple: int, least: int) -> PackedLayout:
    """With at least so many slots, and a multiple of it: what is added goes behind the last row."""
    padded = layout.padded_lengths.copy()
    padded[-1] += -(-max(layout.total, least) // multiple) * multiple - layout.total
    return replace(layout, padded_lengths=padded)


def rectangle(layout: PackedLayout, width: int) -> PackedLayout:
    """With ``width`` slots for every row: packing then makes a padded batch (BSHD)."""
    if (layout.lengths > width).any():
        row = int(np.argmax(layout.lengths > width))
        raise BatchError(f"row {row} has {int(layout.lengths[row])} tokens, which do not fit into a width of {width}")
    return replace(layout, padded_lengths=np.full_like(layout.lengths, width))


def rows_in(params: PackedSeqParams, rows: PackedLayout, padded: np.ndarray) -> PackedLayout:
    """Rows whose tokens were read anew, in the slots that some parameters tell of.

    Raises:
        BatchError: the rows are not those that were packed.
    """
    if rows.lengths.size != padded.size or (rows.lengths > padded).any():
        raise BatchError(
            f"{type(params).__name__} has slots for {padded.size} rows, which do not hold the {rows.lengths.size} rows "
            f"given: pass the parameters that came from packing these rows"
        )
    return replace(rows, padded_lengths=padded)


def layout_behind(
    params: PackedSeqParams, source: torch.Tensor, ranks: Ranks, lengths: Lengths = None, starts: Lengths = None
) -> PackedLayout:
    """The layout that packed, from its parameters and the mask [B, S] or the offsets [B + 1] of the rows.

    Nothing is read where the parameters are ours and were made from the same tensor, else the device is read once.
    """
    ours = isinstance(params, HostPackedSeqParams)
    handed = lengths is not None or starts is not None
    if not handed and isinstance(params, VerlPackedSeqParams) and params.is_of(source):
        return params.layout
    unknown = [] if ours else [params.cu_seqlens_q_padded]
    if handed:
        rows, others = PackedLayout.of(lengths, starts=starts, **ranks.sizes), read(*unknown) if unknown else []
    elif source.dim() == 2:
        (rows,), others = layouts_of_masks([source], unknown, **ranks.sizes)
    else:
        offsets, *others = read(source, *unknown)
        rows = PackedLayout.of(np.diff(offsets), **ranks.sizes)
    return rows_in(params, rows, params.layout.padded_lengths if ours else np.diff(others[0]))


def take(part: torch.Tensor, layout: PackedLayout, ranks: Ranks) -> torch.Tensor:
    """[T/cp, ...] -> [N, ...]: the tokens of all ranks, row after row. Differentiable."""
    if part.size(0) * ranks.cp != layout.total:
        raise BatchError(f"the output has {part.size(0)} slots on each of {ranks.cp} ranks, its layout {layout.total}")
    segments = from_all_ranks(layout, flat_columns(layout, 0))
    return move(ranks.gather(part), segments, int(layout.cu_seqlens[-1]))


def nested(values: torch.Tensor, layout: PackedLayout, offsets: torch.Tensor | None = None) -> torch.Tensor:
    """[N, ...] -> nested [B, j, ...], whose shortest and longest row nobody has to read back."""
    if offsets is None:
        (offsets,) = to_device([layout.cu_seqlens], values.device)
    return torch.nested.nested_tensor_from_jagged(
        values, offsets, min_seqlen=int(layout.lengths.min()), max_seqlen=int(layout.lengths.max())
    )


def token_positions(layout: PackedLayout, ranks: Ranks, device: torch.device, ahead: int) -> torch.Tensor:
    """[T/cp] in each local slot the position of its token in the row, or of the one ``ahead`` of it; 0 for none."""
    rows = np.searchsorted(layout.cu_seqlens_padded[1:], layout.local_slots, side="right")
    positions = layout.local_positions + ahead
    (local,) = to_device([np.where(positions < layout.lengths[rows], positions, 0)], device)
    return ranks.local(local)
