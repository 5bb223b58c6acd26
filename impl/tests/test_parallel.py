"""Which layouts are legal, and that the refusal names the size to change."""

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
        ({"ep": 2}, "ep=2 does not divide the 1 ranks"),
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
        ({"tp": 8, "cp": 2, "cp_kind": "all_to_all"}, "cp=2 with cp_kind='all_to_all' does not divide the 1 attention"),
    ],
)
def test_layouts_that_do_not_fit_the_model(sizes, text):
    with pytest.raises(LayoutError, match=text):
        ParallelLayout(**sizes).check(SHAPE)


def test_more_tensor_parallel_ranks_than_key_value_heads_are_legal():
    ParallelLayout(tp=4).check(SHAPE)


def test_the_product_must_be_the_number_of_ranks():
    ParallelLayout(tp=2, dp=2).check_world(4)
    with pytest.raises(LayoutError, match="needs 4 ranks .* but 3 are there"):
        ParallelLayout(tp=2, dp=2).check_world(3)
