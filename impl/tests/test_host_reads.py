"""Every operation that would wait on CUDA is counted once, where it stands; what does not wait is not counted."""

import sys
import threading
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from steelyard.host_reads import allowed, count_host_reads
from steelyard.packing import PackedLayout, next_token_labels, pack, unpack
from suites.baselines import fixed_split

X = torch.arange(12.0).view(3, 4)
MASK = X > 3
TWO = torch.tensor(2)
COUNTS = torch.tensor([1, 2, 1])
STAND_IN = torch.device("cpu")


def assign(target, index, value):
    target.clone()[index] = value


WAITS = {
    "item": (lambda: TWO.item(), "item"),
    "bool": (lambda: bool(TWO), "item"),
    "int": (lambda: int(TWO), "item"),
    "float": (lambda: float(TWO), "item"),
    "comparison as bool": (lambda: 1 if TWO > 1 else 0, "item"),
    "index of a list": (lambda: [1, 2, 3][TWO], "item"),
    "range": (lambda: list(range(TWO)), "item"),
    "slice bound": (lambda: X[0, :TWO], "item"),
    "slice bound of an assignment": (lambda: assign(X, (0, slice(None, TWO)), X[1, :2]), "item"),
    "scalar tensor as index": (lambda: X[TWO], "item"),
    "size": (lambda: torch.zeros(TWO), "item"),
    "is_nonzero": (lambda: torch.is_nonzero(TWO), "item"),
    "contains": (lambda: 3.0 in X, "item"),
    "format": (lambda: f"{TWO:d}", "item"),
    "tensor of a list of scalars": (lambda: torch.tensor([X.sum()]), "item"),
    "tolist": (lambda: X.tolist(), "tolist"),
    "numpy": (lambda: X.numpy(), "numpy"),
    "asarray": (lambda: np.asarray(X), "numpy"),
    "cpu": (lambda: X.cpu(), "cpu"),
    "to cpu": (lambda: X.to("cpu"), "cpu"),
    "to cpu in another type": (lambda: X.to("cpu", torch.float64), "cpu"),
    "to cpu by name": (lambda: X.to(device="cpu"), "cpu"),
    "cpu and numpy": (lambda: X.cpu().numpy(), "cpu"),
    "cpu, arithmetic and item": (lambda: (X.cpu().double() + 1).sum().item(), "cpu"),
    "nonzero": (lambda: MASK.nonzero(), "nonzero"),
    "nonzero as tuple": (lambda: MASK.nonzero(as_tuple=True), "nonzero"),
    "argwhere": (lambda: torch.argwhere(MASK), "nonzero"),
    "where of a condition": (lambda: torch.where(MASK), "nonzero"),
    "mask": (lambda: X[MASK], "boolean index"),
    "mask of a row": (lambda: X[0, MASK[0]], "boolean index"),
    "mask assignment": (lambda: assign(X, MASK, torch.ones(8)), "boolean index assignment"),
    "mask assignment of a scalar of the device": (lambda: assign(X, MASK, X[0, 0]), "boolean index assignment"),
    "masked_select": (lambda: X.masked_select(MASK), "masked_select"),
    "unique": (lambda: COUNTS.unique(), "unique"),
    "unique rows": (lambda: torch.unique(X, dim=0), "unique"),
    "unique_consecutive": (lambda: torch.unique_consecutive(COUNTS), "unique_consecutive"),
    "bincount": (lambda: COUNTS.bincount(), "bincount"),
    "repeat_interleave": (lambda: X.repeat_interleave(COUNTS, dim=0), "repeat_interleave"),
    "equal": (lambda: torch.equal(X, X), "equal"),
    "allclose": (lambda: torch.allclose(X, X), "allclose"),
    "copy to the host": (lambda: torch.empty(3, 4).copy_(X), "copy_"),
}

DOES_NOT_WAIT = {
    "arithmetic": lambda: torch.softmax(X @ X.T, -1).sum(),
    "where of three": lambda: torch.where(MASK, X, 0.0),
    "masked_fill": lambda: X.masked_fill(MASK, 0.0),
    "number through a mask": lambda: assign(X, MASK, 0.0),
    "gather": lambda: X[torch.tensor([0, 2])],
    "scatter": lambda: assign(X, torch.tensor([0, 2]), X[:2]),
    "slice and shape": lambda: (X[1:, :2].shape, len(X), [*X], X.numel()),
    "repeat_interleave with its size": lambda: X.repeat_interleave(COUNTS, dim=0, output_size=4),
    "repeat_interleave by a number": lambda: X.repeat_interleave(2, dim=0),
    "to the device": lambda: X.to(STAND_IN),
    "non-blocking": lambda: X.to("cpu", non_blocking=True),
    "another type": lambda: X.to(torch.float64).to(X),
    "host data": lambda: torch.from_numpy(np.arange(3)).sum().item() + torch.tensor([1, 2])[0].item(),
    "host index": lambda: torch.zeros(4)[torch.from_numpy(np.arange(4) > 1)],
}


@pytest.mark.parametrize("name", WAITS)
def test_an_operation_that_waits_is_counted_once_where_it_stands(name):
    run, operation = WAITS[name]
    with count_host_reads() as reads:
        run()
    assert reads.total == reads.ours == 1, str(reads)
    ((place, _),) = reads.places.items()
    expected = assign.__code__.co_firstlineno + 1 if "assignment" in name else run.__code__.co_firstlineno
    assert (place.operation, place.file, place.line) == (operation, __file__, expected)


@pytest.mark.parametrize("name", DOES_NOT_WAIT)
def test_an_operation_that_does_not_wait_is_not_counted(name):
    with count_host_reads() as reads:
        DOES_NOT_WAIT[name]()
    assert reads.total == 0, str(reads)


def test_two_masks_wait_twice():
    with count_host_reads() as reads:
        X[MASK.any(1), torch.tensor([True, True, False, False]).to(STAND_IN)]
    assert reads.total == 2


def test_what_was_moved_to_the_device_is_no_longer_on_the_host():
    values = torch.arange(3.0)
    with count_host_reads(on_host=[values]) as reads:
        (values + 1).sum().item()
        assert reads.total == 0
        values.to(STAND_IN).sum().item()
        torch.zeros(2, device=STAND_IN).sum().item()
        X.new_tensor(1.0).item()
        assert reads.total == 3
        values.sum().item()
    assert reads.total == 3


def test_moving_to_where_a_tensor_of_the_host_is_reads():
    """The device of another tensor decides, though on a CPU all answer the same."""
    values = torch.arange(3.0)
    with count_host_reads(on_host=[values]) as reads:
        X.to(X.device)
        X.to(X)
        assert reads.total == 0
        X.sum().to(values.device)
        X.sum().to(values)
    assert [place.operation for place in reads.places.elements()] == ["cpu", "cpu"]


def test_reads_of_the_backward_pass_are_counted_where_it_was_called():
    leaf = X.clone().requires_grad_()
    loss = leaf[MASK].sum()
    with count_host_reads() as reads:
        line = sys._getframe().f_lineno + 1
        loss.backward()
    ((place, count),) = reads.places.items()
    assert (place.operation, place.line, count) == ("boolean index assignment", line, 1)
    torch.testing.assert_close(leaf.grad, MASK.float())


def test_a_read_on_the_way_back_is_still_differentiable():
    leaf = X.clone().requires_grad_()
    with count_host_reads():
        (leaf.cpu() * 2).sum().backward()
    torch.testing.assert_close(leaf.grad, torch.full_like(X, 2.0))


def test_contexts_nest_and_end():
    with count_host_reads() as outer:
        TWO.item()
        with count_host_reads() as inner:
            X.cpu().tolist()
        TWO.item()
    TWO.item()
    X.tolist()
    assert (outer.total, inner.total) == (3, 1)


def test_an_error_inside_ends_the_count():
    with pytest.raises(ZeroDivisionError), count_host_reads() as reads:
        raise ZeroDivisionError
    TWO.item()
    assert reads.total == 0


def test_other_threads_are_not_counted():
    with count_host_reads() as reads:
        thread = threading.Thread(target=TWO.item)
        thread.start()
        thread.join()
    assert reads.total == 0


def test_allowed_reads_are_apart_with_their_reason():
    with count_host_reads() as reads:
        with allowed("stands in for a kernel"), allowed("twice"):
            TWO.item()
        TWO.item()
    assert (reads.total, reads.ours, reads.allowed) == (2, 1, 1)
    (place,) = reads.of("allowed")
    assert place.reason == "twice"
    assert "2 host reads: 1 ours, 0 Megatron's, 1 allowed" in str(reads)
    assert f"item at {__file__}" in str(reads)


def test_megatrons_reads_are_apart():
    from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_thd

    lengths, angles = torch.tensor([0, 2, 5], dtype=torch.int32), torch.zeros(8, 1, 1, 4)
    alone = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    with count_host_reads() as reads:
        _apply_rotary_pos_emb_thd(torch.ones(5, 1, 4), lengths, angles, cp_group=alone)
    assert reads.megatron == reads.total > 0, str(reads)
    assert reads.by(_apply_rotary_pos_emb_thd.__code__.co_filename).total() == reads.total
    assert reads.by("/nowhere").total() == 0


@pytest.mark.parametrize("rows", [1, 8, 64])
def test_packing_reads_nothing_back(rows):
    lengths = np.random.default_rng(rows).integers(0, 30, rows)
    lengths[0] = 30
    ids = torch.randint(0, 50, (rows, 30))
    with count_host_reads() as reads:
        layout = PackedLayout.of(lengths, tp=2)
        packed = pack(ids, layout)
        next_token_labels(ids, layout)
        unpack(packed.float().requires_grad_(), layout, 30).sum().backward()
        layout.packed_seq_params(torch.device("cpu"))
    assert reads.total == 0, str(reads)


@pytest.mark.parametrize("rows", [1, 8])
def test_the_naive_side_reads_twice_in_every_row(rows):
    """The longest length once; in each row one slice bound, and one boolean mask."""
    ids = torch.randint(0, 50, (rows, 6))
    mask = torch.arange(6) >= torch.arange(rows)[:, None] % 3
    with count_host_reads() as reads:
        fixed_split._remove_left_padding(ids, mask, 1)
    assert reads.ours == reads.total == 1 + 2 * rows, str(reads)
    assert reads.by(fixed_split.__file__) == reads.places


def test_on_cuda_pytorchs_own_warnings_are_counted(monkeypatch):
    """With stand-ins for the device: each warning is counted, and the mode and other warnings stay as they were."""
    modes = ["default"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def wait():
        warnings.warn("called a synchronizing CUDA operation (Triggered internally)", stacklevel=1)

    with warnings.catch_warnings(record=True) as others, count_host_reads() as outer:
        assert modes[-1] == "warn"
        for _ in range(2):
            wait()
        with count_host_reads() as inner:
            wait()
        warnings.warn("unrelated", stacklevel=1)
    assert modes[-1] == "default"
    assert (outer.ours, inner.ours) == (3, 1)
    assert [str(other.message) for other in others] == ["unrelated"]
    (place,) = outer.places
    assert (place.operation, place.line) == ("synchronizing operation", wait.__code__.co_firstlineno + 1)


def test_the_current_device_decides_which_count_is_used(monkeypatch):
    """Inside ``running_on("cpu")`` a GPU that exists is not asked."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    with count_host_reads() as reads:
        TWO.item()
    assert reads.total == 1
