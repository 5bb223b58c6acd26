"""The hand-over suite: what it predicts, the honest naive side, exact training, and its CUDA path on a stand-in."""

import gc

import pytest
import torch

from steelyard.errors import InputError
from steelyard.memory import Event, Offloader
from steelyard.memory.predict import STATIC_PARTS
from suites import SUITES, handover, matrix
from suites.baselines import rollout_memory
from suites.handover import ALONE, GIB, KEPT, Case, Trace
from suites.matrix import Cell, Layout, Sizes

SIZES = Sizes(layers=2, hidden=64, ffn=96, heads=4, kv_heads=2, head_dim=16, vocab=1024)
# Large enough that segments of 20 MiB do not hide what differs.
LARGER = Sizes(layers=2, hidden=256, ffn=512, heads=4, kv_heads=2, head_dim=64, vocab=16384)


def make_cell(**settings):
    given = {"rows": 4, "scale": 400.0, "dtype": "bfloat16", "pairs": 2, "model": SIZES, **settings}
    return Cell(suite="handover", workload="rl-code-16k-cap", **given)


def values(series):
    return {(one.metric, one.side, one.variant): list(one.values) for one in series}


@pytest.fixture(scope="module")
def prediction():
    return handover.predicted(Case.of(make_cell(model=LARGER)))


def test_a_hand_over_leaves_the_engine_more_and_says_what_holds_the_rest(prediction):
    found = values(prediction)
    alone, both, kept, all_ = (
        found["engine_gib", *way][0]
        for way in (("naive", ALONE), ("naive", ""), ("optimised", KEPT), ("optimised", ""))
    )
    assert alone < both < kept < all_ < 80.0
    held = {(one.side, one.variant): one.notes["held_gib"] for one in prediction if one.metric == "engine_gib"}
    assert {"params", "grads", "optimizer"} <= held["naive", ALONE].keys()
    assert "optimizer" not in held["naive", ""]
    assert held["naive", ""]["grads"] == pytest.approx(2 * held["naive", ""]["params"], rel=0.01), (
        "float32 for bfloat16"
    )
    assert "grads" not in held["optimised", KEPT]
    assert held["optimised", KEPT]["params"] == held["naive", ""]["params"]
    assert held["optimised", ""].keys() <= {"other tensors", "unused"}
    for one in prediction:
        if one.metric == "engine_gib":
            # Capacity less context and NCCL buffers (1.5 GiB) and cuBLAS's workspace (32 MiB), to whole segments.
            taken = 80.0 - one.values[0] - 1.5
            assert taken == pytest.approx(sum(one.notes["held_gib"].values()) + 32 / 1024, abs=1e-6)
            assert (taken * 2**10 % 2) == 0
        assert one.source == "predicted"


def test_every_way_asks_the_allocator_for_what_it_does():
    alloc = [Event("alloc", at, 2**20, tag) for at, tag in enumerate((*STATIC_PARTS, "activations"))]
    trace = Trace("only", alloc, [Event("free", 4)])
    assert trace.way("naive", ALONE) == [Event("empty_cache")], "what reference cycles hold stays"
    freed = [event.block for event in trace.way("optimised", "") if event.kind == "free"]
    assert freed == [0, 1, 2, 3, 4], "everything of the step, and what a collection ends"
    freed = [event.block for event in trace.way("optimised", KEPT) if event.kind == "free"]
    assert freed == [1, 2, 3, 4]
    *out, empty, params, grads, last = trace.way("naive", "")
    assert [event.block for event in out] == [0, 1, 2, 3, 4]
    assert (params.tag, grads.tag) == ("parameters", "gradients")
    assert empty == last == Event("empty_cache")


def test_reference_cycles_are_predicted_to_outlive_a_plain_empty_cache(monkeypatch):
    train, size = Case.train, 64 * 2**20

    def leaking(self, models, optimizer):
        loss = train(self, models, optimizer)
        cycle = [torch.empty(size // 4, device=handover.DEVICE)]
        cycle.append(cycle)
        return loss

    monkeypatch.setattr(Case, "train", leaking)
    gc.disable()
    try:
        found = {(one.side, one.variant): one for one in handover.predicted(Case.of(make_cell())) if one.notes}
    finally:
        gc.enable()
    held = {way: one.notes["held_gib"].get("other tensors", 0.0) * GIB for way, one in found.items()}
    assert held["naive", ALONE] >= size
    assert held["optimised", ""] < size
    assert held["naive", ""] < size, "verl's helpers that move collect garbage"


def test_layouts_of_many_ranks_are_predicted_on_the_stage_with_the_least(monkeypatch):
    traces, original = [], Trace.of
    monkeypatch.setattr(Trace, "of", lambda *given: traces.append(original(*given)) or traces[-1])
    found = handover.measure(
        make_cell(layout=Layout(tp=2, pp=2, dp=2), rows=8, role="critic", model=LARGER), device="cpu"
    )
    assert {one.source for one in found} == {"predicted"}
    (one,) = (one for one in found if one.variant == ALONE)
    held = {trace.stage: sum(event.size for event in trace.live(*handover.PIECES)) for trace in traces}
    assert held["first"] > held["last"], "a critic's last stage has no output layer"
    assert one.notes["stage"] == "first"


def test_a_step_that_does_not_fit_is_one_clear_line():
    with pytest.raises(InputError, match="capacity_gib=1.6 does not hold the training step .* raise it, or lower"):
        handover.predicted(Case.of(make_cell(capacity_gib=1.6, model=LARGER)))


class Device:
    """A device of 8 GiB for the tests: in use is what the training state has there, and freed memory stays cached."""

    total = 8 * GIB

    def __init__(self):
        self.offloader, self.reserved, self.emptied = None, 0, 0

    def is_available(self):
        return True

    def current_device(self):
        return 3

    def memory_allocated(self, device):
        assert device == 3
        allocated = sum(state.device_bytes for state in self.offloader.state.values()) if self.offloader else 0
        self.reserved = max(self.reserved, allocated)
        return allocated

    def memory_reserved(self, device):
        self.memory_allocated(device)
        return self.reserved

    max_memory_allocated, max_memory_reserved = memory_allocated, memory_reserved

    def mem_get_info(self, device):
        return self.total - self.memory_reserved(device), self.total

    def synchronize(self, device=None):
        pass

    def empty_cache(self):
        self.emptied += 1
        self.reserved = self.memory_allocated(3)


def test_the_cuda_path_on_a_stand_in(one_rank, monkeypatch):
    device = Device()

    def watched(models, optimizer):
        device.offloader = Offloader(models, optimizer)
        return device.offloader

    monkeypatch.setattr(handover, "Offloader", watched)
    series = handover.measured(Case.of(make_cell(warmup=0)), api=device)
    found = values(series)
    assert found["loss_difference", "both", ""] == [0.0]
    free = {way: found["device_free_gib", *way] for way in handover.WAYS}
    assert all(len(one) == 2 and min(one) == max(one) for one in free.values()), "every round ends as it began"
    # Optimizer state that N11 moved is on the host, which is the device here.
    assert free["naive", ALONE] == free["naive", ""] < free["optimised", KEPT] < free["optimised", ""] == [8.0] * 2
    for metric in ("out_ms", "back_ms"):
        assert all(min(found[metric, *way]) > 0 for way in handover.WAYS)
    assert not any(one.notes for one in series), "nothing is said of host copies"
    assert len(found["step_ms", "naive", ""]) == len(found["step_ms", "optimised", ""]) == 2


def test_emptying_before_every_micro_batch_is_only_on_the_naive_side(one_rank):
    case, device = Case.of(make_cell(pairs=2, warmup=0, max_tokens=64)), Device()
    with case.groups():
        handover._often(case, *case.build(), device)
    assert len(case.plan.indices) > 1
    assert device.emptied == 2 * len(case.plan.indices)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_naive_way_moves_and_restores_all(one_rank, dtype):
    case, device = Case.of(make_cell(dtype=dtype)), Device()
    with case.groups():
        models, optimizer = case.build()
        case.train(models, optimizer)
        (buffer,) = models[0].buffers
        inner = optimizer.chained_optimizers[0].optimizer
        device.offloader = Offloader(models, optimizer)
        before = [buffer.param_data.clone(), *(value.clone() for value in states(inner))]
        with rollout_memory.loaded_for_rollout(models, optimizer, device):
            assert torch.equal(buffer.param_data, before[0]), "the engine finds the weights"
            assert buffer.grad_data.untyped_storage().nbytes() > 0
            assert not buffer.grad_data.any(), "gradients came back as zeros"
        assert all(map(torch.equal, [buffer.param_data, *states(inner)], before))
        assert device.emptied == 6 + 2, "six moves empty the cache, and N10 does so twice"
        case.train(models, optimizer)
        assert not torch.equal(buffer.param_data, before[0]), "and training goes on"


def states(inner):
    return [value for state in inner.state.values() for value in state.values() if isinstance(value, torch.Tensor)]


def test_a_small_cell_is_predicted_and_measured_on_a_cpu():
    series = handover.measure(make_cell(), device="cpu")
    found = values(series)
    assert found["loss_difference", "both", ""] == [0.0]
    copies = {one.notes["copies"] for one in series if one.metric in ("out_ms", "back_ms")}
    assert copies == {"from host memory to host memory"}
    assert {one.metric: one.source for one in series} == {
        "engine_gib": "predicted",
        "step_reserved_gib": "predicted",
        "loss_difference": "measured",
        "out_ms": "measured",
        "back_ms": "measured",
    }


def test_what_a_cpu_cannot_hold_is_predicted_only(prediction, monkeypatch):
    monkeypatch.setattr(handover, "predicted", lambda case: prediction)
    monkeypatch.setattr(handover, "CPU_STATE_GIB", 0.001)
    assert {one.source for one in handover.measure(make_cell(), device="cpu")} == {"predicted"}


def test_the_matrix_holds_a_realistic_case():
    cells = matrix.load("handover", list(SUITES)).cells()
    assert any(str(cell.layout.parallel()).startswith("tp2+sp pp2 dp2") and cell.model.layers == 28 for cell in cells)
