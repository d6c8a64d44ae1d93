"""Words for people: how many there are of a thing, and which of them.

The keepers import this module, so it imports the standard library only.
"""

from __future__ import annotations

from collections.abc import Sequence


def counted(count: int | str, noun: str) -> str:
    """Return how many there are of a thing: `1 job`, `0 jobs`, `2 processes`.

    Args:
        count: How many; `1-2` and `1 or 2` are not one.
        noun: One of them.
    """
    return f"{count} {noun if str(count) == '1' else plural(noun)}"


def numbered(noun: str, numbers: Sequence[int]) -> str:
    """Return which ones of a thing: `rank 1`, `ranks 0, 2`."""
    return f"{noun if len(numbers) == 1 else plural(noun)} {', '.join(map(str, numbers))}"


def plural(noun: str) -> str:
    """Return the word for several of a thing."""
    return f"{noun}es" if noun.endswith("s") else f"{noun}s"
