"""DDP overrides: read in any form, refused where they would not arrive, and read back from the built model."""

import dataclasses
import importlib.util

import pytest
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.transformer.transformer_config import TransformerConfig
from omegaconf import OmegaConf

from steelyard.errors import InputError
from steelyard.model.ddp import BUILDERS, DEFAULTS, EXCLUDES, NEEDS, is_of_fsdp, resolve_ddp_config
from steelyard.model.ddp_report import OBSERVERS
from steelyard.model.overrides import read_overrides
from steelyard.model.versions import UNREAD_BY_DDP

FIELDS = {field.name: field for field in dataclasses.fields(DistributedDataParallelConfig)}


@pytest.mark.parametrize("builder", BUILDERS)
def test_every_builder_has_the_documented_defaults_and_the_user_wins(builder):
    assert resolve_ddp_config(None, builder) == DistributedDataParallelConfig(**DEFAULTS)
    mine = {"use_distributed_optimizer": False, "grad_reduce_in_fp32": False, "overlap_grad_reduce": True}
    assert resolve_ddp_config(mine, builder) == DistributedDataParallelConfig(**mine)


def test_overrides_come_as_mapping_omegaconf_or_dataclass():
    mine = {"overlap_grad_reduce": True, "bucket_size": 7}
    node = OmegaConf.create({"size": 7, "ddp": {"overlap_grad_reduce": True, "bucket_size": "${size}"}})
    assert resolve_ddp_config(node.ddp) == resolve_ddp_config(mine)
    whole = DistributedDataParallelConfig(**mine)
    assert resolve_ddp_config(whole) == whole, "a dataclass sets every field, so no default of ours is left"
    for wrong in ([("bucket_size", 7)], "bucket_size=7", DistributedDataParallelConfig):
        with pytest.raises(InputError, match=r"override_ddp_config=.* give a mapping of fields, or a dataclass"):
            resolve_ddp_config(wrong)
    with pytest.raises(InputError, match="override_ddp_config cannot be resolved: Missing mandatory value"):
        resolve_ddp_config(OmegaConf.create({"bucket_size": "???"}))


def test_an_unknown_field_is_named_with_the_close_ones():
    with pytest.raises(InputError, match=r"unknown field 'overlap_grad_reduction' \(did you mean overlap_grad_reduce"):
        resolve_ddp_config({"overlap_grad_reduction": True})
    with pytest.raises(InputError, match="unknown field 'xyz': the fields are those of DistributedDataParallelConfig"):
        resolve_ddp_config({"xyz": True})
    with pytest.raises(InputError, match=r"builder='megatron_bridge' is unknown \(did you mean megatron-bridge"):
        resolve_ddp_config({}, "megatron_bridge")


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("overlap_grad_reduce", "true", "it takes bool"),
        ("overlap_grad_reduce", 1, "it takes bool"),
        ("bucket_size", 4e7, "it takes int or None"),
        ("bucket_size", True, "it takes int or None"),
        ("num_distributed_optimizer_instances", None, "it takes int"),
        ("data_parallel_sharding_strategy", 3, "it takes str"),
    ],
)
def test_a_wrong_type_is_named_with_value_and_expected_type(field, value, expected):
    with pytest.raises(InputError, match=f"override_ddp_config: {field}={value!r} is of type .*; {expected}"):
        resolve_ddp_config({field: value, "overlap_grad_reduce" if field != "overlap_grad_reduce" else field: value})


def test_types_of_the_transformer_configuration_are_checked_where_they_are_plain():
    def read(**overrides):
        return read_overrides(TransformerConfig, overrides, "override_transformer_config")

    given = {"layernorm_epsilon": 1, "recompute_granularity": None, "moe_layer_freq": [0, 1], "fp8": "e4m3"}
    assert read(**given) == given
    with pytest.raises(InputError, match="hidden_dropout='0' is of type str; it takes float"):
        read(hidden_dropout="0")
    with pytest.raises(InputError, match="recompute_granularity=1 is of type int; it takes"):
        read(recompute_granularity=1)


def other_than_default(field):
    default = FIELDS[field].default
    if isinstance(default, bool):
        return not default
    return {str: "optim", int: 2}.get(type(default), 9)


@pytest.mark.parametrize(("field", "needed", "why"), NEEDS)
def test_a_field_without_what_it_needs_is_refused_before_megatron_ignores_it(field, needed, why):
    given = {field: other_than_default(field)}
    if needed == "overlap_param_gather":
        given["use_distributed_optimizer"] = True
    else:
        given[needed] = False
    with pytest.raises(InputError, match=rf"{field}=.* needs {needed}=True; without it megatron-core {why}"):
        resolve_ddp_config(given)


@pytest.mark.parametrize(("field", "other", "why"), EXCLUDES)
def test_fields_that_exclude_each_other_are_refused(field, other, why):
    with pytest.raises(InputError, match=rf"{field}=.* does not go with {other}="):
        resolve_ddp_config({field: other_than_default(field), other: other_than_default(other)})


@pytest.mark.parametrize("field", sorted(filter(is_of_fsdp, FIELDS)))
def test_fields_of_fsdp_are_refused_for_ddp_does_not_read_them(field):
    with pytest.raises(InputError, match=f"{field}=.* belongs to Megatron's FSDP"):
        resolve_ddp_config({field: other_than_default(field)})


def test_what_megatron_itself_refuses_has_its_words(monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    later = "param_name_patterns_for_fp32_local_accumulation"  # 0.19 takes nccl_ub with newer versions of torch
    given = {later: ("all",)} if later in FIELDS else {"nccl_ub": True}
    with pytest.raises(InputError, match="override_ddp_config is refused by megatron-core: "):
        resolve_ddp_config(given)


@pytest.mark.skipif("num_buckets" not in FIELDS, reason="megatron-core has this field since 0.19")
def test_a_field_that_ddp_does_not_read_is_refused():
    with pytest.raises(InputError, match="num_buckets=4 has no effect here: .*set bucket_size"):
        resolve_ddp_config({"num_buckets": 4})


def test_every_field_is_observed_or_known_to_do_nothing_on_a_cpu():
    elsewhere = {
        "fp8_param_gather": "FP8 parameters need TransformerEngine",
        "fp4_param_gather": "likewise (0.19)",
        "reuse_grad_buf_for_mxfp8_param_ag": "likewise",
        "nccl_ub": "NCCL",
        "disable_symmetric_registration": "NCCL",
        "delay_wgrad_compute": "TransformerEngine's layers alone delay it",
        "param_name_patterns_for_fp32_local_accumulation": "has an effect since 0.19, which is not observed yet",
    }
    assert set(OBSERVERS) <= set(FIELDS)
    assert set(FIELDS) <= {*OBSERVERS, *elsewhere, *UNREAD_BY_DDP, *filter(is_of_fsdp, FIELDS)}


def test_reduction_is_seen_to_overlap_with_the_backward_pass(ranks):
    ranks("ddp_on_ranks:sees_that_reduction_overlaps", 2)


def test_watching_leaves_nothing_behind(ranks):
    ranks("ddp_on_ranks:watching_leaves_nothing_behind", 1)


def test_the_report_says_what_was_dropped(ranks):
    ranks("ddp_on_ranks:reports_what_was_dropped", 2)


def test_the_report_knows_where_buckets_are_cut(ranks):
    ranks("ddp_on_ranks:finds_where_buckets_are_cut", 1)


def test_a_gradient_that_is_no_number_stops_the_step_where_that_was_asked_for(ranks):
    ranks("ddp_on_ranks:stops_at_a_gradient_that_is_no_number", 1)


def test_what_model_groups_or_device_cannot_do_is_refused_before_a_model_is_built(ranks):
    ranks("ddp_on_ranks:refuses_what_cannot_arrive_here", 2)


def test_callbacks_get_every_bare_chunk_with_its_head_from_every_builder(ranks):
    ranks("ddp_on_ranks:calls_back_with_every_bare_chunk", 2)


def test_a_float32_residual_goes_with_half_precision(ranks):
    ranks("ddp_on_ranks:trains_with_a_float32_residual", 1)


def test_frozen_parameters_have_no_place_in_gradient_buffers_and_stay(ranks):
    ranks("ddp_on_ranks:freezes_before_ddp", 2)


def test_names_to_freeze_count_over_all_stages(ranks):
    ranks("ddp_on_ranks:freezes_over_stages", 2)


NO_BRIDGE = importlib.util.find_spec("megatron.bridge") is None


@pytest.mark.skipif(NO_BRIDGE, reason="megatron-bridge is not installed (pip install --no-deps megatron-bridge==0.3.1)")
@pytest.mark.parametrize(("place", "world"), [("", 1), ("tp=2", 2)])
def test_megatron_bridges_provider_gets_everything_after_finalize(ranks, place, world):
    ranks("ddp_on_ranks:builds_through_megatron_bridge", world, place)
