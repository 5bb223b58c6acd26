"""What test_hf_weights.py runs on ranks: checkpoints into chunks, through Megatron's schedules, and back."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from safetensors.torch import load_file, save_file

from steelyard.cost import ModelShape
from steelyard.errors import InputError
from steelyard.model.build import build_model, initialize_parallel
from steelyard.model.hf_weights import load_hf, save_hf
from steelyard.parallel import ParallelLayout


def built(folder, sizes="", **settings):
    """Chunks of the model in ``folder`` on a layout such as ``tp=2,ep=2``, with the weights that they are made with."""
    layout = ParallelLayout(
        **{name: int(size) for name, size in (part.split("=") for part in sizes.split(",") if part)}
    )
    initialize_parallel(layout)
    return build_model(ModelShape.from_hf(folder), layout, **settings)


def logits(chunks, ids):
    """[rows, width, vocab] on the last stage, a micro-batch for every row; nothing on other stages."""
    found = []

    def step(rows, model):
        row = next(rows)
        output = model(row, torch.arange(row.size(1)).unsqueeze(0), None)

        def keep(output):
            found.append(gather_from_tensor_model_parallel_region(output))
            return output.new_zeros(()), {}

        return output, keep

    with torch.no_grad():
        get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=[iter(ids.split(1)) for _ in chunks] if len(chunks) > 1 else iter(ids.split(1)),
            model=chunks if len(chunks) > 1 else chunks[0],
            num_microbatches=len(ids),
            seq_length=1,
            micro_batch_size=1,
            forward_only=True,
        )
    return torch.cat(found) if found else None


def goes_there_and_back(folder, sizes, file_bytes):
    """Logits are those of transformers, and what is saved is what was loaded, bit for bit."""
    folder = Path(folder)
    chunks = built(folder, sizes)
    load_hf(chunks, folder)
    expected = torch.load(folder.with_suffix(".pt"))
    mine = slice(parallel_state.get_data_parallel_rank(), None, parallel_state.get_data_parallel_world_size())
    got = logits(chunks, expected["ids"][mine])
    if got is not None:
        worst = (got - expected["logits"][mine]).abs().max().item()
        print("WORST", worst, "of", expected["logits"].abs().max().item())
        assert worst < 1e-4
    saved = folder.with_name(f"{folder.name}-saved-{sizes}-{file_bytes}")
    save_hf(chunks, saved, like=folder, file_bytes=int(file_bytes))
    before, after = tensors(folder), tensors(saved)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert (tensor.dtype, tensor.shape) == (after[name].dtype, after[name].shape), name
        assert torch.equal(tensor, after[name]), name
    for name in ("config.json", "tokenizer.json"):
        assert (saved / name).read_bytes() == (folder / name).read_bytes()
    assert not list(folder.parent.glob(".*partial")), "nothing is left of the writing"


def tensors(folder):
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def keeps_half_precision(folder):
    """A bfloat16 model is loaded from float32, and saved in its own dtype."""
    folder = Path(folder)
    chunks = built(folder, dtype=torch.bfloat16)
    load_hf(chunks, folder)
    save_hf(chunks, folder.with_name("half"), like=folder)
    after = tensors(folder.with_name("half"))
    for name, tensor in tensors(folder).items():
        assert torch.equal(tensor.bfloat16(), after[name]), name


def skips_the_output_layer_of_a_critic(folder):
    """A value model keeps its head, and finds it again where it was saved; it stands on the last of two stages."""
    folder = Path(folder)
    chunks = built(folder, "pp=2", value_head=True)
    last = parallel_state.is_pipeline_last_stage()
    head = chunks[-1].module.output_layer.weight if last else torch.zeros(1)
    before = head.detach().clone()
    load_hf(chunks, folder)
    assert torch.equal(head, before)
    saved = folder.with_name("critic")
    save_hf(chunks, saved, like=folder)
    names = tensors(saved).keys()
    assert "score.weight" in names
    assert "lm_head.weight" not in names
    with torch.no_grad():
        head.zero_()
    load_hf(chunks, saved)
    assert torch.equal(head, before)


def saves_what_an_overlapped_gather_has_not_brought_yet(folder):
    """After an optimizer step with ``overlap_param_gather``, every rank's share of the new parameters is saved."""
    import on_ranks

    from steelyard.model.build import build_optimizer
    from steelyard.step import Actor, StepSettings

    folder, layout = Path(folder), ParallelLayout(dp=2)
    saved = []
    for overlap in (False, True):
        chunks = built(
            folder, "dp=2", override_ddp_config={"overlap_grad_reduce": overlap, "overlap_param_gather": overlap}
        )
        load_hf(chunks, folder)
        actor = Actor(chunks, StepSettings(max_tokens=40, layout=layout), build_optimizer(chunks, lr=1e-2))
        batch = on_ranks.rollouts(on_ranks.PROMPTS, on_ranks.RESPONSES).select(on_ranks.mine(8))
        actor.update(batch)
        save_hf(chunks, folder.with_name(f"overlap-{overlap}"), like=folder)
        saved.append(tensors(folder.with_name(f"overlap-{overlap}")))
        actor.update(batch)
        parallel_state.destroy_model_parallel()
    for name, tensor in saved[0].items():
        torch.testing.assert_close(saved[1][name], tensor, rtol=0, atol=1e-6)
        assert not torch.equal(tensor, tensors(folder)[name]), name


def names_the_tensor_that_does_not_fit(folder):
    folder = Path(folder)
    chunks = built(folder)
    whole = tensors(folder)
    name = "model.layers.2.mlp.down_proj.weight"
    cases = {
        "has no tensor model.layers.2.mlp.down_proj.weight, which": {k: v for k, v in whole.items() if k != name},
        r"has no tensor .*q_proj.* \(and \d+ others\)": {k: v for k, v in whole.items() if "q_proj" not in k},
        "holds the tensor model.layers.9.x, for which": whole | {"model.layers.9.x": torch.zeros(1)},
        r"tensor model.layers.2.mlp.down_proj.weight has the shape \[2, 3\], the model needs \[32, 48\]": (
            whole | {name: torch.zeros(2, 3)}
        ),
    }
    before = [parameter.detach().clone() for parameter in chunks[0].parameters()]
    for number, (text, content) in enumerate(cases.items()):
        other = folder.with_name(f"other{number}")
        other.mkdir()
        shutil.copy(folder / "config.json", other)
        save_file(content, other / "model.safetensors")
        with pytest.raises(InputError, match=text):
            load_hf(chunks, other)
    unchanged = zip(before, chunks[0].parameters(), strict=True)
    assert all(torch.equal(old, new) for old, new in unchanged), "a refused checkpoint changes nothing"
    # What is not part of the model although checkpoints may have it.
    more = {
        "lm_head.weight": whole["model.embed_tokens.weight"],
        "model.layers.0.self_attn.rotary_emb.inv_freq": before[0],
    }
    save_file(whole | {key: value.clone() for key, value in more.items()}, other / "model.safetensors")
    load_hf(chunks, other)


def names_the_file_or_setting_that_does_not_fit(folder):
    folder = Path(folder)
    chunks = built(folder)
    config = json.loads((folder / "config.json").read_text())
    other = folder.with_name("settings")
    shutil.copytree(folder, other)
    for change, text in (
        ({"rope_theta": 5e5}, "model with rope_theta=500000.0, but the model was built with rope_theta=1000.0"),
        ({"rms_norm_eps": 1e-6}, "norm_eps=1e-06"),
        ({"num_attention_heads": 8, "head_dim": 4}, "heads=8"),
        ({"tie_word_embeddings": False}, "tied=False"),
        ({"model_type": "qwen3", "head_dim": 8}, "qkv_bias=False, but the model was built with qkv_bias=True"),
        ({"intermediate_size": 40}, "ffn=40"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling is of the kind 'llama3'"),
    ):
        (other / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(InputError, match=text):
            load_hf(chunks, other)
    shutil.copy(folder / "config.json", other)
    (other / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(InputError, match="is not a readable safetensors file"):
        load_hf(chunks, other)
    (other / "model.safetensors").unlink()
    with pytest.raises(InputError, match=r"holds neither model.safetensors nor model.safetensors.index.json"):
        load_hf(chunks, other)
    with pytest.raises(InputError, match=r"config.json: cannot be read"):
        load_hf(chunks, folder.with_name("nowhere"))
    with pytest.raises(InputError, match="holds something already"):
        save_hf(chunks, other, like=folder)


def routes_as_the_checkpoint_says(folder):
    """A mixture of experts that was built with another routing rule is refused, though all tensors fit."""
    chunks = built(folder, override_transformer_config={"moe_router_pre_softmax": False})
    with pytest.raises(InputError, match="norm_topk_prob=False, but the model was built with norm_topk_prob=True"):
        load_hf(chunks, folder)
    parallel_state.destroy_model_parallel()
    chunks = built(folder, override_transformer_config={"moe_router_topk": 3})
    with pytest.raises(InputError, match="experts_per_token=2, but the model was built with experts_per_token=3"):
        load_hf(chunks, folder)
    parallel_state.destroy_model_parallel()
    chunks = built(folder, override_transformer_config={"moe_shared_expert_gate": False})
    with pytest.raises(InputError, match="shared_gate=True, but the model was built with shared_gate=False"):
        load_hf(chunks, folder)


def raises_on_every_rank(folder):
    """A problem of one rank alone is raised on both."""
    folder = Path(folder)
    chunks = built(folder, "pp=2")
    if parallel_state.is_pipeline_last_stage():
        chunks[0].module.register_parameter("adapter", torch.nn.Parameter(torch.zeros(1)))
    with pytest.raises(InputError, match="the model's parameter adapter has no name in a Hugging Face checkpoint"):
        load_hf(chunks, folder)
    if parallel_state.is_pipeline_last_stage():
        del chunks[0].module.adapter
    # Rank 0 finds out when it writes: the file cannot grow any more.
    if parallel_state.is_pipeline_first_stage():
        import resource
        import signal

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
    target = folder.with_name("full")
    with pytest.raises(InputError, match="full: could not be written"):
        save_hf(chunks, target, like=folder, file_bytes=30_000)
    assert not target.exists()
    assert not list(folder.parent.glob(".full*"))
