"""Parameters that are not trained, frozen before DDP wraps the model: no gradient buffer holds a place for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist

from steelyard.errors import InputError
from steelyard.hints import did_you_mean

EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"


class Freezer:
    """Freezes the parameters that patterns name; call it with every bare chunk, and ``check`` it after the last.

    Args:
        patterns: names of modules or parameters as in megatron-core's GPTModel, with the wildcards of ``fnmatch``, e.g.
            ``embedding``, ``decoder.layers.0`` or ``*.router``. Layers are numbered over the whole model. Tied weights
            are one parameter with two names, whichever pipeline stages hold them.
    """

    def __init__(self, patterns: Sequence[str]) -> None:
        if isinstance(patterns, str):
            raise InputError(f"freeze={patterns!r} is one string: give a list of names, [{patterns!r}]")
        self.patterns = tuple(patterns)
        self._matched: set[str] = set()
        self._names: set[str] = set()
        self._trained = 0

    def __call__(self, chunk: torch.nn.Module) -> None:
        for names, parameter in _named(chunk):
            hits = {one for one in self.patterns if any(_covers(one, name) for name in names)}
            self._matched |= hits
            self._names |= names
            if hits:
                parameter.requires_grad_(False)
            self._trained += parameter.requires_grad

    def check(self) -> None:
        """Raise ``InputError`` on every rank when a pattern names nothing on any, or nothing is left to train."""
        if not self.patterns:
            return
        everywhere: list = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, (self._matched, self._names, self._trained))
        matched, names, trained = zip(*everywhere, strict=True)
        modules = {name.rpartition(".")[0] for part in names for name in part}
        for pattern in self.patterns:
            if pattern not in set().union(*matched):
                hint = did_you_mean(pattern, modules)
                raise InputError(f"freeze: {pattern!r} names no module or parameter of the model{hint}")
        if not any(trained):
            raise InputError(f"freeze={list(self.patterns)} leaves no parameter to train: leave out a name")


def _covers(pattern: str, name: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")


def _named(chunk: Any) -> Iterator[tuple[set[str], torch.nn.Parameter]]:
    layers = chunk.decoder.layers
    first = layers[0].layer_number - 1 if len(layers) else 0
    for name, parameter in chunk.named_parameters():
        parts = name.split(".")
        if parts[:2] == ["decoder", "layers"]:
            parts[2] = str(first + int(parts[2]))
        names = {".".join(parts)}
        if chunk.share_embeddings_and_output_weights and names <= {EMBEDDING, OUTPUT}:
            names = {EMBEDDING, OUTPUT}
        yield names, parameter
