"""A user's own sides: each kind is weighed beside the others, and a wrong one is named."""

from __future__ import annotations

import pytest

from steelyard.errors import InputError
from suites import packing, planning, throughput
from suites.matrix import Cell, Layout, Sizes
from suites.sides import attach_sides

SIZES = Sizes(layers=2, hidden=64, ffn=96, heads=4, kv_heads=2, head_dim=16, vocab=128)
OWN = "suites.tests.own_sides:"
VERL = "verl=suites.examples.verl_planner:plan"


def cell(suite: str, *sides: str, **settings: object) -> Cell:
    given = {"rows": 16, "pairs": 2, "warmup": 1, **settings}
    one = Cell(suite=suite, workload="rl-code-16k-cap", model=SIZES, time_limit=120, **given)
    return attach_sides([one], sides)[0]


def test_a_planner_is_scored_like_the_same_one_among_the_others() -> None:
    own = cell("planning", f"mine={OWN}plan", layout=Layout(dp=2, pp=2), planners=["FFD+KK"])
    found = {(one.metric, one.variant): one for one in planning.measure(own)}
    for metric in ("micro_batches", "share_over_cap", "rank_imbalance", "time_over_ideal"):
        assert found[metric, "mine"].values == found[metric, "FFD+KK"].values
    assert found["planning_ms", "mine"].side == "naive"
    assert len(found["planning_ms", "mine"].values) == 2


def test_a_planner_may_refuse_but_not_lose_a_row() -> None:
    layout = Layout(dp=2)
    refused = planning.measure(cell("planning", f"mine={OWN}plan_that_refuses", layout=layout, planners=["FFD+KK"]))
    assert next(one for one in refused if (one.metric, one.variant) == ("time_over_ideal", "mine")).values[0] == float(
        "inf"
    )
    with pytest.raises(InputError, match="side mine: its micro-batches hold 15 rows, 15 of them different, of 16"):
        planning.measure(cell("planning", f"mine={OWN}plan_that_loses_a_row", layout=layout, planners=["FFD+KK"]))


@pytest.mark.parametrize("layout", [Layout(dp=4, pp=4), Layout(dp=4, pp=4, vpp=2), Layout(dp=2)])
def test_verls_own_function_is_a_side_and_plans_as_its_baseline_does(layout: Layout) -> None:
    own = cell("planning", VERL, layout=layout, planners=["verl-0.9.1"], rows=128)
    found = {(one.metric, one.variant): one for one in planning.measure(own)}
    for metric in ("micro_batches", "share_over_cap"):
        assert found[metric, "verl"].values == found[metric, "verl-0.9.1"].values
    assert found["time_over_ideal", "verl"].values == pytest.approx(found["time_over_ideal", "verl-0.9.1"].values)


def test_packing_of_a_user_is_timed_and_must_be_exact() -> None:
    own = cell("packing", f"mine={OWN}pack", f"wrong={OWN}pack_wrongly", layout=Layout(cp=2), rows=4, scale=20.0)
    found = {(one.metric, one.variant): one for one in packing.measure(own, "cpu")}
    assert len(found["packing_ms", "mine"].values) == len(found["packing_ms", ""].values) == 2
    assert found["host_reads", "mine"].values[0] > 0, "it reads as N6 does"
    assert found["packing_difference", "mine"].values == [0.0]
    assert found["packing_difference", "wrong"].values[0] > found["packing_difference", "wrong"].limit


def test_a_step_of_a_user_trains_its_own_copy_of_the_model() -> None:
    own = cell("throughput", f"mine={OWN}fixed", rows=8, scale=400.0)
    found = {(one.metric, one.side, one.variant): one.values for one in throughput.measure(own, "cpu")}
    assert len(found["tokens_per_second", "naive", "mine"]) == 2
    assert found["computed_tokens", "naive", "mine"] == found["computed_tokens", "naive", ""]
    assert found["loss", "naive", "mine"] == pytest.approx(found["loss", "naive", ""], rel=1e-5)


def test_a_side_goes_to_the_cells_that_weigh_its_kind() -> None:
    cells = [cell("planning", layout=Layout(dp=2)), cell("packing")]
    first, second = attach_sides(cells, [f"mine={OWN}plan"])
    assert (first.sides, second.sides) == ({"mine": f"{OWN}plan"}, {})
    with pytest.raises(InputError, match="another side with the name mine"):
        attach_sides(cells, [f"mine={OWN}plan", f"mine={OWN}plan_that_refuses"])
    with pytest.raises(InputError, match="side N4: a planner has that name already"):
        planning.measure(cell("planning", f"N4={OWN}plan"))
