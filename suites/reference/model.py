"""A Qwen2-like decoder for one row of tokens, in float64, from its formulas.

Per layer, with x [T, H] the residual stream:

    x = x + attention(rms_norm(x))          grouped queries, rotary positions, causal
    x = x + swiglu(rms_norm(x))

then a final norm, and logits [T, V] (tied or untied output) or values [T] (value head without bias).

Letters in names: T tokens of the row, H hidden, V vocabulary, D head_dim, F ffn.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch
from torch import Tensor

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class ReferenceConfig:
    """The sizes and the switches of the model.

    Attributes:
        layers, hidden, ffn, heads, kv_heads, head_dim, vocab: the usual sizes.
        tied: the output projection is the embedding. Without effect when there is a value head.
        qkv_bias: the query, key and value projections have a bias (Qwen2).
        qk_norm: every head's query and key go through an RMSNorm before the rotation (Qwen3).
        rope_theta: base of the rotary frequencies.
        norm_eps: epsilon of every RMSNorm.
        value_head: one value per token instead of logits: a critic or a reward model.
    """

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    rope_theta: float = 1e6
    norm_eps: float = 1e-6
    value_head: bool = False

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} heads are not a multiple of {self.kv_heads} key-value heads")
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd: rotary positions turn pairs of components")

    @classmethod
    def from_fields(cls, source: Mapping[str, object] | object, **overrides: object) -> ReferenceConfig:
        """Take the fields of the same names from a mapping or an object's attributes; the rest keep their defaults."""
        taken: dict[str, object] = {}
        for field in fields(cls):
            if isinstance(source, Mapping):
                if field.name in source:
                    taken[field.name] = source[field.name]
            elif hasattr(source, field.name):
                taken[field.name] = getattr(source, field.name)
        return cls(**(taken | overrides))  # type: ignore[arg-type]


def weight_shapes(config: ReferenceConfig) -> dict[str, tuple[int, ...]]:
    """Every weight's name and shape, in the order of the forward pass. Layers count from 0 over the whole model."""
    hidden, ffn = config.hidden, config.ffn
    query_width = config.heads * config.head_dim
    key_width = config.kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"embedding": (config.vocab, hidden)}
    for i in range(config.layers):
        layer: dict[str, tuple[int, ...]] = {"attn_norm": (hidden,)}
        layer |= {"q": (query_width, hidden), "k": (key_width, hidden), "v": (key_width, hidden)}
        if config.qkv_bias:
            layer |= {"q_bias": (query_width,), "k_bias": (key_width,), "v_bias": (key_width,)}
        if config.qk_norm:
            layer |= {"q_norm": (config.head_dim,), "k_norm": (config.head_dim,)}
        layer |= {"o": (hidden, query_width), "mlp_norm": (hidden,)}
        layer |= {"gate": (ffn, hidden), "up": (ffn, hidden), "down": (hidden, ffn)}
        shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    shapes["final_norm"] = (hidden,)
    if config.value_head:
        shapes["value_head"] = (1, hidden)
    elif not config.tied:
        shapes["output"] = (config.vocab, hidden)
    return shapes


# Standard deviation of a projection's output when its input has unit variance; 1 if not named here. Logits should be
# far from uniform. Attention scores and gates are so at 1 already; above it, float32 rounding grows from layer to layer
# up to a few 1e-5 of a gradient.
GAINS = {"embedding": 1.5, "output": 1.5}


def init_weights(config: ReferenceConfig, seed: int) -> Weights:
    """Random weights under which every part of the model matters: a permuted head or a forgotten bias shows.

    Each tensor has a generator of its own, seeded by (seed, name): a weight does not change when another one appears.
    Drawn in float32, then widened: a float32 model can take exactly these values.

        norms  1 + 0.2 z        biases  0.3 z        matrices [out, in]  gain * z / sqrt(in)        z ~ N(0, 1)
    """
    weights = {}
    for name, shape in weight_shapes(config).items():
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        noise = torch.randn(shape, generator=generator, dtype=torch.float32)
        kind = name.rsplit(".", 1)[-1]
        if kind.endswith("norm"):
            value = 1.0 + 0.2 * noise
        elif kind.endswith("bias"):
            value = 0.3 * noise
        else:
            value = noise * (GAINS.get(kind, 1.0) / math.sqrt(shape[-1]))
        weights[name] = value.double()
    return weights


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight * x / sqrt(mean(x^2) + eps), the mean over the last dimension. x [..., N], weight [N]."""
    return weight * x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + eps)


def rotate(x_TD: Tensor, theta: float) -> Tensor:
    """Rotary positions, half-rotation (non-interleaved) style: components j and j + D/2 form a pair.

    At position t, pair j turns by the angle t * theta^(-2j/D).
    """
    length, width = x_TD.shape
    half = width // 2
    frequencies = theta ** (-2.0 * torch.arange(half, dtype=torch.float64) / width)
    angles = torch.arange(length, dtype=torch.float64)[:, None] * frequencies[None, :]
    cos, sin = torch.cos(angles), torch.sin(angles)
    first, second = x_TD[:, :half], x_TD[:, half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def _project_heads(x_TH: Tensor, weights: Weights, name: str, heads: int, head_dim: int) -> list[Tensor]:
    """One projection (with its bias, if it has one), as a list of heads, each [T, D]."""
    y = x_TH @ weights[name].T
    if f"{name}_bias" in weights:
        y = y + weights[f"{name}_bias"]
    return [y[:, h * head_dim : (h + 1) * head_dim] for h in range(heads)]


def attention(x_TH: Tensor, weights: Weights, layer: str, config: ReferenceConfig) -> Tensor:
    """Causal grouped-query attention of one row; head h reads key-value head h // (heads / kv_heads)."""
    queries = _project_heads(x_TH, weights, f"{layer}.q", config.heads, config.head_dim)
    keys = _project_heads(x_TH, weights, f"{layer}.k", config.kv_heads, config.head_dim)
    values = _project_heads(x_TH, weights, f"{layer}.v", config.kv_heads, config.head_dim)
    if config.qk_norm:
        queries = [rms_norm(q, weights[f"{layer}.q_norm"], config.norm_eps) for q in queries]
        keys = [rms_norm(k, weights[f"{layer}.k_norm"], config.norm_eps) for k in keys]
    queries = [rotate(q, config.rope_theta) for q in queries]
    keys = [rotate(k, config.rope_theta) for k in keys]

    length = x_TH.shape[0]
    future = torch.arange(length)[None, :] > torch.arange(length)[:, None]
    heads_per_key = config.heads // config.kv_heads
    mixed = []
    for head, query in enumerate(queries):
        key, value = keys[head // heads_per_key], values[head // heads_per_key]
        scores_TT = query @ key.T / math.sqrt(config.head_dim)
        mixed.append(torch.softmax(scores_TT.masked_fill(future, -math.inf), dim=-1) @ value)
    return torch.cat(mixed, dim=-1) @ weights[f"{layer}.o"].T


def swiglu(x_TH: Tensor, weights: Weights, layer: str) -> Tensor:
    """down(silu(gate(x)) * up(x)), with silu(g) = g * sigmoid(g)."""
    gate = x_TH @ weights[f"{layer}.gate"].T
    up = x_TH @ weights[f"{layer}.up"].T
    return (gate * torch.sigmoid(gate) * up) @ weights[f"{layer}.down"].T


def forward_row(weights: Weights, config: ReferenceConfig, ids_T: Tensor) -> Tensor:
    """Run one row, whose first token is at position 0. Returns logits [T, V], or values [T] with a value head."""
    x_TH = weights["embedding"][ids_T]
    for i in range(config.layers):
        layer = f"layers.{i}"
        x_TH = x_TH + attention(rms_norm(x_TH, weights[f"{layer}.attn_norm"], config.norm_eps), weights, layer, config)
        x_TH = x_TH + swiglu(rms_norm(x_TH, weights[f"{layer}.mlp_norm"], config.norm_eps), weights, layer)
    x_TH = rms_norm(x_TH, weights["final_norm"], config.norm_eps)
    if config.value_head:
        return x_TH @ weights["value_head"][0]
    return x_TH @ weights["embedding" if config.tied else "output"].T
