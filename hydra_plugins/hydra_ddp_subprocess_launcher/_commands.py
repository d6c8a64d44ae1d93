"""Commands for a person to paste into a shell."""

from __future__ import annotations

import itertools
import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import Any

# Names of variables and of config keys whose values nobody is shown.
SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSWORD", re.IGNORECASE)
# A variable whose value is kept secret stands as `$NAME` in a job's facts, and is taken from the shell.
_FROM_SHELL = re.compile(r"\$\w+")
_MOST_AGAIN = 10


def is_secret(name: str) -> bool:
    """Return whether the value of a variable or config key with this name is not to be shown."""
    return SECRET.search(name) is not None


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


def evaluated(command: str, sweep_dir: str, *arguments: object) -> str:
    """Return the line that runs what a command of `hydra-ddp` prints.

    Args:
        command: Such as `command`.
        sweep_dir: Sweep directory.
        arguments: Of the command.
    """
    program = "hydra-ddp"
    if shutil.which(program) is None:
        # The virtual environment is not on the path.
        program = os.path.join(os.path.dirname(sys.executable), program)
    words = shell_words([program, command, "-d", sweep_dir, *map(str, arguments)])
    return f'eval "$({words})"'


def overrides_again(overrides: Sequence[str], sweep_dir: str, *, basic: bool) -> list[str]:
    """Return Hydra's own overrides of a sweep for another one with some of its jobs.

    Args:
        overrides: Those of the sweep (`hydra.overrides.hydra`).
        sweep_dir: Its directory, in which the other one must not overwrite anything.
        basic: Whether its sweeper is Hydra's own, which takes jobs as they are written.
    """
    from ._program import hydra_quoted  # Which imports Hydra, as `hydra-ddp` need not.

    dropped = ("hydra.mode=", "hydra.sweep.dir=", *(() if basic else ("hydra/sweeper=", "hydra.sweeper.")))
    kept = [one for one in overrides if not one.lstrip("+").startswith(dropped)]
    # A grid that stands in the config would be swept again.
    kept.append("hydra.sweeper.params=null" if basic else "hydra/sweeper=basic")
    return [*kept, f"hydra.sweep.dir={hydra_quoted(f'{sweep_dir}_again')}"]


def again(command: Sequence[str], jobs: Sequence[Sequence[str]]) -> list[str]:
    """Return the shell commands that run just these jobs: one where they are a grid, else one a job.

    Args:
        command: To which overrides are added.
        jobs: Override strings, one list a job.
    """
    grid = _as_grid(jobs)
    shown = [grid] if grid is not None else list(jobs[:_MOST_AGAIN])
    lines = [shell_words([*command, *overrides]) for overrides in shown]
    more = len(jobs) - len(shown) if grid is None else 0
    return lines if more <= 0 else [*lines, f"(and {more} more)"]


def _as_grid(jobs: Sequence[Sequence[str]]) -> list[str] | None:
    """Return sweep overrides that stand for just these jobs; None when there are none."""
    split = [[_key_and_value(override) for override in overrides] for overrides in jobs]
    keys = [[key for key, _ in overrides] for overrides in split]
    if not jobs or any(one != keys[0] for one in keys):
        return None
    values = [list(dict.fromkeys(overrides[place][1] for overrides in split)) for place in range(len(keys[0]))]
    wanted = {tuple(value for _, value in overrides) for overrides in split}
    if len(wanted) != len(jobs) or set(itertools.product(*values)) != wanted:
        return None
    return [key + ",".join(several) for key, several in zip(keys[0], values, strict=True)]


def _key_and_value(override: str) -> tuple[str, str]:
    key, equals, value = override.partition("=")
    return key + equals, value
