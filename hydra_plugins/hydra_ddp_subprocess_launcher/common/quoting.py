"""Quoting for the shell and for Hydra's grammar: commands to paste, and the arguments of a rank's command."""

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
# Names of variables and config keys whose values are never shown.
SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSWORD", re.IGNORECASE)
# A key within a value, as in {api_key: …}.
_SECRET_KEY_WITHIN = re.compile(rf"(?:{SECRET.pattern})[\w-]*[\"']?\s*:", re.IGNORECASE)
_MASK = "***"
# Overrides that a resumed sweep, or a rerun of some of its jobs, sets anew.
_OF_ONE_RUN = ("hydra.mode=", "hydra.sweep.dir=", "hydra.launcher.resume=", "hydra.launcher.max_failures=")
_OF_THE_SWEEPER = ("hydra/sweeper", "hydra.sweeper")
# A sweeper that runs the given jobs, like Hydra's basic sweeper, but accepts the options of any other sweeper.
GIVEN_JOBS = f"{__name__.rsplit('.', 2)[0]}.plugins.DDPGivenJobsSweeper"
# A job's facts hold `$NAME` in place of a secret value, so that the shell fills it in.
_FROM_SHELL = re.compile(r"\$\w+")
# Characters that are special to a shell within double quotes; `!` only at a prompt.
_IN_DOUBLE_QUOTES = re.compile(r'["$`\\!]')


def is_secret(name: str) -> bool:
    """Return whether to hide the value of a variable or config key with this name."""
    return SECRET.search(name) is not None


def has_secret(override: str) -> bool:
    """Return whether to hide the value of an override, because it or a part of it is secret."""
    key, equals, value = override.partition("=")
    return bool(equals) and (is_secret(key) or _SECRET_KEY_WITHIN.search(value) is not None)


def masked(argv: Sequence[str]) -> tuple[str, ...]:
    """Return a command line with masked values where the name looks like that of a secret."""
    shown = []
    follows_secret = False
    for part in argv:
        key, equals, _ = part.partition("=")
        shown.append(_MASK if follows_secret else f"{key}={_MASK}" if has_secret(part) else part)
        # For example `--password hunter2`.
        follows_secret = is_secret(key) and not equals and part.startswith("-")
    return tuple(shown)


def rank_line(facts: Mapping[str, Any], rank: int) -> str:
    """Return the shell command that reruns one rank of a job in its directory and environment.

    Args:
        facts: Content of the job's `job.json`.
        rank: The rank.

    Raises:
        IndexError: if the job has no such rank.
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
    """Return a word quoted for bash, on one line and without control characters."""
    if word.isprintable():
        # Prefer double quotes if single quotes would need `'"'"'` and nothing in the word is special in double quotes.
        return f'"{word}"' if "'" in word and not _IN_DOUBLE_QUOTES.search(word) else shlex.quote(word)
    return f"$'{''.join(map(_in_ansi_quotes, word))}'"


def _in_ansi_quotes(char: str) -> str:
    if char in "\\'":
        return f"\\{char}"
    return char if char.isprintable() else "".join(f"\\x{byte:02x}" for byte in os.fsencode(char))


def shell_comment(text: str) -> str:
    """Return a text as a one-line shell comment, with escapes for unprintable characters."""
    printable = (char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
    return f"# {''.join(printable)}"


def shell_words(argv: Sequence[str]) -> str:
    """Return a command line with each word quoted if the shell needs it."""
    return " ".join(map(_quoted, argv))


def repeat_line(sweep_dir: str, job: int, rank: int) -> str:
    """Return a short shell command that reruns one rank of a job: it evaluates the output of `hydra-ddp command`.

    Args:
        sweep_dir: Sweep directory.
        job: Number of the job.
        rank: The rank.
    """
    program = "hydra-ddp"
    if shutil.which(program) is None:
        # The virtual environment is not on PATH.
        program = os.path.join(os.path.dirname(sys.executable), program)
    words = shell_words([program, "command", "-d", sweep_dir, str(job), str(rank)])
    return f'eval "$({words})"'


def overrides_again(overrides: Sequence[str], sweep_dir: str, *, resume: str) -> list[str]:
    """Return the Hydra overrides of a sweep for a resumed run, in which its sweeper proposes the same jobs.

    Args:
        overrides: Hydra overrides of the sweep (`hydra.overrides.hydra`).
        sweep_dir: Sweep directory.
        resume: Value of the option `resume`.
    """
    return [
        *_without(overrides, *_OF_ONE_RUN),
        f"hydra.sweep.dir={hydra_quoted(sweep_dir)}",
        f"hydra.launcher.resume={resume}",
    ]


def overrides_of_given_jobs(overrides: Sequence[str], sweep_dir: str) -> list[list[str]]:
    """Return alternative lists of Hydra overrides for a run of given jobs of a sweep, the shortest first.

    Args:
        overrides: Hydra overrides of the sweep.
        sweep_dir: Sweep directory of that run.
    """
    directory = f"hydra.sweep.dir={hydra_quoted(sweep_dir)}"
    return [
        [*_without(overrides, *_OF_ONE_RUN, *_OF_THE_SWEEPER), "hydra/sweeper=basic", directory],
        # If the config selects the sweeper, keep its options and replace only the class that receives them.
        [*_without(overrides, *_OF_ONE_RUN), f"hydra.sweeper._target_={GIVEN_JOBS}", directory],
    ]


def _without(overrides: Sequence[str], *beginnings: str) -> list[str]:
    return [one for one in overrides if not one.lstrip("+~").startswith(beginnings)]


# Characters that stay readable in `ps`; others, above all quotes and `$`, would need escapes in Hydra's grammar.
_SAFE = "=,./:+-_~[]()@*!^|<>;?"
# Paths that need no quotes in Hydra's grammar, like most.
_PLAIN_PATH = re.compile(r"/[\w./-]*", re.ASCII)
# Linux allows at most 128 KiB per argument; half of it leaves room, and more is unreadable anyway.
_LONGEST_OVERRIDES = 64 * 1024


@dataclass(frozen=True)
class ComposeArgs:
    """How a rank composes the config of its job if it has no payload, as when started by hand after a dry run.

    Attributes:
        config_name: Primary config of the sweep; None if it has none.
        hydra_overrides: Override strings of the sweep for Hydra's part of the config.
        task: Function of the program that the job runs; None if it is not run as a program.
    """

    config_name: str | None
    hydra_overrides: tuple[str, ...]
    task: TaskId | None


def encode_overrides(overrides: Sequence[str]) -> str | None:
    """Return override strings as one percent-encoded text, or None if it is too long for a command."""
    text = " ".join(encode(override) for override in overrides)
    return text if len(text) <= _LONGEST_OVERRIDES else None


def decode_overrides(text: str) -> tuple[str, ...]:
    """Invert `encode_overrides`."""
    return tuple(decode(part) for part in text.split(" ")) if text else ()


def encode(text: str) -> str:
    """Return a value percent-encoded for a command and for Hydra's grammar."""
    # Not `surrogateescape`: under an ASCII locale `ä` is two surrogates, which would be decoded as one `ä`.
    return quote(text, safe=_SAFE, errors="surrogatepass")


def decode(text: str) -> str:
    """Invert `encode`."""
    return unquote(text, errors="surrogatepass")


def hydra_quoted(text: str) -> str:
    """Return a text as the value of an override, quoted if Hydra's grammar needs it."""
    if _PLAIN_PATH.fullmatch(text):
        return text
    # Backslashes are special only directly before a quote, where each must be doubled.
    escaped = re.sub(r"(?<!\\)(\\*)('|\Z)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), text)
    return f"'{escaped}'"


def compose_arguments(compose_args: ComposeArgs) -> tuple[str, ...]:
    """Return the arguments for the command of a rank that composes the config of its job itself."""
    task = compose_args.task and (compose_args.task.module, compose_args.task.qualname, str(compose_args.task.nth))
    values = {
        "config_name": compose_args.config_name and encode(compose_args.config_name),
        "hydra_overrides": encode_overrides(compose_args.hydra_overrides),
        "task": task and encode_overrides(task),
    }
    return tuple(f"hydra.sweeper.{name}='{value}'" for name, value in values.items() if value is not None)


def read_compose_args(config_name: str | None, hydra_overrides: str | None, task: str | None) -> ComposeArgs | None:
    """Decode the percent-encoded options of a rank's sweeper; return None if its job has a payload."""
    if hydra_overrides is None or task is None:
        return None
    module, qualname, nth = decode_overrides(task)
    name = None if config_name is None else decode(config_name)
    return ComposeArgs(name, decode_overrides(hydra_overrides), TaskId(module, qualname, int(nth)))


def escape_interpolations(text: str) -> str:
    """Return a string that OmegaConf resolves to `text`, in which `${` is literal."""
    return _INTERPOLATION.sub(lambda found: found[1] * 2 + "\\" + found[2], text)
