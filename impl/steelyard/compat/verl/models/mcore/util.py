"""Mirror of ``verl.models.mcore.util``: packing (THD) and compaction (BSHD) of the rows of a micro-batch.

verl moves rows in a loop with boolean masks, each of which makes the host wait for the device, and reads lengths and
offsets besides. Here the device is read once per call, for lengths and first columns alone (twice where a mask has
holes), and ``steelyard.packing`` moves all rows together. Nothing is read

- when the caller hands in what the host knows: ``lengths`` (real tokens of each row) and, for padded rows, ``starts``
  (column of the first one; default 0), whole numbers on the host. These arguments are Steelyard's additions;
- on the way back, when it gets the parameters that came from packing and the same mask or nested rows.

Values are verl's, but for:

- **masks**: any dtype, nonzero is a token; verl takes bool only, and other dtypes for indices.
- **labels** (``need_roll``): verl rolls the packed sequence, so that a row's last label is a zero of the padding, the
  next row's first token, or its own first token, as padding and parallel sizes have it. Here it is always 0, the
  padding holds 0, and the positions returned beside are those of the labels.
- **positions**: 0 in all padding; verl numbers the padding in the first of a context-parallel rank's two chunks.
- **FP8**: verl aligns each row to 16 and the total to 128 times the alignment (128·tp·2·cp with context parallelism).
  Here rows keep the plain alignment and the total is a multiple of 128·tp·cp, which gives every rank whole
  blocks: never more slots than verl's. ``packed_seq_params.layout.padding`` is the share of padding.
- **totals** (``min_local_rows``, ``pad_to_length_bucket``): also a multiple of the alignment. verl's need not be, and
  then tokens are lost between context-parallel chunks, or sequence parallelism cannot split the total.
- **short rows** under context parallelism, empty ones included: right here as in verl 0.9.1, where earlier versions cut
  slices of the wrong size.
- **errors** are ``InputError`` and ``BatchError``; a ``forced_max_seqlen`` that would cut rows is one.

What verl adds on Ascend NPUs is not mirrored.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from steelyard.compat.verl import packed as shared
from steelyard.compat.verl.packed import Lengths, Ranks, VerlPackedSeqParams
from steelyard.errors import BatchError, InputError
from steelyard.packing import PackedLayout, next_token_labels, pack, unpack
from steelyard.packing.pack import unpack_gathered
from steelyard.packing.params import to_device

__all__ = [
    "postprocess_bshd",
    "postprocess_bshd_engine",
    "postprocess_packed_seqs",
    "postprocess_packed_seqs_for_dict_output",
    "postprocess_thd_engine",
    "preprocess_bshd",
    "preprocess_bshd_engine",
    "preprocess_packed_seqs",
    "preprocess_thd_engine",
]

ContextParallelLayout = Literal["zigzag", "contiguous"]


def preprocess_packed_seqs(
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    pre_process: bool = True,
    use_fp8_padding: bool = False,
    *,
    lengths: Lengths = None,
    starts: Lengths = None,
) -> tuple[torch.Tensor, PackedSeqParams]:
    """Packs padded rows: ([B, S, ...], mask [B, S]) -> ([1, T/cp, ...], parameters of the THD format).

    Differentiable. Without ``pre_process`` (later pipeline stages) the first result is ``input_ids`` as it came.

    Raises:
        BatchError: rows, mask and lengths do not fit together.
    """
    ranks = Ranks.here()
    recipe = shared.RECIPE if use_fp8_padding else None
    layout = shared.layout_of_mask(attention_mask, lengths, starts, fp8_recipe=recipe, **ranks.sizes)
    params = VerlPackedSeqParams(layout, input_ids.device, attention_mask, ranks)
    return (pack(input_ids, layout).unsqueeze(0) if pre_process else input_ids), params


def postprocess_packed_seqs(
    output: torch.Tensor,
    packed_seq_params: PackedSeqParams,
    attention_mask: torch.Tensor,
    batch_size: int,
    seq_len: int,
    post_process: bool = True,
    *,
    lengths: Lengths = None,
    starts: Lengths = None,
) -> torch.Tensor:
    """The way back from ``preprocess_packed_seqs``: [1, T/cp, ...] -> [B, S, ...], zero where no token is.

    Parts of context-parallel ranks are gathered; gradients go to this rank's part. Without ``post_process`` (earlier
    pipeline stages) ``output`` comes back as it is.

    Raises:
        BatchError: output, parameters and mask do not fit together.
    """
    if not post_process:
        return output
    ranks = Ranks.here()
    layout = shared.layout_behind(packed_seq_params, attention_mask, ranks, lengths, starts)
    if batch_size != layout.lengths.size:
        raise BatchError(f"batch_size={batch_size} but {layout.lengths.size} rows were packed: they belong together")
    return unpack(output[0], layout, seq_len, ranks.cp_group)


def postprocess_packed_seqs_for_dict_output(
    labels_mask: torch.Tensor,
    output: Any,
    packed_seq_params: PackedSeqParams,
    attention_mask: torch.Tensor,
    batch_size: int,
    seq_len: int,
    post_process: bool = True,
    *,
    lengths: Lengths = None,
    starts: Lengths = None,
) -> dict[str, torch.Tensor]:
    """``postprocess_packed_seqs`` for ``output.entropy`` and ``output.log_probs`` of fused kernels, T/cp values each.

    Log-probabilities are 0 where ``labels_mask`` [1, T/cp] is. ``output`` stays as it was; verl writes into it.
    """
    log_probs = output.log_probs.view(1, -1).masked_fill(labels_mask == 0, 0.0)
    packed = {"entropy": output.entropy.view(1, -1), "log_probs": log_probs}
    if not post_process:
        return packed
    ranks = Ranks.here()
    layout = _layout_behind(packed_seq_params, attention_mask, batch_size, ranks, lengths, starts)
    return {name: unpack(part[0], layout, seq_len, ranks.cp_group) for name, part in packed.items()}


def _layout_behind(
    params: PackedSeqParams, source: torch.Tensor, batch_size: int, ranks: Ranks, lengths: Lengths, starts: Lengths
) -> PackedLayout:
    layout = shared.layout_behind(params, source, ranks, lengths, starts)
    if batch_size != layout.lengths.size:
        raise BatchError(f"batch_size={batch_size} but {layout.lengths.size} rows were packed: they belong together")
    return layout


def preprocess_bshd(
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    position_ids: torch.Tensor,
    sequence_parallel: bool = False,
    pre_process: bool = True,
    *,
    lengths: Lengths = None,
    starts: Lengths = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Moves tokens to the left edge of their rows: (ids [B, S, ...], mask, positions [B, S]) -> three of width W.

    W is the longest row; with ``sequence_parallel`` a multiple of the tensor-parallel size. Without ``pre_process``
    the first result is ``input_ids`` as it came. Differentiable.

    Raises:
        InputError: context parallelism, which needs packed input.
        BatchError: rows, mask and lengths do not fit together.
    """
    ranks = Ranks.here()
    if ranks.cp > 1:
        raise InputError(f"context parallel size {ranks.cp} needs packed input: use preprocess_packed_seqs")
    for name, rows in (("attention_mask", attention_mask), ("position_ids", position_ids)):
        if rows.dim() != 2:
            raise BatchError(f"{name} has {rows.dim()} dimensions: [rows, width] is needed")
    tokens = shared.layout_of_mask(attention_mask, lengths, starts)
    layout = shared.rectangle(tokens, _rounded(tokens.max_seqlen, ranks.tp if sequence_parallel else 1))
    rows_of = {"mask": attention_mask, "positions": position_ids, **({"ids": input_ids} if pre_process else {})}
    left = {name: _padded(one, layout) for name, one in pack(rows_of, layout).items()}
    return left.get("ids", input_ids), left["mask"], left["positions"]


def postprocess_bshd(
    result: torch.Tensor,
    attention_mask: torch.Tensor,
    original_attention_mask: torch.Tensor,
    origin_seqlen: int,
    post_process: bool = True,
    *,
    lengths: Lengths = None,
    starts: Lengths = None,
) -> torch.Tensor:
    """The way back from ``preprocess_bshd``: [B, W, ...] -> [B, S, ...], zero where no token is. Differentiable.

    Both masks are read together.

    Raises:
        BatchError: result and masks do not fit together.
    """
    if not post_process:
        return result
    if lengths is None and starts is None:
        (now, before), _ = shared.layouts_of_masks([attention_mask, original_attention_mask])
    else:
        now, before = PackedLayout.of(lengths), PackedLayout.of(lengths, starts=starts)
    if not np.array_equal(now.lengths, before.lengths):
        raise BatchError("attention_mask and original_attention_mask do not hold the same number of tokens in each row")
    return unpack(pack(result, now), before, origin_seqlen)


def preprocess_thd_engine(
    input_ids: torch.Tensor,
    pre_process: bool = True,
    need_roll: bool = False,
    use_fp8_padding: bool = False,
    local_cp_size: int | None = None,
    min_local_rows: int | None = None,
    pad_to_length_bucket: int | None = None,
    cp_layout: ContextParallelLayout = "zigzag",
    *,
    lengths: Lengths = None,
) -> tuple[torch.Tensor, PackedSeqParams, torch.Tensor | None]:
    """Packs nested rows: [B, j, ...] -> ([1, T/cp, ...], parameters of the THD format, positions [1, T/cp]).

    Args:
        input_ids: nested (jagged) rows of tokens, or of anything else for each token. Differentiable.
        pre_process: without it the results are ``input_ids``, parameters, None.
        need_roll: in each slot what belongs to the next token of the same row, 0 behind the last: labels.
        use_fp8_padding: every rank gets a multiple of 128 tokens.
        local_cp_size: size of this micro-batch's own context-parallel group (dynamic context parallelism).
        min_local_rows: slots that each rank has at least.
        pad_to_length_bucket: the total is a multiple of it.
        cp_layout: ``zigzag``, two chunks of every row for each rank, or ``contiguous``, one piece of the whole.
        lengths: of the rows, where the host knows them.

    Raises:
        InputError: a feature that this megatron-core does not have, or a bucket below 1.
        BatchError: rows and lengths do not fit together.
    """
    ranks = Ranks.here(local_cp_size, cp_layout)
    if ranks.contiguous and not shared.takes_partition_mode():
        raise InputError(
            "cp_layout='contiguous' needs a megatron-core whose PackedSeqParams have cp_partition_mode: use 'zigzag'"
        )
    if pad_to_length_bucket is not None and pad_to_length_bucket < 1:
        raise InputError(f"pad_to_length_bucket={pad_to_length_bucket} must be at least 1")
    layout = shared.layout_of_nested(input_ids, lengths, **ranks.sizes)
    multiple = math.lcm(ranks.alignment(use_fp8_padding), pad_to_length_bucket or 1)
    layout = shared.grown(layout, multiple, ranks.cp * (min_local_rows or 0))

    params = VerlPackedSeqParams(layout, input_ids.device, shared.offsets_of(input_ids), ranks)
    if local_cp_size is not None:
        params.local_cp_size, params.cp_group = local_cp_size, ranks.cp_group
    if shared.takes_partition_mode():
        params.cp_partition_mode = cp_layout
    if not pre_process:
        return input_ids, params, None
    packed = ranks.local(next_token_labels(input_ids, layout) if need_roll else pack(input_ids, layout))
    positions = shared.token_positions(layout, ranks, input_ids.device, ahead=int(need_roll))
    return packed.unsqueeze(0), params, positions.unsqueeze(0)


def postprocess_thd_engine(
    output: torch.Tensor,
    packed_seq_params: PackedSeqParams,
    input_ids: torch.Tensor,
    batch_size: int,
    post_process: bool = True,
    local_cp_size: int | None = None,
    cp_layout: ContextParallelLayout = "zigzag",
    *,
    lengths: Lengths = None,
) -> torch.Tensor:
    """The way back from ``preprocess_thd_engine``: [1, T/cp, ...] -> nested [B, j, ...] with the offsets of the rows.

    Parts of context-parallel ranks are gathered; gradients go to this rank's part.

    Raises:
        BatchError: output, parameters and rows do not fit together.
    """
    ranks = Ranks.here(local_cp_size, cp_layout, packed_seq_params.cp_group if local_cp_size is not None else None)
    if not post_process:
        return output
    layout = _layout_behind(packed_seq_params, shared.offsets_of(input_ids), batch_size, ranks, lengths, None)
    values = shared.take(output[0], layout, ranks)
    return shared.nested(values, layout, shared.offsets_of(input_ids))


def preprocess_bshd_engine(
    input_ids: torch.Tensor,
    pre_process: bool = True,
    need_roll: bool = False,
    use_fp8_padding: bool = False,
    forced_max_seqlen: int | None = None,
    *,
    lengths: Lengths = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pads nested rows: [B, j, ...] -> (rows [B, W/cp, ...], mask [B, W/cp], positions [B, W/cp]).

    Under context parallelism a rank holds two chunks of every row, as in packed input. ``pre_process`` changes nothing,
    as in verl.

    Args:
        need_roll: in each place what belongs to the next token of the same row, 0 behind the last: labels.
        use_fp8_padding: every rank gets a multiple of 128 tokens.
        forced_max_seqlen: the longest row of the mini-batch, for one width in all its micro-batches.
        lengths: of the rows, where the host knows them.

    Raises:
        BatchError: a row is longer than ``forced_max_seqlen`` with its alignment, or lengths are not those of the rows.
    """
    ranks = Ranks.here()
    tokens = shared.layout_of_nested(input_ids, lengths, **ranks.sizes)
    longest = int(tokens.lengths.max()) if forced_max_seqlen is None else int(forced_max_seqlen)
    width = _rounded(longest, ranks.alignment(fp8=False))
    if use_fp8_padding:
        blocks = ranks.alignment(fp8=True)
        width = _rounded(width, math.lcm(blocks // math.gcd(tokens.lengths.size, blocks), ranks.alignment(fp8=False)))
    layout = shared.rectangle(tokens, width)

    packed = next_token_labels(input_ids, layout) if need_roll else pack(input_ids, layout)
    places, counts = to_device([layout.local_positions[: width // ranks.cp], layout.lengths], input_ids.device)
    mask = places < counts.unsqueeze(1)
    return _padded(packed, layout), mask, places.expand_as(mask)


def postprocess_bshd_engine(
    output: torch.Tensor,
    attention_mask: torch.Tensor,
    post_process: bool = True,
    *,
    lengths: Lengths = None,
) -> torch.Tensor:
    """The way back from ``preprocess_bshd_engine``: ([B, W/cp, ...], its mask) -> nested [B, j, ...].

    Parts of context-parallel ranks are gathered, those of the mask too unless the host knows the lengths; gradients go
    to this rank's part.

    Raises:
        BatchError: output and mask do not fit together.
    """
    if not post_process:
        return output
    ranks = Ranks.here()
    count, part = attention_mask.shape
    if output.shape[:2] != attention_mask.shape or (ranks.cp > 1 and part % 2):
        raise BatchError(
            f"the output has the shape {tuple(output.shape)}, its mask {count} x {part}: rows and columns must agree, "
            f"and columns be even under context parallelism"
        )
    width, flat = part * ranks.cp, output.flatten(0, 1)
    if lengths is not None:
        tokens = shared.rectangle(PackedLayout.of(lengths, **ranks.sizes), width)
        return shared.nested(shared.take(flat, tokens, ranks), tokens)
    # A rank's part of the mask does not tell how long rows are, so all slots come first.
    slots = PackedLayout.of([width] * count, cp=ranks.cp, cp_rank=ranks.cp_rank)
    whole_mask = unpack_gathered(ranks.gather(attention_mask.to(torch.uint8).flatten()), slots, width)
    (tokens,), _ = shared.layouts_of_masks([whole_mask])
    return shared.nested(pack(unpack_gathered(ranks.gather(flat), slots, width), tokens), tokens)


def _rounded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _padded(packed: torch.Tensor, layout: PackedLayout) -> torch.Tensor:
    """[B·W/cp, ...] -> [B, W/cp, ...] of a layout whose rows all have W slots."""
    rows = layout.lengths.size
    return packed.view(rows, layout.local_total // rows, *packed.shape[1:])
