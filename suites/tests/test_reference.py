"""The judge's losses, gradients, metrics and optimiser, checked by hand-computed numbers and finite differences."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from suites.reference import (
    ActorSettings,
    AggregationSettings,
    CriticSettings,
    ReferenceConfig,
    Row,
    actor_step,
    adamw_step,
    aggregate,
    critic_step,
    explained_variance,
    forward_row,
    global_grad_norm,
    init_weights,
    kl_token_losses,
    policy_token_losses,
    row_log_probs,
    row_values,
    value_token_losses,
)

QWEN2 = ReferenceConfig(
    layers=2, hidden=24, ffn=40, heads=4, kv_heads=2, head_dim=8, vocab=31, qkv_bias=True, rope_theta=1e4
)
QWEN3 = replace(QWEN2, qkv_bias=False, qk_norm=True, tied=True)
CRITIC = replace(QWEN2, value_head=True)


def vector(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def random_rows(config: ReferenceConfig, sizes: list[tuple[int, int]], seed: int = 0) -> list[Row]:
    """Rows of (prompt, response) lengths with every field set and holes in the mask."""
    generator = torch.Generator().manual_seed(seed)

    def normal(n: int, scale: float) -> Tensor:
        return scale * torch.randn(n, generator=generator, dtype=torch.float64)

    rows = []
    for prompt, response in sizes:
        ids = torch.randint(config.vocab, (prompt + response,), generator=generator)
        likely = -math.log(config.vocab)
        rows.append(
            Row(
                prompt=ids[:prompt],
                response=ids[prompt:],
                mask=torch.rand(response, generator=generator) < 0.8,
                old_log_probs=likely + normal(response, 0.8),
                advantages=normal(response, 1.0),
                ref_log_probs=likely + normal(response, 0.5),
                values=normal(response, 0.5),
                returns=normal(response, 1.0),
            )
        )
    return rows


# --- outputs of a row ------------------------------------------------------------------------------------------------


def test_log_probs_and_entropy_come_from_the_position_before():
    ids = torch.tensor([0, 2, 1])
    logits = torch.log(torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.6, 0.3], [0.2, 0.2, 0.6]]).double())
    log_probs, entropy = row_log_probs(logits, ids, prompt_length=1)
    torch.testing.assert_close(log_probs, vector(math.log(0.25), math.log(0.6)), rtol=1e-6, atol=1e-6)
    by_hand = [1.5 * math.log(2), -(0.1 * math.log(0.1) + 0.6 * math.log(0.6) + 0.3 * math.log(0.3))]
    torch.testing.assert_close(entropy, vector(*by_hand), rtol=1e-6, atol=1e-6)


def test_temperature_divides_the_logits():
    ids, logits = torch.tensor([0, 1]), vector(1.0, 3.0).expand(2, 2)
    log_probs, _ = row_log_probs(logits, ids, prompt_length=1, temperature=2.0)
    torch.testing.assert_close(log_probs, vector(math.log(math.e / (1 + math.e))))


def test_a_first_token_without_predecessor_is_zero_and_does_not_count():
    logits, ids = torch.randn(3, 5, dtype=torch.float64), torch.tensor([4, 0, 2])
    log_probs, entropy = row_log_probs(logits, ids, prompt_length=0)
    assert log_probs[0] == 0
    assert entropy[0] == 0
    torch.testing.assert_close(log_probs[1:], row_log_probs(logits, ids, prompt_length=1)[0])
    assert row_values(vector(1, 2, 3), prompt_length=0).tolist() == [0, 1, 2]
    assert row_values(vector(1, 2, 3), prompt_length=1).tolist() == [1, 2]
    assert Row([], [4, 0, 2], [1, 1, 0]).valid.tolist() == [False, True, False]
    assert Row([9], [4, 0, 2], [1, 1, 0]).valid.tolist() == [True, True, False]


def test_fields_of_another_length_are_refused():
    with pytest.raises(ValueError, match="advantages has shape"):
        Row([1], [2, 3], [1, 1], advantages=[0.5])


# --- token losses ----------------------------------------------------------------------------------------------------


def test_dual_clip_by_hand():
    ratios, advantages = vector(1.5, 0.5, 1.1, 5.0, 0.5, 2.0), vector(1, 1, 1, -1, -1, -1)
    loss, clipped, dual, drift = policy_token_losses(
        ratios.log() - 3.0, torch.full_like(ratios, -3.0), advantages, ActorSettings()
    )
    torch.testing.assert_close(loss, vector(-1.2, -0.5, -1.1, 3.0, 0.8, 2.0))
    assert clipped.tolist() == [True, False, False, False, True, False]
    assert dual.tolist() == [False, False, False, True, False, False]
    torch.testing.assert_close(drift, -ratios.log())


def test_the_two_sides_of_the_clip_can_differ():
    settings = ActorSettings(clip_ratio_low=0.1, clip_ratio_high=0.3)
    loss, clipped, _, _ = policy_token_losses(vector(1.4, 0.8).log(), vector(0, 0), vector(2, -2), settings)
    torch.testing.assert_close(loss, vector(-2.6, 1.8))
    assert clipped.all()


def test_kl_estimators_by_hand():
    new, ref = vector(-1.0, -2.0, -8.0), vector(-1.5, -1.0, -1.0)
    torch.testing.assert_close(kl_token_losses(new, ref, "k1"), vector(0.5, -1.0, -7.0))
    torch.testing.assert_close(kl_token_losses(new, ref, "k2"), vector(0.125, 0.5, 24.5))
    expected = vector(math.exp(-0.5) + 0.5 - 1, math.e - 2, 10.0)  # the last is clamped
    torch.testing.assert_close(kl_token_losses(new, ref, "k3"), expected)


def test_value_clip_by_hand():
    # v, old, return: moved away beyond the range; moved towards the return beyond it; within it
    loss, clipped = value_token_losses(vector(2, 2, 0.3), vector(0, 0, 0), vector(-1, 3, 1), cliprange_value=0.5)
    torch.testing.assert_close(loss, 0.5 * vector(9, 6.25, 0.49))
    assert clipped.tolist() == [False, True, False]


# --- a mini-batch ----------------------------------------------------------------------------------------------------


def test_token_mean_counts_tokens_and_not_rows():
    rows = [torch.full((100,), 1.0).double(), torch.full((900,), 3.0).double()]
    assert aggregate(rows, AggregationSettings(loss_agg_mode="token-mean")).item() == pytest.approx(2.8)


@pytest.mark.parametrize(
    ("mode", "extra", "expected"),
    [
        ("token-mean", {}, 12 / 4),
        ("token-sum", {}, 12.0),
        ("seq-mean-token-sum", {}, (4 + 8) / 2),
        ("seq-mean-token-sum", {"global_batch_size": 3}, (4 + 8) / 3),
        ("seq-mean-token-mean", {}, (4 / 3 + 8) / 2),
        ("seq-mean-token-mean", {"global_batch_size": 3}, (4 / 3 + 8) / 3),
        ("seq-mean-token-sum-norm", {"width": 4}, (4 + 8) / 2 / 4),
        ("seq-mean-token-sum-norm", {"width": 4, "loss_scale_factor": 10}, (4 + 8) / 2 / 10),
        ("seq-mean-token-sum-norm", {"width": 4, "global_batch_size": 3}, (4 + 8) / 3 / 4),
    ],
)
def test_aggregation_by_hand(mode: str, extra: dict[str, int], expected: float):
    rows = [vector(1, 0, 3), vector(8), vector()]
    assert aggregate(rows, AggregationSettings(loss_agg_mode=mode, **extra)).item() == pytest.approx(expected)


@pytest.mark.parametrize("mode", ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean"])
def test_no_valid_token_gives_zero_loss_and_zero_gradients(mode: str):
    masked = [replace(row, mask=torch.zeros(len(row.response))) for row in random_rows(QWEN2, [(2, 3), (0, 1)])]
    for rows in (masked, []):
        actor = actor_step(init_weights(QWEN2, 0), QWEN2, rows, ActorSettings(loss_agg_mode=mode))
        critic = critic_step(init_weights(CRITIC, 0), CRITIC, rows, CriticSettings(loss_agg_mode=mode))
        for result in (actor, critic):
            assert result.loss == 0
            assert result.grad_norm == 0
            nothing = {name: value for name, value in result.metrics.items() if name != "actor/ratio_max"}
            assert set(nothing.values()) == {0.0}


def test_norm_mode_without_a_divisor_and_unknown_names_are_refused():
    with pytest.raises(ValueError, match="needs loss_scale_factor or width"):
        aggregate([vector(1)], AggregationSettings(loss_agg_mode="seq-mean-token-sum-norm"))
    with pytest.raises(ValueError, match="is none of"):
        aggregate([vector(1)], AggregationSettings(loss_agg_mode="mean"))
    with pytest.raises(ValueError, match="is none of"):
        kl_token_losses(vector(1), vector(1), "k4")
    with pytest.raises(ValueError, match="needs the old_log_probs"):
        actor_step(init_weights(QWEN2, 0), QWEN2, [Row([1], [2], [1])], ActorSettings())


def test_explained_variance_by_hand():
    assert explained_variance(vector(1, 2, 3, 4), vector(1, 2, 3, 4)) == 1
    assert explained_variance(vector(1, 2, 3, 4), vector(9, 9, 9, 9)) == pytest.approx(0)
    # differences 0, 0, 1, 1: variance 1/4, that of the returns 5/4
    assert explained_variance(vector(1, 2, 3, 4), vector(1, 2, 2, 3)) == pytest.approx(0.8)
    assert explained_variance(vector(0.1, 0.1, 0.1), vector(1, 2, 3)) == 0


def test_what_a_mask_hides_changes_nothing():
    row = random_rows(QWEN2, [(4, 6)])[0]
    row.mask = torch.tensor([1, 1, 0, 1, 0, 0]).bool()
    garbage = {
        name: torch.where(row.mask, getattr(row, name), math.nan)
        for name in ("old_log_probs", "advantages", "ref_log_probs", "values", "returns")
    }
    settings = ActorSettings(use_kl_loss=True, entropy_coeff=0.1)
    for step, config, options in ((actor_step, QWEN2, settings), (critic_step, CRITIC, CriticSettings())):
        weights = init_weights(config, 5)
        clean, dirty = (step(weights, config, [r], options) for r in (row, replace(row, **garbage)))
        assert clean.metrics == dirty.metrics
        assert clean.grad_norm == dirty.grad_norm


FULL_ACTOR = ActorSettings(entropy_coeff=0.3, use_kl_loss=True, kl_loss_coef=0.7, temperature=0.8)


@pytest.mark.parametrize(
    ("step", "config", "settings"),
    [
        (actor_step, QWEN2, FULL_ACTOR),
        (actor_step, QWEN3, replace(FULL_ACTOR, kl_loss_type="k2", loss_agg_mode="seq-mean-token-mean")),
        (critic_step, CRITIC, CriticSettings(loss_agg_mode="seq-mean-token-sum-norm", width=8)),
    ],
)
def test_gradients_agree_with_finite_differences(step, config: ReferenceConfig, settings: AggregationSettings):
    weights = init_weights(config, seed=6)
    rows = random_rows(config, [(3, 5), (0, 4), (6, 2)], seed=1)
    result = step(weights, config, rows, settings)
    generator, delta = torch.Generator().manual_seed(0), 1e-6
    names = [name for name in weights if not name.startswith("layers.1.")]
    for name in names:
        direction = torch.randn(weights[name].shape, generator=generator, dtype=torch.float64)
        ahead = step({**weights, name: weights[name] + delta * direction}, config, rows, settings).loss
        behind = step({**weights, name: weights[name] - delta * direction}, config, rows, settings).loss
        slope = (ahead - behind) / (2 * delta)
        assert (result.grads[name] * direction).sum().item() == pytest.approx(slope, rel=1e-5, abs=1e-7), name


def test_a_tied_embedding_collects_both_gradients():
    tied = replace(QWEN2, tied=True)
    weights = init_weights(tied, seed=2)
    rows = random_rows(QWEN2, [(3, 5)])
    apart = actor_step({**weights, "output": weights["embedding"]}, QWEN2, rows, ActorSettings())
    together = actor_step(weights, tied, rows, ActorSettings())
    torch.testing.assert_close(together.grads["embedding"], apart.grads["embedding"] + apart.grads["output"])


def test_actor_metrics_are_means_over_the_tokens_of_the_whole_mini_batch():
    weights, rows = init_weights(QWEN2, 0), random_rows(QWEN2, [(3, 40), (1, 1), (0, 20)])
    settings = replace(FULL_ACTOR, loss_agg_mode="seq-mean-token-sum", clip_ratio_c=1.5)
    result = actor_step(weights, QWEN2, rows, settings)
    drift, clip, dual_clip, entropy, policy, kl = [], [], [], 0.0, 0.0, 0.0
    row_count = sum(bool(row.valid.any()) for row in rows)
    for row, log_probs, entropies in zip(rows, result.log_probs, result.entropies, strict=True):
        keep = row.valid
        drift.append((row.old_log_probs - log_probs)[keep])
        entropy += entropies[keep].sum().item() / row_count
        new, old, advantage = log_probs[keep], row.old_log_probs[keep], row.advantages[keep]
        loss, clipped, dual_clipped, _ = policy_token_losses(new, old, advantage, settings)
        policy += loss.sum().item() / row_count
        clip += clipped.tolist()
        dual_clip += dual_clipped.tolist()
        kl += kl_token_losses(new, row.ref_log_probs[keep], "k3").sum().item() / row_count
    assert 0 < sum(dual_clip) < sum(clip)
    assert result.metrics["actor/pg_clipfrac"] == pytest.approx(sum(clip) / len(clip))
    assert result.metrics["actor/pg_clipfrac_lower"] == pytest.approx(sum(dual_clip) / len(clip))
    assert result.metrics["actor/ppo_kl"] == pytest.approx(torch.cat(drift).mean().item())
    assert result.metrics["actor/entropy_loss"] == pytest.approx(entropy)
    assert result.metrics["actor/pg_loss"] == pytest.approx(policy)
    assert result.metrics["actor/kl_loss"] == pytest.approx(kl)
    assert result.loss == pytest.approx(policy - 0.3 * entropy + 0.7 * kl)


def test_critic_metrics_come_from_the_values_it_returns():
    rows = random_rows(CRITIC, [(3, 9), (1, 4), (0, 6)])
    result = critic_step(init_weights(CRITIC, 0), CRITIC, rows, CriticSettings())
    values = torch.cat([v[row.valid] for v, row in zip(result.values, rows, strict=True)])
    returns = torch.cat([row.returns[row.valid] for row in rows])
    old = torch.cat([row.values[row.valid] for row in rows])
    assert result.metrics["critic/vpred_mean"] == pytest.approx(values.mean().item())
    residual = (returns - values).var(correction=0) / returns.var(correction=0)
    assert result.metrics["critic/explained_variance"] == pytest.approx(1 - residual.item())
    losses, clipped = value_token_losses(values, old, returns, 0.5)
    assert result.metrics["critic/vf_loss"] == result.loss == pytest.approx(losses.mean().item())
    assert result.metrics["critic/vf_clipfrac"] == pytest.approx(clipped.double().mean().item())


def test_initial_model_is_far_from_uniform_and_its_gradients_reach_every_weight():
    weights = init_weights(QWEN2, seed=0)
    assert 0.5 < forward_row(weights, QWEN2, torch.arange(16)).std() < 4
    result = actor_step(weights, QWEN2, random_rows(QWEN2, [(3, 9), (5, 4)]), ActorSettings())
    assert all(grad.abs().max() > 1e-4 for grad in result.grads.values())
    assert 0.05 < result.grad_norm < 50


# --- the optimiser ---------------------------------------------------------------------------------------------------


def test_adamw_agrees_with_torch_and_clips_like_megatron():
    weights = init_weights(QWEN2, seed=0)
    theirs = {name: torch.nn.Parameter(weight.clone()) for name, weight in weights.items()}
    groups = [
        {"params": [p for p in theirs.values() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in theirs.values() if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8)
    ours, state = weights, None
    for step in (1, 2, 3):
        generator = torch.Generator().manual_seed(step)
        grads = {n: torch.randn(w.shape, generator=generator, dtype=torch.float64) for n, w in weights.items()}
        ours, state = adamw_step(
            ours, grads, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, max_grad_norm=0.5, step=step, state=state
        )
        for name, parameter in theirs.items():
            parameter.grad = grads[name] * (0.5 / (global_grad_norm(grads.values()) + 1e-6))
        optimizer.step()
    for name, parameter in theirs.items():
        torch.testing.assert_close(ours[name], parameter.detach(), rtol=1e-12, atol=1e-12)


def test_small_gradients_are_not_scaled_up_and_inputs_stay():
    weights, grads = {"w": torch.ones(1, 1).double()}, {"w": torch.full((1, 1), 1e-3).double()}
    _, state = adamw_step(weights, grads, lr=0.1, weight_decay=0.0, max_grad_norm=1.0, step=1)
    assert state["w"][0].item() == pytest.approx(1e-4)
    assert weights["w"].item() == 1
