"""Builds through mbridge 0.15, and moves Hugging Face weights in and out through it.

mbridge makes megatron-core's GPTModel with TransformerEngine's layers; where that is not installed, or on a CPU, the
layers of ``te_names.py`` take their place. That, and what mbridge 0.15.1 gets wrong, is all that the subclass below
changes:

- a tied Qwen2 model leaves "the output layer is the embedding" in a dictionary of the class, where later untied
  models of the process find it;
- a value head on a tied model: the last pipeline stage would sum its gradient with the embedding's;
- Qwen2-MoE is built without the gate of its shared expert, so its outputs are others than those of transformers.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from os import PathLike, fspath
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

from steelyard.cost import ModelShape
from steelyard.errors import InputError, ShapeError
from steelyard.hints import did_you_mean
from steelyard.model.bridges import WITHOUT_FUSIONS, te_names
from steelyard.model.config import layout_settings, refuse_hanging_schedule
from steelyard.model.ddp import check_ddp_config
from steelyard.model.layers import uses_transformer_engine
from steelyard.parallel import ParallelLayout

HEAD = "output_layer.weight"


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
    """The chunks that mbridge builds from a configuration of transformers, wrapped in DDP.

    Raises:
        InputError: mbridge is not installed, ``spec`` is no such configuration, mbridge does not know the model, or it
            does not fit the layout.
    """
    kind = _bridge_class(spec)
    with contextlib.suppress(ShapeError):  # mbridge knows more models than ModelShape; megatron-core checks those
        layout.check(ModelShape.from_hf(spec))
    fusions = {} if uses_transformer_engine() else WITHOUT_FUSIONS
    settings = {**layout_settings(layout, dtype), **fusions, **overrides}
    bridge = _adapted(kind)(spec, dtype, settings, value_head)
    refuse_hanging_schedule(bridge.config, layout)
    check_ddp_config(ddp_config, bridge.config)

    def before_wrapping(model: torch.nn.Module, **unused: Any) -> None:
        prepare(model)

    with contextlib.redirect_stdout(sys.stderr):  # mbridge prints the number of parameters
        chunks = bridge.get_model(
            wrap_with_ddp=True,
            fp16=bridge.config.fp16,
            bf16=bridge.config.bf16,
            ddp_config={field.name: getattr(ddp_config, field.name) for field in dataclasses.fields(ddp_config)},
            post_model_creation_callbacks=[before_wrapping],
        )
    # An attribute: a table beside the chunks would keep them alive through the bridge's configuration.
    chunks[0].bridge = bridge
    return chunks


def load_weights(chunks: list[DistributedDataParallel], path: str | PathLike[str]) -> None:
    """Load a Hugging Face checkpoint (a folder) into chunks that mbridge built; call it before ``build_optimizer``.

    A value head keeps its weights where the checkpoint has none for it.
    """
    _bridge_of(chunks).load_weights(chunks, fspath(path))


def save_weights(chunks: list[DistributedDataParallel], path: str | PathLike[str]) -> None:
    """Write the weights as a Hugging Face checkpoint; ``load_weights`` must have been called before."""
    _bridge_of(chunks).save_weights(chunks, fspath(path))


def export_weights(chunks: list[DistributedDataParallel]) -> Iterator[tuple[str, torch.Tensor]]:
    """Hugging Face names and whole tensors, one after the other, on every rank; all ranks must go through it."""
    yield from _bridge_of(chunks).export_weights(chunks)


def _bridge_of(chunks: list[DistributedDataParallel]) -> Any:
    if not hasattr(chunks[0], "bridge"):
        raise InputError("these chunks were not built by mbridge: use build_model(..., builder='mbridge')")
    return chunks[0].bridge


def _bridge_class(spec: Any) -> type:
    try:
        import mbridge
        from mbridge.core.bridge import _MODEL_REGISTRY
    except ImportError as error:
        raise InputError(
            f"builder='mbridge' cannot import mbridge ({error}): pip install 'steelyard[mbridge]', or mbridge==0.15.1 "
            f"einops 'transformers<5'"
        ) from None
    kind = getattr(spec, "model_type", None)
    if kind is None:
        raise InputError(
            f"builder='mbridge' needs a configuration of transformers, got {type(spec).__name__}: use "
            f"transformers.AutoConfig.from_pretrained or a class like Qwen2Config"
        )
    if kind not in _MODEL_REGISTRY:
        known = mbridge.AutoBridge.list_supported_models()
        raise InputError(f"mbridge does not know model_type={kind!r}{did_you_mean(kind, known)}: it knows {known}")
    if getattr(spec, "mlp_only_layers", None) or getattr(spec, "decoder_sparse_step", 1) != 1:
        raise InputError(
            f"mbridge puts experts into every layer of {kind}; this model has mlp_only_layers={spec.mlp_only_layers} "
            f"and decoder_sparse_step={spec.decoder_sparse_step}: use builder='megatron'"
        )
    return _MODEL_REGISTRY[kind]


@cache
def _adapted(base: type) -> type:
    return type(f"Adapted{base.__name__}", (_Adaption, base), {})


class _Adaption:
    """What is changed in a bridge of mbridge; comes before it in the order of inheritance."""

    def __init__(self, hf_config: Any, dtype: torch.dtype, settings: Mapping[str, Any], value_head: bool) -> None:
        self._settings = settings
        self._value_head = value_head
        if value_head:
            hf_config = copy.deepcopy(hf_config)
            hf_config.tie_word_embeddings = False
        # mbridge writes into it: not into that of the class.
        self._DIRECT_MAPPING: dict[str, str] = dict(getattr(type(self), "_DIRECT_MAPPING"))  # noqa: B009
        super().__init__(hf_config, dtype=dtype)  # type: ignore[call-arg]

    def _build_base_config(self, text_config_key: str | None = None, **kwargs: Any) -> Any:
        if self.hf_config.model_type == "qwen2_moe":  # type: ignore[attr-defined]
            kwargs["moe_shared_expert_gate"] = True
        return super()._build_base_config(text_config_key, **{**kwargs, **self._settings})  # type: ignore[misc]

    def _get_transformer_layer_spec(self, vp_stage: int | None = None) -> Any:
        if uses_transformer_engine():
            return super()._get_transformer_layer_spec(vp_stage)  # type: ignore[misc]
        self.has_vp_stage = True
        return te_names.block_spec(self.config, vp_stage)  # type: ignore[attr-defined]

    def load_weights(self, models: list[torch.nn.Module], weights_path: str, memory_efficient: bool = False) -> None:
        head = self._DIRECT_MAPPING[HEAD]
        if self._value_head:
            # Without a head in the checkpoint, mbridge takes any matrix of the vocabulary's height for one to skip.
            names = self._get_safetensor_io(weights_path).load_hf_weight_names()  # type: ignore[attr-defined]
            if head not in names:
                self._DIRECT_MAPPING[HEAD] = self._DIRECT_MAPPING["embedding.word_embeddings.weight"]
        try:
            with torch.no_grad():
                super().load_weights(models, weights_path, memory_efficient)  # type: ignore[misc]
        finally:
            self._DIRECT_MAPPING[HEAD] = head
