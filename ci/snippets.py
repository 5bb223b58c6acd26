"""Runs a Python block of README.md with what the page takes for granted: `python ci/snippets.py NAME FILE`.

plan       lengths of a step
trainer    a batch; CUDA, 8 ranks and a model of 0.5 billion parameters become the CPU, 2 ranks and a tiny model:
           torchrun --nproc-per-node 2 ci/snippets.py trainer FILE
handover   a trained model, its optimizer, and an engine that takes weights and makes rollouts
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

# suites/ is not installed, and this file's folder is what Python looks into.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

SIZES = {"layers": 4, "hidden": 64, "ffn": 96, "heads": 4, "kv_heads": 2, "head_dim": 16, "vocab": 256}
# Each stands in the block exactly once; what a reader would change to try it on a laptop.
FOR_A_CPU = {
    '"cuda"': '"cpu"',
    '"nccl"': '"gloo"',
    "tp=2, pp=2, dp=2": "pp=2",
    'ModelShape.preset("qwen2.5-0.5b")': f"ModelShape(**{SIZES})",
}


def plan(code: str) -> None:
    _execute(code, {"lengths": np.random.default_rng(0).integers(100, 12000, 256)})


def trainer(code: str) -> None:
    for old, new in FOR_A_CPU.items():
        if code.count(old) != 1:
            raise SystemExit(
                f"README's block for trainers holds {old} {code.count(old)} times, not once: see {__file__}"
            )
        code = code.replace(old, new)
    found = _execute(code, {"batch": _batch()})
    assert np.isfinite(found["metrics"]["actor/pg_loss"])
    assert found["log_probs"] is not None
    found["torch"].distributed.destroy_process_group()


def handover(code: str) -> None:
    import torch.distributed as dist

    from steelyard.cost import ModelShape
    from steelyard.model.build import build_model, build_optimizer, initialize_parallel
    from steelyard.model.host import running_on
    from steelyard.parallel import ParallelLayout
    from steelyard.step import Actor, StepSettings

    layout = ParallelLayout()
    with running_on("cpu"), tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1)
        initialize_parallel(layout)
        models = build_model(ModelShape(**SIZES), layout)
        optimizer = build_optimizer(models, lr=1e-6)
        actor = Actor(models, StepSettings(max_tokens=2048, layout=layout), optimizer)
        actor.update(_batch())
        engine = _Engine(models)
        _execute(code, {"models": models, "optimizer": optimizer, "engine": engine, "prompts": ["a", "b"]})
        assert engine.loaded, "the block does not send the weights"
        actor.update(_batch())
        dist.destroy_process_group()


class _Engine:
    """What a rollout engine is to the page: it takes weights, then answers prompts."""

    def __init__(self, models: list[Any]) -> None:
        self.models, self.loaded = models, 0

    def load(self) -> None:
        self.loaded = sum(parameter.numel() for model in self.models for parameter in model.parameters())

    def generate(self, prompts: list[str]) -> list[str]:
        return [prompt * 2 for prompt in prompts]


def _batch() -> dict[str, Any]:
    from steelyard import lengths
    from suites.workloads import make_batch

    return make_batch(lengths.workload("rl-code-16k-cap").draw(8, 0, scale=400.0), SIZES["vocab"], 0)


def _execute(code: str, names: dict[str, Any]) -> dict[str, Any]:
    exec(compile(code, "README.md", "exec"), names)
    return names


if __name__ == "__main__":
    name, file = sys.argv[1:]
    {"plan": plan, "trainer": trainer, "handover": handover}[name](Path(file).read_text())
