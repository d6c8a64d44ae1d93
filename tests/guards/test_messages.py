"""The page with all messages is that of the sources, and each message says what to do."""

from __future__ import annotations

import ast
import importlib.util
import re
from types import ModuleType

import pytest

from hydra_plugins.hydra_ddp_subprocess_launcher import _failures, _importing
from hydra_plugins.hydra_ddp_subprocess_launcher._specs import StopReason
from support.documented import ROOT, text_of

PAGE = ROOT / "docs/errors.md"
# These say all that there is to say: what to do is in what they hand on, or nothing is to be done.
ENOUGH = {
    "hydra.launcher.preload has no effect: REASON",
    "It runs on NNODES nodes, but GONE.",
    "The sweep cannot begin: GONE.",
    "Node JOB cannot go on: GONE.",
    "#JOB : is not preloaded: WHY",
    "This job was not run: WHY.",
    "N JOBS failed (max_failures=N): no more jobs are started",
    "Stopped by STOPPED_BY: LEFT of JOBS jobs did not complete",
    "preload: LEFT_OUT is left out: WHY",
    "NAME: cancelling SAID (once more: do not wait)",
    "No job of this sweep was started, so there is no timeline yet.",
    "FOLDER is not there: the run directory of job JOB was moved or deleted.",
}
# How such a message ends that hands on an error of the user's, of the system or of the cluster, or names what there is.
HANDS_ON = re.compile(r": (ERROR|FILE|HAS)\.?$")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("errors_page", ROOT / "docs/errors.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


def test_the_page_is_up_to_date(script: ModuleType) -> None:
    """It is what docs/errors.py makes of the sources."""
    assert script.page() == text_of(script.PAGE), "run `python docs/errors.py`"


def test_every_module_with_messages_has_a_section(script: ModuleType) -> None:
    """None is left out, and no section names a module that is not there."""
    named = [module for modules in script.SECTIONS.values() for module in modules]
    assert len(named) == len(set(named))
    assert set(script.messages()) <= set(named)
    assert all((script.PACKAGE / f"{module}.py").exists() for module in named)


def test_each_message_says_what_to_do(script: ModuleType) -> None:
    """After what happened and why comes what to do, or what follows, but for a few where that is all."""
    short = {said for of in script.messages().values() for said in of if not script.halves(said)[1]}
    assert {said for said in short if HANDS_ON.search(said) is None} == ENOUGH


def functions(module: ModuleType, name: str) -> list[ast.FunctionDef]:
    """Return the functions of a module that have such a name."""
    assert module.__file__ is not None
    with open(module.__file__, encoding="utf-8") as file:
        tree = ast.parse(file.read())
    return [one for one in tree.body if isinstance(one, ast.FunctionDef) and re.search(name, one.name)]


def words_of(texts: list[ast.expr]) -> list[str]:
    """Return what stands for itself in texts, between what is filled in."""
    parts = [part for one in texts if isinstance(one, ast.JoinedStr) for part in one.values]
    words = [part.value.strip(" :,()") for part in parts if isinstance(part, ast.Constant)]
    return [word for word in words if " " in word]


def test_why_a_module_cannot_be_shared_is_on_the_page() -> None:
    """Each reason has a row on the page about fast start."""
    page = text_of(ROOT / "docs/preload.md")
    found = [one for of in functions(_importing, "_fault$|^import_module$") for one in ast.walk(of)]
    reasons = words_of([one for one in found if isinstance(one, ast.JoinedStr)])
    assert len(reasons) >= 8
    assert [words for words in reasons if words not in page] == []


def test_how_a_job_can_fail_is_on_the_page() -> None:
    """Each reason for which a keeper ends its group, and each sentence about a rank that failed, has a row."""
    page = text_of(PAGE)
    own_words = (StopReason.RANK_FAILED, StopReason.FAILURE_LINGERS, StopReason.START_FAILED, StopReason.LINGERING)
    for reason in set(StopReason) - set(own_words):
        assert f"the job was ended because {reason.value} |" in page, reason
    (describe,) = functions(_failures, "^describe$")
    returned = [one.value for one in ast.walk(describe) if isinstance(one, ast.Return)]
    said = words_of([one.elts[0] for one in returned if isinstance(one, ast.Tuple)])
    assert len(said) >= 8
    for words in said:
        assert words in page.replace("(timeout_min)", ""), words
    for advice in (_failures.LOST_PEER_ADVICE, _failures.SPAWN_ADVICE):
        assert re.split(r"[,(]", advice)[0].strip() in page
