"""A small model, and predictions that all tests of the adviser share."""

import json

import pytest

from steelyard.advise import Job, gpu_named
from steelyard.advise.predictions import Predictions
from steelyard.cost import ModelShape

# Enough layers that two and three of them per chunk are continued, and so large a vocabulary that logits come in
# several chunks, as with any real model.
CONFIG = {
    "model_type": "qwen2",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 65536,
    "tie_word_embeddings": False,
    "max_position_embeddings": 32768,
}


@pytest.fixture(scope="session")
def shape():
    return ModelShape.from_hf(CONFIG, name="tiny")


@pytest.fixture(scope="session")
def predictions():
    """In this process and in memory; answers are shared by all tests."""
    with Predictions() as shared:
        yield shared


@pytest.fixture(scope="session")
def job(shape):
    return Job(shape, 4, gpu_named("h100"), 1024, 8192, rows=24)


@pytest.fixture
def config_file(tmp_path):
    """A shallow one, whose predictions are quick."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    file = folder / "config.json"
    file.write_text(json.dumps({**CONFIG, "num_hidden_layers": 2}), encoding="utf-8")
    return file
