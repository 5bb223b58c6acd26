"""A process that predicts for another one: imported before workers are forked, so that each has torch at once.

megatron-core's imports warn of everything that it could use and does not find; nobody reads that of a worker.
"""

from __future__ import annotations

import os
import signal
import threading
import warnings
from multiprocessing import parent_process

warnings.simplefilter("ignore")

import torch  # noqa: E402

import steelyard.memory.predict  # noqa: E402, F401


def begin() -> None:
    """Leave Ctrl-C to the process that asked, take one core, and end when that process has ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
