"""What README and docs/ tell people to type, read out of them."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
DOCS = sorted((ROOT / "docs").glob("*.md"))
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
PAGES = [README, *DOCS]
# A comment that is not shown, directly before a block, tells the tests what is particular about it.
_BLOCK = re.compile(r"(?:<!-- (?P<mark>[^\n]*) -->\n)?```(?P<kind>\w+)\n(?P<text>.*?)```", re.DOTALL)
# A command in a table or within a line, and one that is indented.
_IN_LINE = re.compile(r"`(?P<command>python train\.py [^`]*)`")
_INDENTED = re.compile(r"^    (?:\$ )?(?P<command>(?:python|hydra-ddp) (?:[^\n]*\\\n)*[^\n]*)$", re.MULTILINE)
# Likewise, with the host on which it is typed.
_ON_HOSTS = re.compile(r"^    host-\w\$ (?P<command>(?:[^\n]*\\\n)*[^\n]*)$", re.MULTILINE)
# What README tells to type first: install, and run.
_QUICK_START = re.compile(r"^    python3 -m pip install [^&\n]* && python3 (?P<run>example_app/[^\n]*)$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A block of a page. `mark` is what the comment before it says."""

    kind: str
    mark: str
    lines: tuple[str, ...]


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def blocks(page: Path) -> list[Block]:
    """Return the marked-up blocks of a page, and the commands that stand within its lines, in the order of the page."""
    text = text_of(page)
    found = [
        (match.start(), Block(match["kind"], match["mark"] or "", tuple(match["text"].splitlines())))
        for match in _BLOCK.finditer(text)
    ]
    inside = re.compile(r"```\w+\n.*?```", re.DOTALL).sub(lambda match: " " * len(match[0]), text)
    found += [
        (match.start(), Block("bash", "", (match["command"].replace("\\\n", " "),)))
        for pattern in (_IN_LINE, _INDENTED)
        for match in pattern.finditer(inside)
        if "…" not in match["command"]
    ]
    on_hosts = [match["command"].replace("\\\n", " ") for match in _ON_HOSTS.finditer(inside)]
    found += [(len(text), Block("bash", "together", tuple(on_hosts)))] if on_hosts else []
    return [block for _, block in sorted(found, key=lambda one: one[0])]


def commands(page: Path, mark: str) -> list[str]:
    """Return the commands of a page that have a mark."""
    return [line for block in blocks(page) if block.kind == "bash" and block.mark == mark for line in block.lines]


def config(page: Path, mark: str) -> str:
    """Return the one piece of config of a page that has a mark."""
    (found,) = [block for block in blocks(page) if block.kind == "yaml" and block.mark == mark]
    return "\n".join(found.lines) + "\n"


def quick_start() -> list[str]:
    """Return program and arguments of the example that README starts with."""
    (run,) = _QUICK_START.findall(text_of(README))
    return shlex.split(run)
