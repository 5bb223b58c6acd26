"""Log-probabilities in chunks equal torch's own in float64, forward and backward, and stay small in memory."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from steelyard.errors import InputError
from steelyard.host_reads import count_host_reads
from steelyard.step.logprobs import CHUNK_BYTES, token_log_probs


def plain(logits, labels, index=None, temperature=1.0):
    """The same in float64 and in whole: the judge."""
    rows = logits.double() if index is None else logits.double()[index]
    every = torch.log_softmax(rows / temperature, -1)
    zero = torch.zeros((), dtype=every.dtype)
    entropy = -torch.where(every == -torch.inf, zero, every.exp() * every).sum(-1)
    return every.gather(1, labels[:, None]).squeeze(1), entropy


def case(rows, vocab, scored=None, dtype=torch.float32, seed=0, spread=3.0):
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(rows, vocab, generator=generator) * spread).to(dtype).requires_grad_()
    index = None if scored is None else torch.randperm(rows, generator=generator)[:scored]
    count = rows if scored is None else scored
    return logits, torch.randint(0, vocab, (count,), generator=generator), index


def gradients(logits, outputs, seed=1):
    """Of the outputs under random weights, so that no two tokens pull alike."""
    generator = torch.Generator().manual_seed(seed)
    weighted = [(x * torch.randn(x.shape, generator=generator, dtype=torch.float64)).sum() for x in outputs]
    return torch.autograd.grad(sum(weighted), logits, retain_graph=True)[0]


@settings(deadline=None, max_examples=60)
@given(
    rows=st.integers(0, 9),
    vocab=st.integers(1, 40),
    share=st.none() | st.floats(0, 1),
    temperature=st.sampled_from([1.0, 0.6, 2.5]),
    chunk=st.integers(1, 10),
    seed=st.integers(0, 1000),
)
def test_values_and_gradients_are_the_plain_ones(rows, vocab, share, temperature, chunk, seed):
    scored = None if share is None else round(share * rows)
    logits, labels, index = case(rows, vocab, scored, seed=seed)
    how = {"index": index, "temperature": temperature}
    got = token_log_probs(logits, labels, **how, with_entropy=True, chunk_tokens=chunk)
    expected = plain(logits, labels, **how)
    assert {x.dtype for x in got} == {torch.float32}
    for ours, judge in zip(got, expected, strict=True):
        torch.testing.assert_close(ours.double(), judge, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradients(logits, got), gradients(logits, expected), rtol=1e-5, atol=1e-5)
    alone = token_log_probs(logits, labels, **how, chunk_tokens=chunk)
    torch.testing.assert_close(alone, got[0], rtol=0, atol=0)
    torch.testing.assert_close(gradients(logits, [alone]), gradients(logits, expected[:1]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("with_entropy", [False, True])
def test_gradients_pass_torchs_numerical_check(with_entropy):
    logits, labels, index = case(6, 5, 4, torch.float64)
    assert torch.autograd.gradcheck(
        lambda x: token_log_probs(x, labels, index=index, temperature=0.7, with_entropy=with_entropy, chunk_tokens=3),
        logits,
    )


def test_entropy_alone_has_its_gradient():
    logits, labels, index = case(7, 11, 5)
    entropy = token_log_probs(logits, labels, index=index, with_entropy=True)[1]
    expected = plain(logits, labels, index)[1]
    torch.testing.assert_close(gradients(logits, [entropy]), gradients(logits, [expected]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_fp32_and_its_gradient_comes_back_in_half(dtype):
    logits, labels, index = case(12, 300, 9, dtype)
    got = token_log_probs(logits, labels, index=index, with_entropy=True, chunk_tokens=4)
    expected = plain(logits, labels, index)
    for ours, judge in zip(got, expected, strict=True):
        torch.testing.assert_close(ours.double(), judge, rtol=1e-5, atol=1e-5)
    gradient, judge = gradients(logits, got), gradients(logits, expected)
    assert gradient.dtype == dtype
    torch.testing.assert_close(gradient, judge, rtol=torch.finfo(dtype).eps, atol=1e-6)


def test_chunks_change_no_bit_and_the_logits_stay_as_they_are():
    logits, labels, index = case(23, 17, 19)
    before = logits.detach().clone()
    for rows in (index, None):
        chosen = labels if rows is not None else torch.arange(23) % 17
        outputs = [token_log_probs(logits, chosen, index=rows, chunk_tokens=size) for size in (1, 5, 23, None)]
        for other in outputs[1:]:
            torch.testing.assert_close(other, outputs[0], rtol=0, atol=0)
            torch.testing.assert_close(gradients(logits, [other]), gradients(logits, outputs[:1]), rtol=0, atol=0)
    torch.testing.assert_close(logits.detach(), before, rtol=0, atol=0)


def test_large_logits_and_impossible_entries_stay_finite():
    logits = torch.tensor([[1000.0, 1001.0, -torch.inf], [-1e4, -1e4, 0.0]], requires_grad=True)
    labels = torch.tensor([0, 2])
    got, expected = token_log_probs(logits, labels, with_entropy=True), plain(logits, labels)
    for ours, judge in zip(got, expected, strict=True):
        torch.testing.assert_close(ours.double(), judge, rtol=1e-6, atol=1e-6)
    gradient = gradients(logits, got)
    assert gradient.isfinite().all()
    assert gradient[0, 2] == 0


def test_an_impossible_label_has_no_probability():
    logits = torch.zeros(2, 4)
    assert token_log_probs(logits, torch.tensor([3, 4])).tolist() == [pytest.approx(-1.3862944), -torch.inf]


class NewTensors(TorchDispatchMode):
    """Bytes of every tensor that an operation allocates, by type, and how many of the large ones there were."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {x.untyped_storage().data_ptr() for x in tree_iter((args, kwargs)) if isinstance(x, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for x in tree_iter(result):
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in given:
                self.sizes.append((x.untyped_storage().nbytes(), x.dtype))
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scored", [None, 600])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_no_tensor_is_larger_than_a_chunk_but_the_gradient(dtype, scored, with_entropy):
    rows, vocab, chunk = 800, 500, 32
    logits, labels, index = case(rows, vocab, scored, dtype)
    with NewTensors() as new:
        got = token_log_probs(logits, labels, index=index, with_entropy=with_entropy, chunk_tokens=chunk)
        forward = list(new.sizes)
        (sum(x.sum() for x in got) if with_entropy else got.sum()).backward()
    bound, whole = chunk * vocab * 4, rows * vocab * logits.itemsize
    assert max(size for size, _ in forward) <= bound
    large = [(size, kind) for size, kind in new.sizes if size > bound]
    assert large == [(whole, dtype)], "the gradient alone"
    assert logits.grad.dtype == dtype


def test_the_size_of_a_chunk_follows_from_its_bytes():
    vocab = 2**20
    logits = torch.zeros(40, vocab, dtype=torch.bfloat16)
    with NewTensors() as new:
        token_log_probs(logits, torch.zeros(40, dtype=torch.int64))
    assert max(size for size, _ in new.sizes) == CHUNK_BYTES


def test_nothing_is_read_back():
    logits, labels, index = case(50, 30, 40)
    with count_host_reads() as reads:
        log_probs, entropy = token_log_probs(logits, labels, index=index, temperature=0.8, with_entropy=True)
        (log_probs.sum() + entropy.sum()).backward()
    assert reads.total == 0, str(reads)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_vocabulary_split_over_ranks_changes_nothing(ranks, world):
    ranks("scores_a_split_vocabulary", world)


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ({"logits": torch.zeros(1, 2, 3)}, r"logits have shape \(1, 2, 3\)"),
        ({"labels": torch.zeros(3, dtype=torch.int64)}, r"labels have shape \(3,\), but 2 tokens are scored"),
        ({"index": torch.zeros(1, dtype=torch.int64)}, r"but 1 tokens are scored"),
        ({"temperature": 0.0}, "temperature=0.0 must be above 0"),
        ({"temperature": float("nan")}, "temperature=nan must be above 0"),
        ({"chunk_tokens": 0}, "chunk_tokens=0 must be at least 1"),
    ],
)
def test_what_does_not_belong_together_is_refused(how, text):
    given_ = {"logits": torch.zeros(2, 3), "labels": torch.zeros(2, dtype=torch.int64), **how}
    with pytest.raises(InputError, match=text):
        token_log_probs(given_.pop("logits"), given_.pop("labels"), **given_)
