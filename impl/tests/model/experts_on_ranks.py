"""What test_experts.py runs on ranks: the same mixture of experts spread in several ways."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hf_on_ranks import built
from megatron.core import parallel_state
from on_ranks import PROMPTS, RESPONSES, mine, rollouts

from steelyard.cost import ModelShape
from steelyard.errors import PlanError, PlanMismatch
from steelyard.model.build import build_optimizer
from steelyard.model.hf_layout import weights_of
from steelyard.model.hf_weights import load_hf, named_parts, place_of
from steelyard.parallel import ParallelLayout
from steelyard.step import Actor, ActorRole, Critic, StepSettings, forward_backward_batch
from steelyard.step.metrics import reduce_metrics


def parse(sizes):
    return ParallelLayout(**{name: int(size) for name, size in (part.split("=") for part in sizes.split(",") if part)})


def gradients(folder, sizes, budget=40):
    """Loss and gradients of one step, the latter as this rank's part of each weight: {name: (weight, part, tensor)}."""
    chunks = built(folder, sizes, override_ddp_config={"use_distributed_optimizer": False})
    load_hf(chunks, folder)
    role, settings = ActorRole(), StepSettings(max_tokens=budget, layout=parse(sizes))
    result = forward_backward_batch(rollouts(PROMPTS, RESPONSES).select(mine(8)), role, chunks, settings)
    loss = reduce_metrics(role, result["output"])["actor/pg_loss"]
    weights = {weight.name: weight for weight in weights_of(ModelShape.from_hf(folder))}
    found = {}
    for (name, part), parameter in named_parts(chunks, weights):
        found[name] = (weights[name], part, place_of(weights[name])[1], parameter.main_grad.clone())
    return loss, found


def has_the_gradients_of_one_expert_parallel_rank(folder, *layouts):
    """Against plain data parallelism on as many ranks: the same loss, and the same part of every gradient."""
    reference_loss, reference = gradients(folder, f"dp={dist.get_world_size()}")
    parallel_state.destroy_model_parallel()
    for sizes in layouts:
        loss, found = gradients(folder, sizes)
        assert abs(loss - reference_loss) < 1e-6 * abs(reference_loss), (sizes, loss, reference_loss)
        for name, (weight, part, parts, gradient) in found.items():
            whole = weight.unshard([reference[name][3]])
            torch.testing.assert_close(
                gradient, weight.shard(whole, part, parts), rtol=2e-5, atol=2e-7, msg=f"{sizes}: {name}"
            )
        assert sum(weight.of_an_expert for weight, *_ in found.values()) >= 4
        parallel_state.destroy_model_parallel()


def learns_the_same(folder, *layouts):
    """Two steps with either optimizer end at one loss and one gradient norm, whatever the expert-parallel size."""
    ends = {}
    for sizes in layouts:
        for distributed in (True, False):
            chunks = built(folder, sizes, override_ddp_config={"use_distributed_optimizer": distributed})
            load_hf(chunks, folder)
            settings = StepSettings(max_tokens=40, layout=parse(sizes))
            actor = Actor(chunks, settings, build_optimizer(chunks, lr=1e-3))
            batch = rollouts(PROMPTS, RESPONSES).select(mine(8))
            steps = [actor.update(batch) for _ in range(3)]
            ends[sizes, distributed] = [step[f"actor/{name}"] for step in steps for name in ("pg_loss", "grad_norm")]
            parallel_state.destroy_model_parallel()
    first = next(iter(ends.values()))
    for which, values in ends.items():
        np.testing.assert_allclose(values, first, rtol=1e-4, err_msg=str(which))
    assert first[2] != first[0], "the weights moved"


def keeps_experts_in_buffers_of_their_own(folder):
    chunks = built(folder, "dp=2,ep=2")
    (chunk,) = chunks
    inside = {parameter for buffer in chunk.expert_parallel_buffers for parameter in buffer.params}
    names = {name for name, parameter in chunk.module.named_parameters() if parameter in inside}
    assert names == {name for name, _ in chunk.module.named_parameters() if ".local_experts." in name}
    assert len(names) == 3 * 2 * 2, "three layers with two of the four experts, each with two matrices"
    size = sum(parameter.numel() for parameter in inside)
    assert sum(buffer.numel_unpadded for buffer in chunk.expert_parallel_buffers) == size


def runs_fillers(folder, role, sizes):
    """Rank 1 has one row and fills up with micro-batches without tokens, as if all rows had gone in one."""
    layout = parse(sizes)
    norms = []
    for plan in ("one", "filled"):
        chunks = built(folder, sizes, value_head=role == "critic")
        load_hf(chunks, folder)
        if role == "critic" and parallel_state.is_pipeline_last_stage():
            chunks[-1].module.output_layer.weight.data.fill_(0.1)
        worker = (Critic if role == "critic" else Actor)(
            chunks, StepSettings(max_tokens=99, layout=layout), build_optimizer(chunks, lr=1e-3)
        )
        rows = [0, 1, 2, 3, 4] if parallel_state.get_data_parallel_rank() == 0 else [5]
        batch = rollouts(PROMPTS, RESPONSES).select(rows)
        (worker.compute_values if role == "critic" else worker.compute_log_prob)(batch)
        each = [[row] for row in range(len(rows))]
        fillers = [[] for _ in range(6 - len(rows))]
        metrics = worker.update(batch, indices=None if plan == "one" else [*fillers, *each])
        norms.append(metrics[f"{role}/grad_norm"])
        parallel_state.destroy_model_parallel()
    assert abs(norms[0] - norms[1]) < 1e-5 * norms[0], norms


def refuses_fillers_that_would_change_the_result(folder):
    """One rank needs a filler; with an auxiliary loss, a z-loss or an expert bias that is an error on both ranks."""
    cases = {
        "moe_aux_loss_coeff=0.01": {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.01},
        r"moe_aux_loss_coeff=\[0.0, 0.5\]": {
            "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"],
            "moe_aux_loss_coeff": [0.0, 0.5],
        },
        "moe_z_loss_coeff=0.001": {"moe_z_loss_coeff": 0.001},
        "moe_router_enable_expert_bias=True": {
            "moe_router_enable_expert_bias": True,
            "moe_router_score_function": "sigmoid",
        },
    }
    settings = StepSettings(max_tokens=40, layout=ParallelLayout(dp=2))
    rows = [0, 1, 2, 3, 4] if dist.get_rank() == 0 else [5]
    batch = rollouts(PROMPTS, RESPONSES).select(rows)
    for text, overrides in cases.items():
        chunks = built(folder, "dp=2", override_transformer_config=overrides)
        match = f"data-parallel rank 1 needs . fillers .* mixture of experts with {text}: give the rank more rows"
        with pytest.raises(PlanError, match=match):
            forward_backward_batch(batch, ActorRole(), chunks, settings)
        if "sigmoid" in overrides.values():
            parallel_state.destroy_model_parallel()
            continue  # the count for the bias is compiled when it first runs, which takes half a minute
        with torch.no_grad():
            forward_backward_batch(batch, ActorRole(), chunks, settings, forward_only=True)
        # Enough rows on both ranks: no filler, no refusal.
        forward_backward_batch(rollouts(PROMPTS, RESPONSES).select(mine(8)), ActorRole(), chunks, settings)
        parallel_state.destroy_model_parallel()
    chunks = built(folder, "dp=2", override_transformer_config={"moe_router_load_balancing_type": "aux_loss"})
    forward_backward_batch(batch, ActorRole(), chunks, settings)


def refuses_unequal_counts(folder):
    """Ranks that exchange tokens need as many micro-batches; told on both before one waits for the other for ever."""
    chunks = built(folder, "dp=2,ep=2")
    batch = rollouts(PROMPTS, RESPONSES).select(range(3 + dist.get_rank()))
    settings = StepSettings(micro_batch_size=1, layout=ParallelLayout(dp=2, ep=2))
    for forward_only in (False, True):
        with pytest.raises(PlanMismatch, match="data-parallel rank 1 has 4 micro-batches, rank 0 has 3: with ep=2"):
            forward_backward_batch(batch, ActorRole(), chunks, settings, forward_only=forward_only)


def places_dense_and_expert_layers(folder):
    """Two stages of two chunks: the first of four layers is dense, wherever it is built."""
    chunks = built(folder, "pp=2,vpp=2")
    kinds = {layer.layer_number: layer.is_moe_layer for chunk in chunks for layer in chunk.module.decoder.layers}
    everywhere = [None, None]
    dist.all_gather_object(everywhere, kinds)
    assert everywhere[0] | everywhere[1] == {1: False, 2: True, 3: True, 4: True}


def trains_in_half_precision(*folders):
    """One step of every family in bfloat16: the gradient norm of float32, nearly."""
    for folder in folders:
        norms = []
        for dtype in (torch.float32, torch.bfloat16):
            chunks = built(folder, dtype=dtype)
            load_hf(chunks, folder)
            actor = Actor(chunks, StepSettings(max_tokens=60), build_optimizer(chunks, lr=1e-3))
            norms.append(actor.update(rollouts(PROMPTS, RESPONSES))["actor/grad_norm"])
            parallel_state.destroy_model_parallel()
        print(folder, norms)
        assert abs(norms[1] / norms[0] - 1) < 0.1, (folder, norms)
