"""Predictions against the same step counted on real ranks, and what they refuse and leave behind."""

import dataclasses
import json
from pkgutil import resolve_name

import numpy as np
import pytest
import torch
import torch.distributed as dist
from counted_ranks import MICRO_BATCHES, SHAPE
from megatron.core import parallel_state

from steelyard.errors import BatchError, InputError, PlanError
from steelyard.memory import fakes
from steelyard.memory.fakes import STAND_INS
from steelyard.memory.live import rounded
from steelyard.memory.predict import RECOMPUTE, predict_peak
from steelyard.parallel import ParallelLayout
from steelyard.step import Actor, ActorRole, CriticRole, StepSettings

EXPERTS = dataclasses.replace(SHAPE, experts=4, experts_per_token=2, moe_ffn=64)
CASES = {
    "one rank": {},
    "critic": {"critic": True},
    "sequence parallel": {"layout": {"tp": 2}},
    "tensor parallel": {"layout": {"tp": 2, "sp": False}},
    "pipeline": {"layout": {"pp": 2}},
    "full recompute": {"layout": {"pp": 2}, "recompute": "full"},
    "virtual stages": {"layout": {"pp": 2, "vpp": 2}},
    "context parallel": {"layout": {"cp": 2}},
    "context parallel over heads": {"layout": {"cp": 2, "cp_kind": "all_to_all"}},
    "plain optimizer": {"layout": {"dp": 2}, "ddp": {"use_distributed_optimizer": False}},
    "overlapped gradients": {"layout": {"dp": 2}, "ddp": {"overlap_grad_reduce": True, "bucket_size": 20000}},
    "experts": {"shape": EXPERTS},
    "fused SwiGLU": {"transformer": {"bias_activation_fusion": True}},
    "experts with fused SwiGLU": {"shape": EXPERTS, "transformer": {"bias_activation_fusion": True}},
}


@pytest.mark.parametrize("name", CASES)
def test_within_two_percent_of_the_same_step_counted_on_real_ranks(ranks, name):
    case = CASES[name]
    shape, layout = case.get("shape", SHAPE), ParallelLayout(**case.get("layout", {}))
    given = {
        "layout": case.get("layout", {}),
        "shape": dataclasses.asdict(shape),
        "micro_batches": MICRO_BATCHES,
        "critic": case.get("critic", False),
        "ddp": case.get("ddp"),
        "transformer": {**RECOMPUTE[case.get("recompute", "none")], **case.get("transformer", {})},
    }
    output = ranks("counted_ranks:count", layout.world, json.dumps(given))
    counted = [json.loads(line.split(" ", 1)[1]) for line in output.splitlines() if line.startswith("COUNTED")]
    assert len(counted) == layout.world
    for one in counted:
        if one["rank"] % layout.tp:
            # Its tensor-parallel peer holds the same.
            continue
        predicted = predict_peak(
            shape,
            layout,
            MICRO_BATCHES,
            rank=one["rank"],
            role=CriticRole() if case.get("critic") else ActorRole(),
            dtype=torch.float32,
            recompute=case.get("recompute", "none"),
            kernels="cpu",
            override_ddp_config=case.get("ddp"),
            override_transformer_config=case.get("transformer"),
        )
        assert predicted.peak_bytes == pytest.approx(one["peak"], rel=0.02)


def small(layout=None, micro_batches=MICRO_BATCHES, **settings):
    return predict_peak(SHAPE, layout or ParallelLayout(), micro_batches, **settings)


def test_the_peak_does_not_grow_with_the_number_of_micro_batches():
    layout = ParallelLayout(pp=2)
    few, many = (small(layout, [[512, 300]] * count).peak_bytes for count in (3, 7))
    # Scalars are kept of each.
    assert few <= many <= few + 16 * 1024
    assert small(layout, [[512, 300]] * 3, forward_only=True).peak_bytes < 0.5 * few


def test_parts_and_phases_add_up_to_the_peak_and_to_the_trace():
    found = small(trace=True)
    assert found.peak_bytes == sum(found.parts.values()) == max(held.bytes for held in found.phases.values())
    assert found.peak_bytes == found.phases[found.phase].bytes
    assert set(found.phases) == {"build", "forward", "backward", "gradient reduction", "optimizer"}
    now, alive, highest = 0, {}, 0
    for event in found.events:
        if event.kind == "alloc":
            assert event.block not in alive
            alive[event.block] = event.size
            now += rounded(event.size)
        else:
            now -= rounded(alive.pop(event.block))
        highest = max(highest, now)
    assert highest == found.peak_bytes
    assert small().events == []


def test_a_straight_line_through_two_depths_meets_the_full_run():
    deep = dataclasses.replace(SHAPE, layers=10)
    layout = ParallelLayout(pp=2)
    full, continued = (
        predict_peak(deep, layout, [[1500], [900], [1200]], rank=1, extrapolate=extrapolate)
        for extrapolate in (False, True)
    )
    assert (full.extrapolated, continued.extrapolated) == (False, True)
    assert continued.parameters == full.parameters
    assert continued.phase == full.phase
    assert continued.peak_bytes == pytest.approx(full.peak_bytes, rel=0.01)
    assert continued.parts["activations"] == pytest.approx(full.parts["activations"], rel=0.01)


def test_what_is_highest_in_shallow_models_only_does_not_bend_the_line():
    # Two short layers need less than the gradient of the embedding; ten need more.
    wide = dataclasses.replace(SHAPE, layers=20, vocab=16384)
    full, continued = (
        predict_peak(wide, ParallelLayout(pp=2), [[256]] * 3, extrapolate=extrapolate) for extrapolate in (False, True)
    )
    assert continued.phases["backward"].bytes == pytest.approx(full.phases["backward"].bytes, rel=0.002)
    assert continued.sections["backward"].bytes < continued.sections["backward: embedding"].bytes or (
        continued.phases["backward"] == continued.sections["backward"]
    )


def test_chunks_of_logits_that_are_left_out_change_no_figure(monkeypatch):
    # A wide vocabulary: 5 chunks.
    wide = dataclasses.replace(SHAPE, vocab=65536)
    some = predict_peak(wide, ParallelLayout(), [[1200]] * 2)
    monkeypatch.setattr(fakes, "STAND_INS", tuple(one for one in STAND_INS if one.name != "_parts"))
    every = predict_peak(wide, ParallelLayout(), [[1200]] * 2)
    assert some.phase == "backward"
    assert {name: held.parts for name, held in some.phases.items()} == {
        name: held.parts for name, held in every.phases.items()
    }


def test_a_step_of_your_own_sees_the_rows_and_must_repeat_itself():
    seen = []

    def step(batch, models, optimizer):
        seen.append((tuple(batch["input_ids"].shape), len(models), optimizer is not None))

    small(step=step)
    assert seen == [((9, 1500), 1, True)] * 2

    settings, counts = StepSettings(micro_batch_size=3), iter((3, 9))

    def changing(batch, models, optimizer):
        count = next(counts)
        Actor(models, settings, optimizer).update({name: value[:count] for name, value in batch.items()})

    with pytest.raises(PlanError, match="it must repeat itself"):
        small(step=changing)


def test_what_stays_on_the_host_does_not_count_and_what_is_moved_is_inputs():
    mib = 2**20
    rows = torch.from_numpy(np.zeros(16 * mib, np.int8))

    def on_the_host(batch, models, optimizer):
        assert (rows + 1).sum() == 16 * mib

    def moved(batch, models, optimizer):
        there = rows.to(torch.cuda.current_device())
        assert there.to("cuda").data_ptr() == there.data_ptr(), "it is there already"
        there.sum()

    with_rows, without = (small(step=step).phases["forward"] for step in (moved, on_the_host))
    assert with_rows.parts["inputs"] == 16 * mib
    assert with_rows.bytes - without.bytes == pytest.approx(16 * mib, abs=4096)
    assert "inputs" not in without.parts


def test_balanced_experts_on_expert_parallel_ranks():
    whole, spread = (
        predict_peak(EXPERTS, ParallelLayout(dp=4, ep=ep), MICRO_BATCHES, kernels="fused") for ep in (1, 4)
    )
    experts = 4 * 4 * 3 * 64 * 64
    assert whole.parameters - spread.parameters == experts * 3 // 4
    assert spread.parts["activations"] == pytest.approx(whole.parts["activations"], rel=0.1)


def test_the_process_is_left_as_it_was():
    before = [getattr(resolve_name(one.owner), one.name) for one in STAND_INS]
    torch.manual_seed(5)
    state = torch.get_rng_state()
    small()
    with pytest.raises(InputError, match="unknown field 'overlap'"):
        small(override_ddp_config={"overlap": True})
    assert [getattr(resolve_name(one.owner), one.name) for one in STAND_INS] == before
    assert torch.equal(torch.get_rng_state(), state)
    assert not dist.is_initialized()
    assert not parallel_state.model_parallel_is_initialized()
    assert small().peak_bytes == small().peak_bytes


def test_what_cannot_be_predicted_is_refused():
    with pytest.raises(BatchError, match="a row of 40000 tokens is above the 32768 positions .* use at most 32768"):
        small(micro_batches=[[40000]])
    with pytest.raises(BatchError, match="rows of more than prompt_tokens=8 tokens are needed"):
        small(micro_batches=[[8]], prompt_tokens=8)
    with pytest.raises(PlanError, match="3 micro-batches .* on pp2 vpp2: the next one is 4"):
        small(ParallelLayout(pp=2, vpp=2), [[9]] * 3)
    with pytest.raises(InputError, match=r"kernels='cud' is unknown \(did you mean cuda or "):
        small(kernels="cud")
    with pytest.raises(InputError, match="recompute='all' is unknown: use one of none, selective, full"):
        small(recompute="all")
    with pytest.raises(InputError, match="rank=2 is not one of the 2 ranks of dp2: 0 to 1"):
        small(ParallelLayout(dp=2), rank=2)
    latent = dataclasses.replace(
        SHAPE, qkv_bias=False, head_dim=12, kv_lora=16, qk_nope=8, qk_rope=4, v_head_dim=8, name="latent"
    )
    with pytest.raises(InputError, match="model latent: multi-head latent attention"):
        predict_peak(latent, ParallelLayout(), MICRO_BATCHES)
    assert not dist.is_initialized()


def test_a_process_of_a_real_group_is_refused(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with pytest.raises(InputError, match="a prediction needs a process group of its own"):
            small()
    finally:
        dist.destroy_process_group()
