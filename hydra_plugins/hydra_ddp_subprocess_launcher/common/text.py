"""Words for people: how many there are of a thing, and which of them."""

from __future__ import annotations

import sys
from collections.abc import Sequence

# Characters of a reason that stands on one line, of a line of a longer text, and lines of one.
MOST_OF_A_CAUSE = 400
_MOST_OF_A_LINE = 4000
_MOST_LINES = 400


def pluralize(count: int | str, noun: str) -> str:
    """Return how many there are of a thing: `1 job`, `0 jobs`, `2 processes`.

    Args:
        count: How many; `1-2` and `1 or 2` are not one.
    """
    return f"{count} {noun if str(count) == '1' else plural(noun)}"


def list_numbers(noun: str, numbers: Sequence[int]) -> str:
    """Return which ones of a thing: `rank 1`, `ranks 0, 2`."""
    return f"{noun if len(numbers) == 1 else plural(noun)} {', '.join(map(str, numbers))}"


def plural(noun: str) -> str:
    """Return the word for several of a thing."""
    return f"{noun}es" if noun.endswith("s") else f"{noun}s"


def bounded(text: str, most: int = MOST_OF_A_CAUSE) -> str:
    """Return a text of about `most` characters: of a longer one its beginning and its end, and how much is left out."""
    if len(text) <= most:
        return text
    end = most // 4
    return f"{text[: most - end]} … {len(text) - most} characters left out … {text[len(text) - end :]}"


def bounded_lines(text: str, *, lines: int = _MOST_LINES, width: int = _MOST_OF_A_LINE) -> str:
    """Return a text of several lines, each of them bounded, and of very many the first and the last ones.

    What is not too long stays as it is.
    """
    if text.count("\n") <= lines and len(text) <= width:
        return text
    every = text.splitlines(keepends=True)
    if len(every) > lines:
        first = lines // 4
        every = [*every[:first], f"… {len(every) - lines} lines left out …\n", *every[first - lines :]]
    return "".join(bounded(line, width) for line in every)


def last_state(line: str) -> str:
    """Return what a terminal shows of a line with carriage returns; one at the end stays, as a line feed may follow."""
    start = line.rfind("\r", 0, len(line.rstrip("\r")))
    return line[start + 1 :]


def encodable(text: str) -> str:
    """Return a text in a form that standard output can take: escapes for what its encoding lacks."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def duration(seconds: float | None) -> str:
    """Return a duration for people: `0.8 s`, `3:05`, `1:02:03`."""
    if seconds is None:
        return "-"
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
