"""Does what a user overrides arrive? Every field that has an effect on a CPU, through every builder, seen in a step.

A cell builds a small model for each case and builder, takes a step, and looks at a second: buffers, buckets and
collectives for ``override_ddp_config`` (``steelyard.model.ddp_report``), and layers and activations for
``override_transformer_config``. The configuration itself is not asked. N12, which loses overrides, runs through the
same cases and must be caught in each.

- ``override_arrives``: 1 where the effect was seen and nothing contradicts it on any rank, else 0, for each case
  (``variant``: builder and field); N12 must have 0.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from suites.launch.local import run_ranks
from suites.matrix import Cell
from suites.measure import Series

BUILDERS = ("megatron", "mbridge", "megatron-bridge")
N12 = "N12"
# Small against the model of a cell, so that there are several buckets.
BUCKET = 6000


@dataclass(frozen=True)
class Case:
    """One field with the value that is asked for.

    Attributes:
        field: its name.
        asked: the overrides, with what the field needs beside it; to the transformer's configuration where
            ``transformer`` says so, else to DDP's.
        dtype: of the model; bfloat16 where float32 would hide the effect.
        loss: in which way N12 loses it.
        instances: copies of the distributed optimizer's state.
    """

    field: str
    asked: dict[str, Any]
    transformer: bool = False
    dtype: str = "float32"
    loss: str = "dropped"
    instances: int = 1


BUCKETS = {"overlap_grad_reduce": True, "bucket_size": BUCKET}
GATHER = {"overlap_param_gather": True, **BUCKETS}
DDP_CASES = (
    Case("grad_reduce_in_fp32", {"grad_reduce_in_fp32": False}, dtype="bfloat16"),
    # The default must hold where the user sets something else.
    Case("grad_reduce_in_fp32", {"overlap_grad_reduce": True}, dtype="bfloat16", loss="fp32 reduction forgotten"),
    Case("overlap_grad_reduce", {"overlap_grad_reduce": True}),
    Case("bucket_size", BUCKETS),
    Case("use_distributed_optimizer", {"use_distributed_optimizer": False}, loss="distributed optimizer forced"),
    Case("num_distributed_optimizer_instances", {"num_distributed_optimizer_instances": 2}, instances=2),
    Case("average_in_collective", {"average_in_collective": True}),
    Case("pad_buckets_for_high_nccl_busbw", {"pad_buckets_for_high_nccl_busbw": True}),
    Case(
        "reduce_scatter_with_fp32_accumulation",
        {"reduce_scatter_with_fp32_accumulation": True, "grad_reduce_in_fp32": False},
        dtype="bfloat16",
    ),
    Case("overlap_param_gather", GATHER),
    Case("align_param_gather", {"align_param_gather": True, **GATHER}),
    Case("check_for_nan_in_grad", {"check_for_nan_in_grad": True}),
    Case("check_for_large_grads", {"check_for_large_grads": True}),
)
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
TRANSFORMER_CASES = (
    Case("recompute_granularity", FULL, True),
    Case("recompute_modules", {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}, True),
    Case("layernorm_epsilon", {"layernorm_epsilon": 0.25}, True),
    Case("init_method_std", {"init_method_std": 0.5}, True),
    Case("num_layers_in_first_pipeline_stage", {"num_layers_in_first_pipeline_stage": 1}, True),
)


def cases(cell: Cell) -> list[Case]:
    """The cases that show something on the layout of a cell."""
    layout = cell.layout
    return [
        one
        for one in (*DDP_CASES, *TRANSFORMER_CASES)
        if (one.instances == 1 or layout.dp % one.instances == 0)
        and (one.field != "num_layers_in_first_pipeline_stage" or (layout.pp > 1 and layout.vpp == 1))
    ]


def measure(cell: Cell, device: str | None = None) -> list[Series]:
    """Build and observe every case on this cell's ranks.

    Raises:
        InputError: mbridge, megatron-bridge or transformers is not installed.
        RanksFailed: a rank died or hung.
    """
    found = run_ranks(
        "suites.overrides:on_rank",
        cell.layout.parallel().world,
        cell.model_dump(),
        time_limit=cell.time_limit,
        device=device,
    )
    series = []
    for one in found:
        naive = one["builder"] == N12
        arrives = float(one["arrives"])
        series.append(
            Series(
                "override_arrives",
                "naive" if naive else "optimised",
                "1",
                "lower" if naive else "higher",
                [arrives],
                limit=0.0 if naive else 1.0,
                variant=f"{one['builder']} {one['case']} {one['field']}",
                notes={name: one[name] for name in ("builder", "case", "field", "asked", "observed", "others")},
            )
        )
    return series


def on_rank(payload: dict[str, Any]) -> list[dict[str, Any]]:
    """What every rank runs; rank 0's result has one entry for each case and builder, over all ranks."""
    from suites.ranks import gather_to_all, parallel_groups

    cell = Cell.model_validate(payload)
    builds = [(number, builder) for number in range(len(cases(cell))) for builder in (*BUILDERS, N12)]
    mine: dict[tuple[int, str], dict[str, Any]] = {}
    # Few process groups: gloo keeps threads and connections for each until the process ends.
    for instances in sorted({_instances(cell, *build) for build in builds}):
        with parallel_groups(cell.layout.parallel(), cell.seed, optimizer_instances=instances):
            for build in builds:
                if _instances(cell, *build) == instances:
                    mine[build] = _observe(cell, *build)
    everywhere = gather_to_all([mine[build] for build in builds])
    return [_over_ranks(cell, [ranks[index] for ranks in everywhere]) for index in range(len(builds))]


def _instances(cell: Cell, number: int, builder: str) -> int:
    """Copies of optimizer state that the process groups must be made for; N12 does not get that far."""
    return 1 if builder == N12 else cases(cell)[number].instances


def _over_ranks(cell: Cell, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    case = cases(cell)[ranks[0]["case"]]
    verdicts = [one["seen"] for one in ranks]
    others = sorted({other for one in ranks for other in one["others"]})
    return {
        "builder": ranks[0]["builder"],
        "case": ranks[0]["case"],
        "field": case.field,
        "asked": ", ".join(f"{name}={value}" for name, value in case.asked.items()),
        "observed": next((one["observed"] for one in ranks if one["seen"] is not None), ranks[0]["observed"]),
        "others": others,
        # Seen on some rank, contradicted on none; a later pipeline stage may show nothing.
        "arrives": any(verdicts) and not any(one is False for one in verdicts) and not others,
    }


def _observe(cell: Cell, number: int, builder: str) -> dict[str, Any]:
    """Build a case and look at it."""
    from steelyard.model.build import build_model
    from steelyard.model.ddp import forget_models
    from suites import override_effects
    from suites.baselines import dropped_override
    from suites.families import model_spec
    from suites.ranks import DTYPES

    case, layout = cases(cell)[number], cell.layout.parallel()
    spec, dtype = model_spec(cell.model, builder), DTYPES[case.dtype]
    forget_models()
    if builder == N12:
        asked = {} if case.transformer else case.asked
        chunks = dropped_override.build(spec, layout, asked, case.loss, dtype=dtype)
    else:
        kind = "override_transformer_config" if case.transformer else "override_ddp_config"
        chunks = build_model(spec, layout, builder=builder, dtype=dtype, **{kind: case.asked})
    effect = (override_effects.of_transformer if case.transformer else override_effects.of_ddp)(cell, case, chunks)
    return {"case": number, "builder": builder, **asdict(effect)}
