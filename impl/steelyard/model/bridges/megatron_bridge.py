"""Builds through Megatron-Bridge 0.3: a provider's ``provide_distributed_model``, after ``finalize()``.

Importing ``megatron.bridge``, and so its ``AutoBridge``, needs TransformerEngine. Its GPT provider does not, and runs
on a CPU with the layers of ``te_names.py``; ``gpt_provider_class`` gets at it. Not verified here: ``AutoBridge``.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

from steelyard.errors import InputError
from steelyard.model.bridges import WITHOUT_FUSIONS, te_names
from steelyard.model.config import layout_settings, refuse_hanging_schedule
from steelyard.model.ddp import check_ddp_config
from steelyard.model.layers import uses_transformer_engine
from steelyard.parallel import ParallelLayout


def build_chunks(
    spec: Any,
    layout: ParallelLayout,
    *,
    dtype: torch.dtype,
    ddp_config: DistributedDataParallelConfig,
    overrides: Mapping[str, Any],
    value_head: bool,
    prepare: Callable[[torch.nn.Module], None],
) -> list[DistributedDataParallel]:
    """The chunks that Megatron-Bridge builds, wrapped in DDP.

    Args:
        spec: a configuration of transformers, or a provider, which is copied and not changed. Hooks that are registered
            with it run before ``prepare``.

    Raises:
        InputError: Megatron-Bridge cannot be imported, or ``spec`` is neither.
    """
    provider = copy.copy(spec) if hasattr(spec, "provide_distributed_model") else _provider_for(spec)
    settings = {**layout_settings(layout, dtype), **overrides}
    if not uses_transformer_engine():
        settings = {**WITHOUT_FUSIONS, "transformer_layer_spec": te_names.block_spec, **settings}
    if value_head:
        settings["share_embeddings_and_output_weights"] = False
    for name, value in settings.items():
        setattr(provider, name, value)
    provider.finalize()
    refuse_hanging_schedule(provider, layout)
    check_ddp_config(ddp_config, provider)

    def before_wrapping(chunks: list[torch.nn.Module]) -> list[torch.nn.Module]:
        for chunk in chunks:
            prepare(chunk)
        return chunks

    registered = provider.pre_wrap_hook
    return provider.provide_distributed_model(
        ddp_config=ddp_config,
        fp16=provider.fp16,
        bf16=provider.bf16,
        pre_wrap_hook=[*([registered] if registered else []), before_wrapping],
    )


def gpt_provider_class() -> type:
    """Megatron-Bridge's ``GPTModelProvider``, on a machine without TransformerEngine too.

    Raises:
        InputError: megatron-bridge is not installed.
    """
    place = importlib.util.find_spec("megatron.bridge")
    if place is None:
        raise InputError("megatron-bridge is not installed: pip install --no-deps megatron-bridge==0.3.1")
    packages = {"megatron.bridge": "", "megatron.bridge.models": "/models"}
    there = [name for name in packages if name in sys.modules]
    if not there:
        # For the time of the import the two packages stand without what their __init__ would import.
        for name, folder in packages.items():
            sys.modules[name] = types.ModuleType(name)
            sys.modules[name].__path__ = [f"{path}{folder}" for path in place.submodule_search_locations or ()]
    try:
        return importlib.import_module("megatron.bridge.models.gpt_provider").GPTModelProvider
    finally:
        for name in packages:
            if not there:
                sys.modules.pop(name, None)


def _provider_for(hf_config: Any) -> Any:
    try:
        from megatron.bridge import AutoBridge
    except ImportError as error:
        raise InputError(
            f"builder='megatron-bridge' cannot import megatron.bridge ({error}): pip install megatron-bridge==0.3.1, "
            f"which needs TransformerEngine and CUDA; builder='mbridge' or 'megatron' does without"
        ) from None
    if not hasattr(hf_config, "model_type"):
        raise InputError(
            f"builder='megatron-bridge' needs a configuration of transformers or a provider, got "
            f"{type(hf_config).__name__}: use transformers.AutoConfig.from_pretrained or a class like Qwen2Config"
        )
    return AutoBridge.from_hf_config(hf_config).to_megatron_provider(load_weights=False)
