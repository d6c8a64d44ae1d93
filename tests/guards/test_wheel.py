"""The package as it is handed out: sdist and wheel, and the wheel alone in an empty virtual environment.

Needs an index of packages and a minute; `nox -s wheel` runs it.
"""

from __future__ import annotations

import os
import re
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import hydra_plugins.hydra_ddp_subprocess_launcher as package
from support.documented import ROOT

if TYPE_CHECKING:
    from support.runner import Runner

pytestmark = [
    pytest.mark.skipif("HYDRA_DDP_TEST_WHEEL" not in os.environ, reason="`nox -s wheel` runs it"),
    pytest.mark.timeout(900),
]
APP = """
import os
import hydra
from hydra.core.config_store import ConfigStore

ConfigStore.instance().store(name="train", node={"lr": 0.1})

@hydra.main(version_base=None, config_path=None, config_name="train")
def main(cfg):
    print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"])
    return cfg.lr

if __name__ == "__main__":
    main()
"""


def test_a_wheel_that_is_built_from_the_sdist_runs_elsewhere(runner: Runner, tmp_path: Path) -> None:
    """Both have what they should, and two jobs of two ranks run where nothing but the wheel was installed."""
    index = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    built = runner.python("-m", "build", "--outdir", tmp_path / "dist", ROOT, env=index, timeout_s=400)
    assert built.returncode == 0, built.output
    (sdist,) = (tmp_path / "dist").glob("*.tar.gz")
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = ["LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", "CITATION.cff", "noxfile.py", "docs/options.md"]
    assert set(wanted) | {"docs/options.py", "example_app/conf/config.yaml", "tests/conftest.py"} <= names
    # What the tests need, so that they run from the sdist, too.
    kept = [file for kind in ("py", "sh", "yaml") for file in (ROOT / "tests").rglob(f"*.{kind}")]
    assert {file.relative_to(ROOT).as_posix() for file in kept} <= names
    with zipfile.ZipFile(wheel) as archive:
        modules = {name.partition("/")[0] for name in archive.namelist()}
    assert {name for name in modules if not name.endswith(".dist-info")} == {"hydra_plugins"}

    python = tmp_path / "empty/bin/python"
    assert runner.python("-m", "venv", tmp_path / "empty").returncode == 0
    installed = runner.run(python, "-m", "pip", "install", "-q", wheel, env=index, timeout_s=400)
    assert installed.returncode == 0, installed.output

    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "train.py").write_text(APP)
    version = runner.run(python.parent / "hydra-ddp", "--version", cwd=outside)
    assert version.stdout.strip() == f"hydra-ddp {package.__version__}"
    plugins = runner.run(python, "train.py", "--info", "plugins", cwd=outside)
    assert "DDPSubprocessLauncher" in plugins.output
    options = ["hydra/launcher=ddp_subprocess", "hydra.launcher.nproc_per_node=2", "hydra.sweep.dir=sweep"]
    ran = runner.run(python, "train.py", "-m", *options, "lr=0.1,0.01", cwd=outside)
    assert ran.returncode == 0, ran.output
    said = "".join(log.read_text() for log in outside.glob("sweep/*/.ddp/rank_*.log"))
    assert sorted(re.findall(r"rank \d of \d", said)) == ["rank 0 of 2"] * 2 + ["rank 1 of 2"] * 2
    # Nothing of this process's environment was of help.
    assert str(Path(sys.prefix)) not in ran.output
