"""Cost of sequences: FLOPs and parameters against plain torch, and fits to measured seconds."""

from __future__ import annotations

import dataclasses
import pickle
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from steelyard.cost import ModelShape, SequenceCost
from steelyard.errors import InputError, LengthsError

SMALL = ModelShape(layers=3, hidden=64, ffn=160, heads=8, kv_heads=2, head_dim=16, vocab=500, qkv_bias=True, tied=True)
LATENT = {
    "kv_heads": 8,
    "head_dim": 24,
    "kv_lora": 32,
    "qk_nope": 16,
    "qk_rope": 8,
    "v_head_dim": 20,
    "qkv_bias": False,
}
EXPERTS = {"experts": 6, "experts_per_token": 2, "moe_ffn": 48}
SHAPES = {
    "grouped queries": SMALL,
    "normalised queries": dataclasses.replace(SMALL, qk_norm=True, qkv_bias=False, tied=False, out_bias=True),
    "experts": dataclasses.replace(SMALL, **EXPERTS),
    "shared experts": dataclasses.replace(SMALL, **EXPERTS, shared_ffn=96, shared_gate=True, dense_layers=1),
    "latent": dataclasses.replace(SMALL, **LATENT),
    "latent queries": dataclasses.replace(SMALL, **LATENT, **EXPERTS, q_lora=40, shared_ffn=48, dense_layers=1),
}


class PlainModel(nn.Module):
    """The model of a shape in plain torch, without a causal mask: every matrix and vector is a parameter."""

    def __init__(self, shape: ModelShape, value_head: bool = False) -> None:
        super().__init__()
        self.shape, self.matrices, self.vectors = shape, nn.ParameterDict(), nn.ParameterDict()
        self.embedding = nn.Parameter(torch.randn(shape.vocab, shape.hidden))
        self.value_head = value_head

    def times(self, name: str, x: torch.Tensor, columns: int) -> torch.Tensor:
        """x times the matrix called ``name``, which is made at its first use."""
        if name not in self.matrices:
            self.matrices[name] = nn.Parameter(torch.randn(x.shape[-1], columns) / x.shape[-1])
        return x @ self.matrices[name]

    def vector(self, name: str, size: int) -> torch.Tensor:
        if name not in self.vectors:
            self.vectors[name] = nn.Parameter(torch.ones(size))
        return self.vectors[name]

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.rms_norm(x, x.shape[-1:], self.vector(name, x.shape[-1]))

    def queries_keys_values(self, at: str, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        s, n = self.shape, x.shape[0]
        if s.kv_lora:
            low = self.norm(f"{at}q_norm", self.times(f"{at}q_a", x, s.q_lora)) if s.q_lora else x
            query = self.times(f"{at}q", low, s.heads * s.head_dim).view(n, s.heads, -1)
            latent, rotary = self.times(f"{at}kv_a", x, s.kv_lora + s.qk_rope).split([s.kv_lora, s.qk_rope], dim=-1)
            up = self.times(f"{at}kv_b", self.norm(f"{at}kv_norm", latent), s.heads * (s.qk_nope + s.v_head_dim))
            key, value = up.view(n, s.heads, -1).split([s.qk_nope, s.v_head_dim], dim=-1)
            return query, torch.cat([key, rotary[:, None].expand(-1, s.heads, -1)], dim=-1), value
        made = []
        for name, heads in (("q", s.heads), ("k", s.kv_heads), ("v", s.kv_heads)):
            part = self.times(f"{at}{name}", x, heads * s.head_dim)
            if s.qkv_bias:
                part = part + self.vector(f"{at}{name}_bias", part.shape[-1])
            part = part.view(n, heads, s.head_dim)
            made.append(self.norm(f"{at}{name}_norm", part) if s.qk_norm and name != "v" else part)
        share = s.heads // s.kv_heads
        return made[0], made[1].repeat_interleave(share, 1), made[2].repeat_interleave(share, 1)

    def attend(self, at: str, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (each.transpose(0, 1) for each in self.queries_keys_values(at, x))
        mixed = torch.softmax(query @ key.transpose(1, 2), dim=-1) @ value
        out = self.times(f"{at}o", mixed.transpose(0, 1).reshape(x.shape[0], -1), self.shape.hidden)
        return out + self.vector(f"{at}o_bias", self.shape.hidden) if self.shape.out_bias else out

    def gated(self, at: str, x: torch.Tensor, size: int) -> torch.Tensor:
        inner = nn.functional.silu(self.times(f"{at}gate", x, size)) * self.times(f"{at}up", x, size)
        return self.times(f"{at}down", inner, self.shape.hidden)

    def feed_forward(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        s, at = self.shape, f"{layer}_ffn_"
        if not s.experts or layer < s.dense_layers:
            return self.gated(at, x, s.ffn)
        chosen = self.times(f"{at}router", x, s.experts).topk(s.experts_per_token).indices
        out = torch.zeros_like(x)
        for expert in range(s.experts):
            rows = (chosen == expert).any(-1).nonzero()[:, 0]
            out[rows] += self.gated(f"{at}{expert}_", x[rows], s.moe_ffn)
        if s.shared_ffn:
            shared = self.gated(f"{at}shared_", x, s.shared_ffn)
            out += shared * self.times(f"{at}shared_router", x, 1).sigmoid() if s.shared_gate else shared
        return out

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding[ids]
        for layer in range(self.shape.layers):
            x = x + self.attend(f"{layer}_", self.norm(f"{layer}_before_attention", x))
            x = x + self.feed_forward(layer, self.norm(f"{layer}_before_ffn", x))
        x = self.norm("final", x)
        if self.value_head:
            return self.times("value", x, 1)
        return x @ self.embedding.T if self.shape.tied else self.times("output", x, self.shape.vocab)


def counted(model: PlainModel, tokens: int) -> int:
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.randint(0, model.shape.vocab, (tokens,), generator=torch.Generator().manual_seed(0)))
    return counter.get_total_flops()


@pytest.mark.parametrize("value_head", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_flops_are_those_of_torchs_counter(name: str, value_head: bool) -> None:
    shape = SHAPES[name]
    cost = SequenceCost(shape, causal=False, value_head=value_head)
    model = PlainModel(shape, value_head)
    for tokens in (7, 64, 300):
        assert cost([tokens])[0] == pytest.approx(counted(model, tokens), rel=1e-9)


@pytest.mark.parametrize("name", SHAPES)
def test_parameters_are_those_of_the_plain_model(name: str) -> None:
    model = PlainModel(SHAPES[name])
    counted(model, 200)  # enough tokens that every expert is chosen and so made
    assert SHAPES[name].parameters == sum(each.numel() for each in model.parameters())


@pytest.mark.parametrize("name", SHAPES)
def test_the_causal_term_counts_each_pair_once(name: str) -> None:
    shape = SHAPES[name]
    full, causal = SequenceCost(shape, causal=False), SequenceCost(shape)
    for tokens in (1, 2, 9, 33):
        mask = np.tril(np.ones((tokens, tokens)))
        per_pair = full.attention([tokens])[0] / tokens**2
        assert causal.attention([tokens])[0] == pytest.approx(per_pair * mask.sum(), rel=1e-12)
    assert np.array_equal(full.linear([5, 6]), causal.linear([5, 6]))


@given(st.lists(st.integers(0, 40_000), max_size=50), st.sampled_from(sorted(SHAPES)), st.booleans())
@settings(max_examples=50, deadline=None)
def test_parts_add_up_and_order_does_not_matter(lengths: list[int], name: str, value_head: bool) -> None:
    cost = SequenceCost(SHAPES[name], fixed=1e9, value_head=value_head)
    work = cost(lengths)
    assert work.dtype == np.float64
    assert work.shape == (len(lengths),)
    assert np.allclose(sum(cost.parts(lengths).values()), work, rtol=1e-12)
    assert np.allclose(cost.linear(lengths) + cost.attention(lengths), work, rtol=1e-12)
    assert cost.micro_batch(lengths) == cost.micro_batch(lengths[::-1]) == cost.micro_batch(np.array(lengths, int))
    assert cost.micro_batch(lengths) == pytest.approx(1e9 + work.sum(), rel=1e-12)


def test_one_long_sequence_costs_more_than_its_halves() -> None:
    cost = SequenceCost(ModelShape.preset("qwen2.5-7b"))
    assert cost.micro_batch([32768]) > cost.micro_batch([16384, 16384])
    # The known rule of thumb: twice the weights per token, and attention on top (embedding rows are looked up).
    shape = cost.shape
    weights = shape.parameters - shape.vocab * shape.hidden
    assert cost.linear([1])[0] == pytest.approx(2 * weights, rel=1e-3)


def test_a_value_head_saves_the_logits() -> None:
    shape = SHAPES["latent"]
    saved = SequenceCost(shape)([10]) - SequenceCost(shape, value_head=True)([10])
    assert saved[0] == 2 * 10 * shape.hidden * (shape.vocab - 1)


@pytest.mark.parametrize(
    ("lengths", "named"),
    [
        ([3, -1], "sequence 1 has length -1"),
        ([2.5], "sequence 0 has length 2.5"),
        ([1, float("nan")], "sequence 1 has length nan"),
        ([float("inf")], "sequence 0 has length inf"),
        (5, "0 dimensions"),
        ([[1, 2]], "2 dimensions"),
        ([[1], [1, 2]], "list of whole numbers"),
        (["x"], "list of whole numbers"),
    ],
)
def test_bad_lengths_are_named(lengths: Any, named: str) -> None:
    with pytest.raises(LengthsError, match=named):
        SequenceCost(SMALL)(lengths)


@pytest.mark.parametrize("fixed", [-1.0, float("nan"), float("inf"), "1"])
def test_a_bad_fixed_cost_is_refused(fixed: Any) -> None:
    with pytest.raises(InputError, match="fixed="):
        SequenceCost(SMALL, fixed=fixed)


def test_a_cost_travels_between_processes() -> None:
    cost = SequenceCost(SMALL, fixed=5.0)
    assert pickle.loads(pickle.dumps(cost)).micro_batch([3, 4]) == cost.micro_batch([3, 4])


def test_costs_need_no_torch() -> None:
    script = "import sys, steelyard.cost as c; c.ModelShape.preset('qwen3-8b'); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)


# Fits


def micro_batches(count: int, seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(1, 16_000, rng.integers(1, 9)).tolist() for _ in range(count)]


@given(
    st.floats(0, 1),
    st.floats(1e-15, 1e-12),
    st.floats(1e-15, 1e-12),
    st.integers(0, 1000),
)
@settings(max_examples=40, deadline=None)
def test_a_fit_finds_the_coefficients_behind_exact_seconds(fixed: float, a: float, b: float, seed: int) -> None:
    cost = SequenceCost(ModelShape.preset("qwen2.5-0.5b"))
    batches = micro_batches(30, seed)
    seconds = [fixed + a * cost.linear(each).sum() + b * cost.attention(each).sum() for each in batches]
    fitted = cost.fit(zip(batches, seconds, strict=True))
    assert (fitted.per_linear, fitted.per_attention) == pytest.approx((a, b), rel=1e-4)
    assert fitted.fixed == pytest.approx(fixed, abs=1e-6 * max(seconds))
    assert fitted.max_error < 1e-4
    assert fitted.r_squared > 1 - 1e-9
    assert fitted.samples == 30


def test_a_fit_states_its_error_and_is_a_cost_in_seconds() -> None:
    cost = SequenceCost(ModelShape.preset("qwen2.5-0.5b"))
    noise = np.random.default_rng(0).normal(1, 0.05, 200)
    batches = micro_batches(200, 1)
    seconds = [float(n * (0.01 + cost.micro_batch(each) * 1e-14)) for n, each in zip(noise, batches, strict=True)]
    fitted = cost.fit(zip(batches, seconds, strict=True))
    predicted = np.array([fitted.micro_batch(each) for each in batches])
    relative = np.abs(predicted - seconds) / seconds
    assert (fitted.median_error, fitted.max_error) == pytest.approx((np.median(relative), relative.max()))
    assert fitted.r_squared == pytest.approx(1 - ((predicted - seconds) ** 2).sum() / np.var(seconds) / 200)
    assert 0.02 < fitted.median_error < 0.06
    assert fitted.r_squared > 0.95
    assert fitted.micro_batch(batches[0]) == pytest.approx(fitted.fixed + fitted(batches[0]).sum())
    assert "R² 0.9" in str(fitted)
    assert pickle.loads(pickle.dumps(fitted)).micro_batch([3]) == fitted.micro_batch([3])


@given(st.integers(0, 10_000))
@settings(max_examples=40, deadline=None)
def test_a_fit_is_the_best_without_negative_coefficients(seed: int) -> None:
    nnls = pytest.importorskip("scipy.optimize").nnls
    cost = SequenceCost(SMALL)
    batches = micro_batches(12, seed)
    seconds = np.random.default_rng(seed).uniform(0.1, 1.0, 12)  # noise: some coefficients want to be negative
    fitted = cost.fit((each, float(taken)) for each, taken in zip(batches, seconds, strict=True))
    assert min(fitted.fixed, fitted.per_linear, fitted.per_attention) >= 0
    columns = np.array([[1.0, cost.linear(each).sum(), cost.attention(each).sum()] for each in batches])
    columns /= np.linalg.norm(columns, axis=0)
    predicted = np.array([fitted.micro_batch(each) for each in batches])
    assert np.linalg.norm(predicted - seconds) == pytest.approx(nnls(columns, seconds)[1], rel=1e-6)


@pytest.mark.parametrize(
    ("samples", "named"),
    [
        ([], "at least 3 samples, got 0"),
        ([([1], 1.0), ([2], 2.0)], "got 2"),
        ([([1], 1.0), ([2], 0.0), ([3], 1.0)], "sample 1: 0.0"),
        ([([1], 1.0), ([2], float("nan")), ([3], 1.0)], "sample 1: nan"),
        # Sequences of one length only: tokens and pairs grow together.
        ([([512] * n, float(n)) for n in range(1, 9)], "do not tell"),
        ([([100, 200], 1.0)] * 5, "do not tell"),
        ([([], 1.0)] * 5, "do not tell"),
    ],
)
def test_samples_that_cannot_be_fitted_are_refused(samples: list, named: str) -> None:
    with pytest.raises(InputError, match=named):
        SequenceCost(SMALL).fit(samples)
