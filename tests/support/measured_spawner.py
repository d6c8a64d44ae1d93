"""Coverage of the spawner and its keepers, which run without site-packages and so without what starts coverage.

For a virtual environment that is there for measuring alone: `nox -s coverage` puts this file into its site-packages,
with a `.pth` file that imports it. Processes that are measured then start their spawner with site-packages.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

_start = subprocess.Popen.__init__


def _start_measured(self: Any, args: Any, *more: Any, **options: Any) -> None:
    if isinstance(args, list) and args[1:4] == ["-I", "-S", "-X"] and "spawner.main(" in args[6]:
        args = [args[0], *args[3:]]
    _start(self, args, *more, **options)


if "COVERAGE_PROCESS_CONFIG" in os.environ or "COVERAGE_PROCESS_START" in os.environ:
    subprocess.Popen.__init__ = _start_measured  # type: ignore[method-assign]
    # Hydra takes a program that is traced for one that is debugged, and then hides nothing of a traceback.
    sys.gettrace = lambda: None
