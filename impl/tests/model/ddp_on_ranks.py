"""What test_ddp.py and test_freeze.py run on ranks."""

import importlib.util
import logging
from functools import partial

import hf_checkpoints
import pytest
import torch
from bridges_on_ranks import parse
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.utils import unwrap_model
from on_ranks import PROMPTS, RESPONSES, mine, rollouts
from transformers import AutoConfig

from steelyard.errors import InputError
from steelyard.model.build import build_model, build_optimizer
from steelyard.model.ddp_report import ddp_report
from steelyard.model.ddp_watch import watch_ddp
from steelyard.model.layers import ValueHead
from steelyard.step import Actor, StepSettings

# mbridge does not know the newest megatron-core.
BUILT = ("megatron", "mbridge") if importlib.util.find_spec("mbridge") else ("megatron",)


def config(**changes):
    return AutoConfig.for_model("qwen2", **hf_checkpoints.FAMILIES["qwen2"] | changes)


def trained(layout, chunks):
    """The optimizer, and a function that takes a step."""
    optimizer = build_optimizer(chunks, lr=1e-2)
    actor = Actor(chunks, StepSettings(max_tokens=40, layout=layout), optimizer)
    return optimizer, lambda: actor.update(rollouts(PROMPTS, RESPONSES).select(mine(8)))


def verdict(report, field):
    return next(one.agrees for one in report.findings if one.field == field)


def sees_that_reduction_overlaps():
    """Not in the first step, in which Megatron learns the order; every bucket but the last before backward ends."""
    layout, asked = parse("dp=2"), {"overlap_grad_reduce": True, "bucket_size": 6000}
    chunks = build_model(config(), layout, override_ddp_config=asked)
    optimizer, step = trained(layout, chunks)
    with watch_ddp(chunks) as first:
        step()
    assert {one.phase for one in first.of("gradients")} == {"outside"}
    with watch_ddp(chunks) as watch:
        step()
    phases = [one.phase for one in watch.of("gradients")]
    assert len(phases) == len(chunks[0].buffers[0].buckets) > 2
    assert set(phases) == {"backward"}
    report = ddp_report(chunks, optimizer, asked=asked, watch=watch)
    assert report.overlaps
    assert report.agrees, str(report)
    assert report.distributed_optimizer
    assert report.config["overlap_grad_reduce"] is True
    assert not ddp_report(chunks, optimizer, asked={}, watch=watch).agrees


def watching_leaves_nothing_behind():
    layout = parse("")
    chunks = build_model(config(), layout)
    before = torch.distributed.all_reduce
    with watch_ddp(chunks):
        assert torch.distributed.all_reduce is not before
    assert torch.distributed.all_reduce is before
    group = chunks[0].bucket_groups[0]
    assert not {"start_grad_sync", "start_param_sync", "finish_param_sync", "check_grads"} & set(vars(group))
    with watch_ddp(chunks) as nothing:
        pass
    with pytest.raises(InputError, match="reduced no gradients"):
        ddp_report(chunks, watch=nothing)
    unwatched = ddp_report(chunks, asked={"overlap_grad_reduce": True})
    assert (verdict(unwatched, "overlap_grad_reduce"), unwatched.overlaps) == (None, None)


def reports_what_was_dropped():
    """The model was built without what the user asked for."""
    layout = parse("dp=2")
    chunks = build_model(config(), layout, dtype=torch.bfloat16, override_ddp_config={"grad_reduce_in_fp32": False})
    report = ddp_report(chunks, build_optimizer(chunks, lr=1e-3), asked={"use_distributed_optimizer": False})
    assert not report.agrees
    wrong = {one.field for one in report.findings if one.agrees is False}
    assert wrong == {"grad_reduce_in_fp32", "use_distributed_optimizer"}
    assert "grad_reduce_in_fp32                    NO" in str(report)
    assert [one.grad_dtype for one in report.buffers] == [torch.bfloat16]


def finds_where_buckets_are_cut():
    """The rule of megatron-core, against another size than that which it was given."""
    layout = parse("")
    given = {"overlap_grad_reduce": True, "bucket_size": 6000}
    chunks = build_model(config(), layout, override_ddp_config=given)
    assert verdict(ddp_report(chunks, asked=given), "bucket_size")
    for other in (2000, 9000):
        assert verdict(ddp_report(chunks, asked={**given, "bucket_size": other}), "bucket_size") is False


def stops_at_a_gradient_that_is_no_number():
    layout = parse("")
    for asked, stops in (({"check_for_nan_in_grad": True}, True), ({}, False)):
        chunks = build_model(config(), layout, override_ddp_config=asked)
        _, step = trained(layout, chunks)
        chunks[0].module.decoder.layers[0].self_attention.linear_proj.weight.data[0, 0] = float("nan")
        if stops:
            with pytest.raises(RuntimeError, match="found NaN in local grad norm"):
                step()
        else:
            step()


def refuses_what_cannot_arrive_here():
    layout = parse("dp=2")

    def refused(message, ddp=None, **transformer):
        with pytest.raises(InputError, match=message):
            build_model(config(), layout, override_ddp_config=ddp, override_transformer_config=transformer)

    refused("does not go with calculate_per_token_loss", {"average_in_collective": True}, calculate_per_token_loss=True)
    refused(
        r"needs process groups made for it, and those are made for 1: call initialize_parallel\(layout, "
        r"optimizer_instances=2\)",
        {"num_distributed_optimizer_instances": 2},
    )
    refused("nccl_ub=True needs CUDA and NCCL", {"nccl_ub": True})
    refused("set fp8 in override_transformer_config", {"fp8_param_gather": True})
    refused("set it in override_transformer_config too", {"delay_wgrad_compute": True})
    refused("override_transformer_config has the unknown field 'recompute'.*recompute_m", recompute=True)
    build_model(config(), layout)
    refused("one switch for all", {"reduce_scatter_with_fp32_accumulation": True})
    parallel_state.destroy_model_parallel()
    # New groups, other models: and what one of them switches on does not stay.
    for asked in (True, False):
        layout = parse("dp=2")
        overrides = {"reduce_scatter_with_fp32_accumulation": asked, "grad_reduce_in_fp32": False}
        chunks = build_model(config(), layout, override_ddp_config=overrides, dtype=torch.bfloat16)
        _, step = trained(layout, chunks)
        with watch_ddp(chunks) as watch:
            step()
        kinds = {one.kind for one in watch.of("gradients")}
        assert kinds == {"reduce_scatter_with_fp32_accumulation" if asked else "reduce_scatter_tensor"}
        parallel_state.destroy_model_parallel()


def calls_back_with_every_bare_chunk():
    layout = parse("pp=2,vpp=2")
    for builder in BUILT:
        seen = []
        chunks = build_model(config(), layout, builder=builder, value_head=True, callbacks=[seen.append])
        assert [unwrap_model(chunk) for chunk in chunks] == seen
        assert not any(isinstance(chunk, DistributedDataParallel) for chunk in seen)
        assert sum(isinstance(chunk.output_layer, ValueHead) for chunk in seen if chunk.post_process) == (
            parallel_state.is_pipeline_last_stage()
        )


def trains_with_a_float32_residual():
    """Embeddings are float32, and norms give the linear layers the type of their weights."""
    layout = parse("")
    for builder in BUILT:
        overrides = {"fp32_residual_connection": True}
        chunks = build_model(
            config(), layout, builder=builder, dtype=torch.bfloat16, override_transformer_config=overrides
        )
        bare = unwrap_model(chunks[0])
        watched = {"residual": bare.embedding, "linear": bare.decoder.layers[0].mlp.linear_fc1}
        seen = {}
        for name, module in watched.items():
            module.register_forward_hook(partial(note_type, seen, name))
        _, step = trained(layout, chunks)
        assert step()["actor/grad_norm"] > 0
        assert seen == {"residual": torch.float32, "linear": torch.bfloat16}


def note_type(seen, name, module, inputs, output):
    seen[name] = (output[0] if isinstance(output, tuple) else output).dtype


def freezes_before_ddp():
    layout = parse("dp=2")
    for builder in BUILT:
        chunks = build_model(
            config(),
            layout,
            builder=builder,
            freeze=["decoder.layers.1", "*.linear_qkv.bias", "decoder.final_layernorm"],
        )
        parameters = dict(chunks[0].module.named_parameters())
        frozen = {name for name, parameter in parameters.items() if not parameter.requires_grad}
        assert frozen == {
            name for name in parameters if "layers.1." in name or "qkv.bias" in name or "final_layernorm" in name
        }
        held = sum(part for buffer in ddp_report(chunks).buffers for bucket in buffer.parameters for part in bucket)
        assert held == sum(one.numel() for one in parameters.values() if one.requires_grad)
        before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        _, step = trained(layout, chunks)
        step()
        assert {name for name in before if torch.equal(before[name], parameters[name])} == frozen


def freezes_over_stages():
    """Layers are numbered over the model, tied weights are one, and a name that no rank knows is refused on all."""
    layout = parse("pp=2")
    for builder in BUILT:
        for name in ("embedding", "output_layer"):
            chunks = build_model(config(), layout, builder=builder, freeze=[name, "decoder.layers.3"])
            frozen = {name for name, one in unwrap_model(chunks[0]).named_parameters() if not one.requires_grad}
            first = parallel_state.is_pipeline_first_stage()
            assert ("embedding.word_embeddings.weight" if first else "output_layer.weight") in frozen
            assert any("layers.1." in name for name in frozen) == (not first)
            assert not any("layers.0." in name for name in frozen)
            _, step = trained(layout, chunks)
            step()
    with pytest.raises(InputError, match=r"'decoder.layer.0' names no module.*did you mean .*decoder.layers.0"):
        build_model(config(), layout, freeze=["decoder.layer.0", "embedding"])
    with pytest.raises(InputError, match="leaves no parameter to train"):
        build_model(config(), layout, freeze=["*"])


def builds_through_megatron_bridge(place):
    """Its real provider: the user's object stays as it was, and hooks, head, freezing and DDP fields arrive."""
    from steelyard.model.bridges.megatron_bridge import gpt_provider_class

    logging.getLogger("megatron.bridge").setLevel(logging.ERROR)
    provider = gpt_provider_class()(
        num_layers=4, hidden_size=32, ffn_hidden_size=48, num_attention_heads=4, num_query_groups=2, vocab_size=96,
        normalization="RMSNorm", gated_linear_unit=True, activation_func=torch.nn.functional.silu,
        add_bias_linear=False, position_embedding_type="rope", seq_length=64,
    )  # fmt: skip
    order = []
    provider.register_pre_wrap_hook(lambda chunks: order.append("registered") or chunks)
    layout, asked = parse(place), {"overlap_grad_reduce": True, "grad_reduce_in_fp32": True, "bucket_size": 6000}
    chunks = build_model(
        provider,
        layout,
        builder="megatron-bridge",
        value_head=True,
        override_ddp_config=asked,
        override_transformer_config={"layernorm_epsilon": 0.25},
        callbacks=[lambda chunk: order.append("callback")],
        freeze=["embedding"],
    )
    assert order == ["registered", "callback"]
    assert provider.layernorm_epsilon != 0.25
    assert chunks[0].config.layernorm_epsilon == 0.25
    assert chunks[0].config.tensor_model_parallel_size == layout.tp
    bare = unwrap_model(chunks[0])
    assert not bare.share_embeddings_and_output_weights
    assert isinstance(bare.output_layer, ValueHead)
    assert not bare.embedding.word_embeddings.weight.requires_grad
    assert ddp_report(chunks, build_optimizer(chunks, lr=1e-3), asked=asked).agrees
