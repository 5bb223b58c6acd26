"""What the tests of this folder run on ranks; the fixture ``ranks`` starts them."""

import importlib
import os
import sys
import traceback

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
    names = ("pg_loss", "pg_clipfrac", "pg_clipfrac_lower", "ppo_kl", "ratio_max", "grad_norm", "lr")
    assert set(metrics) == {f"actor/{name}" for name in names}


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
    text = (
        r"micro_batch_size=1 makes 3 micro-batches of 3 rows.*: use micro_batch_size=2 \(2 micro-batches, predicted "
        r"time 1\.[0-9]{2} of the ideal\) or max_tokens"
    )
    with pytest.raises(PlanError, match=text):
        forward_backward_batch(batch, ActorRole(), models, StepSettings(micro_batch_size=1, layout=layout))


def refuses_virtual_stages_without_overlap():
    from steelyard.model.config import transformer_config

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


def scores_a_split_vocabulary():
    """Against one rank in float64 and against megatron-core's own cross entropy; no scored token included."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    from steelyard.step.logprobs import token_log_probs

    world, rank = dist.get_world_size(), dist.get_rank()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world)
    group = parallel_state.get_tensor_model_parallel_group()
    generator = torch.Generator().manual_seed(0)
    for rows, scored, temperature, dtype in (
        (11, 7, 0.7, torch.float32),
        (11, None, 1.0, torch.float32),
        (5, 0, 1.0, torch.float32),
        (9, 6, 1.3, torch.bfloat16),
    ):
        whole = (torch.randn(rows, 24, generator=generator) * 4 + 100 * (torch.arange(24) // 6)).to(dtype)
        whole[:, 3] = -torch.inf
        index = None if scored is None else torch.randperm(rows, generator=generator)[:scored]
        labels = torch.arange(rows if scored is None else scored) * 5 % 24
        weights = torch.randn(2, labels.numel(), generator=generator)

        judge = whole.double().requires_grad_()
        every = torch.log_softmax((judge if index is None else judge[index]) / temperature, -1)
        expected = every.gather(1, labels[:, None]).squeeze(1), torch.special.entr(every.exp()).sum(-1)
        (weights[0] * expected[0]).sum().backward()

        own = slice(rank * 24 // world, (rank + 1) * 24 // world)
        for chunk in (None, 2):
            mine, other = (whole[:, own].clone().requires_grad_() for _ in range(2))
            how = {"index": index, "temperature": temperature, "group": group, "chunk_tokens": chunk}
            got = token_log_probs(mine, labels, **how, with_entropy=True)
            for ours, right in zip(got, expected, strict=True):
                torch.testing.assert_close(ours.double(), right.detach(), rtol=1e-5, atol=1e-5)
            (weights[0] * got[0]).sum().backward()
            close = {"rtol": max(1e-5, torch.finfo(dtype).eps), "atol": 1e-6}
            torch.testing.assert_close(mine.grad, judge.grad[:, own].to(dtype), **close)

            # Megatron's own. An independent way to the same numbers.
            selected = (other if index is None else other.index_select(0, index)).float() / temperature
            megatron = -vocab_parallel_cross_entropy(selected, labels)
            torch.testing.assert_close(got[0], megatron, rtol=1e-5, atol=1e-5)
            (weights[0] * megatron).sum().backward()
            # It divides large logits before it takes differences, and so loses a digit.
            torch.testing.assert_close(mine.grad, other.grad, rtol=max(1e-4, torch.finfo(dtype).eps), atol=2e-5)

            # Both gradients together, of the vocabulary's parts put together, against the whole on one rank.
            mine.grad = None
            (torch.stack(token_log_probs(mine, labels, **how, with_entropy=True)) * weights).sum().backward()
            alone = whole.clone().requires_grad_()
            outputs = token_log_probs(alone, labels, index=index, temperature=temperature, with_entropy=True)
            (torch.stack(outputs) * weights).sum().backward()
            torch.testing.assert_close(mine.grad, alone.grad[:, own], **close)
    parallel_state.destroy_model_parallel()


def reads_once_in_a_step(where):
    """The host waits for the device once in a step of ours: when the metrics leave it."""
    from megatron.core import parallel_state

    from steelyard.host_reads import count_host_reads
    from steelyard.step import ActorRole, CriticRole, StepSettings, forward_backward_batch
    from steelyard.step.metrics import reduce_metrics

    layout = ParallelLayout(pp=dist.get_world_size())
    batch = rollouts(PROMPTS, RESPONSES)
    tensors = [batch.input_ids, batch.response_mask, *batch.fields.values()] if where == "host" else []
    for role, packed in ((ActorRole(), True), (CriticRole(), True), (ActorRole(), False)):
        models, _ = make(layout, value_head=isinstance(role, CriticRole))
        settings = StepSettings(max_tokens=40, layout=layout, packed=packed)
        with count_host_reads(on_host=tensors) as reads:
            result = forward_backward_batch(batch, role, models, settings)
            reduce_metrics(role, result["output"])
        print(type(role).__name__, "packed" if packed else "padded", reads)
        assert len(result["indices"]) > 2
        ours = list(reads.of("ours").elements())
        assert [place.file.split("/")[-1] for place in ours] == ["metrics.py"], str(reads)
        # Stages exchange shapes before every transfer; the count shows that they were looked at.
        assert (reads.megatron > 0) is (layout.pp > 1), str(reads)
        parallel_state.destroy_model_parallel()


def scales_the_loss_alike_on_every_path(dp, cp):
    """A loss alone, a loss with a count, and Megatron's per-token loss end at the same gradient norm."""
    from megatron.core import parallel_state

    from steelyard.model.build import build_model, build_optimizer, initialize_parallel
    from steelyard.step import Critic, StepSettings

    layout = ParallelLayout(dp=int(dp), cp=int(cp))
    norms = {}
    for path in ("alone", "counted", "per token"):
        torch.manual_seed(0)
        initialize_parallel(layout)
        overrides = {"calculate_per_token_loss": path == "per token"}
        models = build_model(SHAPE, layout, value_head=True, override_transformer_config=overrides)
        settings = StepSettings(max_tokens=40, layout=layout, counted_loss=path == "counted")
        critic = Critic(models, settings, build_optimizer(models, lr=1e-3))
        norms[path] = critic.update(rollouts(PROMPTS, RESPONSES).select(mine(8)))["critic/grad_norm"]
        parallel_state.destroy_model_parallel()
    assert max(norms.values()) - min(norms.values()) < 1e-5 * norms["alone"], norms


def does_not_grow_with_the_count(role):
    """Peak of live bytes in a training step at 4, 16 and 64 micro-batches of one row each."""
    from steelyard.memory import LiveBytes
    from steelyard.step import Actor, Critic, StepSettings

    models, optimizer = make(ParallelLayout(), value_head=role == "critic")
    worker = (Critic if role == "critic" else Actor)(models, StepSettings(micro_batch_size=1), optimizer)
    worker.update(rollouts([8], [248]))
    peaks = []
    for rows in (4, 16, 64):
        batch = rollouts([8] * rows, [248] * rows)
        with LiveBytes() as live:
            worker.update(batch)
        peaks.append(live.peak)
    assert peaks[2] < 1.1 * peaks[0], f"PEAKS {peaks}"


def survives_masks(role):
    """Masked micro-batches change nothing, and a mini-batch without a token in the mask has no loss and no gradient."""
    from steelyard.step import Actor, Critic, StepSettings

    layout = ParallelLayout(dp=2, pp=2)
    models, optimizer = make(layout, value_head=role == "critic")
    worker = (Critic if role == "critic" else Actor)(models, StepSettings(micro_batch_size=1, layout=layout), optimizer)
    state = [parameter.detach().clone() for model in models for parameter in model.parameters()]

    def update(batch):
        for parameter, before in zip((p for model in models for p in model.parameters()), state, strict=True):
            parameter.data.copy_(before)
        return worker.update(batch)

    # Rank 1 holds masked rows alone, whose fields are not numbers; some have no prompt, some no response.
    whole = rollouts([4, 0, 5, 0], [6, 9, 7, 0])
    masked = rollouts([3, 0, 6, 2], [8, 1, 2, 0])
    masked.response_mask.zero_()
    for values in masked.fields.values():
        values.fill_(float("nan"))
    from megatron.core import parallel_state

    first = parallel_state.get_data_parallel_rank() == 0
    metrics = update(whole if first else masked)
    assert all(np.isfinite(value) for value in metrics.values()), metrics
    assert metrics[f"{role}/grad_norm"] > 0
    nothing = update(masked)
    zero = {name: value for name, value in nothing.items() if name.endswith(("_loss", "frac", "grad_norm"))}
    assert set(zero.values()) == {0.0}, nothing
    assert set(nothing) == set(metrics)


def trains_in_mini_batches():
    """Two epochs of four mini-batches on two ranks, the learning rate by optimizer step; unequal rows are refused."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    from steelyard.errors import BatchError
    from steelyard.step import Actor, StepSettings

    layout = ParallelLayout(dp=2)
    models, optimizer = make(layout)
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=1e-3,
        min_lr=0.0,
        lr_warmup_steps=4,
        lr_decay_steps=100,
        lr_decay_style="constant",
        start_wd=0.0,
        end_wd=0.0,
        wd_incr_steps=100,
        wd_incr_style="constant",
    )
    actor = Actor(models, StepSettings(max_tokens=40, layout=layout), optimizer, scheduler=scheduler)
    batch = rollouts(PROMPTS, RESPONSES)
    steps = list(actor.train(batch.select(mine(8)), mini_batch_size=1, epochs=2, shuffle_seed=1))
    rates = [step["actor/lr"] for step in steps]
    assert len(steps) == 8
    np.testing.assert_allclose(rates, [0.0, 2.5e-4, 5e-4, 7.5e-4, 1e-3, 1e-3, 1e-3, 1e-3], rtol=1e-6, atol=1e-12)
    rows = [0, 1, 2] if dist.get_rank() == 0 else [3, 4]
    with pytest.raises(BatchError, match="rank 1 has 2 rows .*, rank 0 has 3"):
        next(actor.train(batch.select(rows), mini_batch_size=1))
    with pytest.raises(BatchError, match="4 rows do not divide into mini-batches of mini_batch_size=3"):
        next(actor.train(batch.select(mine(8)), mini_batch_size=3))


def has_ratio_one(first, second):
    """Log-probabilities under one plan and layout, an update under another before any step: every ratio is 1."""
    from megatron.core import parallel_state

    from steelyard.step import Actor, StepSettings

    batch = rollouts(PROMPTS, RESPONSES)
    plans = []
    for sizes in (first, second):
        layout = ParallelLayout(**{name: int(size) for name, size in (part.split("=") for part in sizes.split(","))})
        models, optimizer = make(layout)
        fill_alike(models)
        if not plans:
            packed = Actor(models, StepSettings(max_tokens=34, layout=layout))
            rows = mine(8)
            old = torch.zeros(8, batch.response_width)
            old[rows] = packed.compute_log_prob(batch.select(rows))
            dist.all_reduce(old, group=parallel_state.get_data_parallel_group())
            plans.append(old)
        else:
            again = batch.select(range(8))
            again.fields["old_log_probs"] = plans[0]
            settings = StepSettings(micro_batch_size=2, packed=layout.cp > 1, layout=layout)
            metrics = Actor(models, settings, optimizer).update(again.select(mine(8)))
            assert abs(metrics["actor/ratio_max"] - 1.0) < 1e-5, metrics
            assert abs(metrics["actor/ppo_kl"]) < 1e-6, metrics
            assert metrics["actor/pg_clipfrac"] == metrics["actor/pg_clipfrac_lower"] == 0.0, metrics
        parallel_state.destroy_model_parallel()


def fill_alike(models):
    """Weights that are the same function of their place in the whole model on every layout."""
    from megatron.core import parallel_state
    from megatron.core.utils import unwrap_model

    tp, rank = parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()
    for chunk in models:
        model = unwrap_model(chunk)
        offset = model.decoder.layers[0].layer_number - 1
        for name, parameter in model.named_parameters():
            parts = name.split(".")
            if parts[1] == "layers":
                parts[2] = str(offset + int(parts[2]))
            axis = parameter.partition_dim if tp > 1 and parameter.partition_dim >= 0 else None
            shape = list(parameter.shape)
            if axis is not None:
                shape[axis] *= tp
            generator = torch.Generator().manual_seed(sum(map(ord, ".".join(parts))))
            whole = torch.randn(shape, generator=generator) / shape[-1] ** 0.5 + (len(shape) == 1)
            if axis is None:
                mine_of_it = whole
            elif parameter.partition_stride == 2:
                gate, up = whole.chunk(2, axis)
                mine_of_it = torch.cat((gate.chunk(tp, axis)[rank], up.chunk(tp, axis)[rank]), axis)
            else:
                mine_of_it = whole.chunk(tp, axis)[rank]
            parameter.data.copy_(mine_of_it)


def finds_a_peer_with_other_micro_batches():
    from steelyard.errors import PlanMismatch
    from steelyard.step import ActorRole, StepSettings, forward_backward_batch

    layout = ParallelLayout(tp=2, cp=2)
    models, _ = make(layout)
    batch = rollouts(PROMPTS, RESPONSES)
    indices = [[0, 1, 2, 3], [4, 5, 6, 7]] if dist.get_rank() else [[0, 1, 2], [3, 4, 5, 6, 7]]
    with pytest.raises(PlanMismatch, match="peers hold different plans"):
        forward_backward_batch(batch, ActorRole(), models, StepSettings(max_tokens=99, layout=layout), indices=indices)
    dist.barrier()


def runs_a_legal_remainder():
    """Six micro-batches in groups of four on two stages of two chunks: a remainder of two, which Megatron takes."""
    from steelyard.step import Critic, StepSettings

    layout = ParallelLayout(pp=2, vpp=2, group=4)
    models, optimizer = make(layout, value_head=True)
    batch = rollouts(PROMPTS, RESPONSES).select(range(6))
    whole = Critic(models, StepSettings(max_tokens=64, layout=layout)).compute_values(batch)
    critic = Critic(models, StepSettings(micro_batch_size=1, layout=layout), optimizer)
    torch.testing.assert_close(critic.compute_values(batch), whole, rtol=1e-5, atol=1e-5)
    assert critic.update(batch)["critic/grad_norm"] > 0


def keeps_no_graph():
    """Outputs and totals that stay from one micro-batch to the next hold no activation, also where gradients are on."""
    from steelyard.step import ActorRole, StepSettings, forward_backward_batch

    models, _ = make(ParallelLayout())
    for forward_only in (True, False):
        settings = StepSettings(micro_batch_size=2)
        kept = forward_backward_batch(
            rollouts(PROMPTS, RESPONSES), ActorRole(), models, settings, forward_only=forward_only
        )
        tensors = [value for part in kept["output"] for value in part.values() if isinstance(value, torch.Tensor)]
        assert tensors
        assert not any(tensor.requires_grad for tensor in tensors)


def scores_at_the_last_token():
    from steelyard.step import Reward, StepSettings

    models, _ = make(ParallelLayout(), value_head=True)
    batch = rollouts([4, 0, 3], [5, 2, 0])
    reward = Reward(models, StepSettings(max_tokens=9))
    every, last = reward.compute_scores(batch, per_token=True), reward.compute_scores(batch)
    assert last.tolist() == [every[0, 4].item(), every[1, 1].item(), 0.0]
    assert every[1, 0] != 0, "a score stands at the token itself, so the first token of a row has one"


def main(function, arguments, rank, world, folder):
    """One rank: its output goes to a file, and it exits with 1 where the function raises.

    ``function`` is one of this module, or ``module:function``.
    """
    log = os.open(f"{folder}/{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    torch.set_num_threads(1)
    try:
        with host.running_on("cpu"):
            store = dist.FileStore(f"{folder}/store", world)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
            module, _, name = function.rpartition(":")
            getattr(importlib.import_module(module or __name__), name)(*arguments)
            dist.barrier()
            dist.destroy_process_group()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        # Threads of the process group may still wait for peers: leave without them.
        os._exit(1)
    sys.stdout.flush()
