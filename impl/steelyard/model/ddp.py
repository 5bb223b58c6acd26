"""Settings of Megatron's DistributedDataParallel: documented defaults, and overrides that arrive or are refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from megatron.core.distributed import DistributedDataParallelConfig

from steelyard.errors import InputError

# Gradients are reduced in float32 and optimizer state is spread over data-parallel ranks, as mbridge does by default;
# overlap is the user's to switch on.
DEFAULTS: dict[str, Any] = {"grad_reduce_in_fp32": True, "use_distributed_optimizer": True}


def resolve_ddp_config(overrides: Mapping[str, Any] | None = None) -> DistributedDataParallelConfig:
    """The configuration that DDP gets: ``DEFAULTS``, then what the user sets.

    Raises:
        InputError: a field that this megatron-core does not have, with the closest names.
    """
    overrides = dict(overrides or {})
    known = {field.name for field in dataclasses.fields(DistributedDataParallelConfig)}
    for name in overrides:
        if name not in known:
            near = get_close_matches(name, known, 3)
            hint = f"did you mean {' or '.join(near)}?" if near else f"the fields are {', '.join(sorted(known))}"
            raise InputError(f"override_ddp_config has the unknown field {name!r}: {hint}")
    return DistributedDataParallelConfig(**{**DEFAULTS, **overrides})
