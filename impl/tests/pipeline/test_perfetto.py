"""Trace files have the structure that Chromium's format asks for."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

from steelyard.pipeline import Pipeline, simulate
from steelyard.pipeline.perfetto import trace_events


def test_a_trace_file_has_every_pass_as_a_complete_event_with_named_processes_and_threads() -> None:
    pipeline = Pipeline(2, 2)
    one, other = simulate([1.0, 2.0], pipeline), simulate([2.0, 1.0], replace(pipeline, exchange=True))
    content = json.loads(json.dumps(trace_events({"naive": one.spans, "optimised": other.spans})))
    assert set(content) == {"traceEvents", "displayTimeUnit"}
    events = content["traceEvents"]
    passes = [event for event in events if event["ph"] == "X"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {
        0: "naive: stage 0",
        1: "naive: stage 1",
        2: "optimised: stage 0",
        3: "optimised: stage 1",
    }
    threads = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    assert len(passes) == len(one.spans) + len(other.spans)
    assert {(event["pid"], event["tid"]) for event in passes} == threads == {(p, t) for p in range(4) for t in range(2)}
    for event in passes:
        assert event["dur"] > 0
        assert event["ts"] >= 0
        assert event["name"] == f"{event['cat'][0].upper()}{event['args']['micro_batch']}"
    assert max(event["ts"] + event["dur"] for event in passes if event["pid"] < 2) == one.makespan * 1e6
    # Passes of a stage never overlap, whatever their chunk.
    for process in range(4):
        mine = sorted((event["ts"], event["ts"] + event["dur"]) for event in passes if event["pid"] == process)
        assert all(end <= start + 1e-6 for (_, end), (start, _) in itertools.pairwise(mine))


def test_no_timeline_makes_an_empty_file() -> None:
    assert trace_events({"naive": []})["traceEvents"] == []
