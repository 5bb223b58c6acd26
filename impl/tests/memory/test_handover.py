"""Hand-overs: order, report, and every order of calls in a state machine."""

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from stand_in import GIB, StandIn
from training import bytes_of, make, one_rank, rollouts, tensors_of

from steelyard.errors import InputError
from steelyard.memory.handover import hand_over
from steelyard.memory.offload import PIECES, Offloader


@pytest.fixture(scope="module")
def world():
    with one_rank() as layout:
        yield layout


@pytest.fixture(scope="module")
def trained(world):
    models, optimizer, actor = make(world, torch.bfloat16)
    actor.update(rollouts())
    return models, optimizer, actor


@pytest.fixture
def offloader(trained):
    one = Offloader(*trained[:2])
    yield one
    one.onload()


class Order:
    """Notes the calls of an offloader and of a device, in their order."""

    def __init__(self, offloader, monkeypatch):
        self.calls, self.cuda = [], StandIn()
        for name in ("offload", "onload"):
            monkeypatch.setattr(offloader, name, self.noting(name, getattr(offloader, name)))
        monkeypatch.setattr(self.cuda, "empty_cache", self.noting("empty_cache", self.cuda.empty_cache))

    def noting(self, name, function):
        def noted(*pieces, **options):
            self.calls.append(" ".join((name, *pieces)))
            return function(*pieces, **options)

        return noted


def test_pieces_leave_and_return_in_the_right_order(offloader, monkeypatch):
    order = Order(offloader, monkeypatch)
    with hand_over(offloader, lambda: order.calls.append("send"), api=order.cuda):
        order.calls.append("rollout")
    assert order.calls == [
        "offload grads",
        "offload optimizer",
        "onload params",
        "send",
        "offload params",
        "empty_cache",
        "rollout",
        "empty_cache",
        "onload params",
        "onload grads",
        "onload optimizer",
    ]


def test_the_report_says_what_was_freed_and_how_long_it_took(offloader):
    sizes = {name: state.device_bytes for name, state in offloader.state.items()}
    cuda = StandIn()
    tensor = cuda.tensor(3 * GIB)
    del tensor
    with hand_over(offloader, lambda: None, api=cuda) as report:
        assert report.out.moved == sizes
        assert {state.where for state in offloader.state.values()} == {"host"}
        assert (report.out.freed, report.out.emptied.freed_reserved) == (3 * GIB, 3 * GIB)
        assert report.out.after.free == 80 * GIB
        engine = cuda.tensor(GIB)
    assert report.back.moved == sizes
    assert set(report.out.seconds) == {*PIECES, "weights", "cache"}
    assert set(report.back.seconds) == {*PIECES, "cache"}
    assert report.out.total_seconds > 0 < report.back.total_seconds
    del engine


def test_kept_pieces_stay_and_weights_are_there_when_they_are_sent(offloader):
    seen = []
    with hand_over(offloader, lambda: seen.append(offloader.state["params"].where), keep=["params"]) as report:
        assert offloader.state["params"].where == "device"
        assert offloader.state["grads"].where == "host"
    assert set(report.out.moved) == {"params", "grads", "optimizer"}
    assert report.out.moved["params"] == 0
    offloader.offload("params")
    with hand_over(offloader, lambda: seen.append(offloader.state["params"].where)) as report:
        assert report.out.moved["params"] == 0, "they came for the engine and left again"
    assert seen == ["device", "device"]
    assert offloader.state["params"].where == "host", "where they were before"
    with pytest.raises(InputError, match="piece 'weights' is unknown"), hand_over(offloader, keep=["weights"]):
        pass


def test_discarded_gradients_take_no_host_memory(offloader):
    with hand_over(offloader, discard_grads=True):
        assert offloader.state["grads"] == ("host", 0, 0)
    assert offloader.state["grads"].where == "device"


@pytest.mark.parametrize("where", ["send", "rollout"])
def test_an_error_leaves_the_training_state_whole(trained, offloader, where):
    before = offloader.state
    values = {name: [one.clone() for one in tensors] for name, tensors in tensors_of(*trained[:2]).items()}

    def fail():
        raise RuntimeError("engine")

    with pytest.raises(RuntimeError, match="engine"), hand_over(offloader, fail if where == "send" else None):
        fail()
    assert offloader.state == before
    for name, tensors in tensors_of(*trained[:2]).items():
        assert all(torch.equal(one, other) for one, other in zip(tensors, values[name], strict=True))


def test_all_ranks_send_whole_weights(ranks):
    ranks("offload_ranks:sends_whole_weights", 2, time_limit=200)


class Calls(RuleBasedStateMachine):
    """Every order of offload, onload, hand-overs (also nested) and training steps, against copies of all tensors."""

    trained = None  # one model for all runs of one kind

    def __init__(self):
        super().__init__()
        self.models, self.optimizer, self.actor = self.trained
        self.offloader = Offloader(self.models, self.optimizer)
        self.open = []

    @initialize()
    def note(self):
        self.tensors = tensors_of(self.models, self.optimizer)
        self.values = {name: [one.clone() for one in tensors] for name, tensors in self.tensors.items()}
        self.sizes = {name: bytes_of(tensors) for name, tensors in self.tensors.items()}
        self.where = dict.fromkeys(PIECES, "device")

    @rule(pieces=st.lists(st.sampled_from(PIECES), max_size=3))
    def offload(self, pieces):
        self.check(self.offloader.offload(*pieces), pieces, "device")
        self.where.update(dict.fromkeys(pieces or PIECES, "host"))

    @rule(pieces=st.lists(st.sampled_from(PIECES), max_size=3))
    def onload(self, pieces):
        self.check(self.offloader.onload(*pieces), pieces, "host")
        self.where.update(dict.fromkeys(pieces or PIECES, "device"))

    def check(self, did, pieces, moving_from):
        wanted = pieces or PIECES
        assert did.bytes == {
            name: self.sizes[name] if self.where[name] == moving_from else 0 for name in PIECES if name in wanted
        }

    @precondition(lambda self: len(self.open) < 3)
    @rule(keep=st.lists(st.sampled_from(PIECES), max_size=2), sends=st.booleans())
    def enter(self, keep, sends):
        context = hand_over(self.offloader, self.send if sends else None, keep=keep)
        self.open.append((context, dict(self.where)))
        before = dict(self.where)
        report = context.__enter__()
        for name in PIECES:
            if name not in keep:
                self.where[name] = "host"
        if sends and "params" in keep:
            self.where["params"] = "device"
        for name, size in report.out.moved.items():
            assert size == self.sizes[name] * ((before[name] == "device") - (self.where[name] == "device"))

    def send(self):
        assert self.same("params")

    @precondition(lambda self: self.open)
    @rule(fails=st.booleans())
    def leave(self, fails):
        context, self.where = self.open.pop()
        if fails:
            error = RuntimeError("engine")
            assert context.__exit__(RuntimeError, error, None) in (None, False)
        else:
            context.__exit__(None, None, None)

    @precondition(lambda self: not self.open and set(self.where.values()) == {"device"})
    @rule()
    def train(self):
        self.actor.update(rollouts())
        self.note()

    def same(self, name):
        return all(torch.equal(one, other) for one, other in zip(self.tensors[name], self.values[name], strict=True))

    @invariant()
    def what_is_there_is_as_it_was_and_what_is_away_is_released(self):
        for name, state in self.offloader.state.items():
            assert state.where == self.where[name]
            if state.where == "device":
                assert (state.device_bytes, state.host_bytes) == (self.sizes[name], 0)
                assert self.same(name)
            else:
                assert (state.device_bytes, state.host_bytes) == (0, self.sizes[name])
                assert not bytes_of(self.tensors[name])

    def teardown(self):
        while self.open:
            self.leave(fails=False)
        self.offloader.onload()
        assert all(self.same(name) for name in PIECES)


@pytest.mark.parametrize(
    ("dtype", "distributed"), [(torch.bfloat16, True), (torch.float32, True), (torch.bfloat16, False)], ids=str
)
def test_every_order_of_calls(world, dtype, distributed):
    class Machine(Calls):
        trained = make(world, dtype, use_distributed_optimizer=distributed)

    Machine.TestCase.settings = settings(
        max_examples=30, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
    )
    Machine.TestCase().runTest()
