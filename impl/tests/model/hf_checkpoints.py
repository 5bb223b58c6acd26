"""Tiny Hugging Face checkpoints with random weights, one of each family, and the logits that transformers computes."""

import torch

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e3,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
FAMILIES = {
    "qwen2": SIZES | {"tie_word_embeddings": True},
    "qwen3": SIZES | {"head_dim": 16},
    "llama": SIZES,
    "qwen2_moe": SIZES | EXPERTS | {"shared_expert_intermediate_size": 40, "mlp_only_layers": [0]},
    "qwen3_moe": SIZES | EXPERTS | {"head_dim": 16, "norm_topk_prob": True, "tie_word_embeddings": True},
}
ROWS, WIDTH = 4, 12


def write(family, folder, **changes):
    """Save a model of the family in ``folder``, and its input and logits beside the folder; returns the folder."""
    from transformers import AutoConfig, AutoModelForCausalLM

    generator = torch.Generator().manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **FAMILIES[family] | changes))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Biases and norms are drawn too, so that each of them shows in the logits.
            parameter.normal_(mean=float("norm" in name), std=0.2, generator=generator)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    ids = torch.randint(1, 96, (ROWS, WIDTH), generator=generator)
    torch.save({"ids": ids, "logits": logits(model, ids)}, folder.with_suffix(".pt"))
    return folder


def logits(model, ids):
    with torch.no_grad():
        return model.eval()(ids).logits
