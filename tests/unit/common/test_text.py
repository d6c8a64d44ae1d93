"""Texts for people: one thing is singular, and long texts are bounded."""

from __future__ import annotations

import pytest

from hydra_plugins.hydra_ddp_subprocess_launcher.common.text import bounded, bounded_lines, list_numbers, pluralize


@pytest.mark.parametrize(
    ("count", "noun", "said"),
    [
        (0, "job", "0 jobs"),
        (1, "job", "1 job"),
        (2, "running job", "2 running jobs"),
        (1, "process", "1 process"),
        (3, "process", "3 processes"),
        ("1", "rank", "1 rank"),
        ("1-2", "rank", "1-2 ranks"),
    ],
)
def test_how_many(count: int | str, noun: str, said: str) -> None:
    """One is singular, none and several are plural."""
    assert pluralize(count, noun) == said


def test_which_ones() -> None:
    """The word goes with how many are named."""
    assert (list_numbers("rank", [1]), list_numbers("rank", [0, 2])) == ("rank 1", "ranks 0, 2")


@pytest.mark.parametrize("text", ["", "short", "a\nb\n", "x" * 10_000, "x\n" * 10_000, "x\r\n\x0c" * 5000, "é" * 9999])
def test_bounded_texts(text: str) -> None:
    """What is short stays; of what is long both ends stay, and to bound it again changes nothing."""
    short = bounded_lines(text, lines=20, width=100)
    assert len(short) < 20 * 150 and bounded_lines(short, lines=25, width=200) == short
    assert text.startswith(short[:2]) and text.endswith(short[-1:])
    assert bounded(text, 10_000) == text[:10_000] or len(bounded(text, 10_000)) < 10_100
