"""Carries the judge's weights into a Megatron model by name, and its gradients to where Megatron keeps its own.

``megatron_shard`` knows how megatron-core lays a weight out and cuts it over tensor-parallel ranks. Loading and
comparing use the same function, and the independent forward pass of the judge tells whether it is right.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from megatron.core import parallel_state
from megatron.core.utils import unwrap_model

from suites.reference import ReferenceConfig


def named_weights(chunks: list[torch.nn.Module]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Every parameter of this rank's chunks with its global name: layers are numbered over the whole model, from 0."""
    for chunk in chunks:
        model = unwrap_model(chunk)
        first = model.decoder.layers[0].layer_number - 1
        for name, parameter in model.named_parameters():
            parts = name.split(".")
            if parts[:2] == ["decoder", "layers"]:
                parts[2] = str(first + int(parts[2]))
            yield ".".join(parts), parameter


def megatron_shard(
    name: str, full: Mapping[str, torch.Tensor], config: ReferenceConfig, rank: int, ranks: int
) -> torch.Tensor:
    """The part of the judge's tensors that tensor-parallel rank ``rank`` of ``ranks`` holds as parameter ``name``."""

    def rows(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.chunk(ranks, 0)[rank]

    def columns(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.chunk(ranks, 1)[rank]

    if name == "embedding.word_embeddings.weight":
        return rows(full["embedding"])
    if name == "output_layer.weight":
        return full["value_head"] if config.value_head else rows(full["embedding" if config.tied else "output"])
    if name == "decoder.final_layernorm.weight":
        return full["final_norm"]
    _, _, layer, rest = name.split(".", 3)
    prefix = f"layers.{layer}."
    plain = {
        "input_layernorm.weight": "attn_norm",
        "pre_mlp_layernorm.weight": "mlp_norm",
        "self_attention.q_layernorm.weight": "q_norm",
        "self_attention.k_layernorm.weight": "k_norm",
    }
    if rest in plain:
        return full[prefix + plain[rest]]
    if rest == "self_attention.linear_qkv.weight":
        return rows(_interleave_qkv(*(full[prefix + part] for part in "qkv"), config))
    if rest == "self_attention.linear_qkv.bias":
        return rows(_interleave_qkv(*(full[f"{prefix}{part}_bias"] for part in "qkv"), config))
    if rest == "self_attention.linear_proj.weight":
        return columns(full[prefix + "o"])
    if rest == "mlp.linear_fc1.weight":
        return torch.cat((rows(full[prefix + "gate"]), rows(full[prefix + "up"])))
    if rest == "mlp.linear_fc2.weight":
        return columns(full[prefix + "down"])
    raise KeyError(f"the judge has no weight for {name}")


def _interleave_qkv(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, config: ReferenceConfig) -> torch.Tensor:
    """Megatron stores, for each key-value head, the query heads that share it, then the key, then the value."""
    groups = config.kv_heads
    parts = [tensor.unflatten(0, (groups, -1)) for tensor in (q, k, v)]
    return torch.cat(parts, dim=1).flatten(0, 1)


def load(chunks: list[torch.nn.Module], full: Mapping[str, torch.Tensor], config: ReferenceConfig) -> None:
    """Copy the judge's weights into this rank's chunks."""
    rank = parallel_state.get_tensor_model_parallel_rank()
    ranks = parallel_state.get_tensor_model_parallel_world_size()
    with torch.no_grad():
        for name, parameter in named_weights(chunks):
            parameter.copy_(megatron_shard(name, full, config, rank, ranks))


def squared_differences(
    chunks: list[torch.nn.Module], full: Mapping[str, torch.Tensor], config: ReferenceConfig, what: str = "main_grad"
) -> dict[str, tuple[float, float]]:
    """For each parameter of this rank: (squared norm of the difference to the judge's, squared norm of the judge's).

    Args:
        what: ``main_grad`` compares gradients, ``data`` the weights themselves.
    """
    rank = parallel_state.get_tensor_model_parallel_rank()
    ranks = parallel_state.get_tensor_model_parallel_world_size()
    found: dict[str, tuple[float, float]] = {}
    for name, parameter in named_weights(chunks):
        expected = megatron_shard(name, full, config, rank, ranks).double()
        got = getattr(parameter, what).detach().cpu().double()
        found[name] = (float((got - expected).square().sum()), float(expected.square().sum()))
    return found
