"""Layers without TransformerEngine whose parameters have the names that TransformerEngine's layers give them.

Bridges map checkpoints by those names: a norm in front of a linear layer is part of it (``layer_norm_weight``), and the
experts of a rank are one grouped layer (``weight0``, ``weight1`` ...). The computation is that of ``layers.py``.
"""

from __future__ import annotations

from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F  # noqa: N812
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from steelyard.model.layers import RMSNorm, layer_specs


class NormColumnParallelLinear(ColumnParallelLinear):
    """RMSNorm and a column-parallel linear layer in one, as TransformerEngine's ``LayerNormLinear`` is."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **settings: Any) -> None:
        super().__init__(input_size, output_size, config=config, **settings)
        norm = RMSNorm(config, input_size, config.layernorm_epsilon)
        self.layer_norm_weight, self.eps = norm.weight, norm.eps

    def forward(self, input_: torch.Tensor, *arguments: Any, **settings: Any) -> Any:
        weight = self.layer_norm_weight
        normed = F.rms_norm(input_, weight.shape, weight, self.eps).to(weight.dtype)
        return super().forward(normed, *arguments, **settings)


class _GroupedLinear(torch.nn.Module):
    """The same linear layer of every expert of this rank, one after the other; rows are sorted by expert."""

    kind: ClassVar[type[torch.nn.Module]]
    flow: ClassVar[dict[str, bool]]

    def __init__(
        self,
        experts: int,
        input_size: int,
        output_size: int,
        *,
        pg_collection: Any,
        skip_bias_add: bool,
        **settings: Any,
    ) -> None:
        super().__init__()
        # A list, not a ModuleList: the parameters are named here.
        self._layers = [
            self.kind(
                input_size,
                output_size,
                skip_bias_add=True,  # the only way of the row-parallel layer; biases are off
                tp_group=pg_collection.expt_tp,
                **self.flow,
                **settings,
            )
            for _ in range(experts)
        ]
        for expert, layer in enumerate(self._layers):
            self.register_parameter(f"weight{expert}", cast(torch.nn.Parameter, layer.weight))

    def forward(self, rows: torch.Tensor, rows_per_expert: list[int]) -> tuple[torch.Tensor, None]:
        parts = zip(self._layers, rows.split(rows_per_expert), strict=True)
        return torch.cat([layer(part)[0] for layer, part in parts]), None


class GroupedColumnParallelLinear(_GroupedLinear):
    kind = ColumnParallelLinear
    flow: ClassVar = {"gather_output": False}


class GroupedRowParallelLinear(_GroupedLinear):
    kind = RowParallelLinear
    flow: ClassVar = {"input_is_parallel": True}


def block_spec(config: TransformerConfig, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """This rank's layers, as ``layers.layer_specs`` has them, under TransformerEngine's names."""
    return TransformerBlockSubmodules(
        layer_specs=[_renamed(spec) for spec in layer_specs(config, vp_stage)], layer_norm=RMSNorm
    )


def _renamed(spec: ModuleSpec) -> ModuleSpec:
    layer = spec.submodules
    layer.input_layernorm = IdentityOp
    layer.self_attention.submodules.linear_qkv = NormColumnParallelLinear
    if hasattr(layer.mlp.submodules, "experts"):
        # The norm before a mixture of experts stays a module of its own: router and experts share its output.
        grouped = MLPSubmodules(linear_fc1=GroupedColumnParallelLinear, linear_fc2=GroupedRowParallelLinear)
        layer.mlp.submodules.experts = ModuleSpec(module=TEGroupedMLP, submodules=grouped)
    else:
        layer.pre_mlp_layernorm = IdentityOp
        layer.mlp.submodules.linear_fc1 = NormColumnParallelLinear
    return spec
