"""What is to be trained, on which GPUs, and on which lengths."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from steelyard.advise.machine import Gpu
from steelyard.cost import ModelShape
from steelyard.errors import InputError
from steelyard.hints import did_you_mean
from steelyard.lengths import LengthSample, workload

ROLES = ("actor", "critic", "reference", "reward")
TRAINED = ("actor", "critic")
# Left free: CUDA context, buffers of NCCL, workspaces of matrix products, and fragmentation of the allocator.
RESERVE_GIB = 4.0
# Assumed where no lengths are given: its responses stop at 16,000 tokens, which is scaled to the job's own limit.
ASSUMED, ASSUMED_CAP = "rl-code-16k-cap", 16_000


@dataclass(frozen=True)
class Job:
    """One optimizer step of reinforcement learning, and where it runs.

    Attributes:
        shape: the model; all roles have its sizes.
        gpus: their number.
        gpu: what one of them is.
        max_prompt, max_response: longest prompt and response in tokens.
        roles: the models that share the GPUs, of ``ROLES``.
        lengths: drawn rows, for speed; None assumes a workload (see ``sample``). Memory follows from the longest row
            allowed, never from the drawn ones.
        rows: rows of a mini-batch, over all data-parallel ranks; where lengths are given, their number counts.
        gpus_per_node: GPUs that NVLink connects.
        reserve_gib: left free of a GPU's memory.
        rollout_gib: what the rollout engine keeps on the GPU while training; 0 while it sleeps.
        rollout_share: share of a GPU that the rollout engine takes while it generates (verl's
            ``gpu_memory_utilization``), beside all that is not offloaded; 0 where it has GPUs of its own.

    Raises:
        InputError: a value is out of range, or the longest row is above the model's positions.
    """

    shape: ModelShape
    gpus: int
    gpu: Gpu
    max_prompt: int
    max_response: int
    roles: tuple[str, ...] = ("actor",)
    lengths: LengthSample | None = None
    rows: int = 128
    gpus_per_node: int = 8
    reserve_gib: float = RESERVE_GIB
    rollout_gib: float = 0.0
    rollout_share: float = 0.0

    def __post_init__(self) -> None:
        for name in ("gpus", "max_prompt", "max_response", "rows", "gpus_per_node"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise InputError(f"{name}={value!r} must be a whole number of at least 1")
        object.__setattr__(self, "roles", _checked(self.roles))
        for name in ("reserve_gib", "rollout_gib"):
            if not 0 <= getattr(self, name) < self.gpu.gib:
                raise InputError(
                    f"{name}={getattr(self, name)!r} must be 0 to less than the {self.gpu.gib:g} GiB of a GPU"
                )
        if not 0 <= self.rollout_share < 1:
            raise InputError(f"rollout_share={self.rollout_share!r} must be from 0 to below 1")
        if self.longest > self.shape.max_positions:
            raise InputError(
                f"max_prompt={self.max_prompt} plus max_response={self.max_response} are {self.longest} tokens, above "
                f"the {self.shape.max_positions} positions of {self.shape.name}: lower one of them, or raise the "
                f"model's positions if it was trained for more"
            )

    @property
    def longest(self) -> int:
        """Tokens of the longest row: prompt and response."""
        return self.max_prompt + self.max_response

    @property
    def shared(self) -> bool:
        """Whether the GPUs do anything else than the one update, so that offloading frees something."""
        return len(self.roles) > 1 or self.rollout_share > 0

    @property
    def available_gib(self) -> float:
        """What a training step may use of a GPU."""
        return self.gpu.gib - self.reserve_gib - self.rollout_gib

    @functools.cached_property
    def sample(self) -> LengthSample:
        """The rows that speed is judged by, cut to the job's limits."""
        if self.lengths is None:
            scale = ASSUMED_CAP / self.max_response
            return workload(ASSUMED).draw(
                self.rows, 0, scale=scale, max_prompt=self.max_prompt, max_response=self.max_response
            )
        given = self.lengths
        return LengthSample(
            np.minimum(given.prompts, self.max_prompt),
            np.minimum(given.responses, self.max_response),
            given.name,
            given.source,
            given.scale,
            given.seed,
        )

    @property
    def lengths_in_words(self) -> str:
        """Where ``sample`` comes from."""
        rows = len(self.sample)
        if self.lengths is None:
            return f"{rows} rows of {ASSUMED}, scaled to responses of at most {self.max_response} (assumed)"
        return f"{rows} rows of {self.sample.name}"


def _checked(roles: Sequence[str]) -> tuple[str, ...]:
    for role in roles:
        if role not in ROLES:
            raise InputError(f"unknown role {role!r}{did_you_mean(str(role), ROLES)}: use {', '.join(ROLES)}")
    if not set(roles) & set(TRAINED):
        raise InputError(f"roles={','.join(roles)!r}: at least one of {' and '.join(TRAINED)} must be among them")
    if len(set(roles)) < len(roles):
        raise InputError(f"roles={','.join(roles)!r}: name each role once")
    return tuple(roles)
