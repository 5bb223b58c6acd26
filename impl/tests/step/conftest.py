"""Runs a program of this folder on ranks with torchrun, as a user would."""

import os
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
        result = subprocess.run(
            [*command, str(FOLDER / "on_ranks.py"), function, *arguments],
            capture_output=True,
            text=True,
            timeout=time_limit,
            check=False,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-6000:]
        return result.stdout

    return run
