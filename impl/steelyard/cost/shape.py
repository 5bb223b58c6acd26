"""The sizes of a model, and how many parameters they make."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from typing import Any

from steelyard.errors import ShapeError

_POSITIVE = ("layers", "hidden", "ffn", "heads", "kv_heads", "head_dim", "vocab", "max_positions")
_EXPERTS = ("experts", "experts_per_token", "moe_ffn", "shared_ffn", "dense_layers")
_LATENT = ("q_lora", "kv_lora", "qk_nope", "qk_rope", "v_head_dim")


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder-only transformer (RMSNorm, gated SiLU feed-forward, rotary positions).

    Attributes:
        layers, hidden, ffn, heads, kv_heads, head_dim, vocab: the usual sizes; ``ffn`` is that of a dense layer.
        tied: the output projection is the embedding.
        qkv_bias: the query, key and value projections have a bias (Qwen2).
        qk_norm: queries and keys are normalised per head (Qwen3).
        rope_theta, norm_eps, max_positions: base of the rotary frequencies, epsilon of RMSNorm, longest sequence the
            model takes.
        experts, experts_per_token, moe_ffn, shared_ffn: mixture of experts; 0 experts means dense. ``shared_ffn`` is
            the size of all shared experts together.
        dense_layers: leading layers that stay dense in a mixture-of-experts model.
        q_lora, kv_lora, qk_nope, qk_rope, v_head_dim: multi-head latent attention; ``kv_lora=0`` means ordinary
            attention, ``q_lora=0`` with latent attention means that queries are projected directly. ``head_dim`` is
            then that of a query, ``qk_nope + qk_rope``.
        name: where the shape came from, for messages.
        out_bias: the output projection of attention has a bias.
        shared_gate: the shared experts are scaled by a learned gate (Qwen2-MoE).
        norm_topk_prob: the weights of a token's chosen experts add up to 1, instead of being shares of all experts.

    Raises:
        ShapeError: sizes are not whole numbers, out of range, or contradict each other.
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
    max_positions: int = 32768
    experts: int = 0
    experts_per_token: int = 0
    moe_ffn: int = 0
    shared_ffn: int = 0
    dense_layers: int = 0
    q_lora: int = 0
    kv_lora: int = 0
    qk_nope: int = 0
    qk_rope: int = 0
    v_head_dim: int = 0
    name: str = "custom"
    out_bias: bool = False
    shared_gate: bool = False
    norm_topk_prob: bool = False

    def __post_init__(self) -> None:
        for name in (*_POSITIVE, *_EXPERTS, *_LATENT):
            value, least = getattr(self, name), int(name in _POSITIVE)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ShapeError(f"model {self.name}: {name}={value!r} must be a whole number of at least {least}")
        if self.heads % self.kv_heads:
            raise ShapeError(
                f"model {self.name}: {self.heads} heads are not a multiple of {self.kv_heads} key-value heads"
            )
        self._check_experts()
        self._check_latent()

    def _check_experts(self) -> None:
        if not self.experts:
            given = [
                f"{name}={getattr(self, name)}"
                for name in (*_EXPERTS, "shared_gate", "norm_topk_prob")
                if getattr(self, name)
            ]
            if given:
                raise ShapeError(f"model {self.name}: {', '.join(given)} needs experts above 0")
            return
        if not 1 <= self.experts_per_token <= self.experts:
            raise ShapeError(
                f"model {self.name}: experts_per_token={self.experts_per_token} must be 1 to experts={self.experts}"
            )
        if not self.moe_ffn:
            raise ShapeError(f"model {self.name}: moe_ffn=0 with {self.experts} experts: give the size of one expert")
        if self.dense_layers > self.layers:
            raise ShapeError(f"model {self.name}: dense_layers={self.dense_layers} is above layers={self.layers}")

    def _check_latent(self) -> None:
        if not self.kv_lora:
            given = [f"{name}={getattr(self, name)}" for name in _LATENT if getattr(self, name)]
            if given:
                raise ShapeError(f"model {self.name}: {', '.join(given)} needs kv_lora above 0 (latent attention)")
            return
        for name in ("qk_nope", "qk_rope", "v_head_dim"):
            if not getattr(self, name):
                raise ShapeError(f"model {self.name}: {name}=0 with latent attention (kv_lora={self.kv_lora}): give it")
        if self.head_dim != self.qk_nope + self.qk_rope:
            raise ShapeError(
                f"model {self.name}: head_dim={self.head_dim} must be qk_nope + qk_rope = {self.qk_nope + self.qk_rope}"
            )
        if self.qkv_bias or self.qk_norm or self.out_bias:
            raise ShapeError(f"model {self.name}: latent attention takes no qkv_bias, qk_norm or out_bias")

    @classmethod
    def from_hf(cls, config: Mapping[str, Any] | str | PathLike[str] | Any, *, name: str | None = None) -> ModelShape:
        """The shape that a Hugging Face configuration describes.

        Knows qwen2, qwen3, llama, qwen2_moe, qwen3_moe, deepseek_v2 and deepseek_v3 (Moonlight too). Scaling of rotary
        positions, routing in groups and multi-token prediction layers are not part of a shape.

        Args:
            config: a dict, a ``config.json`` or a folder that holds one, or anything with ``to_dict()`` (a
                configuration of transformers).
            name: for messages; by default the model's own.

        Raises:
            ShapeError: the file can't be read, the model is of another kind, a size is missing, or the model has
                something that a shape does not describe.
        """
        from steelyard.cost.huggingface import shape_fields

        return cls(**shape_fields(config, name))

    @classmethod
    def preset(cls, name: str) -> ModelShape:
        """A shape shipped with Steelyard (see ``presets()``); upper and lower case are the same.

        Raises:
            ShapeError: there is none of that name; the text has the close ones.
        """
        from steelyard.cost.huggingface import preset_config

        canonical, config = preset_config(name)
        return cls.from_hf(config, name=canonical)

    @property
    def moe_layers(self) -> int:
        """Layers whose feed-forward is a mixture of experts."""
        return self.layers - self.dense_layers if self.experts else 0

    @property
    def value_dim(self) -> int:
        """Size of a value per head."""
        return self.v_head_dim if self.kv_lora else self.head_dim

    @property
    def attention_weights(self) -> int:
        """Weights in the projections of one attention layer, without biases and norms."""
        queries, out = self.heads * self.head_dim, self.heads * self.value_dim * self.hidden
        if not self.kv_lora:
            return self.hidden * (queries + 2 * self.kv_heads * self.head_dim) + out
        query = self.q_lora * (self.hidden + queries) if self.q_lora else self.hidden * queries
        # The rotary part of the key is one vector for all heads and skips the latent.
        down = self.hidden * (self.kv_lora + self.qk_rope)
        up = self.kv_lora * self.heads * (self.qk_nope + self.v_head_dim)
        return query + down + up + out

    def feed_forward_weights(self, experts: int) -> int:
        """Weights in the matrices of all feed-forward layers, counting ``experts`` routed ones in each MoE layer."""
        dense = 3 * self.hidden * self.ffn * (self.layers - self.moe_layers)
        router = self.hidden * (self.experts + self.shared_gate)
        return dense + self.moe_layers * (router + 3 * self.hidden * (experts * self.moe_ffn + self.shared_ffn))

    @property
    def parameters(self) -> int:
        """Parameters of the language model: embedding, layers, norms, biases and, when untied, the output projection.

        Multi-token prediction layers and balancing biases of routers are not counted.
        """
        return self._parameters(self.experts)

    @property
    def parameters_active(self) -> int:
        """Parameters that one token meets: ``parameters`` with only ``experts_per_token`` of the routed experts."""
        return self._parameters(self.experts_per_token)

    def _parameters(self, experts: int) -> int:
        per_layer = self.attention_weights + 2 * self.hidden
        per_layer += self.qkv_bias * (self.heads + 2 * self.kv_heads) * self.head_dim + self.out_bias * self.hidden
        per_layer += 2 * self.head_dim * self.qk_norm + self.q_lora + self.kv_lora
        embeddings = self.vocab * self.hidden * (1 if self.tied else 2)
        return self.layers * per_layer + self.feed_forward_weights(experts) + embeddings + self.hidden


def presets() -> list[str]:
    """Names of the shipped shapes."""
    from steelyard.cost.huggingface import preset_names

    return preset_names()
