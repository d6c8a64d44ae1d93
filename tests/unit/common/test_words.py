"""Words for people: one thing is singular, in all messages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hydra_plugins.hydra_ddp_subprocess_launcher import _words
from hydra_plugins.hydra_ddp_subprocess_launcher._words import counted, numbered

PACKAGE = Path(_words.__file__).parent
# What is counted in messages.
NOUNS = "attempt|change|core|device|failure|file|GPU|job|key|line|module|node|process|rank|restart|start|thread"


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
    assert counted(count, noun) == said


def test_which_ones() -> None:
    """The word goes with how many are named."""
    assert (numbered("rank", [1]), numbered("rank", [0, 2])) == ("rank 1", "ranks 0, 2")


@pytest.mark.parametrize("file", sorted(PACKAGE.glob("*.py")), ids=lambda file: file.stem)
def test_no_message_counts_by_itself(file: Path) -> None:
    """A number that is filled in before such a word would be wrong for one: `counted` is there for that."""
    text = file.read_text(encoding="utf-8")
    # Behind `{what}` and the like it is a verb.
    assert re.findall(rf"(?:(?<!what)(?<!_IMPORTING)\}}|%[ds]) (?:\w+ )?(?:{NOUNS})e?s\b", text) == []
    assert re.findall(rf"\b(?:{NOUNS})\(e?s\)", text) == []
    assert re.findall(r"""['"]e?s['"] (?:\*|if )""", text) == [] or file.stem == "_words"
