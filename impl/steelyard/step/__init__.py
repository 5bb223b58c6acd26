"""One forward-backward engine for every model of a reinforcement-learning step."""

from steelyard.step.batch import RolloutBatch
from steelyard.step.engine import StepSettings, forward_backward_batch
from steelyard.step.losses import Aggregation
from steelyard.step.metrics import reduce_metrics
from steelyard.step.roles import ActorRole, CriticRole, RewardRole, Role
from steelyard.step.workers import Actor, Critic, Reward

__all__ = [
    "Actor",
    "ActorRole",
    "Aggregation",
    "Critic",
    "CriticRole",
    "Reward",
    "RewardRole",
    "Role",
    "RolloutBatch",
    "StepSettings",
    "forward_backward_batch",
    "reduce_metrics",
]
