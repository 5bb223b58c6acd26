"""Micro-batches are cut out of a batch so that each response token is scored by the token before it, in its own row."""

import pytest
import torch

from steelyard.errors import BatchError
from steelyard.step.batch import RolloutBatch, make_micro_batch

PROMPTS, RESPONSES = [2, 0, 3, 1], [3, 2, 0, 1]
P, R = 3, 4


def tensors(prompts=PROMPTS, responses=RESPONSES):
    """A batch whose token at (row, position in the row) is 10 * (row + 1) + position."""
    ids = torch.zeros(len(prompts), P + R, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        first = P - prompt
        ids[row, first : P + response] = 10 * (row + 1) + torch.arange(prompt + response)
        mask[row, first : P + response] = 1
    block = torch.arange(len(prompts) * R, dtype=torch.float32).view(len(prompts), R)
    return {"input_ids": ids, "attention_mask": mask, "response_mask": mask[:, P:].clone(), "advantages": block}


def cut(batch, rows, **settings):
    weights = torch.ones_like(batch.response_mask)
    return make_micro_batch(batch, rows, weights, torch.ones(()), ["advantages"], device="cpu", **settings)


def test_lengths_come_from_the_attention_mask():
    batch = RolloutBatch.of(tensors())
    assert batch.prompts.tolist() == PROMPTS
    assert batch.responses.tolist() == RESPONSES
    assert list(batch.fields) == ["advantages"]


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("rows", [[0, 1, 2, 3], [3, 0], [1]])
def test_each_scored_token_follows_the_position_that_scores_it(packed, tp, rows):
    batch = RolloutBatch.of(tensors())
    part = cut(batch, rows, packed=packed, tp=tp)
    scoring = part.input_ids.flatten()[part.scored]
    assert torch.equal(scoring + 1, part.labels), "tokens of a row count up by one"
    places = [(at, column) for at, row in enumerate(rows) for column in range(RESPONSES[row])]
    expected = [(at, column) for at, column in places if PROMPTS[rows[at]] + column]
    assert part.places.tolist() == [at * R + column for at, column in expected]
    assert part.fields["advantages"].tolist() == [rows[at] * R + column for at, column in expected]
    assert part.spread(part.labels.float()).shape == (len(rows), R)
    assert part.computed_tokens % tp == 0


def test_packed_input_has_no_padding_and_padded_input_is_as_wide_as_its_longest_row():
    batch = RolloutBatch.of(tensors())
    assert cut(batch, [0, 1, 2, 3], packed=True).computed_tokens == sum(PROMPTS) + sum(RESPONSES)
    assert cut(batch, [1, 3], packed=False).input_ids.shape == (2, 2)
    assert cut(batch, [0, 3], packed=False).input_ids.tolist() == [[10, 11, 12, 13, 14], [40, 41, 0, 0, 0]]


def test_the_first_token_of_a_row_without_a_prompt_counts_nowhere():
    batch = RolloutBatch.of(tensors())
    assert batch.response_mask[1].tolist() == [0, 1, 0, 0]


def test_tokens_outside_the_attention_mask_never_count():
    given = tensors()
    given["response_mask"] = torch.ones(4, R)
    assert RolloutBatch.of(given).response_mask.sum(1).tolist() == [3, 1, 0, 1]


@pytest.mark.parametrize("packed", [True, False])
def test_a_filler_computes_few_tokens_and_scores_none(packed):
    batch = RolloutBatch.of(tensors())
    part = cut(batch, [], packed=packed, tp=2)
    assert part.computed_tokens == 2
    assert part.scored.numel() == part.labels.numel() == 0
    assert part.spread(torch.zeros(0)).shape == (0, R)


def test_rows_without_any_token_make_a_micro_batch_that_scores_nothing():
    batch = RolloutBatch.of(tensors([0, 0], [0, 0]))
    part = cut(batch, [0, 1])
    assert part.scored.numel() == 0
    assert part.spread(torch.zeros(0)).tolist() == [[0.0] * R] * 2


def without(name):
    return {key: value for key, value in tensors().items() if key != name}


def with_hole():
    given = tensors()
    given["attention_mask"][0, P + 1] = 0
    return given


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (without("attention_mask"), "no 'attention_mask'"),
        (tensors() | {"attention_mask": torch.ones(4, 2)}, "attention_mask has shape"),
        (tensors() | {"response_mask": torch.ones(3, R)}, "response_mask has shape"),
        (tensors() | {"input_ids": torch.zeros(0, P + R)}, "at least one row"),
        (with_hole(), "attention_mask of row 0 is not a left-padded prompt"),
    ],
)
def test_a_malformed_batch_is_refused_by_name(given, text):
    with pytest.raises(BatchError, match=text):
        RolloutBatch.of(given)


def test_a_missing_field_is_named():
    with pytest.raises(BatchError, match="no .* field 'returns'; it has advantages"):
        RolloutBatch.of(tensors()).require(("advantages", "returns"))
