"""Actor and critic as a trainer uses them: a role with its models, its optimizer and its own settings."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.optimizer import MegatronOptimizer

from steelyard.errors import InputError
from steelyard.step.batch import RolloutBatch
from steelyard.step.engine import Indices, StepSettings, forward_backward_batch
from steelyard.step.metrics import reduce_metrics
from steelyard.step.roles import ActorRole, CriticRole, Role

Batch = RolloutBatch | Mapping[str, torch.Tensor]


class Worker:
    """A role with its models.

    Attributes:
        role: what is computed.
        models: this rank's chunks.
        settings: micro-batches of this role; roles have budgets of their own.
        optimizer: None for a model that is only evaluated.
    """

    name: str

    def __init__(
        self,
        role: Role,
        models: list[DistributedDataParallel],
        settings: StepSettings,
        optimizer: MegatronOptimizer | None = None,
    ) -> None:
        self.role, self.models, self.settings, self.optimizer = role, models, settings, optimizer

    def update(self, batch: Batch, *, indices: Indices | None = None) -> dict[str, float]:
        """One optimizer step on one mini-batch; returns the metrics of the whole mini-batch, the same on every rank.

        Args:
            batch: this data-parallel rank's rows.
            indices: micro-batches that were planned elsewhere, as ``forward_backward_batch`` takes them.
        """
        if self.optimizer is None:
            raise InputError(f"this {self.name} has no optimizer: give it one to update it")
        for model in self.models:
            model.zero_grad_buffer()
        self.optimizer.zero_grad()
        result = forward_backward_batch(batch, self.role, self.models, self.settings, indices=indices)
        metrics = reduce_metrics(self.role, [part["sums"] for part in result["output"]])
        _, grad_norm, _ = self.optimizer.step()
        return {
            **metrics,
            f"{self.name}/grad_norm": float(grad_norm or 0.0),
            f"{self.name}/lr": float(self.optimizer.param_groups[0]["lr"]),
        }

    def _evaluate(self, batch: Batch) -> torch.Tensor:
        """[B, R] of the role's output in the order of the batch, on every rank of the pipeline."""
        rollouts = batch if isinstance(batch, RolloutBatch) else RolloutBatch.of(batch)
        with torch.no_grad():
            result = forward_backward_batch(rollouts, self.role, self.models, self.settings, forward_only=True)
        device = torch.cuda.current_device()
        restored = torch.zeros(rollouts.rows, rollouts.response_width, device=device)
        if result["output"]:
            parts = torch.cat([part[self.role.output_name] for part in result["output"]])
            order = np.concatenate([np.asarray(rows, dtype=np.int64) for rows in result["indices"]])
            restored.index_copy_(0, torch.from_numpy(order).to(device, non_blocking=True), parts)
        if parallel_state.get_pipeline_model_parallel_world_size() > 1:
            dist.broadcast(
                restored,
                parallel_state.get_pipeline_model_parallel_last_rank(),
                group=parallel_state.get_pipeline_model_parallel_group(),
            )
        return restored


class Actor(Worker):
    """The policy."""

    name = "actor"

    def __init__(
        self,
        models: list[DistributedDataParallel],
        settings: StepSettings,
        optimizer: MegatronOptimizer | None = None,
        role: ActorRole | None = None,
    ) -> None:
        super().__init__(role or ActorRole(), models, settings, optimizer)

    def compute_log_prob(self, batch: Batch) -> torch.Tensor:
        """[B, R] float32 log-probabilities of the response tokens, zero where there is none."""
        return self._evaluate(batch)


class Critic(Worker):
    """The value function."""

    name = "critic"

    def __init__(
        self,
        models: list[DistributedDataParallel],
        settings: StepSettings,
        optimizer: MegatronOptimizer | None = None,
        role: CriticRole | None = None,
    ) -> None:
        super().__init__(role or CriticRole(), models, settings, optimizer)

    def compute_values(self, batch: Batch) -> torch.Tensor:
        """[B, R] float32 value before each response token, zero where there is none."""
        return self._evaluate(batch)
