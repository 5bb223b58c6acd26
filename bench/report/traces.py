"""Trace files of the pipelines in a run, for ui.perfetto.dev or chrome://tracing."""

from __future__ import annotations

import json
from pathlib import Path

from bench.bubbles import timelines
from bench.summary import Summary
from steelyard.pipeline.perfetto import trace_events

FOLDER = "traces"


def write_traces(summary: Summary, folder: Path) -> list[str]:
    """Write one file for each cell with timelines; returns their paths within ``folder``."""
    files = []
    for cell, _ in summary.bubbles:
        found = {f"{side}, {source}": spans for (side, source), spans in timelines(cell).items()}
        if found:
            file = Path(FOLDER) / f"{cell.id.replace('/', '_')}.json"
            (folder / FOLDER).mkdir(exist_ok=True)
            (folder / file).write_text(json.dumps(trace_events(found)))
            files.append(str(file))
    return files
