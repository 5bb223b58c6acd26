"""One forward-backward pass over a mini-batch, for every role, on Megatron's own schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig

from steelyard.balance import MicroBatchPlan, digest_of, plan_micro_batches, verify_digest
from steelyard.balance.agreement import gather
from steelyard.errors import InputError, PlanError, PlanMismatch
from steelyard.model.config import routing_losses
from steelyard.parallel import ParallelLayout
from steelyard.pipeline import Pipeline, is_legal_count
from steelyard.step.batch import MicroBatch, RolloutBatch, make_micro_batch
from steelyard.step.fixed import legal_sizes, split_rows, time_over_ideal
from steelyard.step.losses import mask_totals
from steelyard.step.roles import Role

Indices = Sequence[Sequence[int]] | MicroBatchPlan


@dataclass(frozen=True)
class StepSettings:
    """How a mini-batch is cut into micro-batches.

    Exactly one of the first two is set.

    Attributes:
        micro_batch_size: fixed micro-batches of this many rows, in the order of the batch.
        max_tokens: dynamic micro-batches of at most this many tokens per GPU; context-parallel ranks share a
            micro-batch, so the budget of a micro-batch is cp times this.
        packed: pack the rows of a micro-batch into one sequence (THD) instead of padding them to the longest (BSHD).
        layout: the parallel layout that megatron-core was initialised with.
        cost: work of sequences, for balancing (a ``SequenceCost``, or any callable from lengths to work).
        counted_loss: give megatron-core's schedule a token count with each loss (its 3-tuple); the result is the same.
    """

    micro_batch_size: int | None = None
    max_tokens: int | None = None
    packed: bool = True
    layout: ParallelLayout = field(default_factory=ParallelLayout)
    cost: Callable[[Sequence[int]], Any] | None = None
    counted_loss: bool = False

    def __post_init__(self) -> None:
        if (self.micro_batch_size is None) == (self.max_tokens is None):
            raise InputError(
                f"set either micro_batch_size (fixed) or max_tokens (dynamic): got "
                f"micro_batch_size={self.micro_batch_size}, max_tokens={self.max_tokens}"
            )
        for name in ("micro_batch_size", "max_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"{name}={value} must be at least 1")
        if self.layout.cp > 1 and not self.packed:
            raise InputError(
                f"packed=False does not go with cp={self.layout.cp}: context parallelism needs packed rows"
            )

    @property
    def alignment(self) -> int:
        """Tokens of a row come in multiples of this, so that sequence and context parallelism can split them."""
        return self.layout.row_alignment

    @property
    def budget(self) -> int:
        """Tokens that a dynamic micro-batch may hold over all context-parallel ranks."""
        return (self.max_tokens or 0) * self.layout.cp

    def slots(self, lengths: np.ndarray) -> np.ndarray:
        """What rows of these lengths take of the budget once they are aligned: plan with these."""
        return -(-np.asarray(lengths) // self.alignment) * self.alignment

    def pipeline(self) -> Pipeline | None:
        """The schedule to plan for, or None without pipeline stages."""
        layout = self.layout
        if layout.pp == 1:
            return None
        return Pipeline.of(layout)


def plan(batch: RolloutBatch, settings: StepSettings) -> list[list[int]]:
    """The rows of every micro-batch, in execution order.

    Raises:
        PlanError: a row above the budget, or a count of fixed micro-batches that Megatron's schedule refuses.
    """
    if settings.max_tokens is None:
        return _fixed_split(batch, settings)
    layout = settings.layout
    made = plan_micro_batches(
        settings.slots(batch.lengths),
        settings.budget,
        cost=settings.cost,
        pipeline=settings.pipeline(),
        group=parallel_state.get_data_parallel_group() if layout.dp > 1 else None,
    )
    return made.indices


def _fixed_split(batch: RolloutBatch, settings: StepSettings) -> list[list[int]]:
    size = settings.micro_batch_size or batch.rows
    indices = split_rows(batch.rows, size)
    pipeline = settings.pipeline()
    if pipeline is None or is_legal_count(len(indices), pipeline):
        return indices
    sizes = legal_sizes(batch.rows, size, pipeline)
    choices = [
        f"micro_batch_size={one} ({len(split)} micro-batches, predicted time "
        f"{time_over_ideal(split, settings.slots(batch.lengths), pipeline, settings.cost, packed=settings.packed):.2f} "
        f"of the ideal)"
        for one, split in ((one, split_rows(batch.rows, one)) for one in sizes)
    ]
    raise PlanError(
        f"micro_batch_size={size} makes {len(indices)} micro-batches of {batch.rows} rows, which Megatron's schedule "
        f"refuses for {settings.layout}: use {' or '.join([*choices, 'max_tokens for dynamic micro-batches'])}"
    )


def forward_backward_batch(
    batch: RolloutBatch | Mapping[str, torch.Tensor],
    role: Role,
    models: list[DistributedDataParallel],
    settings: StepSettings,
    *,
    indices: Indices | None = None,
    forward_only: bool = False,
) -> dict[str, list]:
    """Run one mini-batch through the model, micro-batch by micro-batch, and leave its gradients in the models' buffers.

    Loss and gradients are those of the whole mini-batch over all data-parallel ranks, whatever the micro-batches are.

    Args:
        batch: this data-parallel rank's rows. Kept on the host, each micro-batch moves to the device when its turn
            comes.
        role: actor, critic or reward model.
        models: this rank's chunks, as ``build_model`` returned them.
        settings: fixed or dynamic micro-batches, packed or padded.
        indices: micro-batches that were planned elsewhere: positions in ``batch``, or the plan that chose the rows of
            ``batch``; None plans them here.
        forward_only: compute outputs, no loss and no gradients.

    Returns:
        ``indices``, the rows of each micro-batch in execution order, and ``output``, one dictionary per micro-batch on
        the last pipeline stage (an empty list on the others). Forward only, it holds the role's output as [b, R], zero
        where no token is scored; otherwise ``sums`` and ``maxima``, for ``reduce_metrics``. Nothing carries a graph.

    Raises:
        BatchError: a field that the role needs is missing.
        PlanError: no legal micro-batches, or model-parallel peers hold different ones, or a mixture of experts would
            notice the fillers among them.
    """
    rollouts = batch if isinstance(batch, RolloutBatch) else RolloutBatch.of(batch)
    layout, device = settings.layout, torch.device(torch.cuda.current_device())
    needed = () if forward_only else role.inputs
    rollouts.require(needed)
    if isinstance(indices, MicroBatchPlan):
        indices = indices.positions
    chosen = [list(part) for part in (plan(rollouts, settings) if indices is None else indices)]
    _compare_with_peers(chosen, rollouts, layout)
    if forward_only:
        weights, denominator = torch.zeros_like(rollouts.response_mask), torch.ones((), device=device)
    else:
        weights = role.aggregation.weights(rollouts.response_mask)
        denominator = role.aggregation.denominator(_global_totals(rollouts)).float()
    _check_experts(chosen, rollouts, models[0].config, layout, forward_only)

    def micro_batches() -> Iterator[tuple[int, MicroBatch]]:
        for number, rows in enumerate(chosen):
            yield (
                number,
                make_micro_batch(
                    rollouts,
                    rows,
                    weights,
                    denominator,
                    needed,
                    device=device,
                    packed=settings.packed,
                    tp=settings.layout.tokens_split_over_tp,
                    cp=layout.cp,
                    cp_rank=parallel_state.get_context_parallel_rank(),
                    place=role.place,
                ),
            )

    finish = partial(_outputs, role) if forward_only else partial(_loss, role, _loss_scale(models, settings, chosen))
    output = get_forward_backward_func()(
        forward_step_func=partial(_forward_step, finish),
        data_iterator=[micro_batches() for _ in models] if len(models) > 1 else micro_batches(),
        model=models if len(models) > 1 else models[0],
        num_microbatches=len(chosen),
        # Shapes are exchanged between stages: these two are not read.
        seq_length=1,
        micro_batch_size=1,
        forward_only=forward_only,
    )
    return {"output": output, "indices": chosen}


def _compare_with_peers(chosen: list[list[int]], batch: RolloutBatch, layout: ParallelLayout) -> None:
    """Raise ``PlanMismatch`` on every rank unless all ranks of this copy of the model hold the same micro-batches."""
    if layout.model_ranks > 1:
        groups = (parallel_state.get_model_parallel_group(), parallel_state.get_context_parallel_group())
        verify_digest(digest_of(chosen, batch.lengths.tolist()), *groups)


def _check_experts(
    chosen: list[list[int]], batch: RolloutBatch, config: TransformerConfig, layout: ParallelLayout, forward_only: bool
) -> None:
    """What a mixture of experts asks of the micro-batches of all data-parallel ranks; raised on every one of them."""
    if config.num_moe_experts is None:
        return
    reasons = [] if forward_only else routing_losses(config)
    if layout.ep == 1 and not reasons:
        return
    group = parallel_state.get_data_parallel_group()
    fillers = sum(not batch.lengths[rows].any() for rows in chosen)
    everywhere = gather((len(chosen), fillers), group)
    for rank, (count, fillers) in enumerate(everywhere):
        if layout.ep > 1 and count != everywhere[0][0]:
            raise PlanMismatch(
                f"data-parallel rank {rank} has {count} micro-batches, rank 0 has {everywhere[0][0]}: with "
                f"ep={layout.ep} they exchange tokens in every one; plan with max_tokens, or give every rank as many"
            )
        if fillers and reasons:
            raise PlanError(
                f"data-parallel rank {rank} needs {fillers} fillers among its {count} micro-batches, and their tokens "
                f"would change the result of a mixture of experts with {' and '.join(reasons)}: give the rank more "
                f"rows, lower max_tokens, or switch that off"
            )


def _global_totals(batch: RolloutBatch) -> torch.Tensor:
    """[2] tokens in the mask and rows with one, over all data-parallel ranks; on the device, never read back."""
    totals = mask_totals(batch.response_mask).to(torch.cuda.current_device(), non_blocking=True)
    dist.all_reduce(totals, group=parallel_state.get_data_parallel_group())
    return totals


@dataclass(frozen=True)
class _LossScale:
    """What undoes megatron-core's scaling of the loss, which already holds its global normaliser.

    Three ways lead through the schedule and DDP (M micro-batches of this rank):
    - a loss alone is multiplied by cp and divided by M, and DDP averages gradients over the dp·cp ranks;
    - a loss with a token count is divided by the count and by M, and DDP averages;
    - with ``calculate_per_token_loss``, neither happens, and the gradient is divided by the counts of all micro-batches
      and dp·cp ranks. The first micro-batch of each rank counts 1, the others 0, so that the sum is known.
    """

    factor: float
    counted: bool

    def __call__(self, number: int, loss: torch.Tensor, kept: dict[str, Any]) -> tuple:
        if not self.counted:
            return loss * self.factor, kept
        return loss * self.factor, torch.tensor(int(number == 0), dtype=torch.int, device=loss.device), kept


def _loss_scale(models: list[DistributedDataParallel], settings: StepSettings, chosen: list[list[int]]) -> _LossScale:
    layout = settings.layout
    if models[0].config.calculate_per_token_loss:
        return _LossScale(layout.dp * layout.cp, counted=True)
    if settings.counted_loss:
        return _LossScale(len(chosen) * layout.dp * layout.cp, counted=True)
    return _LossScale(len(chosen) * layout.dp, counted=False)


def _forward_step(
    finish: Callable[[int, MicroBatch, torch.Tensor], tuple],
    micro_batches: Iterator[tuple[int, MicroBatch]],
    model: DistributedDataParallel,
) -> tuple[torch.Tensor, Callable]:
    number, part = next(micro_batches)
    # megatron-core's half-precision wrapper would make a float32 copy of the logits; roles convert what they use.
    half = {"fp32_output": False} if model.config.bf16 or model.config.fp16 else {}
    output = model(part.input_ids, part.position_ids, None, packed_seq_params=part.packed_seq_params, **half)
    return output, partial(finish, number, part)


def _outputs(role: Role, number: int, part: MicroBatch, model_output: torch.Tensor) -> tuple:
    kept: dict[str, Any] = {"computed_tokens": part.computed_tokens}
    for name, scored in role.output(model_output, part).items():
        kept[name] = part.spread(scored.detach())
        if parallel_state.get_context_parallel_world_size() > 1:
            # Every rank scored its own tokens; the others' places are zero.
            dist.all_reduce(kept[name], group=parallel_state.get_context_parallel_group())
    return model_output.new_zeros(()), kept


def _loss(role: Role, scale: _LossScale, number: int, part: MicroBatch, model_output: torch.Tensor) -> tuple:
    loss, totals = role.loss(role.output(model_output, part), part)
    # One small tensor of each kind is all that stays of a micro-batch.
    kept = {
        "sums": torch.stack([totals[name] for name in role.sums]),
        "maxima": torch.stack([totals[name] for name in role.maxima]) if role.maxima else loss.new_zeros(0).double(),
    }
    return scale(number, loss, {**kept, "computed_tokens": part.computed_tokens})
