"""Mirror of ``verl.utils.seqlen_balancing`` as of verl 0.9.1: its functions, arguments and results on our planner.

What verl promises holds: index lists partition the rows, sorted within a micro-batch; none is empty;
``num_batches_divided_by`` divides the count, which is at least ``min_num_micro_batch`` and the same on the ranks of
``dp_group``; rows of a forced group stay together; small micro-batches stand at both ends.

What is different, each with a test:

- the count is the least that keeps the cap, as far as packing finds it, where verl raises its first guess until one
  partition happens to fit;
- real tokens count against the cap, not the padded width of the batch;
- what cannot be planned is a ``PlanError`` (a ``ValueError``) with position, value and limit, raised on every rank of
  ``dp_group`` after one collective; verl asserts on one rank while the others wait;
- parts are levelled further than differencing leaves them;
- rows of one uid stay together wherever they stand;
- work is computed in 64 bits whatever the lengths come in.

Fillers are not used here: verl's engines cannot run a micro-batch without rows. Too few rows for the count are an error
on every rank.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import distributed as dist

from steelyard.balance import plan_micro_batches
from steelyard.compat.verl.partitions import balanced
from steelyard.compat.verl.rows import select_nested, select_rows, token_counts
from steelyard.errors import BatchError, PlanError

__all__ = [
    "calculate_workload",
    "ceildiv",
    "get_group_balanced_partitions",
    "get_reverse_idx",
    "get_seqlen_balanced_partitions",
    "greedy_partition",
    "karmarkar_karp",
    "log_seqlen_unbalance",
    "prepare_dynamic_batch",
    "rearrange_micro_batches",
    "restore_dynamic_batch",
    "roundup_divisible",
]

LINEAR = 24576  # work of a token in a dense model of about 7B parameters, in units of one attended position
VERL_NAMES = (
    "through verl, max_tokens is max_token_len (max_token_len_per_gpu times the sequence-parallel size), multiple_of "
    "is num_batches_divided_by, min_count is min_num_micro_batch; its engines take neither fillers nor oversized rows"
)


def calculate_workload(seqlen_list: torch.Tensor) -> torch.Tensor:
    """Relative forward work of sequences of ``s`` tokens, ``24576 * s + s * s``: also the planner's default cost.

    Whole numbers of fewer than 64 bits are widened first: in 32 bits the work of 36,000 tokens is negative.
    """
    if isinstance(seqlen_list, torch.Tensor) and not seqlen_list.is_floating_point():
        seqlen_list = seqlen_list.long()
    return LINEAR * seqlen_list + seqlen_list * seqlen_list


def karmarkar_karp(seqlen_list: list[int], k_partitions: int, equal_size: bool) -> list[list[int]]:
    """Positions in ``k_partitions`` parts with even sums, in falling order of sum.

    ``greedy_partition`` is the same function: the planner runs differencing and a greedy pass, and refines the better.

    Raises:
        PlanError: values or numbers that allow no partition.
    """
    return balanced(seqlen_list, k_partitions, equal_size=equal_size)


def greedy_partition(seqlen_list: list[int], k_partitions: int, equal_size: bool) -> list[list[int]]:
    """As ``karmarkar_karp``."""
    return balanced(seqlen_list, k_partitions, equal_size=equal_size)


def get_seqlen_balanced_partitions(seqlen_list: list[int], k_partitions: int, equal_size: bool) -> list[list[int]]:
    """As ``karmarkar_karp``, with no part empty and each part sorted.

    Raises:
        PlanError: values or numbers that allow no partition, or fewer values than parts.
    """
    parts = balanced(seqlen_list, k_partitions, equal_size=equal_size)
    if not all(parts):
        raise PlanError(
            f"{len(seqlen_list)} sequences make no {k_partitions} partitions: ask for fewer, or add sequences"
        )
    return [sorted(part) for part in parts]


def log_seqlen_unbalance(seqlen_list: list[int], partitions: list[list[int]], prefix: str) -> dict[str, Any]:
    """Sums of tokens before and after balancing, under verl's metric names.

    "Before" are equal shares of the rows as they stand; what division leaves over is one more share.

    Raises:
        PlanError: no partition, or no sequence.
    """
    if not len(partitions) or not len(seqlen_list):
        raise PlanError(f"{len(seqlen_list)} sequences in {len(partitions)} partitions: there is nothing to compare")
    share = max(1, len(seqlen_list) // len(partitions))
    before = [sum(seqlen_list[at : at + share]) for at in range(0, len(seqlen_list), share)]
    after = [sum(seqlen_list[row] for row in part) for part in partitions]
    return {
        f"{prefix}/min": min(before),
        f"{prefix}/max": max(before),
        f"{prefix}/minmax_diff": max(before) - min(before),
        f"{prefix}/balanced_min": min(after),
        f"{prefix}/balanced_max": max(after),
        f"{prefix}/mean": sum(before) / len(partitions),
    }


def ceildiv(a: int, b: int) -> int:
    """``a / b`` rounded up, in whole numbers."""
    return -(-a // b)


def roundup_divisible(a: int, b: int) -> int:
    """Least multiple of ``b`` (at least 1) that is not below ``a``."""
    return ceildiv(a, b) * b


class _Unreadable:
    """Lengths that this rank could not read: they raise in planning, where the other ranks hear of it."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __iter__(self) -> Iterator[int]:
        raise self.error


def rearrange_micro_batches(
    batch: Any,
    max_token_len: int,
    dp_group: Any = None,
    num_batches_divided_by: int | None = None,
    same_micro_num_in_dp: bool = True,
    min_num_micro_batch: int | None = None,
    use_dynamic_bsz_balance: bool = True,
    force_group_size: int = 1,
) -> tuple[list[Any], list[list[int]]]:
    """Micro-batches of one data-parallel rank within a token cap: ``steelyard.balance.plan_micro_batches``.

    Args:
        batch: TensorDict or dict with ``input_ids``, nested, or dense beside an ``attention_mask`` [rows, width]. A row
            without tokens counts as one token.
        max_token_len: tokens that a micro-batch may hold.
        dp_group: data-parallel group whose ranks call this together: one collective, and either all get a plan or all
            raise the same error.
        num_batches_divided_by: the count is a multiple of it (virtual pipeline stages).
        same_micro_num_in_dp: False where ranks need not agree; then there is no collective.
        min_num_micro_batch: the count is at least this.
        use_dynamic_bsz_balance: small micro-batches at both ends; False runs the largest first.
        force_group_size: as many consecutive rows stay together.

    Returns:
        micro-batches as TensorDicts, and the rows of each, both in execution order.

    Raises:
        PlanError: no plan exists, or there are fewer rows (or groups) than micro-batches are needed.
        BatchError: fields are missing or do not fit together; where ranks plan together it is a ``PlanError``.
    """
    together = same_micro_num_in_dp and dp_group is not None and dist.is_available() and dist.is_initialized()
    lengths: Any
    groups = None
    try:
        lengths = [max(1, tokens) for tokens in token_counts(batch)]
        groups = _groups(len(lengths), force_group_size)
    except Exception as error:  # whatever it is, the other ranks are about to wait for this one
        lengths = _Unreadable(error)
    try:
        plan = plan_micro_batches(
            lengths,
            max_token_len.item() if isinstance(max_token_len, torch.Tensor) else max_token_len,
            multiple_of=1 if num_batches_divided_by is None else num_batches_divided_by,
            min_count=min_num_micro_batch or 1,
            group=dp_group if together else None,
            fill="error",
            groups=groups,
            order="both_ends" if use_dynamic_bsz_balance else "largest_first",
        )
    except PlanError as error:
        error.add_note(VERL_NAMES)
        raise
    return [select_rows(batch, rows) for rows in plan.indices], plan.indices


def _groups(rows: int, size: int) -> list[int] | None:
    if size == 1:
        return None
    if size < 1 or rows % size:
        raise PlanError(f"{rows} rows make no groups of force_group_size={size}: the size must divide them")
    return [row // size for row in range(rows)]


def get_reverse_idx(idx_map: Any) -> Any:
    """The inverse of a permutation, in what it came in: a list, an array or a tensor.

    Raises:
        PlanError: ``idx_map`` is no permutation of its positions.
    """
    places = idx_map.tolist() if hasattr(idx_map, "tolist") else list(idx_map)
    inverse = sorted(range(len(places)), key=places.__getitem__)
    if any(places[place] != at for at, place in enumerate(inverse)):
        raise PlanError(f"idx_map does not hold each of 0 to {len(places) - 1} once: it has no inverse")
    if isinstance(idx_map, torch.Tensor):
        return idx_map.new_tensor(inverse)
    return np.array(inverse, idx_map.dtype) if isinstance(idx_map, np.ndarray) else inverse


def prepare_dynamic_batch(
    data: Any,
    max_token_len: int,
    dp_group: Any = None,
    num_batches_divided_by: int | None = None,
    same_micro_num_in_dp: bool = True,
    min_num_micro_batch: int | None = None,
    use_dynamic_bsz_balance: bool = True,
) -> tuple[list[Any], list[list[int]]]:
    """``rearrange_micro_batches`` for a ``DataProto``; each micro-batch gets its non-tensor rows and a copy of
    ``meta_info``.
    """
    batches, indices = rearrange_micro_batches(
        data.batch,
        max_token_len,
        dp_group=dp_group,
        num_batches_divided_by=num_batches_divided_by,
        same_micro_num_in_dp=same_micro_num_in_dp,
        min_num_micro_batch=min_num_micro_batch,
        use_dynamic_bsz_balance=use_dynamic_bsz_balance,
    )
    micro_batches = [
        type(data).from_dict(
            tensors=dict(batch.items()),
            non_tensors={name: values[rows] for name, values in data.non_tensor_batch.items()},
            meta_info=copy.deepcopy(data.meta_info),
        )
        for batch, rows in zip(batches, indices, strict=True)
    ]
    return micro_batches, indices


def restore_dynamic_batch(data: torch.Tensor, batch_idx_list: list[list[int]]) -> torch.Tensor:
    """Bring rows from execution order back into the order of the batch; dense or nested, differentiable.

    Args:
        data: [rows, ...] outputs of all micro-batches, joined in execution order.
        batch_idx_list: the rows of each micro-batch.

    Raises:
        BatchError: another number of rows.
        PlanError: the lists are no partition of the rows.
    """
    executed = list(chain.from_iterable(batch_idx_list))
    if data.size(0) != len(executed):
        raise BatchError(f"data has {data.size(0)} rows but the index lists hold {len(executed)}")
    inverse = get_reverse_idx(executed)
    return select_nested(data, inverse) if data.is_nested else data[torch.tensor(inverse, device=data.device)]


def get_group_balanced_partitions(
    seqlen_list: list[int], uid_list: Sequence[Any], k_partitions: int
) -> list[list[int]]:
    """Rows in parts with even work that hold equally many uids, all rows of a uid in one part; each part is sorted.

    Raises:
        PlanError: lists of different length, or a number of uids that ``k_partitions`` does not divide.
    """
    if len(seqlen_list) != len(uid_list):
        raise PlanError(
            f"uid_list has {len(uid_list)} entries but seqlen_list has {len(seqlen_list)}: give one uid per sequence"
        )
    members: dict[Any, list[int]] = {}
    for row, uid in enumerate(uid_list):
        members.setdefault(uid, []).append(row)
    groups = list(members.values())
    if len(groups) < k_partitions:
        raise PlanError(f"{len(groups)} uids make no {k_partitions} partitions: ask for fewer, or add prompts")
    work = calculate_workload(torch.tensor(seqlen_list)).tolist()
    parts = balanced([sum(work[row] for row in rows) for rows in groups], k_partitions, equal_size=True)
    return [sorted(row for group in part for row in groups[group]) for part in parts]
