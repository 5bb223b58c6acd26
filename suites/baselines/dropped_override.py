"""Overrides that a builder lost on the way (baseline N12), in three ways that happened to verl's users.

- ``dropped``: with mbridge, ``get_model`` was called without ``ddp_config`` (and the transformer overrides had no way
  in), so the model had mbridge's defaults.
- ``distributed optimizer forced``: ``use_distributed_optimizer=False`` was overwritten by the trainer's own setting.
- ``fp32 reduction forgotten``: a configuration object was made of the user's fields alone, so that gradients were
  reduced in bfloat16, which is Megatron's default, although the builder's documented default is float32.

The model is built by mbridge as the optimised side builds it; only what is handed over differs. Renamed arguments,
the fourth way, end like ``dropped``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megatron.core.distributed import DistributedDataParallel

from steelyard.model.build import build_model
from steelyard.parallel import ParallelLayout

Overrides = Mapping[str, Any]

# How the user's DDP fields arrived.
LOSSES: dict[str, Callable[[Overrides], Overrides]] = {
    "dropped": lambda asked: {},
    "distributed optimizer forced": lambda asked: {**asked, "use_distributed_optimizer": True},
    "fp32 reduction forgotten": lambda asked: {"grad_reduce_in_fp32": False, **asked},
}


def build(
    spec: Any, layout: ParallelLayout, asked: Overrides, loss: str = "dropped", **settings: Any
) -> list[DistributedDataParallel]:
    """Chunks for which the user asked ``asked`` of DDP, and got what ``loss`` left of it.

    Args:
        spec: a configuration of transformers.
        layout: over which ranks the model is spread.
        asked: fields of ``DistributedDataParallelConfig``.
        loss: a key of ``LOSSES``.
        settings: what ``build_model`` takes beside it.
    """
    return build_model(spec, layout, builder="mbridge", override_ddp_config=LOSSES[loss](asked), **settings)
