"""Writing a picture to a file that a user has named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from steelyard.errors import InputError


def new_figure(**settings: Any) -> Any:
    """matplotlib's ``Figure``, which is no dependency of the package.

    Raises:
        InputError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError(
            "a picture needs matplotlib: install it (pip install matplotlib), or leave --picture out"
        ) from None
    return Figure(**settings)


def write_figure(figure: Any, path: Path) -> None:
    """Write it in the format that the file's ending names.

    Raises:
        InputError: matplotlib cannot write such a file there.
    """
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise InputError(
            f"--picture {path}: cannot be written ({error}): name a .png file in a folder that is there"
        ) from None
