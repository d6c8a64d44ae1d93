"""What the command of a rank says of its job: values that survive a shell and Hydra's grammar. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import quote, unquote

from ._specs import TaskId

# What stays readable in `ps`; everything else, quotes and `$` above all, would need care in Hydra's grammar.
_SAFE = "=,./:+-_~[]()@*!^|<>;?"
# Of values for Hydra, paths that need no quotes there, as most.
_PLAIN_PATH = re.compile(r"/[\w./-]*", re.ASCII)
# Linux takes at most 128 KiB an argument; half of it leaves room, and nobody reads more.
_LONGEST_OVERRIDES = 64 * 1024


@dataclass(frozen=True)
class Recipe:
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
    escaped = re.sub(r"(\\*)('|\Z)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), text)
    return f"'{escaped}'"


def recipe_arguments(recipe: Recipe) -> tuple[str, ...]:
    """Return what to add to the command of a rank that composes its job's config itself."""
    task = recipe.task and (recipe.task.module, recipe.task.qualname, str(recipe.task.nth))
    values = {
        "config_name": recipe.config_name and encode(recipe.config_name),
        "hydra_overrides": encode_overrides(recipe.hydra_overrides),
        "task": task and encode_overrides(task),
    }
    return tuple(f"hydra.sweeper.{name}='{value}'" for name, value in values.items() if value is not None)


def read_recipe(config_name: str | None, hydra_overrides: str | None, task: str | None) -> Recipe | None:
    """Return what the options of a rank's sweeper say, each percent-encoded; None: its job has a payload."""
    if hydra_overrides is None or task is None:
        return None
    module, qualname, nth = decode_overrides(task)
    name = None if config_name is None else decode(config_name)
    return Recipe(name, decode_overrides(hydra_overrides), TaskId(module, qualname, int(nth)))
