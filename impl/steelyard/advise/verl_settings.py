"""A setting under the names that users of verl's Megatron backend write, and the other way.

Names and defaults are those of verl 0.9.1 (``verl/trainer/config``); ``grad_offload``, which older versions knew, is
read but not written.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from steelyard.advise.job import Job
from steelyard.advise.setting import Recompute, Setting
from steelyard.errors import InputError, LayoutError
from steelyard.hints import did_you_mean
from steelyard.parallel import CpKind, ParallelLayout

_ACTOR, _REFERENCE, _CRITIC = "actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic"
_ROLLOUT, _MODEL = "actor_rollout_ref.rollout", "actor_rollout_ref.model"
_TRANSFORMER = "megatron.override_transformer_config"
_OPTIMIZER = "optim.override_optimizer_config"

_SIZES = {
    "tp": "megatron.tensor_model_parallel_size",
    "pp": "megatron.pipeline_model_parallel_size",
    "vpp": "megatron.virtual_pipeline_model_parallel_size",
    "cp": "megatron.context_parallel_size",
    "ep": "megatron.expert_model_parallel_size",
    "etp": "megatron.expert_tensor_parallel_size",
}
_GROUP = f"{_TRANSFORMER}.microbatch_group_size_per_vp_stage"
_SEQUENCE_PARALLEL = "megatron.sequence_parallel"
_CP_KIND = f"{_TRANSFORMER}.cp_comm_type"
# Megatron's default, p2p, holds of other ranks' keys at most what all_gather holds of them: judged as all_gather.
_CP_KINDS: dict[str | None, CpKind] = {
    "a2a": "all_to_all",
    "all_gather": "all_gather",
    "p2p": "all_gather",
    None: "all_gather",
}
_RECOMPUTE = f"{_TRANSFORMER}.recompute_granularity"
_RECOMPUTE_METHOD, _RECOMPUTE_LAYERS = (f"{_TRANSFORMER}.recompute_{name}" for name in ("method", "num_layers"))
_RECOMPUTES: dict[str | None, Recompute] = {None: "none", "selective": "selective", "full": "full"}
_OFFLOADS = ("megatron.param_offload", "megatron.grad_offload", "megatron.optimizer_offload")
_ON_HOST = f"{_OPTIMIZER}.optimizer_cpu_offload"
_ON_HOST_SHARE = f"{_OPTIMIZER}.optimizer_offload_fraction"
# Dynamic or fixed micro-batches: of what is trained, and of log-probabilities only.
_TRAINED_SPLIT = ("use_dynamic_bsz", "ppo_max_token_len_per_gpu", "ppo_micro_batch_size_per_gpu")
_FORWARD_SPLIT = ("log_prob_use_dynamic_bsz", "log_prob_max_token_len_per_gpu", "log_prob_micro_batch_size_per_gpu")

# What is read of a job. verl's default stands where a name is not set.
_JOB: dict[str, Any] = {
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    f"{_MODEL}.path": None,
    f"{_MODEL}.use_fused_kernels": False,
    f"{_ACTOR}.ppo_mini_batch_size": 256,
    f"{_ACTOR}.strategy": "megatron",
    f"{_ACTOR}.use_kl_loss": None,
    f"{_ROLLOUT}.n": 1,
    f"{_ROLLOUT}.gpu_memory_utilization": 0.5,
    "actor_rollout_ref.hybrid_engine": True,
    f"{_CRITIC}.enable": None,
    "algorithm.adv_estimator": "gae",
    "algorithm.use_kl_in_reward": None,
    "reward.reward_model.enable": False,
    "reward_model.enable": False,
    "trainer.nnodes": 1,
    "trainer.n_gpus_per_node": 8,
}
_TRAINED: dict[str, Any] = {
    **dict.fromkeys(_SIZES.values(), 1),
    _SIZES["vpp"]: None,
    _SIZES["etp"]: None,
    _GROUP: None,
    _SEQUENCE_PARALLEL: True,
    _CP_KIND: None,
    **dict.fromkeys((_RECOMPUTE, _RECOMPUTE_METHOD, _RECOMPUTE_LAYERS)),
    **dict.fromkeys(_OFFLOADS, False),
    _ON_HOST: False,
    _ON_HOST_SHARE: 1.0,
    **dict(zip(_TRAINED_SPLIT, (False, 16384, None), strict=True)),
}
_SECTIONS = {
    _ACTOR: tuple(_TRAINED),
    _CRITIC: tuple(_TRAINED),
    _REFERENCE: (*_SIZES.values(), _SEQUENCE_PARALLEL, _OFFLOADS[0], *_FORWARD_SPLIT),
    _ROLLOUT: _FORWARD_SPLIT,
}
# Settings that change memory and have no counterpart here: what they must be for a judgement to hold, and what is
# judged instead.
_ASSUMED = {
    f"{_MODEL}.lora_rank": (0, "judged as training of all parameters"),
    f"{_MODEL}.lora.rank": (0, "judged as training of all parameters"),
    f"{_ROLLOUT}.free_cache_engine": (True, "judged as if the rollout engine slept: say what it keeps"),
    f"{_ACTOR}.megatron.use_distributed_optimizer": (True, "judged with the distributed optimizer"),
    f"{_ACTOR}.megatron.use_megatron_fsdp": (False, "judged as Megatron's DDP"),
    f"{_ACTOR}.megatron.use_remove_padding": (True, "judged as packed rows"),
    f"{_ACTOR}.megatron.dtype": ("bfloat16", "judged as bfloat16"),
    f"{_ACTOR}.optim.use_precision_aware_optimizer": (False, "judged with float32 gradients and moments"),
    f"{_ACTOR}.{_RECOMPUTE_METHOD}": ("uniform", "judged as recompute of every layer"),
    f"{_ACTOR}.{_RECOMPUTE_LAYERS}": (1, "judged as recompute of every layer by itself"),
    f"{_ACTOR}.{_TRANSFORMER}.recompute_modules": (["core_attn"], "judged as recompute of attention"),
    f"{_ACTOR}.{_TRANSFORMER}.num_layers_in_first_pipeline_stage": (None, "judged with equal stages"),
    f"{_ACTOR}.{_TRANSFORMER}.num_layers_in_last_pipeline_stage": (None, "judged with equal stages"),
    f"{_ACTOR}.{_TRANSFORMER}.account_for_embedding_in_pipeline_split": (False, "judged with equal stages"),
    f"{_ACTOR}.{_TRANSFORMER}.account_for_loss_in_pipeline_split": (False, "judged with equal stages"),
}
_READ = {*_JOB, *_ASSUMED, *(f"{section}.{name}" for section, names in _SECTIONS.items() for name in names)}
_GROUPS = (
    *("actor_rollout_ref", "critic", "data", "trainer", "algorithm", "reward", "reward_model", "distillation"),
    *("custom_reward_function", "sandbox_fusion", "transfer_queue", "global_profiler", "skip", "ray_kwargs"),
    *("model_engine", "defaults", "hydra"),
)


# Alike enough to be a slip of the pen; and verl's own names that are as much like a name that is read.
_CLOSE = 0.85
_NEIGHBOURS = ("ppo_micro_batch_size", "log_prob_micro_batch_size", "forward_max_token_len_per_gpu")


def to_verl(setting: Setting, job: Job) -> dict[str, Any]:
    """Overrides that make verl train with ``setting``: name and value, for every role of the job that it trains itself.

    A name that verl's own files do not hold starts with ``+``, as its command line wants it. None is ``null``.
    """
    found: dict[str, Any] = {
        "data.max_prompt_length": job.max_prompt,
        "data.max_response_length": job.max_response,
        "trainer.nnodes": -(-job.gpus // job.gpus_per_node),
        "trainer.n_gpus_per_node": min(job.gpus, job.gpus_per_node),
        f"{_MODEL}.use_fused_kernels": setting.chunked_logits,
        f"{_CRITIC}.enable": "critic" in job.roles,
    }
    for role, prefix in (("actor", _ACTOR), ("critic", _CRITIC)):
        if role in job.roles:
            found |= _prefixed(prefix, {**_split(setting, _TRAINED_SPLIT), **_engine(setting), **_trained(setting)})
    if "actor" in job.roles:
        found |= _prefixed(_ROLLOUT, _split(setting, _FORWARD_SPLIT))
    if "reference" in job.roles:
        found |= _prefixed(_REFERENCE, {**_split(setting, _FORWARD_SPLIT), **_engine(setting)})
    if "reward" in job.roles:
        found["reward.reward_model.enable"] = True
    return found


def command_line(overrides: Mapping[str, Any]) -> list[str]:
    """``name=value`` for each override, as verl's command line reads it."""
    return [f"{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in overrides.items()]


def _prefixed(prefix: str, names: Mapping[str, Any]) -> dict[str, Any]:
    """Names in the section ``prefix``; a leading ``+`` stays in front."""
    return {("+" if name[0] == "+" else "") + f"{prefix}.{name.lstrip('+')}": names[name] for name in names}


def _split(setting: Setting, names: tuple[str, str, str]) -> dict[str, Any]:
    dynamic, budget, size = names
    if setting.micro_batch_size is not None:
        return {dynamic: False, size: setting.micro_batch_size}
    return {dynamic: True, budget: setting.max_tokens}


def _engine(setting: Setting) -> dict[str, Any]:
    """What every role's engine is told, forward only or trained."""
    layout = setting.layout
    found: dict[str, Any] = {name: getattr(layout, size) for size, name in _SIZES.items()}
    if layout.vpp == 1:
        found[_SIZES["vpp"]] = None
    if layout.expert_tensor_parallel == layout.tp:
        found[_SIZES["etp"]] = None
    # verl's default, which means nothing without tensor parallelism.
    found[_SEQUENCE_PARALLEL] = layout.sequence_parallel or layout.tp == 1
    found[_OFFLOADS[0]] = setting.offload
    return found


def _trained(setting: Setting) -> dict[str, Any]:
    """What trained roles are told besides; the reference's engine takes its transformer settings from the actor."""
    layout = setting.layout
    full = setting.recompute == "full"
    found: dict[str, Any] = {
        _OFFLOADS[2]: setting.offload,
        _RECOMPUTE: {ours: theirs for theirs, ours in _RECOMPUTES.items()}[setting.recompute],
        _RECOMPUTE_METHOD: "uniform" if full else None,
        _RECOMPUTE_LAYERS: 1 if full else None,
    }
    if layout.cp > 1 and layout.cp_kind == "all_to_all":
        found["+" + _CP_KIND] = "a2a"
    if layout.group != layout.pp:
        found["+" + _GROUP] = layout.group
    if setting.optimizer_on_host:
        found["+" + _ON_HOST] = True
        found["+" + _ON_HOST_SHARE] = 1.0
    return found


@dataclass(frozen=True)
class VerlSettings:
    """What a user's file under verl's names says.

    Attributes:
        setting: the actor's.
        facts: of the job: ``model`` (as written, or None), ``gpus``, ``gpus_per_node``, ``max_prompt``,
            ``max_response``, ``rows`` of a mini-batch, ``roles``, ``rollout_share``.
        ignored: names that are set and mean nothing for memory.
        assumed: settings that mean something and cannot be expressed, with what is judged instead.
    """

    setting: Setting
    facts: dict[str, Any]
    ignored: tuple[str, ...]
    assumed: tuple[str, ...]


def from_verl(values: Mapping[str, Any]) -> VerlSettings:
    """Read settings under verl's names; nested, dotted, or both. What is not set has verl's default.

    An interpolation (``${...}``) counts as not set where verl's files have one role follow another.

    Raises:
        InputError: a name is unknown, or a value is none that its name can have.
        LayoutError: the sizes do not fit the GPUs or each other.
    """
    given = dict(_flat(values))
    for name, value in list(given.items()):
        _refuse_unknown(name)
        if isinstance(value, str) and value.startswith("${"):
            if name in _JOB or name.removeprefix(f"{_ACTOR}.") in _TRAINED:
                raise InputError(
                    f"{name}={value!r} is an interpolation: give the configuration with its values filled in"
                )
            del given[name]
    strategy = _value(given, f"{_ACTOR}.strategy", str)
    if strategy != "megatron":
        raise InputError(f"{_ACTOR}.strategy={strategy!r}: only verl's megatron backend can be judged")
    gpus_per_node = _value(given, "trainer.n_gpus_per_node", int)
    facts = {
        "model": _value(given, f"{_MODEL}.path", str),
        "gpus": _value(given, "trainer.nnodes", int) * gpus_per_node,
        "gpus_per_node": gpus_per_node,
        "max_prompt": _value(given, "data.max_prompt_length", int),
        "max_response": _value(given, "data.max_response_length", int),
        # verl counts prompts, each of which is answered n times.
        "rows": _value(given, f"{_ACTOR}.ppo_mini_batch_size", int) * _value(given, f"{_ROLLOUT}.n", int),
        "roles": _roles(given),
        "rollout_share": _rollout_share(given),
    }
    setting = _setting(given, _ACTOR, facts["gpus"])
    return VerlSettings(
        setting,
        facts,
        ignored=tuple(sorted(name for name in given if name not in _READ)),
        assumed=(*_assumed(given), *_differing(given, setting)),
    )


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        name = prefix + str(key).lstrip("+")
        if isinstance(value, Mapping) and value:
            yield from _flat(value, name + ".")
        else:
            yield name, value


def _refuse_unknown(name: str) -> None:
    """Raise for a name of no group of verl's, or of one letter or two beside a name that is read."""
    group = name.split(".")[0]
    if group not in _GROUPS:
        raise InputError(f"unknown name {name!r}{did_you_mean(group, _GROUPS)}: give names as verl's configuration has")
    section, _, leaf = name.rpartition(".")
    if name in _READ or leaf in _NEIGHBOURS:
        return
    beside = [each.removeprefix(f"{section}.") for each in _READ if each.startswith(f"{section}.")]
    close = difflib.get_close_matches(leaf, beside, n=1, cutoff=_CLOSE)
    if close:
        raise InputError(
            f"unknown name {name!r} (did you mean {section}.{close[0]}?): give names as verl's configuration has"
        )


def _value(given: Mapping[str, Any], name: str, kind: type, default: Any = None) -> Any:
    """The value of a name, or its default where it is not set or null; a whole number is at least 1."""
    value: Any = given.get(name)
    if value is None:
        return _JOB.get(name, default)
    kinds = (int, float) if kind is float else (kind,)
    if type(value) in kinds:
        if kind is int and value < 1:
            raise InputError(f"{name}={value!r} must be at least 1")
        return value
    words = {int: "a whole number", bool: "true or false", str: "text", float: "a number"}[kind]
    raise InputError(f"{name}={value!r} must be {words}")


def _roles(given: Mapping[str, Any]) -> tuple[str, ...]:
    """By verl's own rules (``need_critic``, ``need_reference_policy``); a file that only configures the reference has
    one.
    """
    roles = ["actor"]
    critic = _value(given, f"{_CRITIC}.enable", bool)
    if critic or (critic is None and _value(given, "algorithm.adv_estimator", str) == "gae"):
        roles.append("critic")
    wanted = [_value(given, name, bool) for name in (f"{_ACTOR}.use_kl_loss", "algorithm.use_kl_in_reward")]
    configured = any(name.startswith(f"{_REFERENCE}.") for name in given)
    if any(wanted) or (wanted == [None, None] and configured):
        roles.append("reference")
    if any(_value(given, name, bool) for name in ("reward.reward_model.enable", "reward_model.enable")):
        roles.append("reward")
    return tuple(roles)


def _rollout_share(given: Mapping[str, Any]) -> float:
    """0 where the rollout engine has GPUs of its own."""
    shares = _value(given, "actor_rollout_ref.hybrid_engine", bool)
    return _value(given, f"{_ROLLOUT}.gpu_memory_utilization", float) if shares else 0.0


def _setting(given: Mapping[str, Any], prefix: str, gpus: int) -> Setting:
    def value(name: str, kind: type) -> Any:
        return _value(given, f"{prefix}.{name}", kind, _TRAINED[name])

    sizes: dict[str, Any] = {size: value(name, int) for size, name in _SIZES.items()}
    sizes["vpp"] = sizes["vpp"] or 1
    ranks = sizes["tp"] * sizes["pp"] * sizes["cp"]
    if gpus % ranks:
        raise LayoutError(
            f"tensor, pipeline and context parallel sizes of {prefix} make {ranks} GPUs, which do not divide {gpus} "
            f"(trainer.nnodes * trainer.n_gpus_per_node): change one of them"
        )
    layout = ParallelLayout(
        **sizes,
        sp=value(_SEQUENCE_PARALLEL, bool) and sizes["tp"] > 1,
        dp=gpus // ranks,
        group=value(_GROUP, int),
        cp_kind=_CP_KINDS[_one_of(prefix, _CP_KIND, value(_CP_KIND, str), _CP_KINDS)],
    )
    dynamic, budget, size = (value(name, kind) for name, kind in zip(_TRAINED_SPLIT, (bool, int, int), strict=True))
    if not dynamic and size is None:
        raise InputError(
            f"{prefix}: neither use_dynamic_bsz=True nor ppo_micro_batch_size_per_gpu is set: micro-batches need one"
        )
    return Setting(
        layout,
        max_tokens=budget,
        micro_batch_size=None if dynamic else size,
        recompute=_RECOMPUTES[_one_of(prefix, _RECOMPUTE, value(_RECOMPUTE, str), _RECOMPUTES)],
        # Gradients go with the parameters since verl has no switch of their own for them.
        offload=value(_OFFLOADS[0], bool) and value(_OFFLOADS[2], bool),
        chunked_logits=_value(given, f"{_MODEL}.use_fused_kernels", bool),
        optimizer_on_host=value(_ON_HOST, bool) and value(_ON_HOST_SHARE, float) == 1,
    )


def _one_of(prefix: str, name: str, value: str | None, known: Collection[str | None]) -> str | None:
    if value not in known:
        words = ", ".join("null" if each is None else each for each in known)
        raise InputError(f"{prefix}.{name}={value!r} must be one of {words}")
    return value


def _assumed(given: Mapping[str, Any]) -> Iterator[str]:
    for name, (expected, words) in _ASSUMED.items():
        if name in given and given[name] not in (expected, None):
            yield f"{name}={given[name]}: {words}"
    params, _, optimizer = (bool(given.get(f"{_ACTOR}.{name}")) for name in _OFFLOADS)
    if params != optimizer:
        yield f"{_ACTOR}: only one of param_offload and optimizer_offload is set: judged without offload"
    share = given.get(f"{_ACTOR}.{_ON_HOST_SHARE}", 1)
    if given.get(f"{_ACTOR}.{_ON_HOST}") and share != 1:
        yield f"{_ACTOR}.{_ON_HOST_SHARE}={share}: judged with the whole optimizer on the GPU"


def _differing(given: Mapping[str, Any], setting: Setting) -> Iterator[str]:
    """Names of other roles that are set to something else than the actor's."""
    alike = {
        _CRITIC: {**_split(setting, _TRAINED_SPLIT), **_engine(setting), **_trained(setting)},
        _REFERENCE: {**_split(setting, _FORWARD_SPLIT), **_engine(setting)},
        _ROLLOUT: _split(setting, _FORWARD_SPLIT),
    }
    for prefix, names in alike.items():
        for written, value in _prefixed(prefix, names).items():
            name = written.lstrip("+")
            if name in given and given[name] != value:
                yield f"{name}={given[name]}: judged as the actor's {value}"
