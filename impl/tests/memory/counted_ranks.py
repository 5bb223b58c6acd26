"""A real step on gloo ranks whose storages are counted: what a prediction is compared with."""

import gc
import json

import torch
import torch.distributed as dist

from steelyard.cost import ModelShape
from steelyard.memory.record import Recorder
from steelyard.parallel import ParallelLayout
from steelyard.step import Actor, ActorRole, Critic, CriticRole, RolloutBatch, StepSettings

SHAPE = ModelShape(layers=4, hidden=64, ffn=160, heads=8, kv_heads=4, head_dim=8, vocab=512, qkv_bias=True)
# Unequal on purpose: the shapes of transfers differ from one micro-batch to the next.
MICRO_BATCHES = [[700, 412, 300], [1500], [256, 1100], [900, 128, 64]]


def rows(micro_batches):
    """The batch behind them, as trainers shape it: one token of prompt, the rest of the row is response."""
    lengths = torch.tensor([length for part in micro_batches for length in part])
    width = int(lengths.max())
    mask = (torch.arange(width) < lengths[:, None]).long()
    block = torch.zeros(len(lengths), width - 1)
    fields = {name: block.clone() for name in ("old_log_probs", "advantages", "values", "returns")}
    return {"input_ids": mask.clone(), "attention_mask": mask, "response_mask": mask[:, 1:].float(), **fields}


def positions(micro_batches):
    numbers = iter(range(sum(map(len, micro_batches))))
    return [[next(numbers) for _ in part] for part in micro_batches]


def count(arguments):
    """Print the highest count of this rank over the second of two steps, and its parameters."""
    from steelyard.model.build import build_model, build_optimizer, initialize_parallel

    given = json.loads(arguments)
    layout = ParallelLayout(**given["layout"])
    shape = ModelShape(**given["shape"])
    initialize_parallel(layout)
    batch, critic = RolloutBatch.of(rows(given["micro_batches"])), given.get("critic", False)
    recorder = Recorder()
    # Predictions on a CPU count what is not compiled.
    with torch.compiler.set_stance("force_eager"), recorder:
        models = build_model(
            shape,
            layout,
            value_head=critic,
            override_ddp_config=given.get("ddp"),
            override_transformer_config=given.get("transformer"),
        )
        optimizer = build_optimizer(models, lr=1e-3)
        worker = (Critic if critic else Actor)(
            models, StepSettings(max_tokens=1, layout=layout), optimizer, CriticRole() if critic else ActorRole()
        )
        worker.update(batch, indices=positions(given["micro_batches"]))
        gc.collect()
        since = recorder.count
        worker.update(batch, indices=positions(given["micro_batches"]))
    found = {"rank": dist.get_rank(), "peak": recorder.peaks(since)["build"].bytes}
    print("COUNTED", json.dumps(found), flush=True)
