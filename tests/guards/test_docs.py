"""The pages in docs/ and README say what is so: links lead somewhere, and options are there."""

from __future__ import annotations

import argparse
import importlib.util
import re
import shlex
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from hydra_plugins.hydra_ddp_subprocess_launcher import __version__ as version
from hydra_plugins.hydra_ddp_subprocess_launcher import config as options
from hydra_plugins.hydra_ddp_subprocess_launcher.cli import main
from hydra_plugins.hydra_ddp_subprocess_launcher.job.settings import read_settings
from hydra_plugins.hydra_ddp_subprocess_launcher.slurm.submitit_api import read_cluster
from support.documented import CONTRIBUTING, DOCS, PAGES, README, ROOT, blocks, text_of

if TYPE_CHECKING:
    pass

MOVING = ROOT / "docs/moving.md"


def test_the_marks_are_known() -> None:
    """Nothing is left out by a mark with a slip of the pen."""
    marks = {block.mark for page in PAGES for block in blocks(page)}
    assert {mark for mark in marks if not mark.startswith("fails: ")} == {
        "",
        "torch",
        "together",
        "config",
        "experiment",
    }
    assert {block.kind for page in PAGES for block in blocks(page)} == {"bash", "yaml", "mermaid"}


# --- options and sub-commands


def known_options() -> dict[str, set[str]]:
    """Return the names of the options of each launcher."""
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    launchers = (options.DDPSubprocessLauncherConf, options.DDPSubmititSlurmConf, options.DDPSubmititLocalConf)
    return {one.__name__: {field.name for field in fields(one)} - {"_target_"} for one in launchers}


def test_the_options_page_is_up_to_date() -> None:
    """It is what docs/options.py makes of config.py."""
    known_options()
    spec = importlib.util.spec_from_file_location("options_page", ROOT / "docs/options.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.page() == text_of(script.PAGE), "run `python docs/options.py`"


def test_every_option_of_every_launcher_is_on_the_options_page() -> None:
    """Ours have a heading each, and submitit's are named."""
    text = text_of(ROOT / "docs/options.md")
    named = set(re.findall(r"^### (\w+)$", text, re.MULTILINE)) | set(re.findall(r"`(\w+)` \(", text))
    assert named == set().union(*known_options().values())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_no_page_names_an_option_that_is_not_there(page: Path) -> None:
    """What stands as `hydra.launcher.NAME` is an option."""
    known = set().union(*known_options().values())
    text = text_of(page)
    # What other launchers have stands in the first column of the tables of that page.
    ours = re.sub(r"^\| .*? \|", "", text, flags=re.MULTILINE) if page == MOVING else text
    assert set(re.findall(r"hydra\.launcher\.([a-z]\w*)", ours)) <= known


def spans(page: Path) -> list[str]:
    """Return what stands in code within the lines of a page, but for what other launchers have."""
    text = re.sub(r"```.*?```", "", text_of(page), flags=re.DOTALL)
    ours = re.sub(r"^\| .*? \|", "", text, flags=re.MULTILINE) if page == MOVING else text
    return re.findall(r"`([^`\n]+)`", ours)


def values_of(span: str) -> dict[str, Any]:
    """Return the options of the launcher that a piece of code sets; none where it is a command, or to be filled in."""
    if span.startswith(("python", "hydra-ddp", "pip")) or "…" in span:
        return {}
    parser, found = OverridesParser.create(), {}
    for word in shlex.split(span):
        match = re.fullmatch(r"\+?(hydra\.launcher\.)?([a-z]\w*)=(.*)", word)
        # Without the prefix `devices=2` is Lightning's.
        if match and (match[1] or match[2] != "devices" or match[3].startswith("[")):
            found[match[2]] = parser.parse_override(f"{match[2]}={match[3]}").value()
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_values_that_a_page_names_can_be_used(page: Path) -> None:
    """What stands in code as `NAME=VALUE` is taken by a launcher that has such an option."""
    known = known_options()
    for span in spans(page):
        set_here = values_of(span)
        has = [name for name, of in known.items() if set_here and set(set_here) <= of]
        if not has:
            assert not any(f"hydra.launcher.{name}=" in span for name in set_here), span
            continue
        conf = OmegaConf.merge(OmegaConf.structured(getattr(options, has[0])), set_here)
        taken = OmegaConf.to_container(conf, resolve=False)
        if has[0] == options.DDPSubprocessLauncherConf.__name__:
            read_settings(taken)
        else:
            read_cluster(taken, "slurm" if "Slurm" in has[0] else "local")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_forms_of_hydra_ddp_that_a_page_names_are_understood(page: Path) -> None:
    """Those in tables and within lines, with what is in brackets and without it."""
    filled = {"JOB": "0", "RANK": "1", "N": "0", "DIR": ".", "SWEEP_DIR": ".", "FILE": "a.svg", "FILE.svg": "a.svg"}
    for span in spans(page):
        if re.match(r"hydra-ddp \w+ ", span):  # Otherwise it is the name of a sub-command.
            for form in (re.sub(r"\[[^]]*\]", "", span), re.sub(r"[][]", "", span)):
                main._parser().parse_args([filled.get(word, word) for word in form.split()[1:]])


def test_each_sub_command_of_hydra_ddp_is_documented() -> None:
    """It stands with its name in README and on the page about logs."""
    parser = main._parser()
    (action,) = [one for one in parser._actions if isinstance(one, argparse._SubParsersAction)]
    for page in (README, ROOT / "docs/logs-and-debugging.md"):
        assert set(re.findall(r"hydra-ddp (\w+)", text_of(page))) >= set(action.choices), page


def test_what_contributing_tells_to_type_is_there() -> None:
    """Files, sessions of nox and tests that its commands name."""
    text = text_of(CONTRIBUTING)
    for file in re.findall(r"\b(?:tests|docs)/[\w/-]+\.\w+", text):
        assert (ROOT / file).exists(), file
    sessions = re.findall(r"^@nox\.session.*\n(?:@.*\n)*def (\w+)\(", text_of(ROOT / "noxfile.py"), re.MULTILINE)
    for named in re.findall(r"nox -s ([\w ]+)`", text):
        assert set(named.split()) <= set(sessions)
    (listed,) = re.findall(r"lists the sessions: ([^.]*(?:\.\d[^.]*)*)\.", text)
    assert set(re.findall(r"`(\w+)`", listed)) == set(sessions)
    for file, words in re.findall(r"pytest (\S+) -k (\w+)", text):
        assert re.search(rf"def test_\w*{words}", text_of(ROOT / file))


def test_version_and_changelog() -> None:
    """The citation has the package's version, and the changelog has headings that tools can read."""
    assert f"\nversion: {version}\n" in text_of(ROOT / "CITATION.cff")
    changes = text_of(ROOT / "CHANGELOG.md")
    for heading in re.findall(r"^## (.*)$", changes, re.MULTILINE):
        assert re.fullmatch(r"\[Unreleased\]|\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", heading), heading


# --- links


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", text_of(page), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, CONTRIBUTING], ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    """Files and headings of this repository that a page links to are there."""
    for link in re.findall(r"\]\(([^)\s]+)\)", text_of(page)):
        if "://" in link:
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_the_readme_links_every_page() -> None:
    """Who reads the front page finds all others."""
    links = set(re.findall(r"\]\(docs/([\w-]+\.md)", text_of(README)))
    assert links == {page.name for page in DOCS}
