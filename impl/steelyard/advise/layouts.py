"""Every way to spread a model over a number of GPUs that Megatron can build."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any, get_args

from steelyard.cost import ModelShape
from steelyard.errors import LayoutError
from steelyard.parallel import CpKind, ParallelLayout


def divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def layouts(shape: ModelShape, gpus: int, gpus_per_node: int = 8) -> Iterator[ParallelLayout]:
    """All legal layouts that use every GPU.

    Tensor-parallel ranks share a node: they exchange activations in every layer. Experts are split like the dense
    layers, or not at all (``etp`` is ``tp`` or 1).
    """
    for tp in divisors(gpus):
        if tp > gpus_per_node:
            continue
        for pp in divisors(gpus // tp):
            for cp in divisors(gpus // tp // pp):
                sizes: dict[str, Any] = {"tp": tp, "pp": pp, "cp": cp, "dp": gpus // tp // pp // cp}
                for more in _variants(shape, sizes):
                    with contextlib.suppress(LayoutError):
                        layout = ParallelLayout(**sizes, **more)
                        layout.check(shape)
                        yield layout


def _variants(shape: ModelShape, sizes: dict[str, int]) -> Iterator[dict[str, Any]]:
    choices: dict[str, list[Any]] = {
        "sp": [False, True] if sizes["tp"] > 1 else [False],
        "vpp": divisors(max(1, shape.layers // sizes["pp"])) if sizes["pp"] > 1 else [1],
        "cp_kind": list(get_args(CpKind)) if sizes["cp"] > 1 else ["all_gather"],
        "ep": divisors(shape.experts) if shape.experts else [1],
        "etp": sorted({1, sizes["tp"]}) if shape.experts else [sizes["tp"]],
    }
    for values in itertools.product(*choices.values()):
        yield dict(zip(choices, values, strict=True))
