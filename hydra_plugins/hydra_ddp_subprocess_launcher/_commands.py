"""Commands for a person to paste into a shell. Pure."""

from __future__ import annotations

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
    assigned = [f"{name}={_quoted(name, value)}" for name, value in environment.items()]
    return " ".join(
        [
            "cd",
            shlex.quote(facts["cwd"]),
            "&&",
            "env",
            *map(shlex.quote, removed),
            *assigned,
            shell_words(facts["argv"]),
        ]
    )


def _quoted(name: str, value: str) -> str:
    return f'"{value}"' if value == f"${name}" and _FROM_SHELL.fullmatch(value) else shlex.quote(value)


def shell_words(argv: Sequence[str]) -> str:
    """Return a command line, each word quoted where the shell needs it."""
    return " ".join(map(shlex.quote, argv))
