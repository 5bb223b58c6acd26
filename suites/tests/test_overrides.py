"""The override suite: every case arrives through every builder on 1, 2 and 4 ranks, and N12 is caught in each."""

import pytest

from steelyard.model.ddp_report import OBSERVERS
from suites import SUITES, matrix, overrides
from suites.baselines.dropped_override import LOSSES
from suites.matrix import Cell, Layout, Sizes

SIZES = Sizes(layers=2, hidden=32, ffn=48, heads=4, kv_heads=2, head_dim=8, vocab=96)


def cell(**layout):
    layers = 4 if "pp" in layout else 2
    return Cell(
        suite="overrides",
        workload="rl-math-short",
        layout=Layout(**layout),
        model=SIZES.model_copy(update={"layers": layers}),
        rows=4,
        micro_batch_size=2,
        scale=40.0,
        time_limit=240.0,
    )


@pytest.mark.parametrize("layout", [{}, {"tp": 2}, {"dp": 2, "pp": 2}], ids=str)
def test_every_override_arrives_through_every_builder_and_n12_is_caught(layout):
    found = overrides.measure(cell(**layout), device="cpu")
    wrong = [(one.notes, one.values) for one in found if one.values != [one.limit]]
    assert not wrong
    builders = {one.notes["builder"]: one.side for one in found}
    assert builders == {"megatron": "optimised", "mbridge": "optimised", "megatron-bridge": "optimised", "N12": "naive"}
    assert len(found) == len(builders) * len(overrides.cases(cell(**layout)))
    assert len({(one.metric, one.side, one.variant) for one in found}) == len(found)


def test_every_field_that_can_be_observed_has_a_case_and_every_loss_is_tried():
    assert {case.field for case in overrides.DDP_CASES} == set(OBSERVERS)
    assert {case.loss for case in overrides.DDP_CASES} == set(LOSSES)
    everywhere = {case.field for layout in ({"dp": 2, "pp": 2}, {}) for case in overrides.cases(cell(**layout))}
    assert everywhere == {case.field for case in (*overrides.DDP_CASES, *overrides.TRANSFORMER_CASES)}


def test_a_case_is_lost_when_one_rank_contradicts_it_or_none_shows_it():
    ranks = [{"case": 0, "builder": "mbridge", "observed": "x", "seen": seen, "others": []} for seen in (None, True)]
    assert overrides._over_ranks(cell(), ranks)["arrives"]
    assert not overrides._over_ranks(cell(), ranks[:1])["arrives"]
    assert not overrides._over_ranks(cell(), [*ranks, {**ranks[1], "seen": False}])["arrives"]
    assert not overrides._over_ranks(cell(), [*ranks, {**ranks[1], "others": ["grad_reduce_in_fp32: lost"]}])["arrives"]


def test_the_matrix_has_one_two_and_four_ranks():
    cells = matrix.load("overrides", list(SUITES)).cells()
    assert {one.layout.parallel().world for one in cells} == {1, 2, 4}
