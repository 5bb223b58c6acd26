"""The tracer on Megatron's real schedules: which pass ran when, and that nothing is left behind."""

import time

import pytest

from steelyard.pipeline.trace import HostClock, Trace


@pytest.mark.parametrize(
    ("pp", "vpp", "group", "counts"),
    [
        (2, 1, 2, (1, 2, 5)),
        (4, 1, 4, (3, 9)),
        (2, 2, 2, (2, 4, 6)),
        (2, 2, 4, (4, 6)),
        (2, 3, 5, (7, 8)),
        (4, 2, 4, (4, 8)),
        (4, 2, 6, (10,)),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, tuple) else None,
)
def test_passes_and_calls_run_in_the_order_that_is_predicted(ranks, pp, vpp, group, counts):
    ranks("traced:runs_in_the_predicted_order", pp, *map(str, (pp, vpp, group, *counts)))


def test_spans_of_all_ranks_are_on_one_time_axis(ranks):
    ranks("traced:times_are_on_one_axis", 2)


def test_a_step_without_a_pipeline_is_traced(ranks):
    ranks("traced:one_stage_is_traced", 1)


def test_the_schedules_are_as_before_also_after_an_error(ranks):
    ranks("traced:puts_the_schedules_back", 2)


def test_a_rank_that_ran_no_pass_is_an_error_on_every_rank(ranks):
    ranks("traced:a_rank_without_a_pass_is_an_error_on_all", 2)


def test_gradients_are_the_same_with_the_tracer(ranks):
    ranks("traced:tracing_changes_no_gradient", 2)


def test_noting_a_pass_costs_less_than_a_hundredth_of_a_short_one():
    """The shortest passes worth tracing take a millisecond; noting one must stay under 10 microseconds."""

    def seconds(passes: int = 2000) -> float:
        trace, model = Trace(HostClock()), object()
        outputs = [object() for _ in range(passes)]
        start = time.process_time()
        for output in outputs:
            trace.forward(model, output, trace.clock.mark(), trace.clock.mark())
            trace.backward(id(output), trace.clock.mark(), trace.clock.mark())
        return (time.process_time() - start) / (2 * passes)

    assert min(seconds() for _ in range(5)) < 10e-6
