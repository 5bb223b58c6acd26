"""Hugging Face checkpoints into models of the plain builder, and back, over every parallel layout.

Each rank reads the tensors that its own parameters are made of, one at a time; when saving, rank 0 receives the parts
of one tensor at a time and writes files of bounded size. No rank ever holds the whole model beside its own shard. A
problem that one rank meets is raised on all.
"""

from __future__ import annotations

import contextlib
from os import PathLike
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.utils import unwrap_model

from steelyard.cost import ModelShape
from steelyard.errors import InputError
from steelyard.model.hf_files import CONFIG, CheckpointReader, CheckpointWriter, read_config
from steelyard.model.hf_layout import Weight, weights_of
from steelyard.model.layers import ValueHead, has_experts

# Old checkpoints keep the rotary frequencies; an output layer may be there though it is tied, or no part of the model.
_NOT_LOADED = (".rotary_emb.inv_freq", "lm_head.weight")

Part = tuple[str, int]  # a parameter's name over the whole model, and which of its tensor-parallel parts


def load_hf(chunks: list[DistributedDataParallel], folder: str | PathLike[str]) -> None:
    """Fill this rank's chunks from a checkpoint (``config.json`` and safetensors files); a collective of all ranks.

    Values are converted to the parameters' dtype. A model with a value head skips the checkpoint's output layer; where
    there is no ``score.weight``, the head keeps the values it was built with. Load before ``build_optimizer``, whose
    copies of the parameters are made once (or call its ``reload_model_params`` afterwards).

    Args:
        chunks: what ``build_model`` returned.
        folder: the checkpoint, with one or several files of weights.

    Raises:
        InputError: on every rank, naming the tensor or setting: missing, left over, of another shape, or a
            ``config.json`` that describes another model than the one that was built.
    """
    value_head = _has_value_head(chunks)
    with contextlib.ExitStack() as stack:
        error, jobs = None, []
        try:
            weights = _weights(chunks, value_head, folder)
            reader = stack.enter_context(CheckpointReader(folder))
            _compare_tensors(reader, weights)
            for (name, part), parameter in named_parts(chunks, weights):
                if weights[name].sources[0][0] in reader.shapes:  # else it is optional
                    jobs.append((parameter, weights[name], part))
        except InputError as problem:
            error = problem
        _raise_on_every_rank(error)
        with torch.no_grad():
            for parameter, weight, part in jobs:
                tensors = [reader.tensor(name) for name, _ in weight.sources]
                parameter.copy_(weight.shard(tensors, part, place_of(weight)[1]))


def save_hf(
    chunks: list[DistributedDataParallel],
    folder: str | PathLike[str],
    *,
    like: str | PathLike[str],
    file_bytes: int = 5_000_000_000,
) -> None:
    """Write the model as a Hugging Face checkpoint that appears at once or not at all; a collective of all ranks.

    Args:
        chunks: what ``build_model`` returned.
        folder: where to; it must be new, or empty. Only rank 0 writes.
        like: the checkpoint that the model came from: its ``config.json``, tokenizer and other files beside the weights
            are carried over.
        file_bytes: size from which a further file is begun, as transformers does.

    Raises:
        InputError: on every rank: ``folder`` holds something, ``like`` describes another model, or writing failed.
    """
    value_head = _has_value_head(chunks)
    error, writer = None, None
    weights: dict[str, Weight] = {}
    held: dict[Part, torch.nn.Parameter] = {}
    try:
        weights = _weights(chunks, value_head, like)
        held = dict(named_parts(chunks, weights))
        if dist.get_rank() == 0:
            writer = CheckpointWriter(folder, like, file_bytes)
    except InputError as problem:
        error = problem
    _raise_on_every_rank(error)
    _finish_gathering(chunks)
    owners = _owners(held, weights)
    for weight in weights.values():
        shards = [_to_rank_0((weight.name, part), held, owners) for part in range(place_of(weight)[1])]
        if writer:
            # After an error it takes nothing more, but the others still send what is left.
            names = [name for name, _ in weight.sources]
            writer.add(zip(names, weight.unshard(shards), strict=True))
    _raise_on_every_rank(writer.finish() if writer else None)


def _has_value_head(chunks: list[DistributedDataParallel]) -> bool:
    """Whether the whole model has one; it stands on the last stage alone."""
    here = any(isinstance(getattr(unwrap_model(chunk), "output_layer", None), ValueHead) for chunk in chunks)
    return any(_gather(here))


def _weights(chunks: list[DistributedDataParallel], value_head: bool, folder: str | PathLike[str]) -> dict[str, Weight]:
    """The weights of the model in ``folder`` by Megatron's names, after a check that the chunks are that model."""
    shape = ModelShape.from_hf(read_config(folder), name=str(folder))
    for name, (described, built) in _settings(shape, unwrap_model(chunks[0]), value_head).items():
        if described != built:
            raise InputError(
                f"{folder}: its {CONFIG} describes a model with {name}={described!r}, but the model was built with "
                f"{name}={built!r}: build it from ModelShape.from_hf of this checkpoint"
            )
    return {weight.name: weight for weight in weights_of(shape, value_head=value_head)}


def _settings(shape: ModelShape, model: GPTModel, value_head: bool) -> dict[str, tuple[Any, Any]]:
    """What makes it the same model: (as a checkpoint describes it, as the model was built)."""
    config = model.config
    moe = config.num_moe_experts is not None
    dense = shape.layers - shape.moe_layers
    return {
        "layers": (shape.layers, config.num_layers),
        "hidden": (shape.hidden, config.hidden_size),
        "ffn": (shape.ffn, config.ffn_hidden_size),
        "heads": (shape.heads, config.num_attention_heads),
        "kv_heads": (shape.kv_heads, config.num_query_groups),
        "head_dim": (shape.head_dim, config.kv_channels),
        "qkv_bias": (shape.qkv_bias, config.add_qkv_bias),
        "qk_norm": (shape.qk_norm, config.qk_layernorm),
        "vocab": (shape.vocab, model.vocab_size),
        "tied": (shape.tied and not value_head, model.share_embeddings_and_output_weights),
        "rope_theta": (shape.rope_theta, model.rotary_base),
        "norm_eps": (shape.norm_eps, config.layernorm_epsilon),
        "experts": (shape.experts, config.num_moe_experts or 0),
        "experts_per_token": (shape.experts_per_token, config.moe_router_topk if moe else 0),
        "norm_topk_prob": (shape.norm_topk_prob, moe and not config.moe_router_pre_softmax),
        "moe_ffn": (shape.moe_ffn, config.moe_ffn_hidden_size or 0),
        "shared_ffn": (shape.shared_ffn, config.moe_shared_expert_intermediate_size or 0),
        "shared_gate": (shape.shared_gate, config.moe_shared_expert_gate),
        "layers with experts": (
            list(range(dense, shape.layers)),
            [layer for layer in range(config.num_layers) if has_experts(config, layer)],
        ),
    }


def _compare_tensors(reader: CheckpointReader, weights: dict[str, Weight]) -> None:
    """Raise ``InputError`` unless the checkpoint holds exactly the tensors of the model."""
    expected = {name: (shape, weight) for weight in weights.values() for name, shape in weight.sources}
    missing = [name for name, (_, weight) in expected.items() if name not in reader.shapes and not weight.optional]
    if missing:
        raise InputError(f"{reader.folder}: has no tensor {_listed(missing)}, which its {CONFIG} asks for")
    extra = [name for name in reader.shapes if name not in expected and not name.endswith(_NOT_LOADED)]
    if extra:
        raise InputError(f"{reader.folder}: holds the tensor {_listed(extra)}, for which the model has no place")
    for name, found in reader.shapes.items():
        if name in expected and found != expected[name][0]:
            raise InputError(
                f"{reader.folder}: tensor {name} has the shape {list(found)}, the model needs {list(expected[name][0])}"
            )


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} (and {len(names) - 1} others)"


def place_of(weight: Weight) -> tuple[int, int]:
    """This rank's number, and how many there are, among the ranks that a weight is split over."""
    if weight.kind == "whole":
        return 0, 1
    if weight.of_an_expert:
        return (
            parallel_state.get_expert_tensor_parallel_rank(),
            parallel_state.get_expert_tensor_parallel_world_size(),
        )
    return parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()


def named_parts(
    chunks: list[DistributedDataParallel], weights: dict[str, Weight]
) -> list[tuple[Part, torch.nn.Parameter]]:
    """This rank's parameters, each with the name of its weight and which part of it this is."""
    found = []
    for chunk in chunks:
        model = unwrap_model(chunk)
        for local, parameter in model.named_parameters():
            name = _whole_name(model, local)
            if name == "output_layer.weight" and name not in weights:
                # With tied weights, the last of several stages keeps a copy of the embedding.
                name = "embedding.word_embeddings.weight"
            if name not in weights:
                raise InputError(
                    f"the model's parameter {local} has no name in a Hugging Face checkpoint: load_hf and save_hf are "
                    f"for models of build_model(builder='megatron') without further parameters"
                )
            found.append(((name, place_of(weights[name])[0]), parameter))
    return found


def _whole_name(model: GPTModel, local: str) -> str:
    """A parameter's name with layers and experts numbered over the whole model, from 0."""
    parts = local.split(".")
    if parts[:2] == ["decoder", "layers"]:
        layer = model.decoder.layers[int(parts[2])]
        parts[2] = str(layer.layer_number - 1)
        if "local_experts" in parts:
            at = parts.index("local_experts") + 1
            parts[at] = str(layer.mlp.local_expert_indices[int(parts[at])])
    return ".".join(parts)


def _finish_gathering(chunks: list[DistributedDataParallel]) -> None:
    """With ``overlap_param_gather``, what an optimizer step changed is gathered in the next forward pass: do it now."""
    for chunk in chunks:
        if chunk.use_forward_hook:
            chunk.disable_forward_pre_hook(param_sync=True)
            chunk.enable_forward_pre_hook()


def _owners(
    held: dict[Part, torch.nn.Parameter], weights: dict[str, Weight]
) -> dict[Part, tuple[int, torch.Size, torch.dtype]]:
    """For every part: the lowest rank that has it, its shape and dtype."""
    first_copy = {
        False: parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0,
        True: parallel_state.get_expert_data_parallel_rank() == 0,
    }
    mine = {
        part: (dist.get_rank(), parameter.shape, parameter.dtype)
        for part, parameter in held.items()
        if first_copy[weights[part[0]].of_an_expert]
    }
    owners: dict[Part, tuple[int, torch.Size, torch.dtype]] = {}
    for reported in _gather(mine):
        for part, facts in reported.items():
            owners.setdefault(part, facts)
    return owners


def _to_rank_0(
    part: Part, held: dict[Part, torch.nn.Parameter], owners: dict[Part, tuple[int, torch.Size, torch.dtype]]
) -> torch.Tensor:
    """The part on rank 0; on other ranks an empty tensor, after sending it where this rank owns it."""
    owner, shape, dtype = owners[part]
    if dist.get_rank() == owner == 0:
        return held[part].detach()
    if dist.get_rank() == 0:
        received = torch.empty(shape, dtype=dtype, device=torch.cuda.current_device())
        dist.recv(received, src=owner)
        return received
    if dist.get_rank() == owner:
        dist.send(held[part].detach().contiguous(), dst=0)
    return torch.empty(0)


def _raise_on_every_rank(error: InputError | None) -> None:
    """Raise the error of the lowest rank that has one."""
    for found in _gather(error):
        if found is not None:
            raise found


def _gather(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
