"""Lines for a shell: bash reads them back as what they were made from."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import Any

import pytest

from hydra_plugins.hydra_ddp_subprocess_launcher.common.quoting import (
    GIVEN_JOBS,
    overrides_again,
    overrides_of_given_jobs,
    rank_line,
    repeat_line,
    shell_comment,
    shell_words,
)

NASTY = (
    "plain",
    "",
    " two  words ",
    "it's \"quoted\" `by` $HOME ${PATH} $(id) \\ \\\\ \\'",
    "!history; # & | > <",
    "line\none\r\ttab\x1b[31m",
    "Grüße 日本 é\u200b",
    "not\udce9unicode's \\",
    "-u",
    "a=b=c",
    "$'\\x41'\n",
)


def facts(**changes: Any) -> dict[str, Any]:
    return {
        "argv": ["env", "-0"],
        "cwd": "/",
        "environment": {},
        "environment_removed": [],
        "rank_environments": [{"RANK": "0"}, {"RANK": "1"}],
        **changes,
    }


def run(line: str, **environ: str) -> list[str]:
    """Return what bash prints for a line, at its zeros."""
    assert "\n" not in line
    done = subprocess.run(
        ["bash", "-c", os.fsencode(line)], env={"PATH": os.environ["PATH"], **environ}, capture_output=True, check=True
    )
    return os.fsdecode(done.stdout).split("\0")[:-1]


@pytest.mark.parametrize(
    ("word", "typed"),
    [
        ("lr=0.1,0.01", "lr=0.1,0.01"),
        (
            "hydra.sweep.dir=/home/me/multirun/2026-11-30/11-32-36",
            "hydra.sweep.dir=/home/me/multirun/2026-11-30/11-32-36",
        ),
        ("hydra.sweep.dir='/sweeps/lr=1'", "\"hydra.sweep.dir='/sweeps/lr=1'\""),
        ("hydra.launcher.devices=[0,1]", "'hydra.launcher.devices=[0,1]'"),
        ("name=${trainer.name}", "'name=${trainer.name}'"),
        ("it's $HOME", "'it'\"'\"'s $HOME'"),
    ],
)
def test_words_are_quoted_as_one_would_type_them(word: str, typed: str) -> None:
    """No more quotes than needed, and single ones within double ones where nothing else is special."""
    assert shell_words([word]) == typed
    assert run(f"printf '%s\\0' {typed}") == [word]


def test_words_come_back() -> None:
    """Every word is read as it was, and stands on one line."""
    assert run(f"printf '%s\\0' {shell_words(NASTY)}") == list(NASTY)


@pytest.mark.parametrize("value", NASTY)
def test_values_come_back(value: str) -> None:
    """A variable has its value, the rank its own, and what is to be removed is gone."""
    line = rank_line(facts(environment={"SOME": value, "RANK": "7"}, environment_removed=["GONE", "-S x"]), 1)
    found = run(line, GONE="here", STAYS="here")
    assert f"SOME={value}" in found
    assert "RANK=1" in found
    assert "STAYS=here" in found
    assert not any(one.startswith("GONE=") for one in found)


def test_secrets_are_taken_from_the_shell() -> None:
    """What stands as `$NAME` is filled in by the shell; a value that only looks like that is taken as it stands."""
    line = rank_line(facts(environment={"MY_TOKEN": "$MY_TOKEN", "OTHER": "$MY_TOKEN"}), 0)
    found = run(line, MY_TOKEN='it\'s $a "secret"')
    assert 'MY_TOKEN=it\'s $a "secret"' in found
    assert "OTHER=$MY_TOKEN" in found


def test_the_directory(tmp_path: Any) -> None:
    """The command runs where the rank would."""
    folder = tmp_path / NASTY[3].replace("/", "_")
    folder.mkdir()
    assert run(rank_line(facts(argv=["printf", "%s\\0", "here"], cwd=str(folder)), 0)) == ["here"]
    assert run(rank_line(facts(argv=["bash", "-c", "printf '%s\\0' \"$PWD\""], cwd=str(folder)), 0)) == [str(folder)]


def test_a_rank_that_is_not_there() -> None:
    """There is no command for a rank that the job does not have."""
    with pytest.raises(IndexError):
        rank_line(facts(), 2)


@pytest.mark.parametrize("text", NASTY)
def test_comments_do_nothing(text: str) -> None:
    """A comment is one line over which the shell passes."""
    line = shell_comment(text)
    assert line.startswith("# ")
    assert "\r" not in line
    assert run(line) == []


# --- the failed jobs again


def test_the_sweep_of_the_failed_jobs() -> None:
    """It has the sweep's own options; what the sweeper would not propose again is given to Hydra's own, elsewhere."""
    ours = ["hydra/launcher=ddp_subprocess", "hydra.launcher.nproc_per_node=2"]
    typed = ["hydra.mode=MULTIRUN", *ours, "hydra.sweep.dir=x"]
    assert overrides_again([*typed, "hydra.launcher.resume=unfinished"], "/sweeps/it's", resume="failed") == [
        "hydra/launcher=ddp_subprocess",
        "hydra.launcher.nproc_per_node=2",
        "hydra.sweep.dir='/sweeps/it\\'s'",
        "hydra.launcher.resume=failed",
    ]
    sampled = ["+hydra/sweeper=optuna", "hydra/sweeper/sampler=random", "hydra.sweeper.n_trials=3"]
    short, whole = overrides_of_given_jobs([*typed, *sampled], "/one")
    assert short == [*ours, "hydra/sweeper=basic", "hydra.sweep.dir=/one"]
    assert whole == [*ours, *sampled, f"hydra.sweeper._target_={GIVEN_JOBS}", "hydra.sweep.dir=/one"]


@pytest.mark.parametrize("found", [True, False])
def test_the_line_that_repeats_a_rank(found: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The console command is named as the shell finds it, else by its path."""
    monkeypatch.setattr(shutil, "which", lambda _name: "/bin/hydra-ddp" if found else None)
    program = "hydra-ddp" if found else os.path.join(os.path.dirname(sys.executable), "hydra-ddp")
    line = repeat_line("/a sweep/it's", 3, 1)
    assert line == f'eval "$({program} command -d "/a sweep/it\'s" 3 1)"'
