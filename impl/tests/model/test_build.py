"""What the builder refuses before anything is built; what it builds is judged by the parity suite."""

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from steelyard.cost import ModelShape
from steelyard.errors import InputError, LayoutError, ShapeError
from steelyard.model import host
from steelyard.model.attention import PackedAttention
from steelyard.model.build import build_model
from steelyard.model.config import transformer_config
from steelyard.parallel import ParallelLayout

SHAPE = ModelShape(layers=4, hidden=32, ffn=48, heads=4, kv_heads=2, head_dim=8, vocab=96)


def test_an_unknown_builder_is_refused():
    with pytest.raises(InputError, match="builder='nemo' is unknown: use 'megatron', 'mbridge' or 'megatron-bridge'"):
        build_model(SHAPE, ParallelLayout(), builder="nemo")


LATENT = {"kv_lora": 8, "qk_nope": 4, "qk_rope": 4, "v_head_dim": 8}


def test_a_shape_that_cannot_be_built_is_refused_by_name():
    values = {name: getattr(SHAPE, name) for name in ("layers", "hidden", "ffn", "heads", "head_dim", "vocab")}
    shape = ModelShape(**values, kv_heads=4, name="mine", **LATENT)
    with pytest.raises(ShapeError, match="model mine: multi-head latent attention"):
        transformer_config(shape, ParallelLayout())


def test_a_layout_that_does_not_fit_is_refused_before_megatron_sees_it():
    with pytest.raises(LayoutError, match="tp=3 does not divide"):
        transformer_config(SHAPE, ParallelLayout(tp=3))


def test_virtual_stages_get_the_settings_that_do_not_hang_or_corrupt():
    config = transformer_config(SHAPE, ParallelLayout(pp=2, vpp=2))
    assert (config.overlap_p2p_comm, config.batch_p2p_comm) == (True, False)
    assert not config.deallocate_pipeline_outputs
    assert config.variable_seq_lengths


def test_overrides_of_the_transformer_config_arrive():
    overrides = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    assert transformer_config(SHAPE, ParallelLayout(), overrides=overrides).recompute_granularity == "full"


def test_swiglu_is_fused_where_models_are_built_for_cuda(monkeypatch):
    assert not transformer_config(SHAPE, ParallelLayout()).bias_activation_fusion
    # What torch answers where there is a GPU; running_on("cpu") answers with the CPU there too.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cuda", 0))
    assert transformer_config(SHAPE, ParallelLayout()).bias_activation_fusion
    with host.running_on("cpu"):
        assert not transformer_config(SHAPE, ParallelLayout()).bias_activation_fusion


def attention(**settings):
    config = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4, kv_channels=8, **settings)
    return PackedAttention(config, 1, None, "self")


def test_attention_refuses_dropout():
    with pytest.raises(InputError, match="attention_dropout=0.1"):
        attention(attention_dropout=0.1)


def test_padded_attention_is_causal():
    with host.running_on("cpu"):
        core = attention(attention_dropout=0.0)
        generator = torch.Generator().manual_seed(0)
        q_SBND, k_SBKD, v_SBKD = (torch.randn(6, 2, heads, 8, generator=generator) for heads in (4, 2, 2))
        before = core(q_SBND, k_SBKD, v_SBKD)
        k_SBKD[4:], v_SBKD[4:] = 0, 0
        after = core(q_SBND, k_SBKD, v_SBKD)
    assert torch.equal(before[:4], after[:4])
    assert not torch.equal(before[4:], after[4:])
