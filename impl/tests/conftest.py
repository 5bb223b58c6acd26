"""Runs functions on gloo ranks: processes forked from one that has imported torch and megatron-core."""

import contextlib
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

import pytest

# Children import the module by name.
sys.path.insert(0, str(Path(__file__).parent / "step"))


@pytest.fixture
def ranks(tmp_path):
    def run(function: str, world: int, *arguments: str, time_limit: float = 120) -> str:
        """Call ``function`` of step/on_ranks.py, or ``module:function`` of a folder that is on the path, on ``world``
        ranks; return what they printed, or fail with it.
        """
        import on_ranks  # here, because it imports megatron-core, which most tests do without

        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["on_ranks", "steelyard.step", "steelyard.model.build", "mbridge"])
        processes = [
            context.Process(target=on_ranks.main, args=(function, arguments, rank, world, str(tmp_path)))
            for rank in range(world)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + time_limit
        while any(process.exitcode is None for process in processes) and time.monotonic() < deadline:
            if any(process.exitcode for process in processes):
                # Peers of a failed rank get a moment to tell their side.
                deadline = min(deadline, time.monotonic() + 2.0)
            time.sleep(0.05)
        codes = [process.exitcode for process in processes]
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
            process.join()
        output = "".join(path.read_text(errors="replace") for path in sorted(tmp_path.glob("*.log")))
        assert codes == [0] * world, f"exit codes {codes}\n{output[-8000:]}"
        return output

    return run
