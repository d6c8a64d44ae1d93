"""The words that an option may take. Apart from `config`, which Hydra may execute twice in one process."""

from enum import Enum


class Entry(Enum):
    """What a rank runs: the user's program again, or the pickled job function."""

    auto = "auto"
    script = "script"
    function = "function"


class OnCodeChange(Enum):
    """What happens to a job when source files changed since the sweep started."""

    warn = "warn"
    fail = "fail"
    ignore = "ignore"


class OnConfigDifference(Enum):
    """What happens when ranks of one job resolve their config differently."""

    warn = "warn"
    error = "error"


class Resume(Enum):
    """Which jobs of an earlier run of the sweep are run again."""

    unfinished = "unfinished"
    failed = "failed"


class ShowProgress(Enum):
    """How a sweep shows what its jobs do."""

    auto = "auto"
    rich = "rich"
    plain = "plain"
    none = "none"


class OnInterrupt(Enum):
    """What becomes of the jobs on a cluster when the launching process is stopped."""

    cancel = "cancel"
    leave = "leave"
