"""Exceptions of the launcher.

    LauncherError               a CompactHydraException: Hydra prints only the message, without our stack
    ├── OptionError             an option is unknown, or its value cannot be used
    ├── StartError              this process cannot launch, or its program cannot be run again in a rank
    ├── FreezeError             a job's config cannot be passed to its ranks
    └── JobFailedError          a job failed without an exception of the user's that explains why

    RankTraceback               not an error itself: the cause of a user's exception, so that its traceback is shown

Each takes its message as the only argument, so that it can be pickled.
"""

from __future__ import annotations

from hydra.errors import CompactHydraException


class LauncherError(CompactHydraException):
    """Base of the errors that the launcher raises."""


class OptionError(LauncherError):
    """An option of the launcher is unknown or has a value that cannot be used."""


class StartError(LauncherError):
    """This process cannot launch ranks, or its program cannot be run again."""


class FreezeError(LauncherError):
    """The config of a job cannot be passed to its ranks."""


class JobFailedError(LauncherError):
    """A job failed without an exception of the user's own."""


class RankTraceback(Exception):  # noqa: N818  (it is no error, it shows one)
    """Carry the text of a traceback from the rank in which it happened."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f"\n{self.text.rstrip()}"
