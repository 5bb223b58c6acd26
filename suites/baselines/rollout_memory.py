"""N10 and N11: how memory went from training to the rollout engine in verl 0.4 and 0.5, until July 2025.

N10, a plain ``torch.cuda.empty_cache()``: no garbage collection, no synchronisation, no second attempt. Where nothing
was offloaded (verl's default) that was all, and parameters, gradients and optimizer state stayed on the device.

N11, parameters and gradients loaded for the rollout: with ``param_offload`` and ``optimizer_offload`` both left the
device after the update (``megatron_workers.py``), and ``MegatronVLLMShardingManager.__enter__`` called N10 and brought
the model back for the transfer of weights, by ``load_megatron_model_to_gpu`` with its default ``load_grad=True``; then
the engine woke up. An engine without tags (vLLM before 0.8.3) took weights and key-value cache at this moment; one with
tags took its weights now and the cache after the model had left again. verl has left gradients behind since its commit
dc8b5076c (2025-07-25).

Kept as it was: helpers that move collect garbage and empty the cache at their end, parameters are copied to pageable
memory and from there to newly pinned memory, gradients leave without a copy and come back as zeros, and the model
leaves and comes back once more while the engine generates.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from steelyard.memory.cache import CUDA, DeviceApi


@contextmanager
def plain_empty_cache(api: DeviceApi = CUDA) -> Iterator[None]:
    """N10 alone; inside this context the engine takes its memory."""
    api.empty_cache()
    yield


@contextmanager
def loaded_for_rollout(models: list[Any], optimizer: Any, api: DeviceApi = CUDA) -> Iterator[None]:
    """N10 and N11; inside this context the engine takes its memory.

    Args:
        models: model chunks in Megatron's DDP.
        optimizer: Megatron's optimizer over them, chained or not.
        api: stands for ``torch.cuda``.
    """
    moves = _Moves(models, optimizer, api)
    moves.offload_model()
    moves.offload_optimizer()
    api.empty_cache()
    moves.load_model()
    yield
    moves.offload_model()
    api.empty_cache()
    moves.load_model()
    moves.load_optimizer()


class _Moves:
    """The four helpers of ``megatron_utils.py``, in the mechanism that they had."""

    def __init__(self, models: list[Any], optimizer: Any, api: DeviceApi) -> None:
        self.api = api
        self.buffers = [one for model in models for one in (*model.buffers, *model.expert_parallel_buffers)]
        self.optimizers = getattr(optimizer, "chained_optimizers", [optimizer])
        self.device = self.buffers[0].grad_data.device
        self.sizes = [
            (one.param_data.untyped_storage().nbytes(), one.grad_data.untyped_storage().nbytes())
            for one in self.buffers
        ]
        self.copies: list[torch.Tensor] = []

    def offload_model(self) -> None:
        self.copies = []
        for buffer in self.buffers:
            copy = buffer.param_data.to("cpu", copy=True)
            self.copies.append(copy.pin_memory() if self.device.type == "cuda" else copy)
            buffer.param_data.untyped_storage().resize_(0)
            buffer.grad_data.untyped_storage().resize_(0)
        self._tidy()

    def load_model(self) -> None:
        for buffer, copy, (parameters, gradients) in zip(self.buffers, self.copies, self.sizes, strict=True):
            buffer.grad_data.untyped_storage().resize_(gradients)
            buffer.grad_data.zero_()
            buffer.param_data.untyped_storage().resize_(parameters)
            buffer.param_data.copy_(copy, non_blocking=True)
        self._tidy()

    def offload_optimizer(self) -> None:
        self._move_optimizer(torch.device("cpu"))

    def load_optimizer(self) -> None:
        self._move_optimizer(self.device)

    def _move_optimizer(self, device: torch.device) -> None:
        for one in self.optimizers:
            # Only copies in float32: where the model is in float32 they are views of it, and go with it.
            for group in one.shard_fp32_from_float16_groups:
                for copy in group:
                    copy.data = copy.data.to(device, non_blocking=True, copy=True)
            for state in one.optimizer.state.values():
                for name in ("exp_avg", "exp_avg_sq"):
                    state[name] = state[name].to(device, non_blocking=True, copy=True)
            self._tidy()

    def _tidy(self) -> None:
        gc.collect()
        self.api.empty_cache()
