"""The judge of parity: a Qwen2-like model, the RL losses and one optimiser step, in plain float64 torch.

Written from formulas and for reading, never for speed: one row at a time, no batch, no padding, no packing, no
parallelism, CPU. It shares no code with what it judges (neither ``steelyard`` nor Megatron is imported), so an
agreement between the two means something.

    model.py    ReferenceConfig, init_weights, forward_row: token ids [T] -> logits [T, V] or values [T]
    losses.py   Row, settings, what a row's tokens cost, how a mini-batch is averaged
    step.py     actor_step, critic_step: loss, gradients and metrics of a mini-batch; adamw_step
"""

from suites.reference.losses import (
    ActorSettings,
    AggregationSettings,
    CriticSettings,
    Row,
    aggregate,
    explained_variance,
    kl_token_losses,
    policy_token_losses,
    row_log_probs,
    row_values,
    value_token_losses,
)
from suites.reference.model import (
    ReferenceConfig,
    Weights,
    forward_row,
    init_weights,
    rms_norm,
    rotate,
    weight_shapes,
)
from suites.reference.step import (
    AdamState,
    JudgeResult,
    actor_step,
    adamw_step,
    critic_step,
    global_grad_norm,
)

__all__ = [
    "ActorSettings",
    "AdamState",
    "AggregationSettings",
    "CriticSettings",
    "JudgeResult",
    "ReferenceConfig",
    "Row",
    "Weights",
    "actor_step",
    "adamw_step",
    "aggregate",
    "critic_step",
    "explained_variance",
    "forward_row",
    "global_grad_norm",
    "init_weights",
    "kl_token_losses",
    "policy_token_losses",
    "rms_norm",
    "rotate",
    "row_log_probs",
    "row_values",
    "value_token_losses",
    "weight_shapes",
]
