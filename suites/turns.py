"""Turns: two processes that measure the same cell let each other go first, sample by sample.

``bench ab`` starts one process per commit. A suite calls ``wait_for_turn()`` right before every sample that is timed;
the call hands the turn to the other process and returns when it comes back. So only one of the two works at any time,
and samples with the same index were taken one after the other. In a plain run nobody listens, and the call returns at
once.

A turn travels through two named pipes in the folder that ``STEELYARD_TURNS`` names: a byte written to ``request`` asks
for the turn, a byte read from ``go`` is the turn.
"""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = "STEELYARD_TURNS"
REQUEST, GO = "request", "go"


def wait_for_turn() -> None:
    """Return when it is this process's turn. Of the ranks of one cell only rank 0 calls it, before a barrier."""
    folder = os.environ.get(VARIABLE)
    if folder:
        with (Path(folder) / REQUEST).open("wb") as request:
            request.write(b"r")
        with (Path(folder) / GO).open("rb", buffering=0) as go:
            go.read(1)
