"""What test_offload.py and test_handover.py run on ranks."""

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from training import bytes_of, make, rollouts, tensors_of

from steelyard.memory.handover import hand_over
from steelyard.memory.offload import Offloader
from steelyard.model.build import initialize_parallel
from steelyard.parallel import ParallelLayout

CASES = {
    "distributed, bf16": (ParallelLayout(dp=2), torch.bfloat16, {}),
    "distributed, overlapped": (
        ParallelLayout(dp=2),
        torch.bfloat16,
        {"overlap_grad_reduce": True, "overlap_param_gather": True},
    ),
    "replicated, bf16": (ParallelLayout(dp=2), torch.bfloat16, {"use_distributed_optimizer": False}),
    "two tensor-parallel ranks, float32": (ParallelLayout(tp=2), torch.float32, {}),
    "two stages of two chunks": (ParallelLayout(pp=2, vpp=2, group=2), torch.float32, {}),
}


def trains_to_the_same_numbers():
    """Every case one after the other: starting ranks takes longer than all of them."""
    for case in CASES:
        print(case)
        trains_as_without(case)
        parallel_state.destroy_model_parallel()


def trains_as_without(case):
    """Three steps with everything moved away between them, and without: metrics and all tensors are equal."""
    layout, dtype, ddp = CASES[case]
    initialize_parallel(layout)
    batches = [rollouts(seed=seed).select(range(dist.get_rank() % layout.dp, 6, layout.dp)) for seed in range(3)]
    ends = []
    for moving in (False, True):
        tensor_parallel.model_parallel_cuda_manual_seed(1234)
        models, optimizer, actor = make(layout, dtype, **ddp)
        offloader = Offloader(models, optimizer)
        metrics = []
        for batch in batches:
            metrics.append(actor.update(batch))
            if moving:
                moves_away_and_back(offloader, models, optimizer)
        ends.append((metrics, tensors_of(models, optimizer)))
    (metrics, plain), (same_metrics, moved) = ends
    assert metrics == same_metrics
    assert metrics[0]["actor/grad_norm"] > 0
    for piece, tensors in plain.items():
        assert all(torch.equal(one, other) for one, other in zip(tensors, moved[piece], strict=True)), piece


def moves_away_and_back(offloader, models, optimizer):
    held = {piece: bytes_of(tensors) for piece, tensors in tensors_of(models, optimizer).items()}
    did = offloader.offload()
    tensors = tensors_of(models, optimizer)
    assert all(not bytes_of(one) for one in tensors.values()), "storages are released"
    assert did.bytes == held
    assert offloader.onload("params", "grads").bytes == {"params": held["params"], "grads": held["grads"]}
    assert offloader.onload().bytes == {"params": 0, "grads": 0, "optimizer": held["optimizer"]}
    with hand_over(offloader):
        assert all(not bytes_of(one) for one in tensors_of(models, optimizer).values())


def sends_whole_weights():
    """What the rollout engine gets is the same on all data-parallel ranks, also where their gather is overlapped."""
    layout, dtype, ddp = CASES["distributed, overlapped"]
    initialize_parallel(layout)
    models, optimizer, actor = make(layout, dtype, **ddp)
    sent = []

    def send():
        sent.append(torch.cat([parameter.detach().flatten().float() for parameter in models[0].parameters()]))

    actor.update(rollouts().select(range(dist.get_rank(), 6, 2)))
    with hand_over(Offloader(models, optimizer), send):
        pass
    peers = [torch.empty_like(sent[0]) for _ in range(2)]
    dist.all_gather(peers, sent[0])
    assert torch.equal(*peers)
    shard = next(iter(optimizer.chained_optimizers[0].shard_fp32_from_float16_groups[0]))
    assert shard.numel(), "this rank has a shard, whose new values the others need"
