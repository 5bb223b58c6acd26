"""What the tests of this folder run on ranks: ``torchrun on_ranks.py FUNCTION [ARGUMENT ...]``."""

import sys

import numpy as np
import pytest
import torch
import torch.distributed as dist

from steelyard.cost import ModelShape
from steelyard.errors import InputError, PlanError, SequenceTooLong
from steelyard.model import host
from steelyard.parallel import ParallelLayout
from steelyard.step.batch import RolloutBatch

SHAPE = ModelShape(layers=4, hidden=32, ffn=48, heads=4, kv_heads=2, head_dim=8, vocab=96, qkv_bias=True)


def rollouts(prompts, responses, seed=0):
    """Random rows with these lengths and every field that a role needs."""
    generator = torch.Generator().manual_seed(seed)
    split, width = max(prompts), max(responses)
    columns = torch.arange(split + width)
    first, last = split - torch.tensor(prompts)[:, None], split + torch.tensor(responses)[:, None]
    mask = (columns >= first) & (columns < last)
    block = (len(prompts), width)
    fields = {name: torch.randn(block, generator=generator) for name in ("advantages", "values", "returns")}
    return RolloutBatch.of(
        {
            "input_ids": torch.randint(1, 96, mask.shape, generator=generator) * mask,
            "attention_mask": mask.long(),
            "response_mask": mask[:, split:].float(),
            "old_log_probs": torch.full(block, -4.5),
            **fields,
        }
    )


PROMPTS, RESPONSES = [4, 7, 3, 5, 9, 2, 6, 4], [20, 3, 11, 8, 2, 30, 5, 16]


def make(layout, value_head=False, **ddp):
    from steelyard.model.build import build_model, build_optimizer, initialize_parallel

    initialize_parallel(layout)
    models = build_model(SHAPE, layout, value_head=value_head, override_ddp_config=ddp)
    return models, build_optimizer(models, lr=1e-3)


def mine(rows):
    """The rows of this data-parallel rank: every dp-th."""
    from megatron.core import parallel_state

    return list(range(parallel_state.get_data_parallel_rank(), rows, parallel_state.get_data_parallel_world_size()))


def plans_itself_with_unequal_rows():
    """dp ranks with other rows and lengths agree on a count in the engine, and the step runs through."""
    from steelyard.step import Actor, StepSettings

    layout = ParallelLayout(dp=2)
    models, optimizer = make(layout)
    rows = [0, 1, 2, 3, 5] if dist.get_rank() == 0 else [4, 6]
    batch = rollouts(PROMPTS, RESPONSES).select(rows)
    actor = Actor(models, StepSettings(max_tokens=32, layout=layout), optimizer)
    metrics = actor.update(batch)
    gathered = [None] * 2
    dist.all_gather_object(gathered, metrics)
    assert gathered[0] == gathered[1], gathered
    assert set(metrics) == {
        f"actor/{name}" for name in ("pg_loss", "pg_clipfrac", "pg_clipfrac_lower", "ppo_kl", "grad_norm", "lr")
    }


def refuses_a_long_row_on_every_rank():
    from steelyard.step import ActorRole, StepSettings, forward_backward_batch

    layout = ParallelLayout(dp=2)
    models, _ = make(layout)
    batch = rollouts(PROMPTS, RESPONSES).select([5, 1] if dist.get_rank() == 1 else [1, 4])
    with pytest.raises(SequenceTooLong) as caught:
        forward_backward_batch(batch, ActorRole(), models, StepSettings(max_tokens=31, layout=layout))
    assert (caught.value.length, caught.value.max_tokens) == (32, 31)


def refuses_an_illegal_fixed_count():
    from steelyard.step import ActorRole, StepSettings, forward_backward_batch

    layout = ParallelLayout(pp=2, vpp=2)
    models, _ = make(layout)
    batch = rollouts(PROMPTS, RESPONSES).select([0, 1, 2])
    with pytest.raises(PlanError, match="micro_batch_size=1 makes 3 micro-batches of 3 rows.*next legal count is 4"):
        forward_backward_batch(batch, ActorRole(), models, StepSettings(micro_batch_size=1, layout=layout))


def refuses_virtual_stages_without_overlap():
    from steelyard.model.build import transformer_config

    with pytest.raises(InputError, match="set overlap_p2p_comm=True and batch_p2p_comm=False"):
        transformer_config(SHAPE, ParallelLayout(pp=2, vpp=2), overrides={"overlap_p2p_comm": False})


def runs_fillers(role):
    """One row, two virtual stages on two ranks: the count needs a filler, and it changes neither loss nor gradient."""
    from steelyard.step import Actor, Critic, StepSettings

    layout = ParallelLayout(pp=2, vpp=2)
    models, optimizer = make(layout, value_head=role == "critic")
    batch = rollouts([4], [9])
    worker = (Critic if role == "critic" else Actor)(models, StepSettings(max_tokens=64, layout=layout), optimizer)
    outputs = (worker.compute_values if role == "critic" else worker.compute_log_prob)(batch)
    assert outputs.shape == (1, 9)
    assert outputs.abs().min() > 0, "every pipeline rank has every output"
    state = [parameter.detach().clone() for model in models for parameter in model.parameters()]
    one = worker.update(batch)
    for parameter, before in zip((p for model in models for p in model.parameters()), state, strict=True):
        parameter.data.copy_(before)
    more = worker.update(batch, indices=[[], [0], [], []])
    assert abs(one[f"{role}/grad_norm"] - more[f"{role}/grad_norm"]) < 1e-6 * one[f"{role}/grad_norm"], (one, more)


def restores_the_order(tp, pp):
    """Outputs come back in the order of the batch whatever the micro-batches were."""
    from steelyard.step import Actor, StepSettings

    layout = ParallelLayout(tp=int(tp), pp=int(pp))
    models, _ = make(layout)
    batch = rollouts(PROMPTS, RESPONSES)
    whole = Actor(models, StepSettings(micro_batch_size=8, layout=layout)).compute_log_prob(batch)
    for settings in (
        StepSettings(max_tokens=34, layout=layout),
        StepSettings(max_tokens=60, packed=False, layout=layout),
        StepSettings(micro_batch_size=3, layout=layout),
    ):
        again = Actor(models, settings).compute_log_prob(batch)
        torch.testing.assert_close(again, whole, rtol=1e-5, atol=1e-5)
    order = np.random.default_rng(0).permutation(8)
    shuffled = Actor(models, StepSettings(max_tokens=34, layout=layout)).compute_log_prob(batch.select(order))
    torch.testing.assert_close(shuffled, whole[order], rtol=1e-5, atol=1e-5)


def learns_the_same_under_either_optimizer(dp):
    """Three steps under the plain and the distributed optimizer, with other budgets, end at the same weights."""
    from megatron.core import parallel_state

    from steelyard.step import Actor, StepSettings

    layout = ParallelLayout(dp=int(dp))
    ends = []
    for distributed, budget in ((False, 34), (True, 70)):
        torch.manual_seed(0)
        models, optimizer = make(layout, use_distributed_optimizer=distributed)
        batch = rollouts(PROMPTS, RESPONSES)
        actor = Actor(models, StepSettings(max_tokens=budget, layout=layout), optimizer)
        for _ in range(3):
            actor.update(batch.select(mine(8)))
        ends.append(torch.cat([parameter.detach().flatten() for parameter in models[0].parameters()]))
        parallel_state.destroy_model_parallel()
    difference = (ends[0] - ends[1]).norm() / ends[0].norm()
    assert difference < 1e-5, difference


def ddp_does_what_was_asked(dp):
    """Overlap with small buckets on two ranks: the overrides arrive, and the gradient does not change."""
    from megatron.core import parallel_state

    from steelyard.step import Actor, StepSettings

    layout = ParallelLayout(dp=int(dp))
    norms = []
    for overrides in ({}, {"overlap_grad_reduce": True, "bucket_size": 3000}):
        torch.manual_seed(0)
        models, optimizer = make(layout, use_distributed_optimizer=False, **overrides)
        actor = Actor(models, StepSettings(max_tokens=40, layout=layout), optimizer)
        norms.append(actor.update(rollouts(PROMPTS, RESPONSES).select(mine(8)))["actor/grad_norm"])
        buckets = sum(len(group.buckets) for group in models[0].bucket_groups)
        assert models[0].ddp_config.overlap_grad_reduce is bool(overrides)
        assert (buckets > 1) is bool(overrides), buckets
        parallel_state.destroy_model_parallel()
    assert abs(norms[0] - norms[1]) < 1e-5 * norms[0], norms


if __name__ == "__main__":
    torch.set_num_threads(1)
    with host.running_on("cpu"):
        dist.init_process_group("gloo")
        globals()[sys.argv[1]](*sys.argv[2:])
        dist.barrier()
        dist.destroy_process_group()
