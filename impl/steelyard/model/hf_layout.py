"""What a weight is called and how it is stored: by megatron-core, and in a Hugging Face checkpoint.

``weights_of(shape)`` lists every parameter of a whole model once. Layers and experts are numbered over the whole model,
from 0. The names on the right are those of transformers' Qwen2, Qwen3, Llama, Qwen2-MoE and Qwen3-MoE.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from steelyard.cost import ModelShape

Kind = Literal["whole", "rows", "columns", "qkv", "gate_up"]


@dataclass(frozen=True)
class Weight:
    """One parameter of a Megatron model, over all its tensor-parallel ranks.

    Attributes:
        name: megatron-core's.
        kind: how the tensors of ``sources`` lie in it. *whole*: as they are, on every rank. *rows*, *columns*: split
            over the ranks along that axis. *qkv*: for each key-value head the rows of the query heads that share it,
            then of the key, then of the value; split by rows. *gate_up*: each rank has its rows of the one above its
            rows of the other.
        sources: (name, shape) of the Hugging Face tensors it is made of.
        groups: key-value heads of the whole model (qkv alone).
        optional: a checkpoint may lack it.
    """

    name: str
    kind: Kind
    sources: tuple[tuple[str, tuple[int, ...]], ...]
    groups: int = 1
    optional: bool = False

    @property
    def of_an_expert(self) -> bool:
        """Whether it is split over the expert-tensor-parallel ranks, and lies on one expert-parallel rank alone."""
        return ".local_experts." in self.name

    def shard(self, tensors: Sequence[torch.Tensor], rank: int, ranks: int) -> torch.Tensor:
        """The part of tensor-parallel rank ``rank`` of ``ranks``, from the whole Hugging Face tensors."""
        if self.kind == "whole":
            return tensors[0]
        if self.kind == "gate_up":
            return torch.cat([tensor.chunk(ranks, 0)[rank] for tensor in tensors])
        if self.kind == "qkv":
            by_group = torch.cat([tensor.unflatten(0, (self.groups, -1)) for tensor in tensors], dim=1)
            return by_group.flatten(0, 1).chunk(ranks, 0)[rank]
        return tensors[0].chunk(ranks, self._axis)[rank]

    def unshard(self, shards: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The whole Hugging Face tensors, from the parts of all tensor-parallel ranks: ``shard`` undone."""
        if self.kind == "whole":
            return [shards[0]]
        if self.kind == "gate_up":
            halves = [shard.chunk(2, 0) for shard in shards]
            return [torch.cat(parts) for parts in zip(*halves, strict=True)]
        if self.kind == "qkv":
            sizes = [shape[0] // self.groups for _, shape in self.sources]
            by_group = torch.cat(list(shards)).unflatten(0, (self.groups, -1))
            return [part.flatten(0, 1) for part in by_group.split(sizes, dim=1)]
        return [torch.cat(list(shards), dim=self._axis)]

    @property
    def _axis(self) -> int:
        return 1 if self.kind == "columns" else 0


def weights_of(shape: ModelShape, *, value_head: bool = False) -> Iterator[Weight]:
    """Every parameter of a model of this shape, from the embedding to the output layer.

    Args:
        shape: the model.
        value_head: it ends in one value per token, under the name that transformers gives a regression head, ``score``;
            a checkpoint of a language model has none.
    """
    vocabulary = (shape.vocab, shape.hidden)
    yield Weight("embedding.word_embeddings.weight", "rows", (("model.embed_tokens.weight", vocabulary),))
    for layer in range(shape.layers):
        yield from _attention(shape, layer)
        yield from _dense(shape, layer) if layer < shape.layers - shape.moe_layers else _experts(shape, layer)
    yield Weight("decoder.final_layernorm.weight", "whole", (("model.norm.weight", (shape.hidden,)),))
    if value_head:
        yield Weight("output_layer.weight", "whole", (("score.weight", (1, shape.hidden)),), optional=True)
    elif not shape.tied:
        yield Weight("output_layer.weight", "rows", (("lm_head.weight", vocabulary),))


def _attention(shape: ModelShape, layer: int) -> Iterator[Weight]:
    ours, theirs, hidden = f"decoder.layers.{layer}.", f"model.layers.{layer}.", shape.hidden
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    rows = {"q": queries, "k": keys, "v": keys}
    yield Weight(f"{ours}input_layernorm.weight", "whole", ((f"{theirs}input_layernorm.weight", (hidden,)),))
    sources = tuple((f"{theirs}self_attn.{part}_proj.weight", (size, hidden)) for part, size in rows.items())
    yield Weight(f"{ours}self_attention.linear_qkv.weight", "qkv", sources, shape.kv_heads)
    if shape.qkv_bias:
        biases = tuple((f"{theirs}self_attn.{part}_proj.bias", (size,)) for part, size in rows.items())
        yield Weight(f"{ours}self_attention.linear_qkv.bias", "qkv", biases, shape.kv_heads)
    if shape.qk_norm:
        for part in "qk":
            norm = f"{theirs}self_attn.{part}_norm.weight"
            yield Weight(f"{ours}self_attention.{part}_layernorm.weight", "whole", ((norm, (shape.head_dim,)),))
    out = f"{theirs}self_attn.o_proj.weight"
    yield Weight(f"{ours}self_attention.linear_proj.weight", "columns", ((out, (hidden, queries)),))
    norm = f"{theirs}post_attention_layernorm.weight"
    yield Weight(f"{ours}pre_mlp_layernorm.weight", "whole", ((norm, (hidden,)),))


def _dense(shape: ModelShape, layer: int) -> Iterator[Weight]:
    yield from _feed_forward(f"decoder.layers.{layer}.mlp", f"model.layers.{layer}.mlp", shape.hidden, shape.ffn)


def _experts(shape: ModelShape, layer: int) -> Iterator[Weight]:
    ours, theirs, hidden = f"decoder.layers.{layer}.mlp", f"model.layers.{layer}.mlp", shape.hidden
    yield Weight(f"{ours}.router.weight", "whole", ((f"{theirs}.gate.weight", (shape.experts, hidden)),))
    for expert in range(shape.experts):
        experts = f"{ours}.experts.local_experts.{expert}", f"{theirs}.experts.{expert}"
        yield from _feed_forward(*experts, hidden, shape.moe_ffn)
    if shape.shared_ffn:
        yield from _feed_forward(f"{ours}.shared_experts", f"{theirs}.shared_expert", hidden, shape.shared_ffn)
    if shape.shared_gate:
        gate = f"{theirs}.shared_expert_gate.weight"
        yield Weight(f"{ours}.shared_experts.gate_weight", "whole", ((gate, (1, hidden)),))


def _feed_forward(ours: str, theirs: str, hidden: int, size: int) -> Iterator[Weight]:
    both = tuple((f"{theirs}.{part}_proj.weight", (size, hidden)) for part in ("gate", "up"))
    yield Weight(f"{ours}.linear_fc1.weight", "gate_up", both)
    yield Weight(f"{ours}.linear_fc2.weight", "columns", ((f"{theirs}.down_proj.weight", (hidden, size)),))
