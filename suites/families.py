"""The model of a cell in the form that each builder takes, made here: nothing is downloaded."""

from __future__ import annotations

from typing import Any

from suites.matrix import Sizes


def hf_config(sizes: Sizes) -> Any:
    """Qwen2 where queries, keys and values have a bias, Qwen3 where they are normalised, else Llama."""
    import transformers

    family = "Qwen2" if sizes.qkv_bias else "Qwen3" if sizes.qk_norm else "Llama"
    shape = sizes.shape()
    return getattr(transformers, f"{family}Config")(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        tie_word_embeddings=shape.tied,
        rms_norm_eps=shape.norm_eps,
        rope_theta=shape.rope_theta,
        max_position_embeddings=shape.max_positions,
    )


def model_spec(sizes: Sizes, builder: str) -> Any:
    """What ``build_model`` takes for this builder: a configuration of transformers, or Megatron-Bridge's provider."""
    return gpt_provider(sizes) if builder == "megatron-bridge" else hf_config(sizes)


def gpt_provider(sizes: Sizes) -> Any:
    """Megatron-Bridge's provider with these sizes.

    Raises:
        InputError: megatron-bridge is not installed.
    """
    import torch

    from steelyard.model.bridges.megatron_bridge import gpt_provider_class

    shape = sizes.shape()
    return gpt_provider_class()(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.ffn,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_heads,
        kv_channels=shape.head_dim,
        vocab_size=shape.vocab,
        share_embeddings_and_output_weights=shape.tied,
        add_qkv_bias=shape.qkv_bias,
        qk_layernorm=shape.qk_norm,
        layernorm_epsilon=shape.norm_eps,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        position_embedding_type="rope",
        rotary_base=shape.rope_theta,
        seq_length=shape.max_positions,
    )
