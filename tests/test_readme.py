"""The README says what is so."""

from __future__ import annotations

import ast
import re
from dataclasses import fields
from pathlib import Path

from omegaconf import OmegaConf

from hydra_plugins.hydra_ddp_subprocess_launcher.config import DDPSubprocessLauncherConf

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_options_table_has_every_option_with_its_default() -> None:
    """Names, order and defaults of the table are those of the dataclass."""
    rows = re.findall(r"^\| `(\w+)` \| `([^`]*)` \| \S", README, re.MULTILINE)
    config = OmegaConf.structured(DDPSubprocessLauncherConf)
    expected = []
    for field in fields(DDPSubprocessLauncherConf):
        if field.name != "_target_":
            value = config[field.name]
            text = "null" if value is None else getattr(value, "value", value)
            text = f"{text:g}" if isinstance(text, float) else str(text)
            expected.append((field.name, text.lower() if isinstance(value, bool) else text))
    assert rows == expected


def test_every_option_has_a_comment() -> None:
    """Each field of the dataclass is explained where it stands."""
    lines = (ROOT / "hydra_plugins/hydra_ddp_subprocess_launcher/config.py").read_text(encoding="utf-8").splitlines()
    options = [field.name for field in fields(DDPSubprocessLauncherConf) if field.name != "_target_"]
    for name in options:
        place = next(number for number, line in enumerate(lines) if line.startswith(f"    {name}: "))
        assert lines[place - 1].lstrip().startswith("#"), name


def test_every_extra_is_named() -> None:
    """What can be installed beside the package stands in the README, in the form in which it is typed."""
    setup = ast.parse((ROOT / "setup.py").read_text(encoding="utf-8"))
    (extras,) = (
        word.value for word in ast.walk(setup) if isinstance(word, ast.keyword) and word.arg == "extras_require"
    )
    assert isinstance(extras, ast.Dict)
    named = {extra for group in re.findall(r"\[([\w,]+)\]\"", README) for extra in group.split(",")}
    assert {ast.literal_eval(key) for key in extras.keys if key is not None} == named
