"""Which layouts are legal, and that the refusal names the size to change."""

import dataclasses

import pytest

from steelyard.cost import ModelShape
from steelyard.errors import LayoutError
from steelyard.parallel import ParallelLayout

SHAPE = ModelShape(layers=8, hidden=64, ffn=96, heads=8, kv_heads=2, head_dim=8, vocab=120)


def test_defaults():
    layout = ParallelLayout(tp=2, pp=2, vpp=2, cp=2, dp=3)
    assert layout.world == 24
    assert layout.model_ranks == 8
    assert layout.sequence_parallel
    assert layout.group == 2
    assert not ParallelLayout().sequence_parallel
    assert str(layout) == "tp2+sp cp2 pp2 vpp2 dp3"
    assert str(ParallelLayout()) == "1"
    assert str(ParallelLayout(tp=2, sp=False, cp=2, cp_kind="all_to_all")) == "tp2 cp2(a2a)"


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ({"tp": 0}, "tp=0 must be a whole number"),
        ({"dp": 1.5}, "dp=1.5 must be a whole number"),
        ({"sp": True}, "sp=True needs tp > 1"),
        ({"vpp": 2}, "vpp=2 needs pp > 1"),
        ({"pp": 4, "group": 2}, "group=2 is below pp=4"),
        ({"cp_kind": "ring"}, "cp_kind='ring' is unknown"),
        ({"ep": 2}, "etp=1 times ep=2 does not divide the 1 ranks"),
        # Megatron spreads an expert over the tensor-parallel ranks unless it is told otherwise.
        ({"tp": 2, "ep": 2}, "etp=2 times ep=2 does not divide the 2 ranks of a stage"),
        ({"tp": 2, "etp": 0}, "etp=0 must be a whole number"),
    ],
)
def test_sizes_that_contradict_each_other(sizes, text):
    with pytest.raises(LayoutError, match=text):
        ParallelLayout(**sizes)


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ({"tp": 3}, "tp=3 does not divide the model's 8 attention heads"),
        ({"tp": 16}, "tp=16 does not divide the model's 8 attention heads"),
        ({"pp": 3}, r"pp\*vpp=3 does not divide the model's 8 layers"),
        ({"pp": 4, "vpp": 4}, r"pp\*vpp=16 does not divide"),
        ({"ep": 2, "dp": 2}, "ep=2 needs a mixture-of-experts model"),
        ({"etp": 1, "tp": 2}, "etp=1 needs a mixture-of-experts model; this one is dense: use etp=2"),
        ({"tp": 8, "cp": 2, "cp_kind": "all_to_all"}, "cp=2 with cp_kind='all_to_all' does not divide the 1 attention"),
    ],
)
def test_layouts_that_do_not_fit_the_model(sizes, text):
    with pytest.raises(LayoutError, match=text):
        ParallelLayout(**sizes).check(SHAPE)


EXPERTS = dataclasses.replace(SHAPE, experts=6, experts_per_token=2, moe_ffn=20, shared_ffn=36)


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ({"ep": 4, "dp": 4}, "ep=4 does not divide the model's 6 experts"),
        ({"etp": 8, "dp": 8}, "etp=8 does not divide an expert's feed-forward size 20"),
        ({"tp": 8, "etp": 1}, "tp=8 does not divide the shared experts' feed-forward size 36"),
        ({"tp": 2, "sp": False}, "sp=False with tp=2: Megatron trains a mixture of experts"),
    ],
)
def test_layouts_that_do_not_fit_the_experts(sizes, text):
    with pytest.raises(LayoutError, match=text):
        ParallelLayout(**sizes).check(EXPERTS)


def test_experts_go_over_the_ranks_of_a_stage():
    layout = ParallelLayout(tp=2, dp=3, pp=2, ep=3)
    layout.check(EXPERTS)
    assert (layout.stage_ranks, layout.expert_tensor_parallel) == (6, 2)
    ParallelLayout(tp=2, cp=3, ep=6, etp=1).check(EXPERTS)
    assert str(ParallelLayout(tp=2, ep=2, etp=1)) == "tp2+sp ep2 etp1"


def test_the_size_of_dense_layers_does_not_matter_where_there_are_none():
    ParallelLayout(tp=4).check(dataclasses.replace(EXPERTS, ffn=97))
    with pytest.raises(LayoutError, match="tp=4 does not divide the model's feed-forward size 97"):
        ParallelLayout(tp=4).check(dataclasses.replace(EXPERTS, ffn=97, dense_layers=1))


def test_more_tensor_parallel_ranks_than_key_value_heads_are_legal():
    ParallelLayout(tp=4).check(SHAPE)


def test_the_product_must_be_the_number_of_ranks():
    ParallelLayout(tp=2, dp=2).check_world(4)
    with pytest.raises(LayoutError, match="needs 4 ranks .* but 3 are there"):
        ParallelLayout(tp=2, dp=2).check_world(3)
