"""Builders outside megatron-core, each behind the same function.

    chunks = build_chunks(spec, layout, dtype=..., ddp_config=..., overrides=..., value_head=..., prepare=...)

A bridge turns a Hugging Face configuration into a model and wraps it in DDP on its own. What is handed to it here is
what the plain builder uses: the same settings of the layout, the same transformer overrides, the same resolved DDP
configuration, whole, and ``prepare``, called with every bare chunk before it is wrapped.
"""

from __future__ import annotations

from typing import Any

# Fusions that bridges switch on and that need TransformerEngine or Apex, or a stream beside the main one.
WITHOUT_FUSIONS: dict[str, Any] = {
    "masked_softmax_fusion": False,
    "persist_layer_norm": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "gradient_accumulation_fusion": False,
    "moe_shared_expert_overlap": False,
}
