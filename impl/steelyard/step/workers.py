"""Actor, critic and reward model as a trainer uses them: a role with its models, optimizer and settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from steelyard.errors import BatchError, InputError
from steelyard.step.batch import RolloutBatch
from steelyard.step.engine import Indices, StepSettings, forward_backward_batch
from steelyard.step.metrics import reduce_metrics
from steelyard.step.roles import ActorRole, CriticRole, RewardRole, Role

Batch = RolloutBatch | Mapping[str, torch.Tensor]


class Worker:
    """A role with its models.

    Attributes:
        role: what is computed.
        models: this rank's chunks.
        settings: micro-batches of this role; roles have budgets of their own.
        optimizer: None for a model that is only evaluated.
        scheduler: learning rate and weight decay by optimizer step; None leaves them.
    """

    name: str

    def __init__(
        self,
        role: Role,
        models: list[DistributedDataParallel],
        settings: StepSettings,
        optimizer: MegatronOptimizer | None = None,
        scheduler: OptimizerParamScheduler | None = None,
    ) -> None:
        self.role, self.models, self.settings = role, models, settings
        self.optimizer, self.scheduler = optimizer, scheduler

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
        metrics = reduce_metrics(self.role, result["output"])
        _, grad_norm, _ = self.optimizer.step()
        learning_rate = self.optimizer.param_groups[0]["lr"]
        if self.scheduler is not None:
            self.scheduler.step(increment=1)
        return {
            **metrics,
            f"{self.name}/grad_norm": float(grad_norm or 0.0),
            f"{self.name}/lr": float(learning_rate),
        }

    def train(
        self, batch: Batch, *, mini_batch_size: int, epochs: int = 1, shuffle_seed: int | None = None
    ) -> Iterator[dict[str, float]]:
        """Go through a batch as PPO does: ``epochs`` times, in mini-batches, one optimizer step each.

        Args:
            batch: this data-parallel rank's rows; every rank has as many.
            mini_batch_size: rows of a mini-batch on each data-parallel rank.
            epochs: times that every row is used.
            shuffle_seed: order of the rows, anew in every epoch; None keeps them as they are. The same on every rank.

        Yields:
            The metrics of each optimizer step.

        Raises:
            BatchError: the rows do not divide into mini-batches, or ranks have unequal rows; on every rank.
        """
        rollouts = batch if isinstance(batch, RolloutBatch) else RolloutBatch.of(batch)
        _check_mini_batches(rollouts.rows, mini_batch_size)
        order = np.arange(rollouts.rows)
        generator = np.random.default_rng(shuffle_seed)
        for _ in range(epochs):
            if shuffle_seed is not None:
                order = generator.permutation(rollouts.rows)
            for start in range(0, rollouts.rows, mini_batch_size):
                yield self.update(rollouts.select(order[start : start + mini_batch_size]))

    def evaluate(self, batch: Batch) -> dict[str, torch.Tensor]:
        """The role's outputs, each [B, R] in the order of the batch, on every rank of the pipeline."""
        rollouts = batch if isinstance(batch, RolloutBatch) else RolloutBatch.of(batch)
        with torch.no_grad():
            result = forward_backward_batch(rollouts, self.role, self.models, self.settings, forward_only=True)
        device = torch.cuda.current_device()
        order = np.concatenate([np.asarray(rows, dtype=np.int64) for rows in result["indices"]])
        place = torch.from_numpy(order).to(device, non_blocking=True)
        restored = {}
        for name in self.role.outputs:
            restored[name] = torch.zeros(rollouts.rows, rollouts.response_width, device=device)
            if result["output"]:
                restored[name].index_copy_(0, place, torch.cat([part[name] for part in result["output"]]))
            if parallel_state.get_pipeline_model_parallel_world_size() > 1:
                dist.broadcast(
                    restored[name],
                    parallel_state.get_pipeline_model_parallel_last_rank(),
                    group=parallel_state.get_pipeline_model_parallel_group(),
                )
        return restored


def _check_mini_batches(rows: int, size: int) -> None:
    # Ranks with other numbers of steps would wait for each other for ever.
    everywhere: list = [None] * parallel_state.get_data_parallel_world_size()
    dist.all_gather_object(everywhere, (rows, size), group=parallel_state.get_data_parallel_group())
    for rank, (its_rows, its_size) in enumerate(everywhere):
        if (its_rows, its_size) != everywhere[0]:
            raise BatchError(
                f"data-parallel rank {rank} has {its_rows} rows in mini-batches of {its_size}, rank 0 has "
                f"{everywhere[0][0]} of {everywhere[0][1]}: give every rank the same"
            )
    if size < 1 or rows % size:
        raise BatchError(f"{rows} rows do not divide into mini-batches of mini_batch_size={size}: use a divisor")


class Actor(Worker):
    """The policy."""

    name = "actor"
    role: ActorRole

    def __init__(
        self,
        models: list[DistributedDataParallel],
        settings: StepSettings,
        optimizer: MegatronOptimizer | None = None,
        role: ActorRole | None = None,
        scheduler: OptimizerParamScheduler | None = None,
    ) -> None:
        super().__init__(role or ActorRole(), models, settings, optimizer, scheduler)

    def compute_log_prob(self, batch: Batch) -> torch.Tensor:
        """[B, R] float32 log-probabilities of the response tokens, zero where there is none.

        ``evaluate`` also gives the entropies when the role computes them.
        """
        return self.evaluate(batch)["log_probs"]


class Critic(Worker):
    """The value function."""

    name = "critic"
    role: CriticRole

    def __init__(
        self,
        models: list[DistributedDataParallel],
        settings: StepSettings,
        optimizer: MegatronOptimizer | None = None,
        role: CriticRole | None = None,
        scheduler: OptimizerParamScheduler | None = None,
    ) -> None:
        super().__init__(role or CriticRole(), models, settings, optimizer, scheduler)

    def compute_values(self, batch: Batch) -> torch.Tensor:
        """[B, R] float32 value before each response token, zero where there is none."""
        return self.evaluate(batch)["values"]


class Reward(Worker):
    """A reward model, evaluated only."""

    name = "reward"

    def __init__(self, models: list[DistributedDataParallel], settings: StepSettings) -> None:
        super().__init__(RewardRole(), models, settings)

    def compute_scores(self, batch: Batch, *, per_token: bool = False) -> torch.Tensor:
        """[B] float32 score at the last response token of each row, 0 for a row without one; or all of them, [B, R]."""
        rollouts = batch if isinstance(batch, RolloutBatch) else RolloutBatch.of(batch)
        scores = self.evaluate(rollouts)["scores"]
        if per_token:
            return scores
        last = torch.from_numpy(np.maximum(rollouts.responses - 1, 0)).to(scores.device, non_blocking=True)
        return scores.gather(1, last.unsqueeze(1)).squeeze(1)
