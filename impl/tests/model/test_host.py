"""megatron-core on a CPU: what is adapted, that it is put back, and that nothing claims CUDA is there."""

import importlib

import pytest
import torch

from steelyard.errors import InputError
from steelyard.model import host

there_is_cuda = torch.cuda.is_available()


def symbols():
    return {
        (one.module, one.name): getattr(importlib.import_module(one.module), one.name, None) for one in host.ADAPTIONS
    }


def test_every_symbol_is_adapted_inside_and_put_back_outside():
    before = symbols()
    with host.running_on("cpu"):
        inside = symbols()
        assert all(inside[key] is not before[key] for key in before)
    assert symbols() == before


def test_symbols_are_put_back_after_an_error_and_after_nesting():
    before = symbols()
    with pytest.raises(RuntimeError, match="inside"), host.running_on("cpu"), host.running_on("cpu"):
        raise RuntimeError("inside")
    assert symbols() == before


def test_leaving_an_inner_context_keeps_the_outer_one():
    with host.running_on("cpu"):
        with host.running_on("cpu"):
            pass
        assert torch.cuda.current_device() == host.CPU
        assert torch.zeros(1, device="cuda").device == host.CPU


def test_whether_cuda_is_there_is_still_told_truthfully():
    with host.running_on("cpu"):
        assert torch.cuda.is_available() is there_is_cuda


def test_cuda_literals_become_the_cpu_inside_only():
    with host.running_on("cpu"):
        assert torch.zeros(1, device="cuda").device == host.CPU
        assert torch.zeros(1, device=torch.device("cuda", 0)).device == host.CPU
        assert torch.zeros(1, pin_memory=True).device == host.CPU
        assert torch.zeros(1).cuda().device == torch.zeros(1).to("cuda").device == host.CPU
        assert torch.zeros(1).type() == "torch.cuda.FloatTensor"
        assert torch.zeros(1, dtype=torch.float32).type(torch.float64).dtype == torch.float64
    assert torch.zeros(1).type() == "torch.FloatTensor"
    if not there_is_cuda:
        with pytest.raises((RuntimeError, AssertionError)):
            torch.zeros(1, device="cuda")


def test_every_adaption_says_why():
    assert all(one.reason for one in host.ADAPTIONS)
    assert len({(one.module, one.name) for one in host.ADAPTIONS}) == len(host.ADAPTIONS)


def test_the_device_asked_for_decides():
    assert host.pick_device("cpu") == host.CPU
    more_than_there_are = torch.cuda.device_count() + 1
    assert host.pick_device(None, world=more_than_there_are) == host.CPU
    with pytest.raises(InputError, match="needs one GPU per rank"):
        host.pick_device("cuda", world=more_than_there_are)
    with pytest.raises(InputError, match="'tpu' is unknown: use 'cpu' or 'cuda'"):
        host.pick_device("tpu")
