"""Rows of micro-batches for the tests that compare packing with verl's, and how results are compared."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any
from unittest import mock

import torch
from hypothesis import strategies as st
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams


@dataclass
class Case:
    """Rows of a micro-batch on an imagined rank: mask [B, S] bool, rows [B, S, 2] of nonzero numbers."""

    mask: torch.Tensor
    tp: int = 1
    cp: int = 1
    rank: int = 0

    @property
    def rows(self) -> torch.Tensor:
        count, width = self.mask.shape
        return torch.arange(1.0, 1 + 2 * count * width, dtype=torch.float64).view(count, width, 2)

    @property
    def ids(self) -> torch.Tensor:
        return self.rows[..., 0].long()

    @property
    def lengths(self) -> list[int]:
        return self.mask.sum(1).tolist()

    def nested(self, rows: torch.Tensor) -> torch.Tensor:
        parts = [row[real] for row, real in zip(rows, self.mask, strict=True)]
        return torch.nested.as_nested_tensor(parts, layout=torch.jagged)

    @contextlib.contextmanager
    def parallel(self) -> Iterator[None]:
        """Megatron's parallel state says that this is such a rank."""
        answers = {
            "get_tensor_model_parallel_world_size": self.tp,
            "get_context_parallel_world_size": self.cp,
            "get_context_parallel_rank": self.rank,
            "get_context_parallel_group": None,
        }
        with contextlib.ExitStack() as stack:
            for name, value in answers.items():
                stack.enter_context(mock.patch.object(parallel_state, name, lambda value=value: value))
            yield


def row_masks(prompts: list[int], responses: list[int]) -> torch.Tensor:
    """Left-padded prompts, followed by right-padded responses."""
    split, columns = max(prompts), torch.arange(max(prompts) + max(responses))
    return (columns >= split - torch.tensor(prompts)[:, None]) & (columns < split + torch.tensor(responses)[:, None])


@st.composite
def cases(draw: Any, cp: tuple[int, ...] = (1, 2, 4), holes: bool = True, least: int = 0) -> Case:
    count = draw(st.integers(1, 5))
    prompts = draw(st.lists(st.integers(least, 7), min_size=count, max_size=count))
    responses = draw(st.lists(st.integers(0, 9), min_size=count, max_size=count))
    mask = row_masks([*prompts[:-1], max(prompts[-1], 1)], responses)
    if holes and draw(st.booleans()):
        kept = draw(st.lists(st.booleans(), min_size=mask.numel(), max_size=mask.numel()))
        mask = mask & torch.tensor(kept).view(mask.shape)
    size = draw(st.sampled_from(cp))
    return Case(mask, draw(st.sampled_from([1, 2, 4])), size, draw(st.integers(0, size - 1)))


def following(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """[B, S] the next token of each one's row, 0 for the last, and its position."""
    ids, labels, positions = case.ids, torch.zeros_like(case.ids), torch.zeros_like(case.ids)
    for row, real in enumerate(case.mask):
        columns = real.nonzero().flatten()
        labels[row, columns[:-1]] = ids[row, columns[1:]]
        positions[row, columns[:-1]] = torch.arange(1, max(len(columns), 1))
    return labels, positions


def assert_same_params(ours_: PackedSeqParams, theirs: PackedSeqParams) -> None:
    assert isinstance(ours_, PackedSeqParams)
    for one in fields(PackedSeqParams):
        here, there = getattr(ours_, one.name), getattr(theirs, one.name)
        assert type(here) is type(there), one.name
        if isinstance(there, torch.Tensor):
            assert (here.dtype, here.device) == (there.dtype, there.device), one.name
            assert here.tolist() == there.tolist(), one.name
        else:
            assert here == there, one.name


def assert_same_rows(here: torch.Tensor, there: torch.Tensor) -> None:
    assert here.dtype == there.dtype
    assert here.is_nested == there.is_nested
    if here.is_nested:
        assert here.offsets().tolist() == there.offsets().tolist()
        here, there = here.values(), there.values()
    assert here.shape == there.shape
    assert torch.equal(here, there)


def with_gradient(call: Callable[[torch.Tensor], torch.Tensor], tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What a call gives, and the gradient of a weighted sum of it."""
    leaf = tensor.clone().requires_grad_()
    result = call(leaf)
    values = result.values() if result.is_nested else result
    if not values.requires_grad:  # what verl makes on a rank without a token
        return result, torch.zeros_like(leaf)
    (values * torch.arange(1.0, 1 + values.numel(), dtype=values.dtype).view(values.shape)).sum().backward()
    return result.detach(), leaf.grad
