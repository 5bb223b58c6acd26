"""A tiny model that trains for real, in this process or on ranks; what the tests of offloading share."""

import contextlib
import multiprocessing
import os
import signal
import sys
import time
import traceback
from pathlib import Path

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


def on_ranks(function, world, folder, time_limit=200):
    """Call a function of ``offload_ranks.py`` on ``world`` gloo ranks, forked from a process that has imported all.

    Returns what they printed.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["offload_ranks"])
    processes = [context.Process(target=_rank, args=(function, rank, world, str(folder))) for rank in range(world)]
    for process in processes:
        process.start()
    deadline = time.monotonic() + time_limit
    while any(process.exitcode is None for process in processes) and time.monotonic() < deadline:
        if any(process.exitcode for process in processes):
            deadline = min(deadline, time.monotonic() + 2.0)
        time.sleep(0.05)
    codes = [process.exitcode for process in processes]
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
        process.join()
    output = "".join(path.read_text(errors="replace") for path in sorted(Path(folder).glob("*.log")))
    assert codes == [0] * world, f"exit codes {codes}\n{output[-8000:]}"
    return output


def _rank(function, rank, world, folder):
    log = os.open(f"{folder}/{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    torch.set_num_threads(1)
    try:
        import offload_ranks

        with host.running_on("cpu"):
            store = dist.FileStore(f"{folder}/store", world)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
            getattr(offload_ranks, function)()
            dist.barrier()
            dist.destroy_process_group()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    sys.stdout.flush()
