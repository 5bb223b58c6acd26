"""Predictions against arithmetic by hand."""

import dataclasses
import json
import subprocess
import sys

import pytest
import torch

from steelyard.cost import ModelShape
from steelyard.memory.kernels import Kernels
from steelyard.memory.predict import GIB, predict_peak
from steelyard.parallel import ParallelLayout

SHAPE = ModelShape(layers=3, hidden=256, ffn=704, heads=8, kv_heads=2, head_dim=32, vocab=4096, qkv_bias=True)
TOKENS = 4096


def bytes_per_parameter(dp, distributed):
    found = predict_peak(
        SHAPE, ParallelLayout(dp=dp), [[64]], override_ddp_config={"use_distributed_optimizer": distributed}
    )
    return found.static_bytes / found.parameters


@pytest.mark.parametrize("dp", [1, 4])
def test_bytes_of_a_parameter(dp):
    # bf16 parameter 2, fp32 gradient 4; fp32 copy 4 and two moments of 4, which the distributed optimizer spreads.
    assert bytes_per_parameter(dp, distributed=False) == pytest.approx(18, rel=0.002)
    assert bytes_per_parameter(dp, distributed=True) == pytest.approx(6 + 12 / dp, rel=0.002)


def activations_per_token(shape, layout, recompute="none", kernels="fused"):
    """Bytes of one more layer and token, from predictions of two depths."""
    deep = dataclasses.replace(shape, layers=shape.layers + 1)
    one, two = (
        predict_peak(each, layout, [[TOKENS]], recompute=recompute, kernels=kernels).phases["forward"]
        for each in (shape, deep)
    )
    return (two.parts["activations"] - one.parts["activations"]) / TOKENS


def test_activations_of_a_layer():
    """What a layer with RMSNorm, grouped queries and SwiGLU keeps of a token, in bf16 bytes.

    Adapted from the 34·s·b·h of Korthikanti et al. 2022 (arXiv 2205.05198): no dropout masks, and no attention scores,
    which a flash kernel does not keep. h hidden, q = heads x head_dim, k = kv_heads x head_dim, f ffn:

    - two norms keep their inputs and reciprocal deviations: 2·2h + 2·4;
    - the two linear layers behind them keep the normed values: 2·2h;
    - values are a view of the projection, which therefore stays: 2(q + 2k);
    - the flash kernel keeps rotated queries and keys, its output and log-sum-exp: 2q + 2k + 2q + 4·heads;
      the output is also what the output projection keeps;
    - SwiGLU keeps both halves, and the down projection their product: 4f + 2f.
    """
    h, f, heads = SHAPE.hidden, SHAPE.ffn, SHAPE.heads
    q, k = heads * SHAPE.head_dim, SHAPE.kv_heads * SHAPE.head_dim
    expected = 8 * h + 8 + 6 * q + 6 * k + 4 * heads + 6 * f
    assert activations_per_token(SHAPE, ParallelLayout()) == pytest.approx(expected, rel=0.002)
    # What build_model's models run on CUDA keeps the same. An unfused SwiGLU also keeps the activated half and a copy
    # of the other one.
    assert activations_per_token(SHAPE, ParallelLayout(), kernels="cuda") == pytest.approx(expected, rel=0.002)
    plain = activations_per_token(SHAPE, ParallelLayout(), kernels=Kernels(swiglu="plain"))
    assert plain == pytest.approx(expected + 4 * f, rel=0.002)
    # Sequence parallelism splits all of it; without it the parts outside attention and feed-forward stay whole.
    assert activations_per_token(SHAPE, ParallelLayout(tp=2)) == pytest.approx(expected / 2, rel=0.002)
    whole = expected / 2 + (8 * h + 8) / 2
    assert activations_per_token(SHAPE, ParallelLayout(tp=2, sp=False)) == pytest.approx(whole, rel=0.002)
    # Full recomputation keeps the input of each layer.
    assert activations_per_token(SHAPE, ParallelLayout(), recompute="full") == pytest.approx(2 * h, rel=0.002)


@pytest.mark.parametrize(("tp", "dtype"), [(1, torch.bfloat16), (2, torch.bfloat16), (2, torch.float32)])
def test_logits(tp, dtype):
    wide = ModelShape(layers=2, hidden=64, ffn=64, heads=4, kv_heads=4, head_dim=16, vocab=131072)
    found = predict_peak(wide, ParallelLayout(tp=tp), [[TOKENS]], dtype=dtype)
    # The logits and their gradient, each in the model's type; beside them only chunks in fp32.
    expected = 2 * dtype.itemsize * TOKENS * wide.vocab / tp
    assert found.phase == "backward"
    assert expected < found.parts["logits and loss"] < expected + 3 * 64 * 2**20


MEASURED = """
import json, pathlib, re
from steelyard.cost import ModelShape
from steelyard.memory.predict import predict_peak
from steelyard.parallel import ParallelLayout
layout = ParallelLayout(tp=2, pp=2, dp=2)
found = predict_peak(ModelShape.preset("qwen2.5-7b"), layout, [[2048] * 8] * 4, kernels="fused")
print(json.dumps({
    # Of this program alone: what getrusage says includes the process that it was forked from.
    "host": int(re.search("VmHWM:[^0-9]*([0-9]+)", pathlib.Path("/proc/self/status").read_text())[1]) * 1024,
    "parameters": found.parameters, "peak": found.peak_bytes, "parts": dict(found.parts),
}))
"""


def test_qwen_7b_on_eight_ranks_in_one_gib_of_host_memory():
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", MEASURED], capture_output=True, text=True, check=True)
    found = json.loads(run.stdout.splitlines()[-1])
    assert found["host"] < GIB
    # By hand: half of the layers and of each matrix, the embedding, and norms and biases of their own.
    shape = ModelShape.preset("qwen2.5-7b")
    matrices = (shape.attention_weights + 3 * shape.hidden * shape.ffn) * 14 + shape.vocab * shape.hidden
    norms, biases = 14 * 2 * shape.hidden, 14 * (shape.heads + 2 * shape.kv_heads) * shape.head_dim // 2
    assert found["parameters"] == matrices // 2 + norms + biases == 1_903_953_408
    gib = {name: size / GIB for name, size in found["parts"].items()}
    assert gib["parameters"] + gib["gradients"] == pytest.approx(10.64, abs=0.01)
    assert gib["master weights"] == pytest.approx(3.55, abs=0.01)
    assert gib["Adam"] == pytest.approx(7.09, abs=0.01)
    # Two micro-batches are under way, and a backward pass of the newest one has begun.
    h, f = shape.hidden, shape.ffn
    q, k = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    kept = (8 * h + 8 + 6 * q + 6 * k + 4 * shape.heads + 6 * f) / 2 * 14 * 16384 * 2
    assert gib["activations"] == pytest.approx(kept / GIB, rel=0.02)
    # An independent count of the same step, with other stand-ins for norm and SwiGLU, found 58.7 GiB.
    assert found["peak"] / GIB == pytest.approx(58.7, rel=0.02)
