"""A batch of rollouts as reinforcement-learning trainers shape it, and the micro-batches that are made from it.

Dimensions: B rows, P prompt columns (left-padded), R response columns (right-padded), N scored response tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from steelyard.errors import BatchError
from steelyard.packing import PackedLayout, compact, pack

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams


@dataclass(frozen=True, eq=False)
class RolloutBatch:
    """Rows of prompt and response with their lengths on the host.

    Attributes:
        input_ids: [B, P + R] token ids; prompts end at column P, responses begin there.
        fields: [B, R] tensors beside the responses (old log-probabilities, advantages, values, returns ...).
        response_mask: [B, R] float32, 1 where a response token counts in the loss.
        prompts, responses: [B] lengths in tokens, host integers.
    """

    input_ids: torch.Tensor
    fields: Mapping[str, torch.Tensor]
    response_mask: torch.Tensor
    prompts: np.ndarray
    responses: np.ndarray

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor]) -> RolloutBatch:
        """Read a batch as trainers hand it over.

        ``input_ids`` and ``attention_mask`` are [B, P + R], ``response_mask`` and every field [B, R]; other tensors are
        left out. The lengths come from the attention mask. Keep the batch on the host: then nothing is read back from a
        device, and each micro-batch moves when its turn comes.

        Raises:
            BatchError: a tensor is missing or has another shape.
        """
        for name in ("input_ids", "attention_mask", "response_mask"):
            if name not in tensors:
                raise BatchError(f"the batch has no {name!r}; it has {', '.join(sorted(tensors)) or 'nothing'}")
        ids, mask, response_mask = tensors["input_ids"], tensors["attention_mask"], tensors["response_mask"]
        if ids.dim() != 2 or ids.size(0) == 0:
            raise BatchError(
                f"input_ids has shape {tuple(ids.shape)}: at least one row of [prompt + response] is needed"
            )
        if mask.shape != ids.shape:
            raise BatchError(
                f"attention_mask has shape {tuple(mask.shape)}, input_ids {tuple(ids.shape)}: they must agree"
            )
        rows, width = response_mask.shape
        if rows != ids.size(0) or width > ids.size(1):
            raise BatchError(
                f"response_mask has shape {tuple(response_mask.shape)}, which does not fit input_ids {tuple(ids.shape)}"
            )
        host = mask.cpu().numpy().astype(bool)
        split = ids.size(1) - width
        prompts, responses = host[:, :split].sum(1), host[:, split:].sum(1)
        columns = np.arange(ids.size(1))
        expected = (columns >= split - prompts[:, None]) & (columns < split + responses[:, None])
        if (host != expected).any():
            row = int(np.argmax((host != expected).any(1)))
            raise BatchError(
                f"attention_mask of row {row} is not a left-padded prompt followed by a right-padded response "
                f"(split at column {split}): tokens to leave out of the loss belong into response_mask"
            )
        known = {"input_ids", "attention_mask", "response_mask", "position_ids", "responses", "prompts"}
        fields = {
            name: value for name, value in tensors.items() if name not in known and value.shape[:2] == (rows, width)
        }
        counted = response_mask.to(torch.float32) * mask[:, split:].to(torch.float32)
        if width:
            # Nothing comes before the first token of a row without a prompt: it has no log-probability and no value.
            counted[torch.from_numpy(prompts == 0), 0] = 0.0
        return cls(ids, fields, counted, prompts.astype(np.int64), responses.astype(np.int64))

    @property
    def lengths(self) -> np.ndarray:
        """[B] prompt plus response, in tokens."""
        return self.prompts + self.responses

    @property
    def rows(self) -> int:
        return self.input_ids.size(0)

    @property
    def response_width(self) -> int:
        return self.response_mask.size(1)

    def select(self, rows: Sequence[int] | np.ndarray) -> RolloutBatch:
        """The named rows, in that order."""
        index = np.asarray(rows, dtype=np.int64)
        take = torch.from_numpy(index).to(self.input_ids.device)
        return RolloutBatch(
            self.input_ids.index_select(0, take),
            {name: value.index_select(0, take) for name, value in self.fields.items()},
            self.response_mask.index_select(0, take),
            self.prompts[index],
            self.responses[index],
        )

    def require(self, names: Sequence[str]) -> None:
        """Raise ``BatchError`` naming the first field that is not there."""
        for name in names:
            if name not in self.fields:
                there = ", ".join(sorted(self.fields)) or "none"
                raise BatchError(f"the batch has no [rows, response] field {name!r}; it has {there}")


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """What one forward pass needs, on the device.

    A response token is scored at the position before it, in its own row. The first token of a row without a prompt has
    no such position: it is not scored, and counts in no loss.

    Attributes:
        input_ids, position_ids: [1, T/cp] packed or [b, S] padded.
        packed_seq_params: for megatron-core, or None when padded.
        scored: [N] index into the flattened output of the model, one entry for each response token that this
            context-parallel rank scores.
        labels: [N] the scored tokens.
        mask: [N] 1 where the token counts in the loss.
        weights: [N] each token's share in the aggregated loss.
        fields: [N] the role's fields.
        places: [N] index into the flattened [b, R] response block.
        shape: (b, R).
        computed_tokens: tokens that the model computes, padding included.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    packed_seq_params: PackedSeqParams | None
    scored: torch.Tensor
    labels: torch.Tensor
    mask: torch.Tensor
    weights: torch.Tensor
    fields: Mapping[str, torch.Tensor]
    places: torch.Tensor
    shape: tuple[int, int]
    computed_tokens: int

    def spread(self, scored: torch.Tensor) -> torch.Tensor:
        """[N] -> [b, R]: values of scored tokens at their places, zero elsewhere."""
        block = scored.new_zeros(self.shape[0] * self.shape[1])
        return block.index_copy(0, self.places, scored).view(self.shape)


def make_micro_batch(
    batch: RolloutBatch,
    rows: Sequence[int],
    weights: torch.Tensor,
    denominator: torch.Tensor,
    fields: Sequence[str],
    *,
    device: torch.device | str,
    packed: bool = True,
    tp: int = 1,
    cp: int = 1,
    cp_rank: int = 0,
    place: Literal["before", "at"] = "before",
) -> MicroBatch:
    """Cut the named rows out of a batch and move them to the device.

    Args:
        batch: where the rows are.
        rows: their indices; none makes a filler, which computes a few padding tokens and scores nothing.
        weights: [B, R] weight of each token in the aggregated loss, beside the batch.
        denominator: scalar on the device that the weights are divided by.
        fields: names of the fields that the role needs.
        device: where the model is.
        packed: one sequence of tokens (THD), or rows padded to the longest of them (BSHD).
        tp: tensor-parallel size when sequence parallelism splits the tokens, else 1.
        cp, cp_rank: context-parallel size and rank; only the tokens that this rank computes are in the micro-batch.
        place: a response token is scored at the position before it, or at its own.
    """
    part = batch.select(rows)
    split = batch.input_ids.size(1) - batch.response_width
    lengths, starts = part.lengths, split - part.prompts
    source = part.input_ids
    if not lengths.any():
        # The schedule needs a forward pass in every micro-batch: give it the fewest tokens that split over the ranks.
        lengths, starts, source = np.array([1]), np.array([0]), source.new_zeros((1, batch.input_ids.size(1)))
    layout = PackedLayout.of(lengths, starts=starts, tp=tp, cp=cp, cp_rank=cp_rank)

    row, column = _scored_tokens(part, place)
    position = part.prompts[row] + column - (place == "before")
    if packed:
        ids = pack(source, layout).unsqueeze(0)
        scored = layout.to_local(layout.cu_seqlens_padded[row] + position)
        mine = scored >= 0
        row, column, scored = row[mine], column[mine], scored[mine]
        params = layout.packed_seq_params(device)
        positions = params.positions.unsqueeze(0)
    else:
        ids = compact(source, layout, layout.max_seqlen)
        scored = row * layout.max_seqlen + position
        params = None
        positions = torch.arange(layout.max_seqlen, device=device).expand(ids.shape)

    places = torch.from_numpy(row * batch.response_width + column).to(source.device)
    label_index = torch.from_numpy(row * batch.input_ids.size(1) + split + column).to(source.device)

    def at_places(block: torch.Tensor) -> torch.Tensor:
        return block.flatten().index_select(0, places)

    mask = at_places(part.response_mask)
    # Whatever stands at tokens that do not count, it must not reach a product with zero.
    values = {name: at_places(part.fields[name]).masked_fill(mask == 0, 0.0) for name in fields}

    return MicroBatch(
        input_ids=ids.to(device, non_blocking=True),
        position_ids=positions,
        packed_seq_params=params,
        scored=torch.from_numpy(scored).to(device, non_blocking=True),
        labels=part.input_ids.flatten().index_select(0, label_index).to(device, non_blocking=True),
        mask=mask.to(device, non_blocking=True),
        weights=at_places(weights[torch.as_tensor(rows, dtype=torch.long)]).to(device, non_blocking=True) / denominator,
        fields={name: value.to(device, non_blocking=True) for name, value in values.items()},
        places=places.to(device, non_blocking=True),
        shape=(len(rows), batch.response_width),
        computed_tokens=ids.numel(),
    )


def _scored_tokens(part: RolloutBatch, place: str) -> tuple[np.ndarray, np.ndarray]:
    """([N] row, [N] response column) of every response token; scored before it, only those that have a token there."""
    first = ((part.prompts == 0) & (place == "before")).astype(np.int64)
    counts = np.maximum(part.responses - first, 0)
    row = np.repeat(np.arange(part.prompts.size), counts)
    column = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts) + first[row]
    return row, column
