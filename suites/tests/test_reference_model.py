"""The judge's model, checked by torch's own functions, by hand-computed numbers and by Hugging Face's model."""

from __future__ import annotations

import ast
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor

import suites.reference as reference
from suites.reference import ReferenceConfig, forward_row, init_weights, rms_norm, rotate

QWEN2 = ReferenceConfig(
    layers=2, hidden=24, ffn=40, heads=4, kv_heads=2, head_dim=8, vocab=31, qkv_bias=True, rope_theta=1e4
)
QWEN3 = replace(QWEN2, qkv_bias=False, qk_norm=True, tied=True)
CRITIC = replace(QWEN2, value_head=True)


def vector(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def complex_rotary(x: Tensor, theta: float) -> Tensor:
    """Rotary positions of x [heads, T, D] by complex multiplication."""
    length, width = x.shape[-2:]
    pairs = torch.complex(x[..., : width // 2], x[..., width // 2 :])
    exponents = torch.arange(0, width, 2, dtype=torch.float64) / width
    turn = torch.polar(
        torch.ones(length, width // 2).double(), torch.outer(torch.arange(length), 1.0 / theta**exponents)
    )
    turned = pairs * turn
    return torch.cat([turned.real, turned.imag], dim=-1)


def torch_forward(weights: dict[str, Tensor], config: ReferenceConfig, ids: Tensor) -> Tensor:
    """The same model from torch.nn.functional, all heads at once."""

    def heads(x: Tensor, name: str) -> Tensor:
        y = F.linear(x, weights[name], weights.get(f"{name}_bias")).view(len(ids), -1, config.head_dim)
        if f"{name}_norm" in weights:
            y = F.rms_norm(y, (config.head_dim,), weights[f"{name}_norm"], config.norm_eps)
        return y.transpose(0, 1)

    def norm(x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, (config.hidden,), weights[name], config.norm_eps)

    x = F.embedding(ids, weights["embedding"])
    for i in range(config.layers):
        at = f"layers.{i}."
        h = norm(x, at + "attn_norm")
        query = complex_rotary(heads(h, at + "q"), config.rope_theta)
        key = complex_rotary(heads(h, at + "k"), config.rope_theta)
        mixed = F.scaled_dot_product_attention(
            query[None], key[None], heads(h, at + "v")[None], is_causal=True, enable_gqa=True
        )[0]
        x = x + F.linear(mixed.transpose(0, 1).reshape(len(ids), -1), weights[at + "o"])
        h = norm(x, at + "mlp_norm")
        x = x + F.linear(
            F.silu(F.linear(h, weights[at + "gate"])) * F.linear(h, weights[at + "up"]), weights[at + "down"]
        )
    x = norm(x, "final_norm")
    if config.value_head:
        return F.linear(x, weights["value_head"])[:, 0]
    return F.linear(x, weights["embedding" if config.tied else "output"])


@pytest.mark.parametrize(
    "config", [QWEN2, QWEN3, CRITIC, replace(QWEN2, kv_heads=4, tied=True), replace(QWEN3, kv_heads=1)]
)
def test_forward_agrees_with_torch_functional(config: ReferenceConfig):
    weights = init_weights(config, seed=1)
    ids = torch.randint(config.vocab, (13,), generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(
        forward_row(weights, config, ids), torch_forward(weights, config, ids), rtol=1e-11, atol=1e-11
    )


def test_rms_norm_by_hand():
    # mean square of (3, 4) is 12.5
    expected = vector(2 * 3 / math.sqrt(12.5), 10 * 4 / math.sqrt(12.5))
    torch.testing.assert_close(rms_norm(vector(3, 4), vector(2, 10), eps=0.0), expected)


def test_rotated_products_depend_on_the_distance_only():
    query = vector(0.3, -1.1, 0.7, 2.0, 0.1, 0.9).expand(12, 6)
    key = vector(1.0, 0.2, -0.4, 0.6, -1.3, 0.8).expand(12, 6)
    products = rotate(query, 100.0) @ rotate(key, 100.0).T
    for distance in range(-11, 12):
        diagonal = products.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))
    assert abs(products[0, 0] - products[5, 0]) > 0.1


def test_position_zero_is_not_turned_and_halves_pair_up():
    x = vector(1, 0, 0, 0).expand(2, 4)
    torch.testing.assert_close(rotate(x, 100.0)[0], x[0])
    torch.testing.assert_close(rotate(x, 100.0)[1], vector(math.cos(1), 0, math.sin(1), 0))
    second = vector(0, 1, 0, 0).expand(2, 4)  # frequency 100^(-1/2)
    torch.testing.assert_close(rotate(second, 100.0)[1], vector(0, math.cos(0.1), 0, math.sin(0.1)))


def test_a_token_sees_nothing_after_it():
    weights = init_weights(QWEN2, seed=3)
    ids = torch.arange(9)
    torch.testing.assert_close(forward_row(weights, QWEN2, ids)[:5], forward_row(weights, QWEN2, ids[:5]))


def test_weights_are_float32_values_and_do_not_depend_on_each_other():
    untied, tied = init_weights(QWEN2, seed=7), init_weights(replace(QWEN2, tied=True, layers=1), seed=7)
    for name, weight in tied.items():
        assert torch.equal(weight, untied[name])
        assert weight.dtype == torch.float64
        assert torch.equal(weight, weight.float().double())
    assert not torch.equal(untied["embedding"], init_weights(QWEN2, seed=8)["embedding"])
    assert not torch.equal(untied["layers.0.q"], untied["layers.1.q"])
    assert untied["layers.0.q_bias"].abs().min() > 0


def test_config_from_mapping_and_object():
    fields = {name: getattr(QWEN3, name) for name in ReferenceConfig.__dataclass_fields__}
    assert ReferenceConfig.from_fields(QWEN3) == QWEN3
    assert ReferenceConfig.from_fields({**fields, "experts": 0}) == QWEN3
    assert ReferenceConfig.from_fields(QWEN3, value_head=True).value_head


@pytest.mark.parametrize("family", ["Qwen2", "Qwen3"])
def test_forward_agrees_with_hugging_face(family: str):
    transformers = pytest.importorskip("transformers")
    config = QWEN2 if family == "Qwen2" else replace(QWEN3, tied=False)
    theirs = getattr(transformers, f"{family}Config")(
        num_hidden_layers=config.layers,
        hidden_size=config.hidden,
        intermediate_size=config.ffn,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        rms_norm_eps=config.norm_eps,
        tie_word_embeddings=False,
        attn_implementation="eager",
    )
    model = getattr(transformers, f"{family}ForCausalLM")(theirs).double()
    weights = init_weights(config, seed=4)
    renamed = {"embedding": "model.embed_tokens.weight", "final_norm": "model.norm.weight", "output": "lm_head.weight"}
    parts = {"attn_norm": "input_layernorm.weight", "mlp_norm": "post_attention_layernorm.weight"}
    for name in "qkvo":
        parts |= {name: f"self_attn.{name}_proj.weight", f"{name}_bias": f"self_attn.{name}_proj.bias"}
        parts |= {f"{name}_norm": f"self_attn.{name}_norm.weight"}
    parts |= {name: f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")}
    renamed |= {
        f"layers.{i}.{ours}": f"model.layers.{i}.{hf}" for i in range(config.layers) for ours, hf in parts.items()
    }
    model.load_state_dict({renamed[name]: weight for name, weight in weights.items()}, strict=True)
    ids = torch.arange(11) % config.vocab
    with torch.no_grad():
        logits = model(input_ids=ids[None]).logits[0]
    # Hugging Face keeps the rotary cosines in float32.
    torch.testing.assert_close(forward_row(weights, config, ids), logits.double(), rtol=1e-5, atol=1e-5)


def test_the_judge_imports_nothing_of_what_it_judges():
    for path in Path(reference.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            allowed = {"__future__", "collections", "dataclasses", "hashlib", "math", "suites", "torch"}
            assert {name.split(".")[0] for name in names} <= allowed, path
            assert all(name.startswith("suites.reference") for name in names if name.startswith("suites")), path
