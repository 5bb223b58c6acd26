"""How a model and a batch are spread over ranks, and whether Megatron can run it that way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from steelyard.errors import LayoutError

if TYPE_CHECKING:
    from steelyard.cost import ModelShape

CpKind = Literal["all_gather", "all_to_all"]


@dataclass(frozen=True)
class ParallelLayout:
    """Sizes of every kind of parallelism; the product tp·cp·dp·pp is the number of ranks.

    Attributes:
        tp: tensor-parallel size.
        sp: sequence parallel (activations split over the tp ranks between the matrix products). None switches it on
            with tp.
        pp: pipeline stages.
        vpp: virtual stages (model chunks) per pipeline stage.
        cp: context-parallel size.
        cp_kind: how context-parallel ranks see each other's keys and values.
        dp: data-parallel size (copies of the model that see different rows).
        ep: expert-parallel size; the experts are spread over ep groups of the tp·cp·dp ranks of a stage.
        etp: tensor-parallel size within an expert; an expert then lies on etp ranks, and all experts on etp·ep. None
            means Megatron's default, ``tp``.
        group: micro-batches that pass one virtual stage before the next (Megatron's
            ``microbatch_group_size_per_vp_stage``). None means Megatron's default, ``pp``.
    """

    tp: int = 1
    sp: bool | None = None
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    cp_kind: CpKind = "all_gather"
    dp: int = 1
    ep: int = 1
    group: int | None = None
    etp: int | None = None

    def __post_init__(self) -> None:
        if self.etp is None:
            object.__setattr__(self, "etp", self.tp)
        for name in ("tp", "pp", "vpp", "cp", "dp", "ep", "etp"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise LayoutError(f"{name}={value!r} must be a whole number of at least 1")
        if self.sp is None:
            object.__setattr__(self, "sp", self.tp > 1)
        if self.sp and self.tp == 1:
            raise LayoutError(
                "sp=True needs tp > 1: sequence parallelism splits activations over the tensor-parallel ranks"
            )
        if self.cp_kind not in ("all_gather", "all_to_all"):
            raise LayoutError(f"cp_kind={self.cp_kind!r} is unknown: use 'all_gather' or 'all_to_all'")
        if self.vpp > 1 and self.pp == 1:
            raise LayoutError(f"vpp={self.vpp} needs pp > 1: virtual stages interleave real pipeline stages")
        if self.group is None:
            object.__setattr__(self, "group", self.pp)
        elif self.group < self.pp:
            raise LayoutError(f"group={self.group} is below pp={self.pp}: Megatron wants pp <= group <= micro-batches")
        if self.stage_ranks % (self.expert_tensor_parallel * self.ep):
            raise LayoutError(
                f"etp={self.etp} times ep={self.ep} does not divide the {self.stage_ranks} ranks of a stage "
                f"(tp*cp*dp), over which Megatron spreads the experts: change ep, or etp (by default tp)"
            )

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.tp * self.cp * self.dp * self.pp

    @property
    def stage_ranks(self) -> int:
        """Ranks of one pipeline stage."""
        return self.tp * self.cp * self.dp

    @property
    def model_ranks(self) -> int:
        """Ranks that hold one copy of the model and work on the same micro-batch."""
        return self.tp * self.cp * self.pp

    @property
    def sequence_parallel(self) -> bool:
        """``sp`` with its default resolved."""
        return bool(self.sp)

    @property
    def tokens_split_over_tp(self) -> int:
        """Tensor-parallel ranks that share the tokens of a rank: all under sequence parallelism, else one."""
        return self.tp if self.sequence_parallel else 1

    @property
    def row_alignment(self) -> int:
        """Tokens of a row come in multiples of this, so that sequence and context parallelism can split them."""
        return self.tokens_split_over_tp * (2 * self.cp if self.cp > 1 else 1)

    @property
    def expert_tensor_parallel(self) -> int:
        """``etp`` with its default resolved."""
        return self.etp or self.tp

    def check(self, shape: ModelShape) -> None:
        """Raise ``LayoutError`` where Megatron could not build ``shape`` on this layout."""
        if shape.heads % self.tp:
            raise LayoutError(
                f"tp={self.tp} does not divide the model's {shape.heads} attention heads: use a divisor of them"
            )
        if shape.kv_heads % self.tp and self.tp % shape.kv_heads:
            raise LayoutError(
                f"tp={self.tp} neither divides the model's {shape.kv_heads} key-value heads nor is a multiple of them: "
                f"use one that does"
            )
        if self.cp > 1 and self.cp_kind == "all_to_all" and shape.heads // self.tp % self.cp:
            raise LayoutError(
                f"cp={self.cp} with cp_kind='all_to_all' does not divide the {shape.heads // self.tp} attention heads "
                f"of a tensor-parallel rank: use cp_kind='all_gather' or a divisor"
            )
        if shape.moe_layers < shape.layers and shape.ffn % self.tp:
            raise LayoutError(f"tp={self.tp} does not divide the model's feed-forward size {shape.ffn}: use a divisor")
        if shape.vocab % self.tp:
            raise LayoutError(f"tp={self.tp} does not divide the model's vocabulary of {shape.vocab}: use a divisor")
        chunks = self.pp * self.vpp
        if shape.layers % chunks:
            raise LayoutError(
                f"pp*vpp={chunks} does not divide the model's {shape.layers} layers: use pp and vpp whose product does"
            )
        self._check_experts(shape)

    def _check_experts(self, shape: ModelShape) -> None:
        if not shape.experts:
            for name, neutral in (("ep", 1), ("etp", self.tp)):
                if getattr(self, name) != neutral:
                    raise LayoutError(
                        f"{name}={getattr(self, name)} needs a mixture-of-experts model; this one is dense: use "
                        f"{name}={neutral}"
                    )
            return
        if shape.experts % self.ep:
            raise LayoutError(f"ep={self.ep} does not divide the model's {shape.experts} experts: use a divisor")
        if shape.moe_ffn % self.expert_tensor_parallel:
            raise LayoutError(
                f"etp={self.etp} does not divide an expert's feed-forward size {shape.moe_ffn}: use a divisor"
            )
        if shape.shared_ffn % self.tp:
            raise LayoutError(
                f"tp={self.tp} does not divide the shared experts' feed-forward size {shape.shared_ffn}: use a divisor"
            )
        if self.tp > 1 and not self.sp:
            raise LayoutError(
                f"sp=False with tp={self.tp}: Megatron trains a mixture of experts on tensor-parallel ranks only with "
                f"sequence parallelism: use sp=True"
            )

    def check_world(self, world: int) -> None:
        """Raise ``LayoutError`` unless the layout needs exactly ``world`` ranks."""
        if self.world != world:
            raise LayoutError(
                f"layout {self} needs {self.world} ranks (tp*cp*dp*pp) but {world} are there: change one of the sizes"
            )

    def __str__(self) -> str:
        """The sizes that differ from one rank, e.g. ``tp2+sp pp2 vpp2``; ``1`` for a single rank."""
        sizes = {"tp": self.tp, "cp": self.cp, "pp": self.pp, "vpp": self.vpp, "dp": self.dp, "ep": self.ep}
        parts = [
            f"{name}{size}" + ("+sp" if name == "tp" and self.sp else "") for name, size in sizes.items() if size > 1
        ]
        if self.etp != self.tp:
            parts.append(f"etp{self.etp}")
        if self.cp > 1 and self.cp_kind == "all_to_all":
            parts[parts.index(f"cp{self.cp}")] += "(a2a)"
        return " ".join(parts) or "1"
