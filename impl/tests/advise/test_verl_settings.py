"""Settings under verl's names: verl's own configuration accepts them, and they come back as they were."""

from __future__ import annotations

import copy
import functools
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from steelyard.advise import Job, Setting, gpu_named
from steelyard.advise.verl_settings import command_line, from_verl, to_verl
from steelyard.cost import ModelShape
from steelyard.errors import InputError, LayoutError
from steelyard.parallel import ParallelLayout

MOE = ModelShape.preset("qwen3-30b-a3b")
SIZES = st.sampled_from([1, 2, 4])


def verl_config() -> Any:
    """The configuration that verl's own script wrote out of its files, closed to other names as hydra closes it."""
    return copy.deepcopy(_verl_config())


@functools.cache
def _verl_config() -> Any:
    spec = find_spec("verl")
    assert spec is not None
    (package,) = spec.submodule_search_locations or ()
    config = OmegaConf.load(Path(package, "trainer", "config", "_generated_ppo_megatron_trainer.yaml"))
    OmegaConf.set_struct(config, True)
    return config


def job_of(layout: ParallelLayout, roles: tuple[str, ...] = ("actor",), **facts: Any) -> Job:
    return Job(MOE, layout.world, gpu_named("h100"), **{"max_prompt": 2048, "max_response": 8192, **facts}, roles=roles)


@st.composite
def layouts(draw: st.DrawFn) -> ParallelLayout:
    tp, pp, cp, dp = (draw(SIZES) for _ in range(4))
    ep = draw(st.sampled_from([size for size in (1, 2, 4) if (cp * dp) % size == 0]))
    return ParallelLayout(
        tp=tp,
        sp=draw(st.booleans()) if tp > 1 else False,
        pp=pp,
        vpp=draw(SIZES) if pp > 1 else 1,
        cp=cp,
        cp_kind=draw(st.sampled_from(["all_gather", "all_to_all"])) if cp > 1 else "all_gather",
        dp=dp,
        ep=ep,
        etp=draw(st.sampled_from([1, tp])),
        group=pp * draw(st.sampled_from([1, 2])),
    )


@st.composite
def settings_(draw: st.DrawFn) -> Setting:
    split = draw(st.sampled_from([{"max_tokens": 20480}, {"max_tokens": 1000}, {"micro_batch_size": 3}]))
    return Setting(
        draw(layouts()),
        **split,
        recompute=draw(st.sampled_from(["none", "selective", "full"])),
        **{name: draw(st.booleans()) for name in ("offload", "chunked_logits", "optimizer_on_host")},
    )


ROLES = st.sets(st.sampled_from(["critic", "reference", "reward"])).map(
    lambda more: ("actor", *(role for role in ("critic", "reference", "reward") if role in more))
)


@settings(deadline=None, max_examples=40)
@given(setting=settings_(), roles=ROLES)
def test_setting_and_job_come_back_from_verls_names(setting: Setting, roles: tuple[str, ...]) -> None:
    job = job_of(setting.layout, roles)
    found = from_verl(to_verl(setting, job))
    assert found.setting == setting
    assert {name: found.facts[name] for name in ("gpus", "max_prompt", "max_response", "roles")} == {
        "gpus": job.gpus,
        "max_prompt": 2048,
        "max_response": 8192,
        "roles": roles,
    }
    assert (found.ignored, found.assumed) == ((), ())


@settings(deadline=None, max_examples=10)
@given(setting=settings_(), roles=ROLES)
def test_verls_own_configuration_has_every_name(setting: Setting, roles: tuple[str, ...]) -> None:
    config = verl_config()
    for name, value in to_verl(setting, job_of(setting.layout, roles)).items():
        known = OmegaConf.select(config, name.lstrip("+"), default="absent", throw_on_missing=False)
        assert (known == "absent") == name.startswith("+"), name
        # hydra: a name that is there is set in closed configuration; "+" adds one, which verl allows in its open parts.
        OmegaConf.update(config, name.lstrip("+"), value, force_add=name.startswith("+"))
        assert OmegaConf.select(config, name.lstrip("+")) == value


def test_other_roles_of_verl_follow_the_setting() -> None:
    setting = Setting(ParallelLayout(tp=4, pp=2, cp=2, cp_kind="all_to_all", ep=2, etp=1), 20480, recompute="full")
    config = verl_config()
    for name, value in to_verl(setting, job_of(setting.layout, ("actor", "critic", "reference"))).items():
        OmegaConf.update(config, name.lstrip("+"), value, force_add=name.startswith("+"))
    actor = OmegaConf.to_container(config.actor_rollout_ref.actor.megatron, resolve=True)
    for other in (config.actor_rollout_ref.ref.megatron, config.critic.megatron):
        resolved = OmegaConf.to_container(other, resolve=True)
        for name in actor:
            if "parallel" in name or name == "override_transformer_config":
                assert resolved[name] == actor[name], name
    assert config.critic.ppo_max_token_len_per_gpu == 20480
    assert config.actor_rollout_ref.ref.log_prob_max_token_len_per_gpu == 20480


def test_every_name_of_verls_own_files_is_known() -> None:
    values = OmegaConf.to_container(verl_config(), resolve=False)
    assert isinstance(values, dict)
    values["actor_rollout_ref"]["actor"]["use_dynamic_bsz"] = True
    found = from_verl(values)
    assert found.setting == Setting(ParallelLayout(dp=8), 16384, chunked_logits=False)
    assert found.facts["roles"] == ("actor", "critic")
    # verl's default budget of the critic differs from the actor's.
    assert found.assumed == ("critic.ppo_max_token_len_per_gpu=32768: judged as the actor's 16384",)
    assert {"trainer.total_epochs", "actor_rollout_ref.actor.optim.lr"} <= set(found.ignored)


def test_settings_of_a_public_script_are_read() -> None:
    """examples/gspo_trainer/run_qwen3_30b_a3b_megatron.sh of verl: nested and dotted, with names of older versions."""
    found = from_verl(
        {
            "data": {"max_prompt_length": 2048, "max_response_length": 8192},
            "algorithm.adv_estimator": "grpo",
            "actor_rollout_ref": {
                "model.path": "Qwen/Qwen3-30B-A3B-Base",
                "rollout": {"n": 16, "gpu_memory_utilization": 0.8},
                "actor": {
                    "ppo_mini_batch_size": 32,
                    "use_dynamic_bsz": True,
                    "ppo_max_token_len_per_gpu": 30720,
                    "use_kl_loss": False,
                    "megatron": {
                        "tensor_model_parallel_size": 2,
                        "expert_model_parallel_size": 8,
                        "expert_tensor_parallel_size": 1,
                        "param_offload": True,
                        "grad_offload": True,
                        "optimizer_offload": True,
                    },
                },
            },
            "+actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity": "full",
        }
    )
    layout = ParallelLayout(tp=2, dp=4, ep=8, etp=1)
    assert found.setting == Setting(layout, 30720, recompute="full", offload=True, chunked_logits=False)
    assert found.facts == {
        "model": "Qwen/Qwen3-30B-A3B-Base",
        "gpus": 8,
        "gpus_per_node": 8,
        "max_prompt": 2048,
        "max_response": 8192,
        "rows": 512,
        "roles": ("actor",),
        "rollout_share": 0.8,
    }
    assert found.ignored == ()


ACTOR = "actor_rollout_ref.actor"
FIXED = {f"{ACTOR}.ppo_micro_batch_size_per_gpu": 1}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"actor_rollout.actor.ppo_epochs": 1}, "did you mean actor_rollout_ref"),
        ({f"{ACTOR}.megatron.tensor_parallel_size": 2}, "megatron.tensor_model_parallel_size"),
        ({"data.max_response_lenght": 1}, "data.max_response_length"),
        ({f"{ACTOR}.strategy": "fsdp"}, "only verl's megatron backend"),
        ({}, "micro-batches need one"),
        ({**FIXED, f"{ACTOR}.megatron.tensor_model_parallel_size": "${oc.env:TP}"}, "is an interpolation"),
        ({**FIXED, f"{ACTOR}.megatron.pipeline_model_parallel_size": "2"}, "must be a whole number"),
        ({**FIXED, f"{ACTOR}.megatron.pipeline_model_parallel_size": 0}, "must be at least 1"),
        ({**FIXED, f"{ACTOR}.megatron.override_transformer_config.cp_comm_type": "ring"}, "null"),
        ({**FIXED, f"{ACTOR}.megatron.override_transformer_config.recompute_granularity": "all"}, "selective"),
    ],
)
def test_what_cannot_be_understood_is_one_clear_line(values: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        from_verl(values)
    assert "\n" not in str(caught.value)


def test_sizes_that_do_not_divide_the_gpus_are_refused() -> None:
    with pytest.raises(LayoutError, match="do not divide 8"):
        from_verl({**FIXED, f"{ACTOR}.megatron.context_parallel_size": 3})


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({f"{ACTOR}.megatron.param_offload": True}, "judged without offload"),
        ({"actor_rollout_ref.model.lora_rank": 32}, "training of all parameters"),
        ({"actor_rollout_ref.rollout.free_cache_engine": False}, "rollout engine"),
        ({f"{ACTOR}.megatron.override_transformer_config.num_layers_in_last_pipeline_stage": 6}, "equal stages"),
        ({"critic.megatron.tensor_model_parallel_size": 4}, "judged as the actor's 1"),
        (
            {
                f"{ACTOR}.optim.override_optimizer_config.optimizer_cpu_offload": True,
                f"{ACTOR}.optim.override_optimizer_config.optimizer_offload_fraction": 0.5,
            },
            "whole optimizer on the GPU",
        ),
    ],
)
def test_what_a_setting_cannot_say_is_told(values: dict[str, Any], words: str) -> None:
    (told,) = from_verl({**FIXED, **values}).assumed
    assert words in told


def test_command_line_is_hydras() -> None:
    setting = Setting(ParallelLayout(cp=2, cp_kind="all_to_all"), 8192, recompute="full")
    lines = command_line(to_verl(setting, job_of(setting.layout)))
    values = dict(line.split("=") for line in lines)
    assert values[f"+{ACTOR}.megatron.override_transformer_config.cp_comm_type"] == "a2a"
    assert values[f"{ACTOR}.megatron.virtual_pipeline_model_parallel_size"] == "null"
    assert json.loads(values[f"{ACTOR}.use_dynamic_bsz"]) is True
