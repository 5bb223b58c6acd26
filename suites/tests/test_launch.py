"""Ranks that end well, and every way in which they can end badly: a result or a reason, never a wait for ever."""

import os
import time
from pathlib import Path

import psutil
import pytest

from steelyard.errors import InputError
from suites.launch import watch
from suites.launch.alone import run_alone
from suites.launch.local import RanksFailed, run_ranks
from suites.tests import rank_jobs

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
    with pytest.raises(RanksFailed, match=r"did not end within 4 s: .*rank 1 stood at") as failure:
        run_ranks(JOBS + "stand_still_here", 2, None, time_limit=4, device="cpu")
    assert time.monotonic() - start < 30
    line = Path(rank_jobs.__file__).read_text().splitlines().index("        time.sleep(600)") + 1
    assert f"rank 1 stood at suites/tests/rank_jobs.py:{line} in stand_still_here" in failure.value.reason
    assert f"called from suites/tests/rank_jobs.py:{line + 1} in stand_still_here" in failure.value.reason
    assert "in stand_still_here" in failure.value.detail


def test_what_a_cell_leaves_running_is_ended_with_it():
    sleeper = run_alone(JOBS + "start_a_sleeper", None, time_limit=60, device="cpu")
    deadline = time.monotonic() + 10
    while psutil.pid_exists(sleeper) and psutil.Process(sleeper).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_cell_has_a_session_of_its_own_and_its_ranks_are_in_it():
    ids = run_alone(JOBS + "sessions_of_cell_and_ranks", None, time_limit=60, device="cpu")
    assert len(set(ids)) == 1
    assert ids[0] != os.getsid(0)


def test_files_of_a_killed_cell_are_removed(tmp_path):
    with pytest.raises(RanksFailed, match="the cell was ended by signal SIGKILL"):
        run_alone(JOBS + "leave_a_file_and_die", str(tmp_path / "where"), time_limit=60, device="cpu")
    assert not Path((tmp_path / "where").read_text()).exists()


def test_a_rank_without_memory_says_so():
    with pytest.raises(RanksFailed, match="rank 1 failed: out of memory: RuntimeError: .*allocate memory"):
        run_ranks(JOBS + "allocate_too_much", 2, None, time_limit=60, device="cpu")


def test_the_kernels_killer_is_named(tmp_path):
    """With a real limit where this process may set one (cgroup v1 or v2), which takes root."""
    group = memory_group(60_000_000)
    if group is None:
        pytest.skip("no memory cgroup can be made here; the counter that is read is tested below")
    try:
        with pytest.raises(RanksFailed, match="rank 1 was ended by signal SIGKILL: out of memory"):
            run_ranks(JOBS + "grow_in_group", 2, str(group / "cgroup.procs"), time_limit=60, device="cpu")
    finally:
        group.rmdir()


def memory_group(limit):
    for root, name in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
        group = Path(root) / f"steelyard-test-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            (group / name).write_text(str(limit))
            return group
        except OSError:
            group.rmdir()
    return None


def test_kills_of_the_kernel_are_counted(tmp_path):
    (tmp_path / "vmstat").write_text("pgfault 7\noom_kill 3\noom_kill_other 9\n")
    assert watch.oom_kills(str(tmp_path / "vmstat")) == 3
    assert watch.oom_kills(str(tmp_path / "absent")) == 0


def test_a_stack_gives_the_innermost_line_and_ours():
    ours, theirs = str(watch.ROOT / "suites" / "mine.py"), "/usr/lib/python3/site-packages/torch/autograd.py"
    text = 'noise\nThread 0x1 (most recent call first):\n  File "/other.py", line 1 in other\n\n'
    text += f'Current thread 0x2 (most recent call first):\n  File "{theirs}", line 7 in backward\n'
    text += f'  File "{ours}", line 5 in step\n'
    assert watch.stands_at(text) == "at torch/autograd.py:7 in backward, called from suites/mine.py:5 in step"
    assert watch.stands_at("nothing") == "at a line that it did not tell"
    many = {f"rank {rank}": text for rank in range(10)}
    assert str(watch.hang(many, 3)).startswith(
        "did not end within 3 s: ranks 0, 1, 2, 3, 4, 5, 6, 7 and 2 more stood at torch/autograd.py:7"
    )
