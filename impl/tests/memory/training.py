"""A tiny model that trains for real; what the tests of offloading share."""

import contextlib

import torch
import torch.distributed as dist

from steelyard.cost import ModelShape
from steelyard.model import host
from steelyard.model.build import build_model, build_optimizer, initialize_parallel
from steelyard.step import Actor, StepSettings
from steelyard.step.batch import RolloutBatch

SHAPE = ModelShape(layers=4, hidden=16, ffn=24, heads=2, kv_heads=2, head_dim=8, vocab=96, qkv_bias=True)


def rollouts(rows=6, seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 96, (rows, 12), generator=generator)
    block = (rows, 8)
    return RolloutBatch.of(
        {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "response_mask": torch.ones(block),
            "old_log_probs": torch.full(block, -4.5),
            "advantages": torch.randn(block, generator=generator),
        }
    )


def make(layout, dtype=torch.float32, **ddp):
    """Model chunks, optimizer and actor, the same at every call."""
    models = build_model(SHAPE, layout, dtype=dtype, override_ddp_config=ddp)
    optimizer = build_optimizer(models, lr=1e-2)
    return models, optimizer, Actor(models, StepSettings(max_tokens=36, layout=layout), optimizer)


def tensors_of(models, optimizer):
    """Piece -> its tensors, by Megatron's own names; one that shares a storage with an earlier piece is left out."""
    found, seen = {"params": [], "grads": [], "optimizer": []}, set()
    for model in models:
        found["params"] += list(model.parameters())
        for buffer in model.buffers + model.expert_parallel_buffers:
            found["grads"].append(buffer.grad_data)
            found["params"] += [] if buffer.param_data is None else [buffer.param_data]
    for one in optimizer.chained_optimizers:
        for group in one.optimizer.param_groups:
            found["grads"] += [shard.grad for shard in group["params"] if shard.grad is not None]
            found["optimizer"] += group["params"]
        for state in one.optimizer.state.values():
            found["optimizer"] += [value for value in state.values() if isinstance(value, torch.Tensor)]
    for piece, tensors in found.items():
        found[piece] = [tensor.detach() for tensor in tensors if tensor.untyped_storage()._cdata not in seen]
        seen |= {tensor.untyped_storage()._cdata for tensor in tensors}
    return found


def bytes_of(tensors):
    """Bytes of the storages behind the tensors, each once."""
    return sum({tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}.values())


@contextlib.contextmanager
def one_rank():
    """A world of one in this process, on the CPU."""
    from megatron.core import parallel_state

    from steelyard.parallel import ParallelLayout

    with host.running_on("cpu"):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            initialize_parallel(ParallelLayout())
            yield ParallelLayout()
        finally:
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()
