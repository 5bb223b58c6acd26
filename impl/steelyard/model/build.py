"""Builds megatron-core's own GPTModel, its DDP wrapper and its optimizer from a shape and a parallel layout.

Nothing here needs TransformerEngine: see ``layers.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig

from steelyard.cost import ModelShape
from steelyard.errors import InputError
from steelyard.model.config import transformer_config
from steelyard.model.ddp import resolve_ddp_config
from steelyard.model.layers import RMSNorm, ValueHead, layer_spec
from steelyard.parallel import ParallelLayout

Callback = Callable[[torch.nn.Module], None]


def initialize_parallel(layout: ParallelLayout, *, seed: int = 1234) -> None:
    """Make megatron-core's process groups for ``layout`` over the default group, and seed its random states.

    Raises:
        LayoutError: the layout does not need exactly the ranks that are there.
    """
    layout.check_world(dist.get_world_size())
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def build_model(
    shape: ModelShape,
    layout: ParallelLayout,
    *,
    builder: str = "megatron",
    dtype: torch.dtype = torch.float32,
    value_head: bool = False,
    override_ddp_config: Mapping[str, Any] | None = None,
    override_transformer_config: Mapping[str, Any] | None = None,
    callbacks: Sequence[Callback] = (),
) -> list[DistributedDataParallel]:
    """This rank's model chunks, one per virtual stage, each wrapped in Megatron's DDP.

    Call it inside ``running_on(device)`` and after ``initialize_parallel(layout)``.

    Args:
        shape: sizes of the model.
        layout: how it is spread over ranks.
        builder: ``megatron`` is megatron-core itself.
        dtype: of parameters and activations.
        value_head: put ``ValueHead`` in the place of the output layer (critics and reward models).
        override_ddp_config: fields of megatron-core's ``DistributedDataParallelConfig``.
        override_transformer_config: fields of megatron-core's ``TransformerConfig``.
        callbacks: called with each bare chunk before it is wrapped.

    Raises:
        InputError: unknown builder or field, or a shape or layout that cannot be built.
    """
    if builder != "megatron":
        raise InputError(f"builder={builder!r} is unknown: use 'megatron'")
    ddp_config = resolve_ddp_config(override_ddp_config)
    config = transformer_config(shape, layout, dtype, override_transformer_config)
    device = torch.cuda.current_device()
    chunks = []
    for index in range(layout.vpp):
        chunk = _bare_chunk(shape, config, index if layout.vpp > 1 else None, value_head)
        for callback in callbacks:
            callback(chunk)
        for parameter in chunk.parameters():
            tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
        chunk.to(device)
        if config.bf16 or config.fp16:
            chunk = Float16Module(config, chunk)
        # megatron-core puts the gradients of later chunks into one bucket: their order of readiness is not known.
        chunk = DistributedDataParallel(config, ddp_config, chunk, disable_bucketing=index > 0)
        chunk.broadcast_params()
        chunks.append(chunk)
    _connect_to_schedule(config, chunks)
    return chunks


def _bare_chunk(shape: ModelShape, config: TransformerConfig, vp_stage: int | None, value_head: bool) -> GPTModel:
    place: dict[str, Any] = {} if vp_stage is None else {"ignore_virtual": False, "vp_stage": vp_stage}
    last = parallel_state.is_pipeline_last_stage(**place)
    spec = layer_spec(config)
    layers = get_num_layers_to_build(config, vp_stage)
    chunk = GPTModel(
        config,
        TransformerBlockSubmodules(layer_specs=[spec] * layers, layer_norm=RMSNorm),
        vocab_size=shape.vocab,
        max_sequence_length=shape.max_positions,
        pre_process=parallel_state.is_pipeline_first_stage(**place),
        post_process=last,
        position_embedding_type="rope",
        rotary_base=shape.rope_theta,
        share_embeddings_and_output_weights=shape.tied and not value_head,
        vp_stage=vp_stage,
    )
    if value_head and last:
        chunk.output_layer = ValueHead(config)
    return chunk


def _connect_to_schedule(config: TransformerConfig, chunks: list[DistributedDataParallel]) -> None:
    """Tell the schedules how gradients are synchronised, as Megatron's own training loop does."""
    config.finalize_model_grads_func = finalize_model_grads
    if chunks[0].ddp_config.overlap_grad_reduce:
        no_sync = [chunk.no_sync for chunk in chunks]
        config.no_sync_func = no_sync if len(chunks) > 1 else no_sync[0]


def build_optimizer(
    chunks: list[DistributedDataParallel], *, lr: float, max_grad_norm: float = 1.0, **settings: Any
) -> MegatronOptimizer:
    """Megatron's optimizer (Adam) over the chunks: distributed when their DDP configuration says so.

    Args:
        chunks: what ``build_model`` returned.
        lr: learning rate.
        max_grad_norm: gradients are scaled down to this norm over all ranks; 0 leaves them.
        settings: further fields of megatron-core's ``OptimizerConfig``.
    """
    config = chunks[0].config
    optimizer_config = OptimizerConfig(
        optimizer="adam",
        lr=lr,
        clip_grad=max_grad_norm,
        bf16=config.bf16,
        fp16=config.fp16,
        params_dtype=config.params_dtype,
        use_distributed_optimizer=chunks[0].ddp_config.use_distributed_optimizer,
        **settings,
    )
    optimizer = get_megatron_optimizer(optimizer_config, chunks)
    config.grad_scale_func = optimizer.scale_loss
    return optimizer
