"""What the commands share: options, one line for bad input, JSON on the last line."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated, Any

import typer

from steelyard.errors import InputError


class DeviceName(StrEnum):
    cpu = "cpu"
    cuda = "cuda"


AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on the last line.")]


def print_json(value: Any) -> None:
    from pydantic_core import to_json

    typer.echo(to_json(value, inf_nan_mode="strings"))


@contextlib.contextmanager
def bad_input_in_one_line() -> Iterator[None]:
    """End with exit code 2 and the error's text in one line."""
    try:
        yield
    except InputError as error:
        typer.echo(f"error: {' '.join(str(error).splitlines())}", err=True)
        raise typer.Exit(2) from None
