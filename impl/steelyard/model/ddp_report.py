"""What Megatron's DDP really does with a built model, beside what the user asked for.

    chunks = build_model(..., override_ddp_config=overrides)
    optimizer = build_optimizer(chunks, lr=1e-6)
    actor.update(batch)                        # in the first step Megatron only learns the order of gradients
    with watch_ddp(chunks) as watch:
        actor.update(batch)
    print(ddp_report(chunks, optimizer, asked=overrides, watch=watch))

Buffers, buckets and collectives are looked at, not the configuration, so an override that a builder dropped or
megatron-core changed shows as a disagreement. Without a watched step, what only shows in one is left open.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import ChainedOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from steelyard.errors import InputError
from steelyard.model.ddp import resolve_ddp_config
from steelyard.model.ddp_watch import Watch

# megatron-core pads buckets to this when they are to suit NCCL at large data-parallel sizes.
NCCL_FRIENDLY = 2**16


@dataclass(frozen=True)
class Buffer:
    """One contiguous gradient buffer of a chunk.

    Attributes:
        chunk: index of the chunk; experts: it holds the parameters of experts.
        param_dtype, grad_dtype: types of the parameters in it, and of the gradients that are added up and reduced.
        buckets: elements of each bucket, padding included, in the order in which gradients become ready.
        parameters: elements of each bucket's parameters, in the order in which they joined it.
        scaling: factor by which gradients are multiplied before they are reduced.
        holds_parameters: the parameters lie in one buffer too, for the distributed optimizer.
        ranks: data-parallel ranks that share a gradient.
        shared_embedding: indices of buckets that a tied embedding has for itself.
    """

    chunk: int
    experts: bool
    param_dtype: torch.dtype
    grad_dtype: torch.dtype
    buckets: tuple[int, ...]
    parameters: tuple[tuple[int, ...], ...]
    scaling: float
    holds_parameters: bool
    ranks: int
    shared_embedding: tuple[int, ...]


@dataclass(frozen=True)
class Finding:
    """One field of the DDP configuration: what was asked, what was seen, and whether they agree.

    ``agrees`` is None where the model alone cannot tell, or where both settings do the same here.
    """

    field: str
    asked: Any
    observed: str
    agrees: bool | None


@dataclass(frozen=True)
class DdpReport:
    """What DDP does on this rank.

    Attributes:
        config: every field of the configuration that DDP holds.
        buffers: gradient buffers of all chunks.
        distributed_optimizer: whether the optimizer is; None when none was given.
        overlaps: gradients are reduced while a backward pass runs; None without a watched step.
        findings: one for each field whose effect can be observed.
    """

    config: dict[str, Any]
    buffers: tuple[Buffer, ...]
    distributed_optimizer: bool | None
    overlaps: bool | None
    findings: tuple[Finding, ...]

    @property
    def agrees(self) -> bool:
        """No finding contradicts what was asked."""
        return all(finding.agrees is not False for finding in self.findings)

    def __str__(self) -> str:
        words = {True: "yes", False: "NO", None: "open"}
        width = max(len(finding.field) for finding in self.findings)
        lines = [f"{'field':{width}}  agrees  asked   observed"]
        lines += [
            f"{one.field:{width}}  {words[one.agrees]:6}  {one.asked!s:6}  {one.observed}" for one in self.findings
        ]
        return "\n".join(lines)


def ddp_report(
    chunks: Sequence[DistributedDataParallel], optimizer: Any = None, *, asked: Any = None, watch: Watch | None = None
) -> DdpReport:
    """Read back what DDP does with these chunks.

    Args:
        chunks: what ``build_model`` returned.
        optimizer: what ``build_optimizer`` returned, to see whether it is distributed.
        asked: the user's overrides, as they were given to ``build_model``; the defaults of ``steelyard.model.ddp``
            stand for the rest.
        watch: from ``watch_ddp`` around a step that was not the first.

    Raises:
        InputError: ``asked`` is not a legal set of overrides, or the watch saw no reduction of gradients.
    """
    if watch is not None and not watch.of("gradients"):
        raise InputError("the watched step reduced no gradients: hold watch_ddp(chunks) around a whole optimizer step")
    buffers = tuple(
        _buffer(index, buffer, experts)
        for index, chunk in enumerate(chunks)
        for experts, several in ((False, chunk.buffers), (True, chunk.expert_parallel_buffers))
        for buffer in several
    )
    distributed = None if optimizer is None else _is_distributed(optimizer)
    seen = _Seen(tuple(chunks), buffers, distributed, watch)
    wanted = resolve_ddp_config(asked)
    findings = []
    for field, observe in OBSERVERS.items():
        value = getattr(wanted, field)
        observed, agrees = observe(seen, value)
        findings.append(Finding(field, value, observed, agrees))
    return DdpReport(asdict(chunks[0].ddp_config), buffers, distributed, seen.overlaps, tuple(findings))


@dataclass(frozen=True)
class _Seen:
    """All that the observers look at."""

    chunks: tuple[DistributedDataParallel, ...]
    buffers: tuple[Buffer, ...]
    distributed_optimizer: bool | None
    watch: Watch | None

    @property
    def overlaps(self) -> bool | None:
        if self.watch is None:
            return None
        return any(one.phase == "backward" for one in self.watch.of("gradients"))


Observation = tuple[str, bool | None]
UNWATCHED: Observation = ("needs a watched step", None)


def _buffer(chunk: int, buffer: Any, experts: bool) -> Buffer:
    return Buffer(
        chunk=chunk,
        experts=experts,
        param_dtype=buffer.param_dtype,
        grad_dtype=buffer.grad_data.dtype,
        buckets=tuple(bucket.grad_data.numel() for bucket in buffer.buckets),
        parameters=tuple(tuple(one.numel() for one in bucket.params_list) for bucket in buffer.buckets),
        scaling=buffer.buckets[0].gradient_scaling_factor,
        holds_parameters=buffer.param_data is not None,
        ranks=buffer.data_parallel_world_size,
        shared_embedding=tuple(
            index
            for index, bucket in enumerate(buffer.buckets)
            if any(getattr(one, "shared_embedding", False) for one in bucket.params_list)
        ),
    )


def _is_distributed(optimizer: Any) -> bool:
    parts = optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]
    return all(isinstance(part, DistributedOptimizer) for part in parts)


def _names(values: Any) -> str:
    return ", ".join(sorted({str(value).removeprefix("torch.") for value in values}))


def _fp32(seen: _Seen, asked: bool) -> Observation:
    kept = [one.grad_dtype == (torch.float32 if asked else one.param_dtype) for one in seen.buffers]
    types = [_names(getattr(one, name) for one in seen.buffers) for name in ("grad_dtype", "param_dtype")]
    text = "{} buffers of {} parameters".format(*types)
    if seen.watch is not None:
        text += f", reduced in {_names(one.dtype for one in seen.watch.of('gradients'))}"
    if all(kept) and all(one.param_dtype == torch.float32 for one in seen.buffers):
        return text, None
    return text, all(kept)


def _overlap(seen: _Seen, asked: bool) -> Observation:
    if seen.watch is None:
        return UNWATCHED
    reductions = seen.watch.of("gradients")
    early = sum(one.phase == "backward" for one in reductions)
    return f"{early} of {len(reductions)} reductions start in the backward pass", bool(seen.overlaps) == asked


def _bucket_size(seen: _Seen, asked: int | None) -> Observation:
    bucketed = [
        one
        for one in seen.buffers
        if one.chunk == 0 and parallel_state.get_pipeline_model_parallel_rank() == 0 and not one.experts
    ]
    text = f"buckets of {', '.join(str(list(one.buckets)) for one in seen.buffers)}"
    if asked is None:
        return text, None
    if not bucketed:
        # megatron-core cuts only the first chunk of the first stage into buckets.
        return f"{text} (later stage)", all(len(one.buckets) - len(one.shared_embedding) <= 1 for one in seen.buffers)
    return text, all(_cut_at(one, asked) for one in bucketed)


def _cut_at(buffer: Buffer, size: int) -> bool:
    """A bucket is full as soon as it holds ``size`` elements (alignment gaps included), and not before."""
    for index, (total, parts) in enumerate(zip(buffer.buckets, buffer.parameters, strict=True)):
        last = index == len(buffer.buckets) - 1 or {index, index + 1} & set(buffer.shared_embedding)
        if (total < size and not last) or sum(parts[:-1]) >= size:
            return False
    return True


def _distributed(seen: _Seen, asked: bool) -> Observation:
    facts = [one.holds_parameters for one in seen.buffers]
    text = f"parameters {'in' if all(facts) else 'outside'} DDP's buffers"
    if seen.distributed_optimizer is not None:
        facts.append(seen.distributed_optimizer)
        text += f", {'distributed' if seen.distributed_optimizer else 'plain'} optimizer"
    if seen.watch is not None:
        kinds = {one.kind for one in seen.watch.of("gradients")}
        facts.append(any("reduce_scatter" in kind for kind in kinds))
        text += f", gradients by {_names(kinds)}"
    return text, all(fact == asked for fact in facts)


def _instances(seen: _Seen, asked: int) -> Observation:
    whole = parallel_state.get_data_parallel_group(with_context_parallel=True).size()
    copies = {whole // one.ranks for one in seen.buffers if not one.experts}
    return f"gradients scattered over {_names(one.ranks for one in seen.buffers)} of {whole} ranks", copies == {asked}


def _average(seen: _Seen, asked: bool) -> Observation:
    text = f"gradients scaled by {_names(f'{one.scaling:g}' for one in seen.buffers)} before"
    if seen.watch is not None:
        ops = {one.op for one in seen.watch.of("gradients")}
        return f"{text}, {_names(ops)} in the collective", ops == {"avg" if asked else "sum"}
    dense = [one for one in seen.buffers if not one.experts and one.ranks > 1]
    return text, all((one.scaling == 1.0) == asked for one in dense) if dense else None


def _padded(seen: _Seen, asked: bool) -> Observation:
    sizes = [size for one in seen.buffers for size in one.buckets]
    fits = all(size % NCCL_FRIENDLY == 0 for size in sizes)
    return f"bucket sizes {'are' if fits else 'are not'} multiples of {NCCL_FRIENDLY}", fits == asked


def _accumulation(seen: _Seen, asked: bool) -> Observation:
    if seen.watch is None:
        return UNWATCHED
    kinds = {one.kind for one in seen.watch.of("gradients")}
    return f"gradients by {_names(kinds)}", ("reduce_scatter_with_fp32_accumulation" in kinds) == asked


def _param_gather(seen: _Seen, asked: bool) -> Observation:
    hooked = any(chunk.remove_forward_pre_hook_handles for chunk in seen.chunks)
    if seen.watch is None:
        return f"{'hooks' if hooked else 'no hooks'} before modules", hooked == asked
    gathers = seen.watch.of("parameters")
    # With aligned gathers, the interleaved schedule starts them before its first forward pass.
    beside = sum(not one.waits for one in gathers)
    return f"{beside} of {len(gathers)} gathers run beside the forward pass", (beside > 0) == asked


def _aligned(seen: _Seen, asked: bool) -> Observation:
    if seen.watch is None:
        return UNWATCHED
    gathers = seen.watch.of("parameters")
    ahead = sum(one.ahead for one in gathers)
    text = f"{ahead} of {len(gathers)} gathers start while another is waited for"
    if not any(chunk.remove_forward_pre_hook_handles and len(chunk.bucket_groups) > 1 for chunk in seen.chunks):
        return text, None
    return text, (ahead == 0) == asked


def _nan_checks(seen: _Seen, asked: bool) -> Observation:
    if seen.watch is None:
        return UNWATCHED
    return f"{seen.watch.nan_checks} checks for NaN and infinity", (seen.watch.nan_checks > 0) == asked


def _large_checks(seen: _Seen, asked: bool) -> Observation:
    if seen.watch is None:
        return UNWATCHED
    return f"{seen.watch.large_checks} checks for large gradients", (seen.watch.large_checks > 0) == asked


# Every field whose effect can be seen in the model or in a step, also on a CPU.
OBSERVERS: dict[str, Callable[[_Seen, Any], Observation]] = {
    "grad_reduce_in_fp32": _fp32,
    "overlap_grad_reduce": _overlap,
    "bucket_size": _bucket_size,
    "use_distributed_optimizer": _distributed,
    "num_distributed_optimizer_instances": _instances,
    "average_in_collective": _average,
    "pad_buckets_for_high_nccl_busbw": _padded,
    "reduce_scatter_with_fp32_accumulation": _accumulation,
    "overlap_param_gather": _param_gather,
    "align_param_gather": _aligned,
    "check_for_nan_in_grad": _nan_checks,
    "check_for_large_grads": _large_checks,
}
