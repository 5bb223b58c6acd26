"""Small fake runs of the real step, side by side on the cores of this machine, and none of them twice.

What is asked is always the same few things: every kind of pipeline stage at two sizes of a micro-batch, with as few
data-parallel ranks as the layout allows (``memory.py`` continues them to other sizes and ranks). So different jobs ask
the same questions, and find the answers in the cache. Nothing here imports torch before a question has no answer yet.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

from steelyard.advise.cache import Cache
from steelyard.advise.setting import Recompute
from steelyard.cost import ModelShape
from steelyard.parallel import ParallelLayout

if TYPE_CHECKING:
    from steelyard.step.roles import Role

# Tokens of a row on one context-parallel rank; a larger micro-batch has several such rows.
ROW = 4096


@dataclass(frozen=True)
class Question:
    """What one rank holds in a step.

    Attributes:
        shape, layout: the model, and how it is spread.
        stage: kind of pipeline stage, by the names of ``stages``.
        role: ``actor`` or ``critic``, in training.
        recompute, chunked_logits: as in ``Setting``.
        tokens: of each micro-batch on one context-parallel rank, a multiple of ``ROW``.
    """

    shape: ModelShape
    layout: ParallelLayout
    stage: str
    role: str
    recompute: Recompute
    chunked_logits: bool
    tokens: int

    @property
    def facts(self) -> dict[str, Any]:
        """What the answer depends on; neither the model's name nor its positions."""
        facts = dataclasses.asdict(self)
        for name in ("name", "max_positions"):
            del facts["shape"][name]
        return facts


@dataclass(frozen=True)
class Answer:
    """What ``predict_peak`` said.

    Attributes:
        phases: bytes at the highest moment of each phase.
        parts: for each phase, what they are held for.
        extrapolated: whether it was continued from shallower models.
    """

    phases: Mapping[str, int]
    parts: Mapping[str, Mapping[str, int]]
    extrapolated: bool


def stages(layout: ParallelLayout) -> tuple[str, ...]:
    """Kinds of pipeline stages, as ``memory.predict.stage_ranks`` names them."""
    return {1: ("only",), 2: ("first", "last")}.get(layout.pp, ("first", "middle", "last"))


def predict(question: Question) -> Answer:
    """Run the question's step on fake tensors."""
    from steelyard.memory.predict import predict_peak, stage_ranks
    from steelyard.memory.threshold import usual_micro_batches

    layout = question.layout
    count = len(usual_micro_batches(layout, 1))
    row = ROW * layout.cp
    shape = dataclasses.replace(question.shape, max_positions=max(row, question.shape.max_positions))
    found = predict_peak(
        shape,
        layout,
        [[row] * (question.tokens // ROW)] * count,
        rank=stage_ranks(layout)[question.stage],
        role=_role(question),
        recompute=question.recompute,
        extrapolate=True,
    )
    return Answer(
        {name: held.bytes for name, held in found.phases.items()},
        {name: dict(held.parts) for name, held in found.phases.items()},
        found.extrapolated,
    )


def _role(question: Question) -> Role:
    from steelyard.step import ActorRole, CriticRole

    if question.role == "critic":
        return CriticRole()
    if question.chunked_logits:
        return ActorRole()
    from steelyard.advise.whole_logits import WholeLogitsActor

    return WholeLogitsActor()


class Predictions:
    """Answers from memory, from the cache, or from new runs.

    Args:
        cache: where answers are kept; None keeps them in memory only.
        workers: processes; 1 runs everything in this one.
        told: called after each new run.
    """

    def __init__(self, cache: Cache | None = None, workers: int = 1, told: Callable[[], None] = lambda: None) -> None:
        self.cache, self.workers, self.told, self.runs = cache, workers, told, 0
        self._known: dict[Question, Answer] = {}
        self._pool: ProcessPoolExecutor | None = None

    def answers(self, questions: Iterable[Question]) -> dict[Question, Answer]:
        """The answer to every question; each new one is kept as soon as it is there."""
        wanted = dict.fromkeys(questions)
        missing = [question for question in wanted if not self._recall(question)]
        if self.workers == 1 or len(missing) < 2:
            for question in missing:
                self._keep(question, predict(question))
        else:
            running = {self._processes().submit(predict, question): question for question in missing}
            for done in as_completed(running):
                self._keep(running[done], done.result())
        return {question: self._known[question] for question in wanted}

    def _recall(self, question: Question) -> bool:
        if question not in self._known and self.cache is not None:
            kept = self.cache.get(question.facts)
            if kept is not None:
                self._known[question] = Answer(**kept)
        return question in self._known

    def _keep(self, question: Question, answer: Answer) -> None:
        self._known[question] = answer
        self.runs += 1
        if self.cache is not None:
            self.cache.put(question.facts, dataclasses.asdict(answer))
        self.told()

    def _processes(self) -> ProcessPoolExecutor:
        if self._pool is None:
            # The server imports torch and megatron-core once; workers are forked from it.
            context = get_context("forkserver")
            context.set_forkserver_preload(["steelyard.advise.worker"])
            self._pool = ProcessPoolExecutor(self.workers, mp_context=context, initializer=_begin)
        return self._pool

    def close(self) -> None:
        """Drop what waits to run, and end the processes once they have finished what they run."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def __enter__(self) -> Predictions:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def usual_workers() -> int:
    """One for each core this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _begin() -> None:
    """In a new worker; what it calls must not be imported here, because it imports torch."""
    from steelyard.advise.worker import begin

    begin()
