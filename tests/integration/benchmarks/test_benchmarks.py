"""The figures and the table of the benchmarks: their pure functions only."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from compare import CONTENDERS, HEADER, QUESTIONS, Answer, Question, answer, answerable, facts, report
from timing import Spread, intervals, rotated, significant, table

pytestmark = pytest.mark.sample
SAMPLES = {"fast": [1.0, 3.0, 2.0], "slow": [10.0, 30.0]}


def test_spread() -> None:
    """The least, the middle and the largest; of an even number the middle is between two."""
    assert Spread.of(SAMPLES["fast"]) == Spread(1.0, 2.0, 3.0)
    assert Spread.of(SAMPLES["slow"]).median == 20.0
    assert Spread.of([4.0]) == Spread(4.0, 4.0, 4.0)


@pytest.mark.parametrize(
    ("value", "text"), [(0.0123456, "0.0123"), (1.0, "1.00"), (12.345, "12.3"), (123.4, "123"), (12345.0, "12345")]
)
def test_significant(value: float, text: str) -> None:
    """Three digits, and never fewer than stand before the point."""
    assert significant(value) == text


def test_intervals() -> None:
    """One fewer than there are times, so that the first job does not count."""
    assert intervals([10.0, 12.0, 15.0]) == [2.0, 3.0]
    assert intervals([10.0]) == []


def test_rotated() -> None:
    """Everybody is first once."""
    assert [rotated("abc", turn) for turn in range(4)] == [list("abc"), list("bca"), list("cab"), list("abc")]
    assert rotated([], 1) == []


def test_table() -> None:
    """Columns are as wide as their widest cell, and no line ends in blanks."""
    assert table([["a", "bb", ""], ["ccc", "d", "e"], ["f", "", ""]]) == "a    bb\nccc  d   e\nf"


def test_answers() -> None:
    """The ratio is that of the medians; a target that is just reached is met; without one nothing is said."""
    questions = [
        Question("met", "fast", "slow", 0.1),
        Question("missed", "fast", "slow", 0.05),
        Question("shown", "slow", "fast", unit="MB"),
    ]
    answers = answer(questions, SAMPLES)
    assert [(one.ratio, one.met) for one in answers] == [(0.1, True), (0.1, False), (10.0, None)]
    lines = report(answers).splitlines()
    assert [line.split()[:1] for line in lines[1:]] == [["met"], ["missed"], ["shown"]]
    assert "0.10   <= 0.10  met" in lines[1]
    assert "0.10   <= 0.05  MISSED" in lines[2]
    assert lines[3].endswith("slow  10.0 / 20.0 / 30.0  fast     1.00 / 2.00 / 3.00  MB")
    assert len(HEADER) == len(answers[0].row)


def test_facts() -> None:
    """The file has every sample, and which targets were met."""
    written = facts([Answer(QUESTIONS[0], Spread(1, 2, 3), Spread(2, 4, 6))], SAMPLES, 3)
    assert written["samples"] == SAMPLES
    question = {"name": "cold", "ours": "cold job", "against": "two bare programs", "target": 1.1, "unit": "s"}
    assert written["answers"] == [question | {"ratio": 0.5, "met": True}]


def test_what_is_missing_is_left_out() -> None:
    """With a contender go all questions that need it, and no other."""
    assert answerable(QUESTIONS, {}) == list(QUESTIONS)
    left = answerable(QUESTIONS, {"preloaded": "no such option", "tiny job, joblib": "not installed"})
    gone = [one for one in QUESTIONS if one not in left]
    assert [(one.name, one.ours) for one in gone] == [
        ("preloaded", "preloaded job"),
        ("entered", "preloaded, until entered"),
        ("own cost", "tiny job"),
    ]


def test_every_series_is_measured_once() -> None:
    """Questions name series that exist."""
    measured = [name for one in CONTENDERS for name in one.series]
    assert len(set(measured)) == len(measured)
    assert {side for one in QUESTIONS for side in (one.ours, one.against)} <= set(measured)
