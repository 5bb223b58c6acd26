"""What the commands share: options, and JSON on the last line."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import typer


class DeviceName(StrEnum):
    cpu = "cpu"
    cuda = "cuda"


AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on the last line.")]


def print_json(value: Any) -> None:
    from pydantic_core import to_json

    typer.echo(to_json(value, inf_nan_mode="strings"))
