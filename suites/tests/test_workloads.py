"""Batches have the shape that trainers use: left-padded prompts, right-padded responses, lengths as drawn."""

import torch

from steelyard import lengths
from suites.workloads import make_batch, take_rows

SAMPLE = lengths.workload("rl-code-16k-cap").draw(12, 5, scale=200.0)


def test_prompts_end_and_responses_begin_at_the_same_column():
    batch = make_batch(SAMPLE, 50, 1)
    split = int(SAMPLE.prompts.max())
    mask = batch["attention_mask"].bool()
    assert mask[:, :split].sum(1).tolist() == SAMPLE.prompts.tolist()
    assert mask[:, split:].sum(1).tolist() == SAMPLE.responses.tolist()
    assert mask[:, split - 1 : split + 1].all()
    assert batch["input_ids"].shape == (12, split + int(SAMPLE.responses.max()))
    assert torch.equal(batch["input_ids"] > 0, mask)
    assert int(batch["input_ids"].max()) < 50


def test_positions_count_real_tokens_from_zero():
    batch = make_batch(SAMPLE, 50, 1)
    last = batch["position_ids"].max(1).values
    assert last.tolist() == (SAMPLE.totals - 1).tolist()


def test_the_same_seed_gives_the_same_batch_and_another_seed_another():
    first, again, other = (make_batch(SAMPLE, 50, seed, holes=0.2) for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["input_ids"], other["input_ids"])


def test_holes_are_cut_out_of_real_responses():
    whole, cut = make_batch(SAMPLE, 50, 1), make_batch(SAMPLE, 50, 1, holes=0.3)
    assert (cut["response_mask"] <= whole["response_mask"]).all()
    assert 0.5 < float(cut["response_mask"].sum() / whole["response_mask"].sum()) < 0.9


def test_rows_are_taken_from_every_tensor():
    batch = make_batch(SAMPLE, 50, 1)
    part = take_rows(batch, [3, 0])
    assert all(torch.equal(part[name], batch[name][[3, 0]]) for name in batch)
