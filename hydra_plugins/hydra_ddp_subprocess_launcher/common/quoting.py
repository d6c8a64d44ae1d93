"""Commands to paste into a shell, and what a rank's command says of its job, quoted for shell and Hydra's grammar."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, unquote

from .protocol import TaskId

_INTERPOLATION = re.compile(r"(?<!\\)(\\*)(\$\{)")
# Names of variables and of config keys whose values nobody is shown.
SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSWORD", re.IGNORECASE)
# A key within a value, as in {api_key: …}.
_SECRET_KEY_WITHIN = re.compile(rf"(?:{SECRET.pattern})[\w-]*[\"']?\s*:", re.IGNORECASE)
_MASK = "***"
# What a sweep that goes on, or runs some of its jobs again, has of its own.
_OF_ONE_RUN = ("hydra.mode=", "hydra.sweep.dir=", "hydra.launcher.resume=", "hydra.launcher.max_failures=")
_OF_THE_SWEEPER = ("hydra/sweeper", "hydra.sweeper")
# The sweeper that runs the jobs it is given, as Hydra's own does, and takes the options of any other.
GIVEN_JOBS = f"{__name__.rsplit('.', 2)[0]}.plugins.DDPGivenJobsSweeper"
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
        job: Number of the job.
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


# What stays readable in `ps`; everything else, quotes and `$` above all, would need care in Hydra's grammar.
_SAFE = "=,./:+-_~[]()@*!^|<>;?"
# Of values for Hydra, paths that need no quotes there, as most.
_PLAIN_PATH = re.compile(r"/[\w./-]*", re.ASCII)
# Linux takes at most 128 KiB an argument; half of it leaves room, and nobody reads more.
_LONGEST_OVERRIDES = 64 * 1024


@dataclass(frozen=True)
class ComposeArgs:
    """How a rank composes its job's config itself, where there is no payload: by hand, after a dry run.

    Attributes:
        config_name: Primary config of the sweep; None: it has none.
        hydra_overrides: Override strings of the sweep for Hydra's part of the config.
        task: Which function of the program the job runs; None: it is not run as a program.
    """

    config_name: str | None
    hydra_overrides: tuple[str, ...]
    task: TaskId | None


def encode_overrides(overrides: Sequence[str]) -> str | None:
    """Return override strings as one percent-encoded text; None when it is too long for a command."""
    text = " ".join(encode(override) for override in overrides)
    return text if len(text) <= _LONGEST_OVERRIDES else None


def decode_overrides(text: str) -> tuple[str, ...]:
    """Invert `encode_overrides`."""
    return tuple(decode(part) for part in text.split(" ")) if text else ()


def encode(text: str) -> str:
    """Return one value, percent-encoded for a command and for Hydra's grammar."""
    # Not `surrogateescape`: under an ASCII locale `ä` is two surrogates, which would come back as one `ä`.
    return quote(text, safe=_SAFE, errors="surrogatepass")


def decode(text: str) -> str:
    """Invert `encode`."""
    return unquote(text, errors="surrogatepass")


def hydra_quoted(text: str) -> str:
    """Return a text as a value for an override, quoted for Hydra's grammar where that needs it."""
    if _PLAIN_PATH.fullmatch(text):
        return text
    # A backslash counts only before a quote, and there each one does.
    escaped = re.sub(r"(?<!\\)(\\*)('|\Z)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), text)
    return f"'{escaped}'"


def compose_arguments(compose_args: ComposeArgs) -> tuple[str, ...]:
    """Return what to add to the command of a rank that composes its job's config itself."""
    task = compose_args.task and (compose_args.task.module, compose_args.task.qualname, str(compose_args.task.nth))
    values = {
        "config_name": compose_args.config_name and encode(compose_args.config_name),
        "hydra_overrides": encode_overrides(compose_args.hydra_overrides),
        "task": task and encode_overrides(task),
    }
    return tuple(f"hydra.sweeper.{name}='{value}'" for name, value in values.items() if value is not None)


def read_compose_args(config_name: str | None, hydra_overrides: str | None, task: str | None) -> ComposeArgs | None:
    """Return what the options of a rank's sweeper say, each percent-encoded; None: its job has a payload."""
    if hydra_overrides is None or task is None:
        return None
    module, qualname, nth = decode_overrides(task)
    name = None if config_name is None else decode(config_name)
    return ComposeArgs(name, decode_overrides(hydra_overrides), TaskId(module, qualname, int(nth)))


def escape_interpolations(text: str) -> str:
    """Return what OmegaConf resolves to `text`, which may hold `${` as it stands."""
    return _INTERPOLATION.sub(lambda found: found[1] * 2 + "\\" + found[2], text)
