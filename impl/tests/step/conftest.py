"""Runs a program of this folder on ranks with torchrun, as a user would."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent


@pytest.fixture
def torchrun():
    def run(function: str, world: int, *arguments: str, time_limit: float = 120) -> str:
        """Call ``function`` of on_ranks.py on ``world`` ranks and return what they printed, or fail with it."""
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
        process = subprocess.Popen(
            [*command, str(FOLDER / "on_ranks.py"), function, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=time_limit)
        finally:
            # Ranks that wait for each other would outlive their launcher.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        assert process.returncode == 0, output[-8000:]
        return output

    return run
