"""Timelines as a trace file that chrome://tracing and ui.perfetto.dev open (the Trace Event Format of Chromium)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from steelyard.pipeline.simulate import Span

MICROSECONDS = 1e6  # the unit of the format


def trace_events(timelines: Mapping[str, Iterable[Span]]) -> dict[str, Any]:
    """The content of a trace file; write it with ``json.dump``.

    Every stage of every timeline is a process, its chunks are the threads. The stages of the first timeline are the
    processes 0, 1, ...; those of the others follow in the order given.

    Args:
        timelines: spans in seconds by the name that the viewer shows, e.g. ``naive, paced``.
    """
    events: list[dict[str, Any]] = []
    offset = 0
    for name, spans in timelines.items():
        listed = list(spans)
        places = sorted({(span.stage, span.chunk) for span in listed})
        for stage in sorted({stage for stage, _ in places}):
            process = offset + stage
            events.append(_name("process_name", process, {"name": f"{name}: stage {stage}"}))
            events.append(_name("process_sort_index", process, {"sort_index": process}))
        events += [
            _name("thread_name", offset + stage, {"name": f"chunk {chunk}"}, thread=chunk) for stage, chunk in places
        ]
        events += [_complete(span, offset) for span in listed]
        offset += 1 + max((stage for stage, _ in places), default=-1)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _name(kind: str, process: int, arguments: dict[str, Any], thread: int = 0) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": arguments}


def _complete(span: Span, offset: int) -> dict[str, Any]:
    """A complete event: one pass with its start and duration."""
    return {
        "name": f"{span.direction}{span.micro_batch}",
        "cat": "forward" if span.direction == "F" else "backward",
        "ph": "X",
        "ts": span.start * MICROSECONDS,
        "dur": (span.end - span.start) * MICROSECONDS,
        "pid": offset + span.stage,
        "tid": span.chunk,
        "args": {"micro_batch": span.micro_batch, "chunk": span.chunk, "stage": span.stage},
    }
