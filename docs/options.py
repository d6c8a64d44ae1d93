"""Make options.md from the comments in config.py: `python docs/options.py`. A test says when it is old."""

from __future__ import annotations

import ast
from dataclasses import fields
from enum import Enum
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from hydra_plugins.hydra_ddp_subprocess_launcher import config
from hydra_plugins.hydra_submitit_launcher.config import LocalQueueConf, SlurmQueueConf

PAGE = Path(__file__).with_name("options.md")
# The sources beside this script, not the installed ones: comments are in both, but one may be old.
SOURCE = Path(__file__).parent.parent / "hydra_plugins/hydra_ddp_subprocess_launcher/config.py"
HEAD = """\
<!-- Made by docs/options.py from the comments in config.py. Do not edit. -->
# Options

Each is set as `hydra.launcher.NAME=VALUE` on the command line, or under `hydra: launcher:` in the config. This prints
them all, with their values:

```bash
python train.py hydra/launcher=ddp_subprocess --cfg hydra -p hydra.launcher
```

An unknown name, or a value that cannot be used, is an error before any process starts. It names the option, and for a
value what is valid.
"""
SUBMITIT = """\
The other options are those of Hydra's launcher `{launcher}`, with the same defaults; its documentation explains them:

{names}.
"""


def comments(source: str) -> dict[str, dict[str, str]]:
    """Return the comment above each field of each dataclass, as one line: by class, then by field."""
    lines = source.splitlines()
    found: dict[str, dict[str, str]] = {}
    for one in ast.walk(ast.parse(source)):
        if isinstance(one, ast.ClassDef):
            named = [(part.target, part.lineno) for part in one.body if isinstance(part, ast.AnnAssign)]
            found[one.name] = {ast.unparse(name): _above(lines, lineno - 1) for name, lineno in named}
    return found


def _above(lines: list[str], place: int) -> str:
    start = place
    while lines[start - 1].lstrip().startswith("#"):
        start -= 1
    return " ".join(line.strip().removeprefix("#").strip() for line in lines[start:place])


def default(value: Any) -> str:
    """Return a default as it is typed in YAML."""
    if value is None:
        return "null"
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def own(conf: type, *without: type) -> list[str]:
    """Return the options of a launcher, in order, but for those that others have, too."""
    others = {field.name for other in without for field in fields(other)}
    return [field.name for field in fields(conf) if field.name not in others and field.name != "_target_"]


def _values(conf: type) -> Any:
    return OmegaConf.to_container(OmegaConf.structured(conf), resolve=False)


def section(title: str, conf: type, names: list[str], texts: dict[str, str]) -> str:
    """Return the options of one launcher."""
    values = _values(conf)
    parts = [f"\n## {title}\n"]
    parts += [f"\n### {name}\n\nDefault: `{default(values[name])}`. {texts[name]}\n" for name in names]
    return "".join(parts)


def submitit(launcher: str, conf: type) -> str:
    """Return the names of what a launcher has from submitit's."""
    values = _values(conf)
    names = [f"`{name}` ({default(values[name])})" for name in own(conf)]
    return "\n" + SUBMITIT.format(launcher=launcher, names=", ".join(names))


def page() -> str:
    """Return the whole page."""
    texts = comments(SOURCE.read_text(encoding="utf-8"))
    ours, here = config.DDPOptions, config.DDPSubprocessLauncherConf
    slurm, local = config.DDPSubmititSlurmConf, config.DDPSubmititLocalConf
    cluster, at_once = texts["DDPSubmititOptions"], texts["DDPSubmititLocalConf"]
    parts = [
        HEAD,
        section("All launchers", ours, own(ours), texts["DDPOptions"]),
        section("hydra/launcher=ddp_subprocess", here, own(here, ours), texts["DDPSubprocessLauncherConf"]),
        section("hydra/launcher=ddp_submitit_slurm", slurm, own(slurm, ours, SlurmQueueConf), cluster),
        submitit("submitit_slurm", SlurmQueueConf),
        section("hydra/launcher=ddp_submitit_local", local, own(local, ours, LocalQueueConf), {**cluster, **at_once}),
        submitit("submitit_local", LocalQueueConf),
    ]
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
