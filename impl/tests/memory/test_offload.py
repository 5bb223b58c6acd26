"""Offloading: what leaves the device is released, comes back to the bit, and training does not notice."""

import pytest
import torch
from offload_ranks import CASES
from training import bytes_of, make, one_rank, rollouts, tensors_of

from steelyard.errors import InputError
from steelyard.memory.offload import PIECES, Offloader


@pytest.fixture(scope="module")
def trained():
    """A bfloat16 model after one step of the distributed optimizer, so that all its state exists."""
    with one_rank() as layout:
        models, optimizer, actor = make(layout, torch.bfloat16)
        actor.update(rollouts())
        yield models, optimizer, actor


@pytest.fixture
def offloader(trained):
    models, optimizer, _ = trained
    one = Offloader(models, optimizer)
    yield one
    one.onload()


def test_training_goes_on_to_the_same_numbers(ranks):
    output = ranks("offload_ranks:trains_to_the_same_numbers", 2, time_limit=200)
    assert all(output.count(case) == 2 for case in CASES)


@pytest.mark.parametrize("piece", PIECES)
def test_a_piece_leaves_alone(trained, offloader, piece):
    before = {name: bytes_of(tensors) for name, tensors in tensors_of(*trained[:2]).items()}
    assert {name: state.device_bytes for name, state in offloader.state.items()} == before
    did = offloader.offload(piece)
    assert did.total == before[piece] > 0
    assert did.seconds > 0
    after = {name: bytes_of(tensors) for name, tensors in tensors_of(*trained[:2]).items()}
    assert after == {**before, piece: 0}
    assert offloader.state[piece] == ("host", 0, before[piece])
    assert {state.where for name, state in offloader.state.items() if name != piece} == {"device"}


def test_calls_may_come_twice_and_in_any_order(offloader):
    assert offloader.onload("grads").total == 0
    size = offloader.offload("grads").total
    assert offloader.offload("grads").total == 0
    assert offloader.onload("grads").total == size
    assert offloader.onload().total == 0


def test_what_came_since_leaves_with_the_next_call(trained, offloader):
    _, optimizer, _ = trained
    offloader.offload("optimizer")
    state = next(iter(optimizer.chained_optimizers[0].optimizer.state.values()))
    kept, state["exp_avg"] = state["exp_avg"], torch.ones(1000)
    assert offloader.state["optimizer"].device_bytes == 4000
    assert offloader.offload("optimizer").total == 4000
    offloader.onload()
    assert torch.equal(state["exp_avg"], torch.ones(1000))
    state["exp_avg"] = kept


def test_discarded_gradients_come_back_as_zeros(trained, offloader):
    grads = tensors_of(*trained[:2])["grads"]
    for grad in grads:
        grad.fill_(3)
    offloader.offload("grads", discard=True)
    assert offloader.state["grads"] == ("host", 0, 0)
    offloader.onload("grads")
    assert not any(grad.any() for grad in grads)
    with pytest.raises(InputError, match="discard=True with params, grads: only 'grads' can"):
        offloader.offload("grads", "params", discard=True)


def test_where_the_host_has_no_room_nothing_changes(trained, offloader, monkeypatch):
    before = offloader.state
    copies = []

    def full(storage):
        if copies:
            raise MemoryError("full")
        copies.append(storage)

    monkeypatch.setattr(offloader, "_copied", full)
    with pytest.raises(MemoryError):
        offloader.offload()
    assert offloader.state == before


def test_a_forward_pass_on_released_memory_is_refused(trained, offloader):
    _, _, actor = trained
    offloader.offload("params")
    with pytest.raises(InputError, match="params are on the host: call onload\\('params'\\) first"):
        actor.compute_log_prob(rollouts())
    offloader.onload("params")
    offloader.offload("grads", "optimizer")
    actor.compute_log_prob(rollouts())
    with pytest.raises(InputError, match="grads are on the host"):
        trained[0][0](None, None, None)
    with pytest.raises(InputError, match="grads are on the host"):
        offloader.require()


@pytest.mark.parametrize("piece", ["params", "grads", "optimizer"])
def test_an_update_on_released_memory_is_refused_before_it_writes(trained, offloader, piece):
    offloader.offload(piece)
    with pytest.raises(InputError, match=f"{piece} are on the host"):
        offloader.optimizer.step()
    if piece == "grads":
        with pytest.raises(InputError, match="grads are on the host"):
            offloader.models[0].zero_grad_buffer()
    offloader.onload()
    offloader.models[0].zero_grad_buffer()
    offloader.optimizer.step()


def test_gradients_do_not_leave_while_they_are_reduced(trained, offloader, monkeypatch):
    monkeypatch.setattr(trained[0][0].bucket_groups[0], "grad_reduce_handle", object())
    with pytest.raises(InputError, match="still being reduced: offload them after the step"):
        offloader.offload()
    assert offloader.offload("params").total


def test_a_bare_model_has_parameters_only():
    bare = torch.nn.Linear(8, 8)
    offloader = Offloader([bare])
    assert offloader.offload().bytes == {"params": 288, "grads": 0, "optimizer": 0}
    assert bare.weight.untyped_storage().nbytes() == 0
    with pytest.raises(InputError, match="params are on the host"):
        bare(torch.zeros(1, 8))
    offloader.onload()
    assert bare(torch.zeros(1, 8)).shape == (1, 8)


def test_what_cannot_move_is_refused(offloader, trained, monkeypatch):
    with pytest.raises(InputError, match="piece 'weights' is unknown: use 'params', 'grads', 'optimizer'"):
        offloader.offload("weights")
    with pytest.raises(InputError, match="the 1 models have no parameters"):
        Offloader([torch.nn.ReLU()])
    monkeypatch.setattr(trained[0][0].buffers[0], "nccl_ub", True)
    with pytest.raises(InputError, match="nccl_ub=True"):
        Offloader(trained[0])
