"""The files of a Hugging Face checkpoint: ``config.json``, safetensors with or without an index, and the rest."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from steelyard.errors import InputError, ShapeError

try:
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import save_file
except ImportError as missing:
    raise InputError("Hugging Face checkpoints need safetensors: pip install 'steelyard[hf]'") from missing

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
_WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack", "*.index.json")


def read_config(folder: str | PathLike[str]) -> Mapping[str, Any]:
    """``config.json`` of a checkpoint.

    Raises:
        InputError: it cannot be read, or asks for rotary positions that the plain builder does not make.
    """
    values = _read_json(Path(folder) / CONFIG)
    for key in ("rope_scaling", "rope_parameters"):
        table = values.get(key) or {}
        kind = table.get("rope_type", table.get("type", "default")) if isinstance(table, Mapping) else table
        if kind != "default":
            raise ShapeError(
                f"{folder}: {key} is of the kind {kind!r}: the plain builder rotates without scaling, so the model "
                f"would give other outputs"
            )
    return values


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error}): give a checkpoint's folder") from None
    except ValueError as error:
        raise InputError(f"{path}: is not valid JSON ({error})") from None
    if not isinstance(values, dict):
        raise InputError(f"{path}: holds a {type(values).__name__} where an object belongs")
    return values


class CheckpointReader(contextlib.AbstractContextManager):
    """Reads tensors by name, whichever file they are in; nothing but names and shapes is read before that.

    Attributes:
        shapes: of every tensor, by name.

    Raises:
        InputError: no weights are there, or a file is missing or broken.
    """

    def __init__(self, folder: str | PathLike[str]) -> None:
        self.folder = Path(folder)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._files: dict[str, Any] = {}
        with contextlib.ExitStack() as stack:
            for name in self._file_names():
                file = stack.enter_context(self._open(name))
                for key in file.keys():  # noqa: SIM118 - not a mapping
                    self.shapes[key] = tuple(file.get_slice(key).get_shape())
                    self._files[key] = file
            self._stack = stack.pop_all()

    def _file_names(self) -> list[str]:
        if (self.folder / INDEX).exists():
            index = _read_json(self.folder / INDEX).get("weight_map")
            if not isinstance(index, Mapping) or not index:
                raise InputError(f"{self.folder / INDEX}: has no 'weight_map' of tensor names to files")
            return sorted(set(index.values()))
        if (self.folder / SINGLE).exists():
            return [SINGLE]
        raise InputError(f"{self.folder}: holds neither {SINGLE} nor {INDEX}: save the model in safetensors format")

    def _open(self, name: str) -> Any:
        path = self.folder / name
        try:
            return safe_open(path, framework="pt")
        except (OSError, SafetensorError) as error:
            raise InputError(f"{path}: is not a readable safetensors file ({error})") from None

    def tensor(self, name: str) -> torch.Tensor:
        """The whole tensor, on the CPU."""
        return self._files[name].get_tensor(name)

    def __exit__(self, *error: object) -> None:
        self._stack.close()


class CheckpointWriter:
    """Writes a checkpoint into a folder of its own, which takes its place when it is complete.

    Args:
        folder: the checkpoint; new, or empty.
        like: the checkpoint whose ``config.json`` and other files beside the weights are copied.
        file_bytes: size from which a further file is begun.

    Raises:
        InputError: ``folder`` holds something, or cannot be made.
    """

    def __init__(self, folder: str | PathLike[str], like: str | PathLike[str], file_bytes: int) -> None:
        self.folder, self.like, self.file_bytes = Path(folder), Path(like), file_bytes
        if self.folder.exists() and (not self.folder.is_dir() or any(self.folder.iterdir())):
            raise InputError(f"{folder}: holds something already: give a new folder, or remove it")
        self._part = self.folder.with_name(f".{self.folder.name}.{os.getpid()}.partial")
        self._error: InputError | None = None
        self._pending: dict[str, torch.Tensor] = {}
        self._places: dict[str, int] = {}
        self._files, self._bytes, self._total = 0, 0, 0
        self._try(lambda: self._part.mkdir(parents=True))
        if self._error:
            raise self._error

    def add(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take tensors by name, and write a file when there are enough; after an error, drop them."""
        for name, tensor in tensors:
            if self._error:
                return
            size = tensor.numel() * tensor.element_size()
            if self._pending and self._bytes + size > self.file_bytes:
                self._flush()
            self._pending[name] = tensor.detach().cpu().contiguous()
            self._bytes += size
            self._total += size

    def finish(self) -> InputError | None:
        """Write what is left and put the folder in its place; returns what went wrong, and then nothing is left."""
        self._flush()
        for action in (self._name_files, self._copy_the_rest, lambda: os.replace(self._part, self.folder)):
            self._try(action)
        if self._error:
            shutil.rmtree(self._part, ignore_errors=True)
        return self._error

    def _flush(self) -> None:
        path = self._part / f"{self._files}.safetensors"
        self._try(lambda: save_file(self._pending, path, metadata={"format": "pt"}))
        self._places |= dict.fromkeys(self._pending, self._files)
        self._pending, self._bytes = {}, 0
        self._files += 1

    def _name_files(self) -> None:
        """Names as transformers writes them, which hold the number of files."""
        count = self._files
        names = (
            [f"model-{number + 1:05}-of-{count:05}.safetensors" for number in range(count)] if count > 1 else [SINGLE]
        )
        for number, name in enumerate(names):
            os.replace(self._part / f"{number}.safetensors", self._part / name)
        if count > 1:
            index = {
                "metadata": {"total_size": self._total},
                "weight_map": {name: names[number] for name, number in sorted(self._places.items())},
            }
            (self._part / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def _copy_the_rest(self) -> None:
        for path in self.like.iterdir():
            if path.is_file() and not any(path.match(pattern) for pattern in _WEIGHT_FILES):
                shutil.copyfile(path, self._part / path.name)

    def _try(self, action: Callable[[], object]) -> None:
        """Do it unless something failed before, and keep the error: other ranks wait to hear of it."""
        if self._error:
            return
        try:
            action()
        except (OSError, SafetensorError) as error:
            self._error = InputError(f"{self.folder}: could not be written ({error})")
