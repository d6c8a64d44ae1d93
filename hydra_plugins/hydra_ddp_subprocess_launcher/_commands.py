"""Commands for a person to paste into a shell. Pure."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

# A variable whose value is kept secret stands as `$NAME` in a job's facts, and is taken from the shell.
_FROM_SHELL = re.compile(r"\$\w+")


def rank_line(facts: Mapping[str, Any], rank: int) -> str:
    """Return the command that runs one rank of a job again, with its directory and environment.

    Args:
        facts: What `job.json` has.
        rank: The rank.

    Raises:
        IndexError: when the job has no such rank.
    """
    environment = {**facts["environment"], **facts["rank_environments"][rank]}
    removed = [part for name in facts["environment_removed"] for part in ("-u", name)]
    assigned = [f"{_quoted(name)}={_value(name, value)}" for name, value in environment.items()]
    return " ".join(
        [
            "cd",
            _quoted(facts["cwd"]),
            "&&",
            "env",
            *map(_quoted, removed),
            *assigned,
            shell_words(facts["argv"]),
        ]
    )


def _value(name: str, value: str) -> str:
    return f'"{value}"' if value == f"${name}" and _FROM_SHELL.fullmatch(value) else _quoted(value)


def _quoted(word: str) -> str:
    """Return a word quoted for bash, on one line and without what a terminal would act on."""
    if word.isprintable():
        return shlex.quote(word)
    return f"$'{''.join(map(_in_ansi_quotes, word))}'"


def _in_ansi_quotes(char: str) -> str:
    if char in "\\'":
        return f"\\{char}"
    return char if char.isprintable() else "".join(f"\\x{byte:02x}" for byte in os.fsencode(char))


def shell_comment(text: str) -> str:
    """Return a text as one line that a shell passes over; what cannot be printed stands as an escape."""
    printable = (char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
    return f"# {''.join(printable)}"


def shell_words(argv: Sequence[str]) -> str:
    """Return a command line, each word quoted where the shell needs it."""
    return " ".join(map(_quoted, argv))
