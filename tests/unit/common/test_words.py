"""Words for people: one thing is singular."""

from __future__ import annotations

import pytest

from hydra_plugins.hydra_ddp_subprocess_launcher._words import counted, numbered


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
