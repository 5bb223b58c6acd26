"""Every error that a user of Steelyard can meet.

An ``InputError`` says in one line which thing is wrong, its value, and what to do instead. Command-line programs print
that line on stderr and exit with code 2; anything else is a defect and keeps its traceback.
"""

from __future__ import annotations


class SteelyardError(Exception):
    """Base of all errors raised on purpose."""


class InputError(SteelyardError, ValueError):
    """What the caller handed in cannot work; the text names the thing, its value and the remedy."""


class LengthsError(InputError):
    """A table or file of sequence lengths is missing, malformed or empty."""


class ShapeError(InputError):
    """A model shape is unknown or inconsistent."""


class LayoutError(InputError):
    """A parallel layout does not fit the ranks, the model or Megatron's rules."""


class BatchError(InputError):
    """A batch of rollouts lacks a field, or its fields do not agree with each other."""


class CapacityError(InputError):
    """The memory of a GPU does not hold a step, or not even what it needs before its first token."""


class PlanError(InputError):
    """No plan of micro-batches satisfies what was asked."""


class SequenceTooLong(PlanError):  # noqa: N818 - the name users read: it says what happened
    """One sequence alone exceeds the token budget of a micro-batch.

    Attributes:
        position: index of the sequence in the lengths that were planned.
        length: its length in tokens.
        max_tokens: the budget it exceeds, in tokens.
        rank: the data-parallel rank that holds it, or None when one process planned alone.
    """

    def __init__(self, position: int, length: int, max_tokens: int, rank: int | None = None) -> None:
        self.position, self.length, self.max_tokens, self.rank = position, length, max_tokens, rank
        where = f"sequence {position}" if rank is None else f"sequence {position} of data-parallel rank {rank}"
        super().__init__(
            f"{where} has {length} tokens, above max_tokens={max_tokens}: raise max_tokens to at least {length}, "
            f"shorten the sequence, or pass oversize='alone' to give it a micro-batch of its own"
        )

    def __reduce__(self) -> tuple:
        # Errors travel between ranks: rebuild from the facts, not from the text.
        return type(self), (self.position, self.length, self.max_tokens, self.rank)


class GroupTooLong(PlanError):  # noqa: N818
    """Rows that must stay together exceed the token budget of a micro-batch.

    Attributes:
        position: index of the first row of the group in the lengths that were planned.
        rows: number of rows in the group.
        length: their tokens together.
        max_tokens: the budget they exceed, in tokens.
        rank: the data-parallel rank that holds them, or None when one process planned alone.
    """

    def __init__(self, position: int, rows: int, length: int, max_tokens: int, rank: int | None = None) -> None:
        self.position, self.rows, self.length, self.max_tokens, self.rank = position, rows, length, max_tokens, rank
        where = f"the group of sequence {position}" + ("" if rank is None else f" of data-parallel rank {rank}")
        super().__init__(
            f"{where} has {length} tokens in {rows} rows, above max_tokens={max_tokens}: raise max_tokens to at least "
            f"{length}, make the groups smaller, or pass oversize='alone' to give it a micro-batch of its own"
        )

    def __reduce__(self) -> tuple:
        return type(self), (self.position, self.rows, self.length, self.max_tokens, self.rank)


class PlanMismatch(PlanError):  # noqa: N818
    """Ranks that must follow one plan hold different ones."""
