"""Ranks that end well, and every way in which they can end badly: a result or a reason, never a wait for ever."""

import time

import pytest

from steelyard.errors import InputError
from suites.launch.local import RanksFailed, run_ranks

JOBS = "suites.tests.rank_jobs:"


@pytest.mark.parametrize("world", [1, 2, 4])
def test_ranks_form_one_group_with_one_thread_each(world):
    result = run_ranks(JOBS + "add_up", world, {"a": [1, None]}, time_limit=60, device="cpu")
    assert result == {"sum": sum(range(world)), "threads": 1, "payload": {"a": [1, None]}}


def test_an_exception_ends_all_ranks_with_its_traceback():
    with pytest.raises(RanksFailed, match=r"rank 1 failed: ZeroDivisionError: planted") as failure:
        run_ranks(JOBS + "fail_on_rank_one", 2, None, time_limit=60, device="cpu")
    assert "in fail_on_rank_one" in failure.value.detail


def test_bad_input_on_a_rank_is_bad_input_for_the_caller():
    with pytest.raises(InputError, match="rows=3 is odd: use an even number"):
        run_ranks(JOBS + "refuse", 2, None, time_limit=60, device="cpu")


def test_a_rank_that_leaves_is_named_with_its_code():
    with pytest.raises(RanksFailed, match="rank 1 exited with code 7"):
        run_ranks(JOBS + "leave_with_code", 2, None, time_limit=60, device="cpu")


def test_a_killed_rank_is_named_with_its_signal_and_last_output():
    with pytest.raises(RanksFailed, match="rank 0 was ended by signal SIGKILL") as failure:
        run_ranks(JOBS + "die_by_signal", 2, None, time_limit=60, device="cpu")
    assert "last words" in failure.value.detail


def test_a_hanging_rank_is_ended_in_time_and_shows_where_it_stood():
    start = time.monotonic()
    with pytest.raises(RanksFailed, match=r"ranks \[0, 1\] did not end within 4 s") as failure:
        run_ranks(JOBS + "stand_still_here", 2, None, time_limit=4, device="cpu")
    assert time.monotonic() - start < 30
    assert "in stand_still_here" in failure.value.detail
