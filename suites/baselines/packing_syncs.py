"""N6. Packing with a host read in every row's slice, as verl 0.3 to 0.6 ran it (``verl/models/mcore/util.py``).

``preprocess_packed_seqs`` and ``postprocess_packed_seqs`` of those versions keep every length and offset on the device
and use them as slice bounds and sizes, so the host waits for the device several times in each row: with one
context-parallel rank 2 + 2B scalar reads on the way in and 3B on the way out. Each row is gathered and scattered
through a boolean mask, which waits once more (its number of tokens must be known). Under context parallelism a row is
put together in a float32 tensor, whatever the type of the output. verl later read all lengths at once
(``tolist``), which left 5 reads and the boolean masks.

What a packed forward pass called: ``pack`` for the ids and again, from scratch, for each field of the log-probabilities
(labels, label mask); ``unpack`` for each of their results. ``padded_labels`` is what it packed as labels.

Kept as it was, with context parallelism: a row too short to reach every rank's first chunk is an error on the ranks
that get nothing of it, and only float32 can be unpacked. The exchange between context-parallel ranks is left out, and
its result handed in, so that one process can take the part of one rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def padded_labels(ids: torch.Tensor) -> torch.Tensor:
    """[B, S] -> [B, S]: the next column's token, the padding (0) in the last column."""
    labels = torch.zeros_like(ids)
    labels[:, :-1] = ids[:, 1:]
    return labels


def pack(
    rows: torch.Tensor, mask: torch.Tensor, *, tp: int = 1, cp: int = 1, cp_rank: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """[B, S] -> ([T/cp] this rank's tokens, [B + 1] padded offsets), both on the device.

    Args:
        rows: a padded batch.
        mask: [B, S] bool, true at real tokens.
        tp, cp, cp_rank: parallel sizes and this rank's place in the context-parallel group.
    """
    lengths = mask.sum(dim=-1, dtype=torch.int32)
    alignment = tp * cp * 2 if cp > 1 else tp
    padded = lengths + (alignment - lengths % alignment) % alignment
    offsets = torch.zeros(len(rows) + 1, dtype=torch.int32, device=rows.device)
    offsets[1:] = torch.cumsum(padded, dim=0)
    padded.max().item()  # max_seqlen of PackedSeqParams
    packed = torch.zeros(padded.sum().item() // cp, dtype=rows.dtype, device=rows.device)
    for row in range(len(rows)):
        tokens = rows[row, mask[row]]
        if cp == 1:
            packed[offsets[row] : offsets[row] + lengths[row]] = tokens
        else:
            _pack_chunks(packed, tokens, padded[row], offsets[row], cp, cp_rank)
    return packed, offsets


def _pack_chunks(
    packed: torch.Tensor, tokens: torch.Tensor, padded: torch.Tensor, offset: torch.Tensor, cp: int, cp_rank: int
) -> None:
    """This rank's two chunks of a row; ``padded`` and ``offset`` are scalars on the device."""
    chunk = padded // cp // 2
    start = offset // cp
    packed[start : start + chunk] = tokens[chunk * cp_rank : chunk * (cp_rank + 1)]
    first, last = padded - chunk * (cp_rank + 1), padded - chunk * cp_rank
    last = min(last, tokens.shape[0])
    there = last - first
    if there > 0:
        packed[start + chunk : start + chunk + there] = tokens[first:last]


def unpack(parts: Sequence[torch.Tensor], offsets: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """[T/cp, ...] of every context-parallel rank -> [B, S, ...], zero where there is no token.

    Args:
        parts: what the all-gather over the context-parallel group gives; one tensor without context parallelism.
        offsets, mask: as for ``pack``.
    """
    output = parts[0]
    rows = torch.zeros((*mask.shape, *output.shape[1:]), dtype=output.dtype, device=output.device)
    for row in range(len(mask)):
        length = mask[row].sum().item()
        if len(parts) == 1:
            rows[row, mask[row]] = output[offsets[row] : offsets[row] + length]
        else:
            rows[row, mask[row]] = _joined(parts, offsets[row], offsets[row + 1])[:length]
    return rows


def _joined(parts: Sequence[torch.Tensor], begin: torch.Tensor, end: torch.Tensor) -> torch.Tensor:
    """The chunks of all ranks in the order of the row, in float32."""
    each = (end - begin) // len(parts)
    chunk, padded = each // 2, each * len(parts)
    joined = torch.empty(padded, *parts[0].shape[1:], device=parts[0].device)
    for rank, part in enumerate(parts):
        start = begin // len(parts)
        first, second = part[start : start + chunk], part[start + chunk : start + each]
        joined[rank * chunk : (rank + 1) * chunk] = first
        joined[padded - (rank + 1) * chunk : padded - rank * chunk] = second
    return joined
