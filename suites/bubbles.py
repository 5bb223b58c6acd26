"""Pipeline bubbles on Megatron's real schedules: micro-batches in the naive order against a plan for the pipeline.

- *naive*: contiguous rows, ``micro_batch_size`` of them in a micro-batch, in the order in which they came.
- *optimised*: ``plan_step`` for this pipeline and its calibrated costs, with the tokens of the largest naive
  micro-batch as its budget.

Both sides take real steps through ``forward_backward_batch``: a small GPTModel with one layer in each virtual stage,
real activations and gradients in real transfers. The stages are paced (``suites/pacing.py``), since ranks outnumber
cores: a pass takes the time of its micro-batch's work, ``24576 * s + s * s`` for a row of s tokens plus
``fixed_tokens`` for the micro-batch, at a pace that is the same for both sides of a cell and makes the mean naive
forward pass through one virtual stage ``pass_ms`` long. Rows are ``scale`` times shorter in the model than in the plan,
to keep it small.

Steps of other micro-batches come first: they calibrate what a pass takes beside its plan and what one call between
stages costs. With both, ``simulate`` predicts each side's makespan, and ``prediction_error`` says how far the fastest
traced step is from that. ``error_without_exchange`` is the same where the simulator knows no exchange of shapes. Where
something else on the machine kept a pass of that step waiting for a core, ``late_ms`` breaks its limit: the step was
not paced, and its figures say nothing.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.optimize import brentq

from steelyard.balance import plan_step
from steelyard.errors import InputError
from steelyard.pipeline import (
    PassTimeline,
    Pipeline,
    Span,
    Timeline,
    best_order,
    check_count,
    is_legal_count,
    legal_count,
    makespan_lower_bound,
    simulate,
)
from suites.baselines.differencing import partition
from suites.baselines.planners import workload
from suites.launch.local import run_ranks
from suites.matrix import Cell
from suites.measure import Series, Side
from suites.planning import Cost

Indices = list[list[int]]
Floats = np.ndarray
WORST_ERROR = 0.10  # of a predicted makespan
TRACER_SHARE = 0.01  # of the time of a pass
PER_TOKEN = 24576.0
ATTEMPTS = 4  # at a step
CALIBRATIONS = 3  # steps; the fastest counts


@dataclass(frozen=True)
class Task:
    """What a cell asks for.

    Attributes:
        pipeline: without the cost of calls, which is calibrated.
        lengths, work: [rows] tokens and work of each row.
        fixed: work of a micro-batch whatever is in it.
        naive: rows of every naive micro-batch, in execution order.
        seconds_per_work: the pace.
        budget: tokens that an optimised micro-batch may hold.
    """

    pipeline: Pipeline
    lengths: np.ndarray
    work: Floats
    fixed: float
    naive: Indices
    seconds_per_work: float
    budget: int

    @classmethod
    def of(cls, cell: Cell) -> Task:
        layout = cell.layout.parallel()
        if layout.pp == 1 or layout.world != layout.pp:
            raise InputError(
                f"layout {layout} of cell {cell.id}: bubbles are weighed on pipeline stages alone: use pp > 1 and 1 "
                f"for all other sizes"
            )
        pipeline = Pipeline(layout.pp, layout.vpp, layout.group, exchange=True)
        lengths = cell.model_copy(update={"scale": 1.0}).draw().totals
        work, fixed = workload(lengths.astype(np.float64)), PER_TOKEN * cell.fixed_tokens
        size = cell.micro_batch_size
        naive = [list(range(start, min(start + size, cell.rows))) for start in range(0, cell.rows, size)]
        check_count(len(naive), pipeline)
        mean = float(work.sum()) / len(naive) + fixed
        pace = cell.pass_ms / 1e3 * pipeline.stages * pipeline.virtual / mean
        budget = cell.max_tokens or max(int(lengths[part].sum()) for part in naive)
        return cls(pipeline, lengths, work, fixed, naive, pace, budget)

    def plan(self, costs: Costs) -> Indices:
        """The optimised micro-batches, from a planner that knows what passes and calls cost here."""
        passes = self.pipeline.stages * self.pipeline.virtual * 2 / (1 + self.pipeline.backward)
        fixed = self.fixed + costs.fixed * passes / self.seconds_per_work
        # As ``StepSettings.pipeline`` does it.
        exchange = self.pipeline.virtual > 1
        pipeline = replace(self.pipeline, p2p=costs.call / self.seconds_per_work, exchange=exchange)
        return plan_step(self.lengths, self.budget, 1, pipeline=pipeline, cost=Cost(fixed))[0].indices

    def loads(self, indices: Indices) -> Floats:
        """[micro-batches] planned forward seconds through the whole model."""
        return self.seconds_per_work * np.array([self.work[part].sum() + self.fixed for part in indices])

    @property
    def calibration(self) -> tuple[Indices, Floats]:
        """Micro-batches and loads of the calibration: neither side's, but as much work.

        Twice as many as the naive side has, where the rows suffice: what each costs beside its work then shows. Sizes
        are spread evenly in an order of their own; with equal ones all stages would want a core at the same moments.
        """
        rows, naive = len(self.lengths), len(self.naive)
        count = legal_count(2 * naive, self.pipeline)
        count = naive if count > rows else count
        sizes = np.random.default_rng(0).permutation(np.linspace(0.4, 1.6, count))
        indices = [part.tolist() for part in np.array_split(np.arange(rows), count)]
        return indices, self.loads(self.naive).sum() / count * sizes


def measure(cell: Cell, device: str | None = None) -> list[Series]:
    """Trace both sides on this machine's CPU, whatever ``device`` is, and predict them.

    Raises:
        InputError: the cell is no pipeline, or the naive side's count is refused by its schedule.
        RanksFailed: a rank died or hung.
    """
    task = Task.of(cell)
    result = run_ranks(
        "suites.bubbles:on_rank", cell.layout.pp, cell.model_dump(), time_limit=cell.time_limit, device="cpu"
    )
    timelines = {
        name: [PassTimeline(tuple(Span(*span) for span in spans), cell.layout.pp) for spans in steps]
        for name, steps in result["spans"].items()
    }
    costs = Costs(**result["costs"])
    indices = {"naive": task.naive, "optimised": result["plan"]}
    series = [
        Series("call_ms", "both", "ms", "lower", [1e3 * costs.call], "paced"),
        Series("pass_fixed_ms", "both", "ms", "lower", [1e3 * costs.fixed], "paced"),
        Series("tracer_overhead", "both", "1", "lower", [result["tracer_share"]], "paced", limit=TRACER_SHARE),
        _by_count(task, costs, max(map(len, indices.values()))),
    ]
    for side, planned in indices.items():
        steps = [_Step(*step) for step in zip(timelines[side], result["late"][side], strict=True)]
        pace = {"seconds_per_work": task.seconds_per_work, "pass_ms": cell.pass_ms}
        series += _series(side, task.loads(planned), task.pipeline, costs, steps, pace)
    return series


@dataclass(frozen=True)
class Costs:
    """What was calibrated, in seconds: of one call between stages, and of a pass beside its plan."""

    call: float
    fixed: float

    @classmethod
    def calibrate(cls, timelines: Sequence[PassTimeline], task: Task) -> Costs:
        """Fit both to the fastest of some traced steps of the calibration's micro-batches."""
        loads, pipeline = task.calibration[1], task.pipeline
        best = min(timelines, key=lambda timeline: timeline.makespan)
        passes = 2 * len(loads) * pipeline.virtual
        fixed = max(0.0, (best.ideal - simulate(loads, pipeline).ideal) / passes)

        def excess(call: float) -> float:
            return cls(call, fixed).predict(loads, pipeline).makespan - best.makespan

        return cls(0.0 if excess(0.0) >= 0 else float(brentq(excess, 0.0, best.makespan, xtol=1e-6)), fixed)

    def predict(self, loads: Floats, pipeline: Pipeline) -> Timeline:
        """The step of micro-batches of these forward seconds."""
        return simulate(loads, replace(pipeline, p2p=self.call), fixed=self.fixed)

    def without_exchange(self, loads: Floats, pipeline: Pipeline) -> float:
        """The makespan that is predicted with the same costs where nobody waits for shapes."""
        return self.predict(loads, replace(pipeline, exchange=False)).makespan

    def lower_bound(self, loads: Floats, pipeline: Pipeline) -> float:
        """A makespan that no order goes below. Neither direction is given more than its fixed time."""
        share = 2 * max(1.0, pipeline.backward)
        carried = loads + 2 * self.fixed / share * pipeline.stages * pipeline.virtual
        return makespan_lower_bound(carried, replace(pipeline, p2p=self.call))


@dataclass(frozen=True)
class _Step:
    """One traced step; ``late``: seconds by which the latest pass of any rank missed its plan."""

    timeline: PassTimeline
    late: float


def _series(
    side: Side, loads: Floats, pipeline: Pipeline, costs: Costs, steps: Sequence[_Step], pace: dict[str, Any]
) -> list[Series]:
    """The figures of one side; ``pace`` says at what pace it ran."""
    predicted = costs.predict(loads, pipeline)
    # What else runs on the machine only lengthens a step: the fastest one is nearest to an undisturbed one.
    best = min(steps, key=lambda step: step.timeline.makespan)
    traced = best.timeline.makespan
    error = traced / predicted.makespan - 1
    plain = traced / costs.without_exchange(loads, pipeline) - 1
    gap = predicted.makespan / costs.lower_bound(loads, pipeline) - 1
    makespans = [step.timeline.makespan for step in steps]
    overheads = [step.timeline.overhead for step in steps]
    notes = {**pace, **_spans(best.timeline)}
    lower = {"direction": "lower"}
    return [
        Series("micro_batches", side, "micro-batches", "none", [len(loads)]),
        Series("late_ms", side, "ms", values=[1e3 * best.late], source="paced", limit=pace["pass_ms"], **lower),
        Series("makespan", side, "s", values=makespans, source="paced", notes=notes, **lower),
        Series("overhead", side, "1", values=overheads, source="paced", **lower),
        Series("predicted_makespan", side, "s", values=[predicted.makespan], source="predicted",
               notes=_spans(predicted), **lower),
        Series("predicted_overhead", side, "1", values=[predicted.overhead], source="predicted", **lower),
        Series("lower_bound_gap", side, "1", values=[gap], source="predicted", **lower),
        Series("prediction_error", side, "1", values=[abs(error)], source="paced", limit=WORST_ERROR,
               notes={"signed": error}, **lower),
        Series("error_without_exchange", side, "1", values=[abs(plain)], source="paced", notes={"signed": plain},
               **lower),
    ]  # fmt: skip


def _spans(timeline: PassTimeline | Timeline) -> dict[str, Any]:
    """Every pass as [stage, chunk, micro-batch, direction, start, end], in seconds to the microsecond."""
    return {"spans": [[*span[:4], round(span.start, 6), round(span.end, 6)] for span in timeline.spans]}


def _by_count(task: Task, costs: Costs, most: int) -> Series:
    """Predicted overhead of the cell's rows in balanced micro-batches, for every count that the schedule takes.

    They keep no token cap, so a plan need not reach them.
    """
    pipeline, rows = task.pipeline, len(task.lengths)
    counts = range(1, min(rows, most + pipeline.stages) + 1)
    legal = [count for count in counts if is_legal_count(count, pipeline)]
    values = []
    for count in legal:
        loads = task.loads(partition(task.work.astype(int).tolist(), count, equal_size=False))
        values.append(costs.predict(loads[best_order(loads, pipeline)], pipeline).overhead)
    notes = {"counts": legal, "refused": [count for count in counts if count not in legal]}
    return Series("overhead_by_count", "both", "1", "lower", values, "predicted", notes=notes)


def on_rank(payload: dict[str, Any]) -> dict[str, Any]:
    """What every rank runs; rank 0's result holds the spans of every step, the costs and the plan."""
    from suites.ranks import parallel_groups

    cell = Cell.model_validate(payload)
    with parallel_groups(cell.layout.parallel(), cell.seed):
        return _trace(cell)


def _trace(cell: Cell) -> dict[str, Any]:
    task, take = Task.of(cell), _Stepper(cell)
    first = [take.step(*task.calibration) for _ in range(cell.warmup + CALIBRATIONS)]
    # Every rank has the same timelines, so it finds the same costs and the same plan.
    costs = Costs.calibrate([step.timeline for step in first], task)
    indices = {"naive": task.naive, "optimised": task.plan(costs)}
    steps: dict[str, list[_Step]] = {side: [] for side in indices}
    for pair in range(cell.pairs):
        for side in indices if pair % 2 == 0 else reversed(indices):
            steps[side].append(take.step(indices[side], task.loads(indices[side])))
    passes = [span.end - span.start for taken in steps.values() for one in taken for span in one.timeline.spans]
    return {
        "costs": vars(costs),
        "plan": indices["optimised"],
        "spans": {side: [one.timeline.spans for one in taken] for side, taken in steps.items()},
        "late": {side: [one.late for one in taken] for side, taken in steps.items()},
        "tracer_share": _noting_seconds() / statistics.mean(passes),
    }


class _Stepper:
    """A small paced model on this rank, and how it takes a traced step.

    A step in which some pass missed its plan by ``late`` seconds or more, that of a mean pass, was disturbed.
    """

    def __init__(self, cell: Cell) -> None:
        from steelyard.model.build import build_model
        from steelyard.step import ActorRole, StepSettings
        from suites.pacing import Pace
        from suites.ranks import DTYPES
        from suites.workloads import make_batch

        self.layout, self.pace, self.role = cell.layout.parallel(), Pace(), ActorRole()
        # One layer in each virtual stage: their work is paced.
        shape = cell.model.model_copy(update={"layers": self.layout.pp * self.layout.vpp}).shape()
        self.models = build_model(shape, self.layout, dtype=DTYPES[cell.dtype], callbacks=[self.pace.attach])
        self.batch = make_batch(cell.draw(), cell.model.vocab, cell.seed)
        self.late = cell.pass_ms / 1e3
        self.settings = StepSettings(micro_batch_size=cell.micro_batch_size, layout=self.layout)

    def step(self, indices: Indices, loads: Floats) -> _Step:
        """One step; taken again where a rank got no core for so long that its step was not paced."""
        steps: list[_Step] = []
        while len(steps) < ATTEMPTS and not any(step.late < self.late for step in steps):
            steps.append(self._attempt(indices, loads))
        return min(steps, key=lambda step: step.late)

    def _attempt(self, indices: Indices, loads: Floats) -> _Step:
        import torch.distributed as dist

        from steelyard.pipeline.trace import gather_timeline, trace_passes
        from steelyard.step import forward_backward_batch
        from suites.ranks import gather_to_all

        for model in self.models:
            model.zero_grad_buffer()
        each = loads[:, None] / (self.layout.pp * self.layout.vpp)
        self.pace.plan(np.broadcast_to(each, (len(loads), self.layout.vpp)))
        dist.barrier()
        with trace_passes() as trace:
            forward_backward_batch(self.batch, self.role, self.models, self.settings, indices=indices)
        return _Step(gather_timeline(trace), max(gather_to_all(max(self.pace.late))))


def _noting_seconds(passes: int = 1000) -> float:
    """What the tracer adds to one pass on this machine."""
    from steelyard.pipeline.trace import HostClock, Trace

    trace, model = Trace(HostClock()), object()
    mark, outputs = trace.clock.mark, [object() for _ in range(passes)]
    start = time.process_time()
    for output in outputs:
        trace.forward(model, output, mark(), mark())
        trace.backward(id(output), mark(), mark())
    return (time.process_time() - start) / (2 * passes)
