"""Predictions are made once, and kept one by one."""

import json

import pytest

from steelyard.advise import Setting
from steelyard.advise.cache import Cache
from steelyard.advise.memory import questions
from steelyard.advise.predictions import Predictions
from steelyard.errors import InputError
from steelyard.parallel import ParallelLayout


@pytest.fixture(scope="module")
def asked(job):
    return questions(job, Setting(ParallelLayout(pp=2, dp=2)))


def test_what_was_predicted_is_never_run_again(asked, tmp_path):
    with Predictions(Cache(tmp_path)) as first:
        answers = first.answers(asked)
        assert first.runs == len(asked)
        first.answers(asked)
        assert first.runs == len(asked)
    with Predictions(Cache(tmp_path)) as second:
        assert second.answers(asked) == answers
        assert second.runs == 0


def test_an_interruption_keeps_what_was_found(asked, tmp_path):
    def interrupt():
        if first.runs == 2:
            raise KeyboardInterrupt

    first = Predictions(Cache(tmp_path), told=interrupt)
    with first, pytest.raises(KeyboardInterrupt):
        first.answers(asked)
    assert len(list(tmp_path.glob("*.json"))) == 2
    with Predictions(Cache(tmp_path)) as second:
        second.answers(asked)
        assert second.runs == len(asked) - 2


def test_processes_give_the_same_answers(asked, predictions, tmp_path):
    with Predictions(Cache(tmp_path), workers=2) as side_by_side:
        assert side_by_side.answers(asked[:2]) == predictions.answers(asked[:2])
        assert side_by_side.runs == 2


def test_an_entry_depends_on_everything_but_the_models_name(asked, tmp_path):
    cache = Cache(tmp_path)
    cache.put(asked[0].facts, {"one": 1})
    assert cache.get(asked[0].facts) == {"one": 1}
    assert "name" not in asked[0].facts["shape"]
    for field, value in (("tokens", 1), ("stage", "last"), ("recompute", "full"), ("role", "critic")):
        assert cache.get({**asked[0].facts, field: value}) is None, field


def test_a_broken_entry_is_made_again(tmp_path):
    cache = Cache(tmp_path)
    cache.put("facts", [1])
    (file,) = tmp_path.iterdir()
    file.write_text(json.dumps([1])[:-1], encoding="utf-8")
    assert cache.get("facts") is None


def test_a_folder_that_cannot_be_made_is_bad_input(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="give another cache folder"):
        Cache(tmp_path / "file" / "folder")
