"""Builds megatron-core's own GPTModel, its DDP wrapper and its optimizer from a shape and a parallel layout.

Nothing here needs TransformerEngine: the layers are megatron-core's local ones with ``PackedAttention`` as core
attention and ``RMSNorm`` below, which knows about sequence parallelism (megatron-core's local norm refuses it).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig

from steelyard.cost import ModelShape
from steelyard.errors import InputError, LayoutError, ShapeError
from steelyard.model.attention import PackedAttention, PackedSelfAttention
from steelyard.model.ddp import resolve_ddp_config
from steelyard.parallel import ParallelLayout

Callback = Callable[[torch.nn.Module], None]


class RMSNorm(torch.nn.RMSNorm):
    """RMSNorm whose weight is marked for the gradient sum over tensor-parallel ranks under sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **unused: object) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=torch.cuda.current_device())
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010 - not declared by torch


class ValueHead(torch.nn.Module):
    """One value per token, in place of the output layer: [S, B, hidden] -> [S, B, 1], float32.

    Under sequence parallelism each rank computes the values of its tokens and the ranks gather them.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.sequence_parallel = config.sequence_parallel
        weight = torch.empty(1, config.hidden_size, dtype=config.params_dtype, device=torch.cuda.current_device())
        torch.nn.init.normal_(weight, std=config.init_method_std)
        self.weight = torch.nn.Parameter(weight)
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010

    def forward(
        self, hidden: torch.Tensor, weight: torch.Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[torch.Tensor, None]:
        values = F.linear(hidden, self.weight).float()
        if self.sequence_parallel:
            # Every rank goes on with all the values, so the gradient needs splitting, not summing.
            values = tensor_parallel.gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None


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


def transformer_config(
    shape: ModelShape,
    layout: ParallelLayout,
    dtype: torch.dtype = torch.float32,
    overrides: Mapping[str, Any] | None = None,
) -> TransformerConfig:
    """Megatron's configuration of a shape on a layout, with what variable micro-batches need.

    Raises:
        ShapeError, LayoutError: what megatron-core could not build, or would hang on.
    """
    if shape.experts or shape.kv_lora:
        raise ShapeError(f"model {shape.name}: only dense models with ordinary attention can be built so far")
    layout.check(shape)
    settings: dict[str, Any] = {
        "num_layers": shape.layers,
        "hidden_size": shape.hidden,
        "ffn_hidden_size": shape.ffn,
        "num_attention_heads": shape.heads,
        "num_query_groups": shape.kv_heads,
        "kv_channels": shape.head_dim,
        "layernorm_epsilon": shape.norm_eps,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "add_qkv_bias": shape.qkv_bias,
        "qk_layernorm": shape.qk_norm,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        "tensor_model_parallel_size": layout.tp,
        "sequence_parallel": layout.sequence_parallel,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp if layout.vpp > 1 else None,
        "microbatch_group_size_per_vp_stage": layout.group,
        "context_parallel_size": layout.cp,
        "cp_comm_type": {"all_gather": "all_gather", "all_to_all": "a2a"}[layout.cp_kind],
        "expert_model_parallel_size": layout.ep,
        # Stages exchange shapes before every transfer; megatron-core then wants this dispatcher, for dense models too.
        "variable_seq_lengths": True,
        "moe_token_dispatcher_type": "alltoall",
        # The interleaved schedule frees a stage's output while its transfer still reads it: now and then the next stage
        # gets other bytes.
        "deallocate_pipeline_outputs": layout.vpp == 1,
        # With virtual stages, the schedule without overlap swaps or deadlocks the exchange of shapes.
        "overlap_p2p_comm": layout.vpp > 1,
        "batch_p2p_comm": layout.vpp == 1,
        **(overrides or {}),
    }
    config = TransformerConfig(**settings)
    if layout.vpp > 1 and config.variable_seq_lengths and not config.overlap_p2p_comm:
        raise LayoutError(
            f"vpp={layout.vpp} with variable_seq_lengths=True and overlap_p2p_comm=False hangs or swaps tensors in "
            f"megatron-core: set overlap_p2p_comm=True and batch_p2p_comm=False"
        )
    return config


def layer_spec(config: TransformerConfig) -> ModuleSpec:
    """megatron-core's local layer with packed self-attention and the norm of this module."""
    spec = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=config.qk_layernorm)
    layer = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
    layer.self_attention.module = PackedSelfAttention
    attention = layer.self_attention.submodules
    attention.core_attention = core_attention()
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return spec


def core_attention() -> type:
    """TransformerEngine's attention where it is installed and the model runs on CUDA, else ours."""
    on_cuda = torch.device(torch.cuda.current_device()).type == "cuda"
    if on_cuda and importlib.util.find_spec("transformer_engine"):
        from megatron.core.extensions.transformer_engine import TEDotProductAttention

        return TEDotProductAttention
    return PackedAttention


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
