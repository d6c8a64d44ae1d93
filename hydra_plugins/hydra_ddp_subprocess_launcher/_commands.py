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
_HARMLESS = re.compile(r"[A-Za-z0-9_/.:+-]+")


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
    dropped = ("hydra.mode=", "hydra.sweep.dir=", *(() if basic else ("hydra/sweeper=", "hydra.sweeper.")))
    kept = [one for one in overrides if not one.lstrip("+").startswith(dropped)]
    # A grid that stands in the config would be swept again.
    kept.append("hydra.sweeper.params=null" if basic else "hydra/sweeper=basic")
    return [*kept, f"hydra.sweep.dir={_hydra_quoted(f'{sweep_dir}_again')}"]


def _hydra_quoted(text: str) -> str:
    """Return a value in Hydra's override grammar."""
    if _HARMLESS.fullmatch(text):
        return text
    return "'" + re.sub(r"(\\*)('|$)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), text) + "'"


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
