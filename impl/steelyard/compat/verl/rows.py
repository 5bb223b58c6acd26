"""Rows of a batch as verl keeps it: a TensorDict, or a dict of tensors, dense or nested."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from steelyard.errors import BatchError


def token_counts(batch: Any) -> list[int]:
    """[rows] tokens that a row really has: its length where ``input_ids`` is nested, else the ones of its
    ``attention_mask``. Reads the device once.

    Raises:
        BatchError: a field that is needed is missing, or one does not have the same number of rows.
    """
    input_ids = _field(batch, "input_ids")
    if input_ids.is_nested:
        counts = [len(row) for row in input_ids.unbind()]
    else:
        counts = _field(batch, "attention_mask").sum(dim=1).tolist()
    for name, value in batch.items():
        if not isinstance(value, torch.Tensor) and not hasattr(value, "shape"):
            raise BatchError(f"field {name!r} is a {type(value).__name__}: give a tensor, an array or a NonTensorStack")
        rows = _rows(value)
        if rows not in (len(counts), None):
            raise BatchError(f"field {name!r} has {rows} rows but input_ids has {len(counts)}")
    return [int(one) for one in counts]


def _rows(value: Any) -> int | None:
    """Rows of a field; None for non-tensor data of the batch as a whole."""
    if isinstance(value, torch.Tensor):
        return value.size(0) if value.dim() else 0
    return value.shape[0] if value.shape else None


def _field(batch: Mapping[str, Any], name: str) -> torch.Tensor:
    if name not in batch.keys():  # noqa: SIM118 - `in` is not defined for a TensorDict
        raise BatchError(
            f"the batch has no {name!r}, which holds the lengths of its rows: it has {sorted(batch.keys())}"
        )
    return batch[name]


def select_rows(batch: Any, rows: list[int]) -> Any:
    """A TensorDict of some rows, in this order; what has no rows (non-tensor data of the whole batch) comes along."""
    from tensordict import TensorDict  # verl brings it; planning alone does not need it

    index = torch.tensor(rows, dtype=torch.long)
    chosen = {name: _select(value, rows, index) for name, value in batch.items()}
    return TensorDict(chosen, batch_size=len(rows))


def _select(value: Any, rows: list[int], index: torch.Tensor) -> Any:
    if not isinstance(value, torch.Tensor):
        return value[index] if value.shape else value
    return select_nested(value, rows) if value.is_nested else value[index.to(value.device)]


def select_nested(value: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """Some rows of a nested tensor, in this order and as a jagged one, whichever of its dimensions is the ragged one.

    Differentiable.
    """
    every = value.unbind()
    ragged = getattr(value, "_ragged_idx", 1)
    chosen = [every[row] for row in rows]
    ends = torch.tensor([0] + [one.shape[ragged - 1] for one in chosen]).cumsum(0)
    values = torch.cat(chosen, dim=ragged - 1)
    return torch.nested.nested_tensor_from_jagged(values, offsets=ends.to(values.device), jagged_dim=ragged)
