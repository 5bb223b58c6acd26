"""Finished predictions in the user's cache folder, by what they were made from.

An entry is one small file that is written as soon as the prediction is there, in one rename: an interrupted run leaves
whole entries only, and the next run goes on from them.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import platformdirs

from steelyard.errors import InputError


class Cache:
    """A folder of JSON objects.

    Args:
        folder: None is ``steelyard/predictions`` in the user's cache folder.

    Raises:
        InputError: the folder cannot be made or written.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or platformdirs.user_cache_path("steelyard") / "predictions"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"{self.folder}: cannot be made ({error.strerror}): give another cache folder") from None

    def get(self, facts: Any) -> Any | None:
        """What was kept for ``facts``, or None; a file that is not whole counts as none."""
        with contextlib.suppress(OSError, ValueError):
            return json.loads(self._file(facts).read_text(encoding="utf-8"))
        return None

    def put(self, facts: Any, value: Any) -> None:
        """Keep ``value`` for ``facts``; both are JSON."""
        handle, name = tempfile.mkstemp(dir=self.folder, suffix=".part")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(value, file)
        os.replace(name, self._file(facts))

    def _file(self, facts: Any) -> Path:
        text = json.dumps([facts, _versions()], sort_keys=True)
        return self.folder / f"{hashlib.sha256(text.encode()).hexdigest()}.json"


@functools.cache
def _versions() -> list[str]:
    """What else a prediction depends on: the libraries, and the code that is run on fake tensors."""
    sources = hashlib.sha256()
    package = Path(__file__).parent.parent
    files = [file for folder in ("memory", "model", "step", "packing") for file in (package / folder).rglob("*.py")]
    files += [package / "advise" / name for name in ("predictions.py", "whole_logits.py")]
    for file in sorted(files):
        sources.update(file.read_bytes())
    return [version("torch"), version("megatron-core"), sources.hexdigest()]
