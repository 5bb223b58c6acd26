"""Every legal layout, and no other: against a loop over all sizes."""

import itertools
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.advise.layouts import layouts
from steelyard.cost import ModelShape
from steelyard.errors import LayoutError
from steelyard.parallel import ParallelLayout


def every_size(shape, gpus, per_node):
    """Layouts that use every GPU and raise nothing, found without thinking."""
    found = set()
    whole = range(1, gpus + 1)
    for tp, pp, cp, dp in itertools.product(whole, whole, whole, whole):
        if tp * pp * cp * dp != gpus or tp > per_node:
            continue
        for vpp, ep, etp in itertools.product(range(1, shape.layers + 1), range(1, shape.experts + 2), {1, tp}):
            for sp, kind in itertools.product((False, True), ("all_gather", "all_to_all")):
                if cp == 1 and kind == "all_to_all":
                    continue  # says nothing without context parallelism
                try:
                    layout = ParallelLayout(tp, sp, pp, vpp, cp, kind, dp, ep, etp=etp)
                    layout.check(shape)
                except LayoutError:
                    continue
                found.add(layout)
    return found


@settings(max_examples=25, deadline=None)
@given(
    gpus=st.sampled_from([1, 2, 3, 4, 6, 8, 12]),
    per_node=st.sampled_from([1, 2, 4, 8]),
    heads=st.sampled_from([4, 6, 8, 12]),
    groups=st.sampled_from([1, 2]),
    layers=st.integers(1, 8),
    experts=st.sampled_from([0, 0, 4, 6]),
)
def test_layouts_are_those_that_megatron_can_build(gpus, per_node, heads, groups, layers, experts):
    shape = ModelShape(
        layers, 64 * heads, 128, heads, heads // groups, 64, 1152, **_of_experts(experts) if experts else {}
    )
    found = list(layouts(shape, gpus, per_node))
    assert len(found) == len(set(found))
    assert set(found) == every_size(shape, gpus, per_node)


def _of_experts(experts):
    return {"experts": experts, "experts_per_token": 2, "moe_ffn": 96}


def test_tensor_parallel_ranks_share_a_node():
    shape = replace(ModelShape.preset("qwen2.5-7b"))
    assert {layout.tp for layout in layouts(shape, 8, gpus_per_node=2)} == {1, 2}
    assert {layout.tp for layout in layouts(shape, 8)} == {1, 2, 4}
