"""The README says what is so."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from dataclasses import fields
from enum import Enum
from typing import get_args, get_type_hints

import pytest
from omegaconf import OmegaConf

from hydra_plugins.hydra_ddp_subprocess_launcher import config as config_module
from support.documented import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")


def defaults(conf: type, names: Iterable[str]) -> list[tuple[str, str]]:
    """Return names and defaults of options as a table has them."""
    config_module = OmegaConf.structured(conf)
    expected = []
    for name in names:
        value = config_module[name]
        text = "null" if value is None else getattr(value, "value", value)
        text = f"{text:g}" if isinstance(text, float) else str(text)
        expected.append((name, text.lower() if isinstance(value, bool) else text))
    return expected


def options(conf: type, *without: type) -> list[str]:
    """Return the options of a launcher, in order, but for those that others have, too."""
    others = {field.name for other in without for field in fields(other)}
    return [field.name for field in fields(conf) if field.name not in others and field.name != "_target_"]


def test_the_options_tables_have_every_option_with_its_default() -> None:
    """Names, order and defaults of each table are those of the dataclasses."""
    submitit = pytest.importorskip("hydra_plugins.hydra_submitit_launcher.config")
    slurm, local = config_module.DDPSubmititSlurmConf, config_module.DDPSubmititLocalConf
    queue = (config_module.DDPOptions, submitit.SlurmQueueConf)
    expected = [
        defaults(config_module.DDPOptions, options(config_module.DDPOptions)),
        defaults(
            config_module.DDPSubprocessLauncherConf,
            options(config_module.DDPSubprocessLauncherConf, config_module.DDPOptions),
        ),
        [*defaults(slurm, options(slurm, *queue)), *defaults(local, options(local, *queue, slurm))],
    ]
    _, *tables = re.split(r"(?:All launchers have these|^Only `\w+` has these|, and):$", README, flags=re.MULTILINE)
    assert [re.findall(r"^\| `(\w+)` \| `([^`]*)` \| \S", table, re.MULTILINE) for table in tables] == expected


def test_launchers_have_the_defaults_of_those_that_they_extend() -> None:
    """What is said of all launchers is so, and what is submitit's is as submitit has it."""
    submitit = pytest.importorskip("hydra_plugins.hydra_submitit_launcher.config")
    slurm, local, ours = (
        config_module.DDPSubmititSlurmConf,
        config_module.DDPSubmititLocalConf,
        config_module.DDPOptions,
    )
    pairs = [(slurm, ours), (local, ours), (config_module.DDPSubprocessLauncherConf, ours)]
    for conf, extended in [*pairs, (slurm, submitit.SlurmQueueConf), (local, submitit.LocalQueueConf)]:
        theirs, its = (OmegaConf.to_container(OmegaConf.structured(one), resolve=False) for one in (extended, conf))
        assert {name: its[name] for name in options(extended)} == {name: theirs[name] for name in options(extended)}


def test_the_words_that_an_option_may_take_are_in_its_row_and_in_its_comment() -> None:
    """Who reads the table of README, or the page with the options, knows all words to choose from."""
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher.config")
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", README, re.MULTILINE))
    page = (ROOT / "docs/options.md").read_text(encoding="utf-8")
    confs = (config_module.DDPSubprocessLauncherConf, config_module.DDPSubmititSlurmConf)
    types = {name: hint for conf in confs for name, hint in get_type_hints(conf).items()}
    words = {
        name: [word.value for word in one]
        for name, hint in types.items()
        for one in (hint, *get_args(hint))
        if isinstance(one, type) and issubclass(one, Enum)
    }
    assert len(words) >= 6
    for name, some in words.items():
        (comment,) = set(re.findall(rf"^### {name}\n\n(.*)$", page, re.MULTILINE))
        assert [word for word in some if f"`{word}`" not in rows[name]] == [], name
        assert [word for word in some if re.search(rf"\b{word}\b", comment) is None] == [], name


def test_no_option_is_dead() -> None:
    """Each is used beyond its reading, a test of the whole sets it, and a page beside the list of options names it."""
    package = ROOT / "hydra_plugins/hydra_ddp_subprocess_launcher"
    used = [file for file in package.rglob("*.py") if file.stem not in ("config", "settings")]
    pages = [page for page in (ROOT / "docs").glob("*.md") if page.stem != "options"]
    where = {"used": used, "tested": (ROOT / "tests/integration").rglob("*.py"), "documented": pages}
    for what, files in where.items():
        text = "".join(file.read_text(encoding="utf-8") for file in files)
        suffix = "=" if what == "tested" else r"\b"
        names = [*options(config_module.DDPSubprocessLauncherConf), "on_interrupt"]
        assert [name for name in names if re.search(rf"\b{name}{suffix}", text) is None] == [], what


def test_every_extra_is_named() -> None:
    """What can be installed beside the package stands in the README, in the form in which it is typed."""
    setup = ast.parse((ROOT / "setup.py").read_text(encoding="utf-8"))
    (extras,) = (
        word.value for word in ast.walk(setup) if isinstance(word, ast.keyword) and word.arg == "extras_require"
    )
    assert isinstance(extras, ast.Dict)
    named = {extra for group in re.findall(r"\[([\w,]+)\]\"", README) for extra in group.split(",")}
    assert {ast.literal_eval(key) for key in extras.keys if key is not None} == named
