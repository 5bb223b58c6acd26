"""What a sequence and a micro-batch cost: the shape of a model, and the forward work its lengths cause."""

from __future__ import annotations

from dataclasses import dataclass

from steelyard.errors import ShapeError


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder-only transformer (RMSNorm, gated SiLU feed-forward, rotary positions).

    Attributes:
        layers, hidden, ffn, heads, kv_heads, head_dim, vocab: the usual sizes; ``ffn`` is that of a dense layer.
        tied: the output projection is the embedding.
        qkv_bias: the query, key and value projections have a bias (Qwen2).
        qk_norm: queries and keys are normalised per head (Qwen3).
        rope_theta, norm_eps, max_positions: base of the rotary frequencies, epsilon of RMSNorm, longest sequence the model takes.
        experts, experts_per_token, moe_ffn, shared_ffn: mixture of experts; 0 experts means dense.
        dense_layers: leading layers that stay dense in a mixture-of-experts model.
        q_lora, kv_lora, qk_nope, qk_rope, v_head_dim: multi-head latent attention; ``kv_lora=0`` means ordinary attention.
        name: where the shape came from, for messages.
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

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "ffn", "heads", "kv_heads", "head_dim", "vocab"):
            if getattr(self, name) < 1:
                raise ShapeError(f"model {self.name}: {name}={getattr(self, name)} must be at least 1")
        if self.heads % self.kv_heads:
            raise ShapeError(f"model {self.name}: {self.heads} heads are not a multiple of {self.kv_heads} key-value heads")
