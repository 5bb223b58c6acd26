"""Builds Megatron's GPTModel, its DDP wrapper and its optimizer, through megatron-core itself or through a bridge.

Every builder takes the same arguments and gets the same resolved settings; what DDP then really does is read back by
``ddp_report``. The plain builder needs no TransformerEngine (see ``layers.py``), and the bridges none on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from steelyard.cost import ModelShape
from steelyard.model.bridges import mbridge, megatron_bridge
from steelyard.model.config import transformer_config
from steelyard.model.ddp import check_ddp_config, forget_models, resolve_ddp_config
from steelyard.model.freeze import Freezer
from steelyard.model.layers import RMSNorm, ValueHead, layer_specs
from steelyard.model.overrides import read_overrides
from steelyard.parallel import ParallelLayout

Callback = Callable[[torch.nn.Module], None]


def initialize_parallel(layout: ParallelLayout, *, seed: int = 1234, optimizer_instances: int = 1) -> None:
    """Make megatron-core's process groups for ``layout`` over the default group, and seed its random states.

    Args:
        layout: sizes of every kind of parallelism.
        seed: of parameters and dropout.
        optimizer_instances: copies of the distributed optimizer's state among the data-parallel ranks, where
            ``num_distributed_optimizer_instances`` of the DDP configuration asks for more than one.

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
        expert_tensor_parallel_size=layout.etp,
        num_distributed_optimizer_instances=optimizer_instances,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    forget_models()


def build_model(
    spec: ModelShape | Any,
    layout: ParallelLayout,
    *,
    builder: str = "megatron",
    dtype: torch.dtype = torch.float32,
    value_head: bool = False,
    override_ddp_config: Any = None,
    override_transformer_config: Any = None,
    callbacks: Sequence[Callback] = (),
    freeze: Sequence[str] = (),
) -> list[DistributedDataParallel]:
    """This rank's model chunks, one per virtual stage, each wrapped in Megatron's DDP.

    Call it inside ``running_on(device)`` and after ``initialize_parallel(layout)``.

    Args:
        spec: the model: a configuration of transformers for any builder, or a ``ModelShape`` for ``megatron``, or a
            provider of Megatron-Bridge for ``megatron-bridge``.
        layout: how it is spread over ranks.
        builder: ``megatron`` is megatron-core itself, ``mbridge`` and ``megatron-bridge`` are the packages.
        dtype: of parameters and activations.
        value_head: put ``ValueHead`` in the place of the output layer (critics and reward models).
        override_ddp_config: fields of megatron-core's ``DistributedDataParallelConfig``, in any form that
            ``resolve_ddp_config`` reads; the defaults are the same for every builder.
        override_transformer_config: fields of megatron-core's ``TransformerConfig``, in the same forms.
        callbacks: called with each bare chunk before it is wrapped, after the value head has been put in.
        freeze: names of modules or parameters that are not trained (see ``Freezer``).

    Raises:
        InputError: unknown builder, field or name to freeze, a combination that would not arrive in DDP, a package that
            is not installed, or a model or layout that cannot be built.
    """
    ddp_config = resolve_ddp_config(override_ddp_config, builder)
    overrides = read_overrides(TransformerConfig, override_transformer_config, "override_transformer_config")
    freezer = Freezer(freeze)

    def prepare(chunk: torch.nn.Module) -> None:
        if value_head and chunk.post_process:
            chunk.output_layer = ValueHead(chunk.config)
        for callback in callbacks:
            callback(chunk)
        freezer(chunk)

    build = {
        "megatron": _plain_chunks,
        "mbridge": mbridge.build_chunks,
        "megatron-bridge": megatron_bridge.build_chunks,
    }
    chunks = build[builder](
        spec, layout, dtype=dtype, ddp_config=ddp_config, overrides=overrides, value_head=value_head, prepare=prepare
    )
    freezer.check()
    _connect_to_schedule(chunks)
    return chunks


def _plain_chunks(
    spec: ModelShape | Any,
    layout: ParallelLayout,
    *,
    dtype: torch.dtype,
    ddp_config: DistributedDataParallelConfig,
    overrides: Mapping[str, Any],
    value_head: bool,
    prepare: Callable[[torch.nn.Module], None],
) -> list[DistributedDataParallel]:
    shape = spec if isinstance(spec, ModelShape) else ModelShape.from_hf(spec)
    config = transformer_config(shape, layout, dtype, overrides)
    check_ddp_config(ddp_config, config)
    device = torch.cuda.current_device()
    chunks = []
    for index in range(layout.vpp):
        chunk = _bare_chunk(shape, config, index if layout.vpp > 1 else None, shape.tied and not value_head)
        prepare(chunk)
        for parameter in chunk.parameters():
            tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
        chunk.to(device)
        if config.bf16 or config.fp16:
            chunk = Float16Module(config, chunk)
        # megatron-core puts the gradients of later chunks into one bucket: their order of readiness is not known.
        chunk = DistributedDataParallel(config, ddp_config, chunk, disable_bucketing=index > 0)
        chunk.broadcast_params()
        chunks.append(chunk)
    return chunks


def _bare_chunk(shape: ModelShape, config: TransformerConfig, vp_stage: int | None, tied: bool) -> GPTModel:
    place: dict[str, Any] = {} if vp_stage is None else {"ignore_virtual": False, "vp_stage": vp_stage}
    return GPTModel(
        config,
        TransformerBlockSubmodules(layer_specs=layer_specs(config, vp_stage), layer_norm=RMSNorm),
        vocab_size=shape.vocab,
        max_sequence_length=shape.max_positions,
        pre_process=parallel_state.is_pipeline_first_stage(**place),
        post_process=parallel_state.is_pipeline_last_stage(**place),
        position_embedding_type="rope",
        rotary_base=shape.rope_theta,
        share_embeddings_and_output_weights=tied,
        vp_stage=vp_stage,
    )


def _connect_to_schedule(chunks: list[DistributedDataParallel]) -> None:
    """Tell the schedules when gradients are reduced and parameters gathered, as Megatron's own training loop does."""
    config, ddp_config = chunks[0].config, chunks[0].ddp_config
    config.finalize_model_grads_func = finalize_model_grads

    def of_chunks(functions: list[Callable]) -> list[Callable] | Callable:
        return functions if len(functions) > 1 else functions[0]

    if ddp_config.overlap_grad_reduce:
        config.no_sync_func = of_chunks([chunk.no_sync for chunk in chunks])
    if ddp_config.overlap_param_gather and ddp_config.align_param_gather:
        config.param_sync_func = of_chunks([chunk.start_param_sync for chunk in chunks])


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
