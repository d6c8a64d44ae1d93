"""Enums of option values. They are not in `config`, because Hydra may execute that module twice in one process."""

from enum import Enum


class Entry(Enum):
    """What a rank runs: the user's program again, or the pickled job function."""

    auto = "auto"
    script = "script"
    function = "function"


class OnCodeChange(Enum):
    """What to do with a job if source files have changed since the sweep started."""

    warn = "warn"
    fail = "fail"
    ignore = "ignore"


class OnConfigDifference(Enum):
    """What to do if the ranks of a job resolve their config differently."""

    warn = "warn"
    error = "error"


class Resume(Enum):
    """Which jobs of an earlier run of the sweep to run again."""

    unfinished = "unfinished"
    failed = "failed"


class ShowProgress(Enum):
    """How to show the progress of a sweep."""

    auto = "auto"
    rich = "rich"
    plain = "plain"
    none = "none"


class OnInterrupt(Enum):
    """What to do with jobs on a cluster when the launching process is stopped."""

    cancel = "cancel"
    leave = "leave"
