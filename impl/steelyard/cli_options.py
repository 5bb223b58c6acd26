"""What the commands share: how bad input ends, choices of options, and models by name."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from steelyard.errors import InputError

if TYPE_CHECKING:
    from steelyard.cost import ModelShape


@contextlib.contextmanager
def bad_input_in_one_line() -> Iterator[None]:
    """End with exit code 2 and the error's text in one line; the harness's commands use it too."""
    try:
        yield
    except InputError as error:
        typer.echo(f"error: {' '.join(str(error).splitlines())}", err=True)
        raise typer.Exit(2) from None


class Recompute(StrEnum):
    none = "none"
    selective = "selective"
    full = "full"


class CpKind(StrEnum):
    all_gather = "all_gather"
    all_to_all = "all_to_all"


def shape_of(name: str, max_positions: int | None = None) -> ModelShape:
    """A shipped shape, or that of a config.json."""
    from steelyard.cost import ModelShape

    shape = ModelShape.from_hf(Path(name)) if Path(name).exists() else ModelShape.preset(name)
    return shape if max_positions is None else replace(shape, max_positions=max_positions)
