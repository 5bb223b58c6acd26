"""Batches as verl keeps them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def make_batch(lengths: list[int], kind: str = "dense", width: int | None = None) -> Any:
    """Rows with these lengths and a field of every sort: ``kind`` is dense, dict or nested."""
    import torch
    from tensordict import NonTensorData, NonTensorStack, TensorDict

    rows, width = len(lengths), width or max(lengths)
    sizes = torch.tensor(lengths)
    ids = torch.arange(rows * width).view(rows, width)
    fields: dict[str, Any] = {"input_ids": ids, "scores": torch.arange(rows, dtype=torch.float32)}
    if kind == "nested":
        pieces = [row[:size] for row, size in zip(ids, lengths, strict=True)]
        fields["input_ids"] = torch.nested.as_nested_tensor(pieces, layout=torch.jagged)
        # Three sorts of positions per token: here the ragged dimension is the last one.
        values = torch.cat([torch.stack([piece, -piece, 2 * piece]) for piece in pieces], dim=1)
        offsets = torch.cat((torch.zeros(1, dtype=torch.long), sizes.cumsum(0)))
        fields["position_ids"] = torch.nested.nested_tensor_from_jagged(values, offsets=offsets, jagged_dim=2)
    else:
        fields["attention_mask"] = (torch.arange(width) < sizes[:, None]).long()
    if kind == "dict":
        return fields
    batch = TensorDict(fields, batch_size=rows)
    batch["names"] = NonTensorStack(*[NonTensorData(f"row {row}") for row in range(rows)])
    batch["temperature"] = NonTensorData(0.7)
    return batch


@pytest.fixture(name="make_batch", scope="session")
def make_batch_fixture() -> Callable[..., Any]:
    return make_batch
