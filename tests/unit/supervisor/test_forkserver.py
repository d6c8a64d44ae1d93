"""What a forked rank tells C libraries."""

from __future__ import annotations

import _ctypes
import subprocess
import sys
from pathlib import Path

import pytest

from hydra_plugins.hydra_ddp_subprocess_launcher.supervisor import forkserver


def test_thread_counts_that_are_no_numbers_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenMP takes lists, too; then one thread stays."""
    monkeypatch.setattr(forkserver, "_loaded_libraries", lambda: pytest.fail("asked"))
    for value in ("", "4,2", "many", "0"):
        forkserver.set_thread_counts({"OMP_NUM_THREADS": value})


UPGRADED = """
import ctypes, os, shutil, sys
from {native} import _loaded, _loaded_libraries, set_thread_counts
source, folder, happens = sys.argv[1:]
# As wheels find theirs: numpy/core/../../numpy.libs.
paths = [f"{{folder}}/core/../{{name}}" for name in ("libgomp-1.so", "libopenblas-1.so")]
os.mkdir(f"{{folder}}/core")
loaded = []
for path in paths:
    shutil.copy(source, path)
    loaded.append(ctypes.CDLL(path))
    if happens != "nothing":
        os.remove(path)
    if happens == "replaced":
        shutil.copy(source, path)
set_thread_counts({{"OMP_NUM_THREADS": "2"}})
names = [name for name in _loaded_libraries() if name.startswith(folder)]
print(names == paths, [_loaded(name)._handle for name in names] == [one._handle for one in loaded])
"""


@pytest.mark.skipif(not hasattr(_ctypes, "__file__"), reason="this Python has no such library")
@pytest.mark.parametrize("happens", ["nothing", "removed", "replaced"])
def test_libraries_that_are_upgraded_while_a_sweep_runs(tmp_path: Path, happens: str) -> None:
    """The ones that were loaded are told; also where they know nothing of threads, as plugins of OpenMP."""
    code = UPGRADED.format(native=forkserver.__name__)
    source = str(_ctypes.__file__)
    output = subprocess.check_output([sys.executable, "-c", code, source, str(tmp_path), happens], text=True)
    assert output == "True True\n"
