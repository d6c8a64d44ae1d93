"""The pages in docs/ say what is so: commands run, links lead somewhere, and options are there. So do README's."""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shlex
import sys
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from hydra_plugins.hydra_ddp_subprocess_launcher import __version__ as version
from hydra_plugins.hydra_ddp_subprocess_launcher import _cli
from hydra_plugins.hydra_ddp_subprocess_launcher import config as options
from hydra_plugins.hydra_ddp_subprocess_launcher._cluster import read_cluster
from hydra_plugins.hydra_ddp_subprocess_launcher._settings import read_settings
from support.documented import CONTRIBUTING, DOCS, PAGES, README, ROOT, Block, blocks, config, text_of

if TYPE_CHECKING:
    from support.runner import Ran, Runner
    from support.slurm_cluster import SlurmCluster

APP = """
import os

import hydra


@hydra.main(version_base=None, config_path="conf", config_name="config")
def main(cfg):
    print("rank", os.environ.get("RANK"), "of", os.environ.get("WORLD_SIZE"), "with lr", cfg.lr)
    return cfg.lr


if __name__ == "__main__":
    main()
"""
CONFIG = "lr: 0.1\nmodel: mlp\nseed: 0\ntrainer: {devices: 1}\n"
FAQ = ROOT / "docs/faq.md"
MOVING = ROOT / "docs/moving.md"
SLURM = ROOT / "docs/slurm.md"
DRY_RUN = "hydra.launcher.dry_run=true"


@pytest.fixture
def project(runner: Runner) -> Runner:
    """A project such as the pages have in mind, with `python` and `hydra-ddp` on the path."""
    files = {
        "train.py": APP,
        "conf/config.yaml": CONFIG,
        "conf/experiment/big.yaml": config(FAQ, "experiment"),
        "bin/python": f'#!/bin/sh\nexec "{sys.executable}" "$@"\n',
        "bin/hydra-ddp": f'#!/bin/sh\nexec "{sys.executable}" -m {_cli.__name__} "$@"\n',
    }
    for name, text in files.items():
        path = runner.cwd / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    return runner


def environment(project: Runner) -> dict[str, str]:
    return {"PATH": f"{project.cwd / 'bin'}:{os.environ['PATH']}"}


def quick(command: str, dry: bool = False) -> str:
    """Return a command as it runs here: without a cluster and a terminal, without other sweeps' devices, and soon."""
    if "--cfg" in command or DRY_RUN in command or "hydra/launcher" not in command:
        return command
    if dry or any(word in command for word in ("ddp_submitit_slurm", "range(", "debug=true")):
        return f"{command} {DRY_RUN}"
    return f"{command} hydra.launcher.lock_devices=false" if ".devices=[" in command else command


def runs_here(block: Block) -> bool:
    return block.kind == "bash" and block.mark not in ("torch", "together")


def start(project: Runner, command: str, dry: bool = False) -> Ran:
    return project.run("bash", "-c", quick(command, dry), env=environment(project))


# --- commands


@pytest.mark.parametrize(
    "page", [page for page in PAGES if any(map(runs_here, blocks(page)))], ids=lambda page: page.stem
)
def test_the_commands_of_a_page_run(project: Runner, page: Path) -> None:
    """All that a page tells to type works, in the order of the page, in one directory."""
    for block in filter(runs_here, blocks(page)):
        for command in block.lines:
            if command.startswith("pip install"):
                continue
            if "submitit" in command:
                pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
            if "timeline" in command:
                pytest.importorskip("matplotlib")
            # What is on these is run as it is on other pages; here it is enough that it is understood.
            ran = start(project, command, dry=page in (README, MOVING))
            expected = block.mark.removeprefix("fails: ") if block.mark.startswith("fails: ") else None
            assert (ran.returncode != 0) == (expected is not None), f"{command}\n{ran.output}"
            assert expected is None or expected in ran.output, f"{command}\n{ran.output}"


@pytest.mark.parametrize("page", [README, SLURM], ids=lambda page: page.stem)
def test_the_commands_for_two_nodes_run(project: Runner, page: Path) -> None:
    """Those that are typed on two nodes find each other, and each job has the ranks of both."""
    (block,) = [block for block in blocks(page) if block.mark == "together"]
    assert len(block.lines) == 2
    nodes = []
    for line in block.lines:
        here = re.sub(r"=(host|node)-a ", "=127.0.0.1 ", line.replace("=/shared/", "="))
        here = here.replace("nproc_per_node=4", "nproc_per_node=2")
        nodes.append(project.start("bash", "-c", here, env=environment(project)))
    for node in nodes:
        output = "".join(node.communicate(timeout=120))
        assert node.returncode == 0, output
    logs = [log.read_text() for log in project.cwd.glob("sweeps/*/*/.ddp/rank_*.log")]
    assert sorted(re.findall(r"rank (\d of \d with lr [\d.]+)", "".join(logs))) == [
        f"{rank} of 4 with lr {lr}" for rank in range(4) for lr in ("0.01", "0.1")
    ]


def test_the_command_for_a_cluster_submits(project: Runner, slurm: SlurmCluster) -> None:
    """Without `dry_run`, and with what the cluster of the tests has, jobs have the ranks of both nodes."""
    command = next(line for block in blocks(SLURM) for line in block.lines if "gpus_per_node=8" in line)
    for there, here in (("=8", "=2"), ("partition=gpu", "partition=test"), (DRY_RUN, "hydra.sweep.dir=sweeps/slurm")):
        assert there in command
        command = command.replace(there, here)
    ran = project.run("bash", "-c", command, env=environment(project), timeout_s=240)
    assert ran.returncode == 0, ran.output
    logs = [log.read_text() for log in project.cwd.glob("sweeps/slurm/*/.ddp/rank_*.log")]
    assert sorted(re.findall(r"rank (\d of \d with lr [\d.]+)", "".join(logs))) == [
        f"{rank} of 4 with lr {lr}" for rank in range(4) for lr in ("0.01", "0.1")
    ]


@pytest.mark.parametrize("page", [README, MOVING], ids=lambda page: page.stem)
def test_the_config_that_chooses_the_launcher(project: Runner, page: Path) -> None:
    """With the lines of the page in the config, plain `python train.py` starts two ranks."""
    (project.cwd / "conf/config.yaml").write_text(config(page, "config") + CONFIG)
    ran = start(project, "python train.py")
    assert ran.returncode == 0, ran.output
    assert "2 ranks each" in ran.output


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
                _cli._parser().parse_args([filled.get(word, word) for word in form.split()[1:]])


def test_each_sub_command_of_hydra_ddp_is_documented() -> None:
    """It stands with its name in README and on the page about logs."""
    parser = _cli._parser()
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
