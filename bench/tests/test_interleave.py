"""Turns: one side at a time, in an order that chance decides."""

from __future__ import annotations

import os
import threading
from itertools import pairwise
from pathlib import Path

import pytest

from bench.interleave import take_turns
from suites import turns


class Talker:
    """A side that asks for ``samples`` turns, and writes down when it works."""

    def __init__(self, name: str, samples: int, diary: list[str]) -> None:
        self.name, self.left, self.diary = name, samples, diary
        self.answer: dict | None = None

    def start(self, cell: dict, device: str | None, limit: float) -> None:
        self.answer = None if self.left else {"side": self.name}

    def go_on(self, limit: float) -> None:
        assert self.answer is None
        self.diary.append(self.name)
        self.left -= 1
        self.answer = None if self.left else {"side": self.name}


def diary(one: int, other: int, seed: int = 0) -> list[str]:
    found: list[str] = []
    sides = (Talker("A", one, found), Talker("B", other, found))
    assert [answer["side"] for answer in take_turns(*sides, {"time_limit": 1.0}, None, seed=seed)] == ["A", "B"]
    return found


def test_samples_with_one_index_are_taken_one_after_the_other() -> None:
    found = diary(20, 20)
    assert all(set(found[at : at + 2]) == {"A", "B"} for at in range(0, 40, 2))


def test_who_goes_first_is_left_to_chance() -> None:
    firsts = diary(200, 200)[::2]
    assert 70 < firsts.count("A") < 130
    # No period: the same side goes first twice in a row about every other time.
    assert 70 < sum(a == b for a, b in pairwise(firsts)) < 130
    assert diary(20, 20, seed=1) != diary(20, 20, seed=2)


def test_a_side_that_needs_more_turns_gets_them() -> None:
    assert sorted(diary(3, 7)) == ["A"] * 3 + ["B"] * 7
    assert diary(0, 2) == ["B", "B"]


def test_a_suite_waits_until_it_has_the_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (turns.REQUEST, turns.GO):
        os.mkfifo(tmp_path / name)
    request, go = (os.open(tmp_path / name, os.O_RDWR) for name in (turns.REQUEST, turns.GO))
    monkeypatch.setenv(turns.VARIABLE, str(tmp_path))
    suite = threading.Thread(target=turns.wait_for_turn, daemon=True)
    suite.start()
    assert os.read(request, 1) == b"r"
    suite.join(0.2)
    assert suite.is_alive()
    os.write(go, b"g")
    suite.join(10)
    assert not suite.is_alive()


def test_in_a_plain_run_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(turns.VARIABLE, raising=False)
    turns.wait_for_turn()
