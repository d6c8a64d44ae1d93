"""Commands for a person to paste into a shell."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from ._encoded import hydra_quoted

# Names of variables and of config keys whose values nobody is shown.
SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSWORD", re.IGNORECASE)
# A key within a value, as in {api_key: …}.
_SECRET_KEY_WITHIN = re.compile(rf"(?:{SECRET.pattern})[\w-]*[\"']?\s*:", re.IGNORECASE)
_MASK = "***"
# What a sweep that goes on, or runs some of its jobs again, has of its own.
_OF_ONE_RUN = ("hydra.mode=", "hydra.sweep.dir=", "hydra.launcher.resume=", "hydra.launcher.max_failures=")
_OF_THE_SWEEPER = ("hydra/sweeper", "hydra.sweeper")
# The sweeper that runs the jobs it is given, as Hydra's own does, and takes the options of any other.
GIVEN_JOBS = f"{__package__}.ddp_rank_sweeper.DDPGivenJobsSweeper"
# A variable whose value is kept secret stands as `$NAME` in a job's facts, and is taken from the shell.
_FROM_SHELL = re.compile(r"\$\w+")
# What a shell acts on within double quotes; `!` at a prompt.
_IN_DOUBLE_QUOTES = re.compile(r'["$`\\!]')


def is_secret(name: str) -> bool:
    """Return whether the value of a variable or config key with this name is not to be shown."""
    return SECRET.search(name) is not None


def has_secret(override: str) -> bool:
    """Return whether the value of an override, or a part of it, is not to be shown."""
    key, equals, value = override.partition("=")
    return bool(equals) and (is_secret(key) or _SECRET_KEY_WITHIN.search(value) is not None)


def masked(argv: Sequence[str]) -> tuple[str, ...]:
    """Return a command line without values whose name looks like that of a secret."""
    shown = []
    follows_secret = False
    for part in argv:
        key, equals, _ = part.partition("=")
        shown.append(_MASK if follows_secret else f"{key}={_MASK}" if has_secret(part) else part)
        # As in `--password hunter2`.
        follows_secret = is_secret(key) and not equals and part.startswith("-")
    return tuple(shown)


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
    """Return a word as one types it for bash, on one line and without what a terminal would act on."""
    if word.isprintable():
        # What single quotes would need `'"'"'` for, stands in double ones, where nothing in it is special there.
        return f'"{word}"' if "'" in word and not _IN_DOUBLE_QUOTES.search(word) else shlex.quote(word)
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


def repeat_line(sweep_dir: str, job: int, rank: int) -> str:
    """Return a short line that runs one rank of a job again: what `hydra-ddp command` prints, evaluated.

    Args:
        sweep_dir: Sweep directory.
        job: Number of the job.
        rank: The rank.
    """
    program = "hydra-ddp"
    if shutil.which(program) is None:
        # The virtual environment is not on the path.
        program = os.path.join(os.path.dirname(sys.executable), program)
    words = shell_words([program, "command", "-d", sweep_dir, str(job), str(rank)])
    return f'eval "$({words})"'


def overrides_again(overrides: Sequence[str], sweep_dir: str, *, resume: str) -> list[str]:
    """Return Hydra's own overrides of a sweep for another run of some of its jobs.

    Args:
        overrides: Those of the sweep (`hydra.overrides.hydra`).
        sweep_dir: Its directory.
        resume: How: the sweeper proposes the same jobs.
    """
    return [
        *_without(overrides, *_OF_ONE_RUN),
        f"hydra.sweep.dir={hydra_quoted(sweep_dir)}",
        f"hydra.launcher.resume={resume}",
    ]


def overrides_of_given_jobs(overrides: Sequence[str], sweep_dir: str) -> list[list[str]]:
    """Return the choices of Hydra's own overrides for a run of given jobs of a sweep, the shortest first.

    Args:
        overrides: Those of the sweep.
        sweep_dir: A directory for that run.
    """
    directory = f"hydra.sweep.dir={hydra_quoted(sweep_dir)}"
    return [
        [*_without(overrides, *_OF_ONE_RUN, *_OF_THE_SWEEPER), "hydra/sweeper=basic", directory],
        # Where the config chooses the sweeper, its options stay what they are, and other code meets them.
        [*_without(overrides, *_OF_ONE_RUN), f"hydra.sweeper._target_={GIVEN_JOBS}", directory],
    ]


def _without(overrides: Sequence[str], *beginnings: str) -> list[str]:
    return [one for one in overrides if not one.lstrip("+~").startswith(beginnings)]
