"""Text for people: counts, lists of numbers, durations, and texts cut to a maximum length."""

from __future__ import annotations

import sys
from collections.abc import Sequence

# Maximum characters of a cause on one line, and of a line of a longer text; maximum lines of a text.
MOST_OF_A_CAUSE = 400
_MOST_OF_A_LINE = 4000
_MOST_LINES = 400


def pluralize(count: int | str, noun: str) -> str:
    """Return a count with its noun: `1 job`, `0 jobs`, `2 processes`.

    Args:
        count: The count; texts such as `1-2` and `1 or 2` take the plural.
        noun: The noun in the singular.
    """
    return f"{count} {noun if str(count) == '1' else plural(noun)}"


def list_numbers(noun: str, numbers: Sequence[int]) -> str:
    """Return a noun with a list of numbers: `rank 1`, `ranks 0, 2`."""
    return f"{noun if len(numbers) == 1 else plural(noun)} {', '.join(map(str, numbers))}"


def plural(noun: str) -> str:
    """Return the plural of a noun."""
    return f"{noun}es" if noun.endswith("s") else f"{noun}s"


def bounded(text: str, most: int = MOST_OF_A_CAUSE) -> str:
    """Return a text cut to about `most` characters: its beginning, how many characters are left out, and its end."""
    if len(text) <= most:
        return text
    end = most // 4
    return f"{text[: most - end]} … {len(text) - most} characters left out … {text[len(text) - end :]}"


def bounded_lines(text: str, *, lines: int = _MOST_LINES, width: int = _MOST_OF_A_LINE) -> str:
    """Return a text with long lines cut to about `width` characters, and at most `lines` of its first and last lines.

    A text that is short enough is returned unchanged.
    """
    if text.count("\n") <= lines and len(text) <= width:
        return text
    every = text.splitlines(keepends=True)
    if len(every) > lines:
        first = lines // 4
        every = [*every[:first], f"… {len(every) - lines} lines left out …\n", *every[first - lines :]]
    return "".join(bounded(line, width) for line in every)


def last_state(line: str) -> str:
    """Return what a terminal shows of a line with carriage returns; keep one at the end, as a line feed may follow."""
    start = line.rfind("\r", 0, len(line.rstrip("\r")))
    return line[start + 1 :]


def encodable(text: str) -> str:
    """Return a text with escapes for the characters that the encoding of standard output lacks."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def duration(seconds: float | None) -> str:
    """Return a readable duration: `0.8 s`, `3:05`, `1:02:03`; `-` for None."""
    if seconds is None:
        return "-"
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
