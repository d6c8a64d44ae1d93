"""What the source of a program tells about what it does when it is imported."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from hydra_plugins.hydra_ddp_subprocess_launcher.job.program import config_values_from, find_calls

SOURCE = """
import os
from dataclasses import dataclass, field

LOCAL = int(os.environ.get("LOCAL_RANK", -1))
OTHER = os.environ.get("HOME")

@dataclass
class Config:
    direct: int = int(os.environ["RANK"]) if "RANK" in os.environ else 0
    by_get: str = os.environ.get("RANK", "0")
    by_getenv: str = os.getenv("WORLD_SIZE", "1")
    by_name: int = LOCAL
    by_factory: int = field(default_factory=lambda: int(os.environ.get("LOCAL_RANK", 0)))
    resolved: str = "${oc.env:RANK,0}"
    named: str = "RANK"
    home: str | None = OTHER
    plain: int = 1
"""


def test_fields_that_are_made_from_a_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However a field's default is read, also by a name of the module; what is resolved later is no such field."""
    (tmp_path / "of_rank_values.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    module = importlib.import_module("of_rank_values")
    # It stays only for as long as the test.
    monkeypatch.delitem(sys.modules, "of_rank_values")
    monkeypatch.setitem(sys.modules, "of_rank_values", module)
    found = config_values_from(module.Config, ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    assert {value.name: value.variable for value in found} == {
        "direct": "RANK",
        "by_get": "RANK",
        "by_getenv": "WORLD_SIZE",
        "by_name": "LOCAL_RANK",
        "by_factory": "LOCAL_RANK",
    }
    assert found[0].place == f"{tmp_path / 'of_rank_values.py'}:10"


def test_classes_without_a_source() -> None:
    """Nothing is claimed of them."""
    assert config_values_from(int, ("RANK",)) == []
    assert config_values_from(type("Made", (), {}), ("RANK",)) == []


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("def f():\n    init()\n", []),
        ("f = lambda: init()\n", []),
        ("import m\nif __name__ == '__main__':\n    m.init('gloo')\n", [3]),
        ("def f():\n    init()\ntry:\n    init()\nfinally:\n    init()\n", [4, 6]),
        ("no python", []),
    ],
)
def test_where_a_function_is_called(tmp_path: Path, source: str, lines: list[int]) -> None:
    """Only what runs when the program is started counts."""
    path = str(tmp_path / "app.py")
    Path(path).write_text(source)
    assert find_calls(path, "init") == lines
    assert find_calls(str(tmp_path / "none.py"), "init") == []
