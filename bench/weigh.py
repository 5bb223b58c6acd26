"""What runs in the process of a cell: its suite, and an eye on the machine meanwhile."""

from __future__ import annotations

import importlib
import time
from typing import Any

from pydantic_core import to_jsonable_python

from bench.environment import Observer, capture
from suites.launch import alone
from suites.launch.watch import NodeLost, describe
from suites.matrix import Cell


def weigh(job: dict[str, Any]) -> dict[str, Any]:
    """Run one cell.

    Args:
        job: ``cell``, the ``module`` of its suite, ``device`` as the user asked for it, and what it ``runs_on``.

    Returns:
        ``series`` (fields of ``suites.measure.Series``), ``reason`` and ``detail`` of what the suite raised, both empty
        when it raised nothing, ``seconds``, ``environment`` and ``conditions``; all as plain data.
    """
    observer, start = Observer(job["runs_on"]), time.monotonic()
    series: list[dict[str, Any]] = []
    reason = detail = ""
    try:
        measured = importlib.import_module(job["module"]).measure(
            Cell.model_validate(job["cell"]), device=job["device"]
        )
        series = [{**vars(one), "values": [float(value) for value in one.values]} for one in measured]
    except NodeLost:
        raise
    except Exception as error:
        told = describe(error)
        reason, detail = told["message"], told["detail"]
    seconds, conditions = time.monotonic() - start, observer.conditions(alone.elsewhere_seconds)
    return {
        "series": to_jsonable_python(series, fallback=str),
        "reason": reason,
        "detail": detail,
        "seconds": seconds,
        "environment": capture(job["runs_on"]).model_dump(mode="json"),
        "conditions": conditions.model_dump(mode="json"),
    }
