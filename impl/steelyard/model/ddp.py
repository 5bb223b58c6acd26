"""Settings of Megatron's DistributedDataParallel: one set of defaults for every builder, and overrides that arrive.

Three builders have three sets of defaults, and each has lost overrides at some time. Here every builder gets the same
resolved configuration, whole. What the user sets is what DDP has; where megatron-core would ignore it, change it or
fail on it later, ``resolve_ddp_config`` and ``check_ddp_config`` refuse it by name before a model is built. The rules
are those of megatron-core 0.16 (``distributed_data_parallel.py``, ``param_and_grad_buffer.py``).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig, param_and_grad_buffer
from megatron.core.transformer.transformer_config import TransformerConfig

from steelyard.errors import InputError
from steelyard.hints import did_you_mean
from steelyard.model.overrides import read_overrides
from steelyard.model.versions import UNREAD_BY_DDP

BUILDERS = ("megatron", "mbridge", "megatron-bridge")

# Gradients are reduced in float32 and optimizer state is spread over data-parallel ranks, as mbridge does by default;
# everything else is megatron-core's own default: no overlap, one bucket, a sum of gradients scaled before it.
DEFAULTS: dict[str, Any] = {"grad_reduce_in_fp32": True, "use_distributed_optimizer": True}

# A field, the field without which it does nothing or fails, and what megatron-core then does.
NEEDS: tuple[tuple[str, str, str], ...] = (
    ("bucket_size", "overlap_grad_reduce", "sets it to None: one bucket"),
    ("overlap_param_gather", "use_distributed_optimizer", "gathers nothing during the forward pass"),
    ("align_param_gather", "overlap_param_gather", "ignores it"),
    ("num_distributed_optimizer_instances", "use_distributed_optimizer", "fails"),
    ("pad_buckets_for_high_nccl_busbw", "use_distributed_optimizer", "pads nothing"),
    ("reduce_scatter_with_fp32_accumulation", "use_distributed_optimizer", "all-reduces in the buffer's own type"),
    ("reuse_grad_buf_for_mxfp8_param_ag", "fp8_param_gather", "fails"),
    ("disable_symmetric_registration", "nccl_ub", "ignores it"),
)
# Two fields that exclude each other, and why.
EXCLUDES: tuple[tuple[str, str, str], ...] = (
    ("reduce_scatter_with_fp32_accumulation", "average_in_collective", "the accumulation only knows sums"),
    ("reduce_scatter_with_fp32_accumulation", "num_distributed_optimizer_instances", "megatron-core fails on both"),
)
# Fields of Megatron's FSDP without its name in theirs. The builders here do not wrap a model in it, and DDP never reads
# its fields.
FSDP_ONLY = (
    "data_parallel_sharding_strategy", "gradient_reduce_div_fusion", "keep_fp8_transpose_cache",
    "outer_dp_sharding_strategy", "preserve_fp32_weights", "suggested_communication_unit_size",
)  # fmt: skip

NAME = "override_ddp_config"


def resolve_ddp_config(overrides: Any = None, builder: str = "megatron") -> DistributedDataParallelConfig:
    """The configuration that DDP gets: ``DEFAULTS``, then what the user sets.

    Args:
        overrides: None, a mapping, an OmegaConf node, or a ``DistributedDataParallelConfig``, which sets every field.
        builder: one of ``BUILDERS``; all have the same defaults and rules.

    Raises:
        InputError: an unknown builder, an unknown field (with the close ones), a value of the wrong type, or a
            combination that megatron-core ignores, changes or fails on.
    """
    if builder not in BUILDERS:
        raise InputError(f"builder={builder!r} is unknown{did_you_mean(builder, BUILDERS)}: use {_either(BUILDERS)}")
    fields = {**DEFAULTS, **read_overrides(DistributedDataParallelConfig, overrides, NAME)}
    _refuse_ineffective(fields)
    try:
        return DistributedDataParallelConfig(**fields)
    except (AssertionError, ValueError) as error:
        raise InputError(f"{NAME} is refused by megatron-core: {error}") from None


def check_ddp_config(ddp_config: DistributedDataParallelConfig, config: TransformerConfig) -> None:
    """Refuse what this model, these process groups or this device cannot do; call it before a model is built.

    Raises:
        InputError: named field, its value and the remedy.
    """
    if ddp_config.average_in_collective and config.calculate_per_token_loss:
        raise InputError(
            f"{NAME}: average_in_collective=True does not go with calculate_per_token_loss=True, which sums gradients: "
            f"leave out one of the two"
        )
    instances = ddp_config.num_distributed_optimizer_instances
    whole, part = (
        parallel_state.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=partial).size()
        for partial in (False, True)
    )
    if part * instances != whole:
        raise InputError(
            f"{NAME}: num_distributed_optimizer_instances={instances} needs process groups made for it, and those "
            f"are made for {whole // part}: call initialize_parallel(layout, optimizer_instances={instances})"
        )
    if ddp_config.nccl_ub and torch.device(torch.cuda.current_device()).type != "cuda":
        raise InputError(f"{NAME}: nccl_ub=True needs CUDA and NCCL, and the model is built for the CPU: leave it out")
    if ddp_config.fp8_param_gather and config.fp8 is None:
        raise InputError(
            f"{NAME}: fp8_param_gather=True needs parameters in FP8: set fp8 in override_transformer_config"
        )
    if ddp_config.delay_wgrad_compute and not config.delay_wgrad_compute:
        raise InputError(
            f"{NAME}: delay_wgrad_compute=True acts on layers that delay it: set it in override_transformer_config too"
        )
    _claim_reduce_scatter(ddp_config)


def forget_models() -> None:
    """The models built so far are not used again: what they asked of the whole process no longer binds.

    ``initialize_parallel`` calls it, since it makes new process groups.
    """
    global _accumulates_in_fp32
    _accumulates_in_fp32 = None


_accumulates_in_fp32: bool | None = None


def _claim_reduce_scatter(ddp_config: DistributedDataParallelConfig) -> None:
    """Make megatron-core's process-wide reduce-scatter the one that this configuration asks for.

    The first model with ``reduce_scatter_with_fp32_accumulation`` switches it on for every other model of the process,
    before and after, and nothing switches it off again.
    """
    global _accumulates_in_fp32
    asked = ddp_config.reduce_scatter_with_fp32_accumulation
    if _accumulates_in_fp32 not in (None, asked):
        raise InputError(
            f"{NAME}: reduce_scatter_with_fp32_accumulation={asked} while another model of this process has {not asked}"
            f": megatron-core has one switch for all, so set it for all of them or for none"
        )
    _accumulates_in_fp32 = asked
    if not asked:
        param_and_grad_buffer.dist_reduce_scatter_func = torch.distributed.reduce_scatter_tensor


def is_of_fsdp(field: str) -> bool:
    """Whether a field of the DDP configuration belongs to Megatron's FSDP; later versions have more of them."""
    return "fsdp" in field or field in FSDP_ONLY


def _refuse_ineffective(fields: dict[str, Any]) -> None:
    plain = {field.name: field.default for field in dataclasses.fields(DistributedDataParallelConfig)}

    def is_set(field: str) -> bool:
        return bool(field in plain and fields.get(field, plain[field]) != plain[field])

    for field in fields:
        if is_of_fsdp(field) and is_set(field):
            raise InputError(
                f"{NAME}: {field}={fields[field]!r} belongs to Megatron's FSDP; models are wrapped in Megatron's DDP "
                f"here, which does not read it: leave it out"
            )
        if field in UNREAD_BY_DDP and is_set(field):
            raise InputError(f"{NAME}: {field}={fields[field]!r} has no effect here: {UNREAD_BY_DDP[field]}")
    for field, needed, otherwise in NEEDS:
        if is_set(field) and not fields.get(needed, plain[needed]):
            raise InputError(
                f"{NAME}: {field}={fields[field]!r} needs {needed}=True; without it megatron-core {otherwise}: set "
                f"{needed}=True or leave out {field}"
            )
    for field, other, why in EXCLUDES:
        if is_set(field) and is_set(other):
            raise InputError(
                f"{NAME}: {field}={fields[field]!r} does not go with {other}={fields[other]!r} ({why}): leave out one"
            )


def _either(names: tuple[str, ...]) -> str:
    quoted = [f"'{name}'" for name in names]
    return f"{', '.join(quoted[:-1])} or {quoted[-1]}"
