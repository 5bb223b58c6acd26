"""Predicted memory against what is counted: on a CPU for real, and what would be asked of CUDA on a stand-in."""

import dataclasses

import pytest
import torch

from steelyard.errors import InputError
from steelyard.memory import replay
from steelyard.memory.record import Recorder
from suites import memory_check
from suites.handover import Case
from suites.matrix import Cell, Layout, Sizes

SIZES = Sizes(layers=4, hidden=64, ffn=160, heads=8, kv_heads=4, head_dim=8, vocab=512)


def make_cell(**settings):
    given = {"rows": 8, "scale": 32.0, "micro_batch_size": 2, "model": SIZES, **settings}
    return Cell(suite="memory", workload="rl-code-16k-cap", **given)


def by_metric(series):
    return {one.metric: one for one in series}


@pytest.mark.parametrize("settings", [{}, {"role": "critic", "dtype": "bfloat16", "recompute": "full"}])
def test_the_prediction_is_what_a_cpu_counts(settings):
    found = by_metric(memory_check.measure(make_cell(**settings), device="cpu"))
    assert set(found) == {"predicted_peak_gib", "peak_gib", "peak_error"}
    error = found["peak_error"]
    assert error.values[0] <= error.limit == memory_check.CPU_LIMIT
    assert found["peak_gib"].source == "measured"
    assert found["predicted_peak_gib"].source == "predicted"


def test_several_ranks_are_refused_in_one_line():
    with pytest.raises(InputError, match="layout dp2 has several ranks: the memory suite measures one"):
        memory_check.measure(make_cell(layout=Layout(dp=2)), device="cpu")


class Cuda:
    """``torch.cuda`` for the tests: its allocator gives a segment of its own to every storage of the real step."""

    def __init__(self):
        self.memory, self.recorder, self.since, self.recording = self, None, None, False

    def _record_memory_history(self, enabled="all", *, max_entries=0, stacks="all", context="all"):
        assert max_entries >= 1_000_000 or enabled is None
        self.recording = enabled is not None

    def reset_peak_memory_stats(self):
        assert self.recording
        assert self.recorder.count > 0, "after the first step"
        self.since = self.recorder.count

    def max_memory_allocated(self):
        return self.recorder.peaks(self.since)["build"].bytes

    def max_memory_reserved(self):
        return replay(self.recorder.events()).peak_reserved

    def _snapshot(self):
        trace, alive = [], {}
        for event in self.recorder.events():
            size = -(-max(event.size, 1) // 2**21) * 2**21
            address = (event.block + 1) << 40
            if event.kind == "alloc":
                alive[event.block] = size
                trace += [{"action": name, "addr": address, "size": size} for name in ("segment_alloc", "alloc")]
            elif event.kind == "free":
                size = alive.pop(event.block)
                names = ("free_requested", "free_completed", "segment_free")
                trace += [{"action": name, "addr": address, "size": size} for name in names]
        segments = [{"device": 0, "total_size": size, "allocated_size": size} for size in alive.values()]
        return {"segments": segments, "device_traces": [trace]}


def test_what_cuda_is_asked(request):
    cuda, case = Cuda(), Case.of(make_cell(dtype="bfloat16"))
    # The prediction with the kernels of a CPU stands for a GPU here, whose fused kernels nothing can run.
    prediction = memory_check.predicted(case, "cpu")
    request.getfixturevalue("one_rank")  # only now: what belongs to a process group cannot predict
    with torch.compiler.set_stance("force_eager"), Recorder() as cuda.recorder:
        counted = memory_check.counted_by_cuda(case, cuda)
    assert not cuda.recording, "the history is switched off again"
    assert counted.allocated == cuda.max_memory_allocated()
    assert counted.reserved == cuda.max_memory_reserved() > counted.allocated
    assert counted.replay_error is not None
    traced = dataclasses.replace(prediction, events=cuda.recorder.events())
    found = by_metric(memory_check.compared(traced, counted))
    assert found["peak_error"].limit == memory_check.CUDA_LIMIT
    assert found["peak_error"].values[0] < memory_check.CPU_LIMIT
    assert found["reserved_error"].values == [0.0]
    assert found["reserved_error"].limit is None
    assert found["replay_error"].limit == memory_check.REPLAY_LIMIT
