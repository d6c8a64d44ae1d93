"""Lines for a shell, and values for Hydra: both read them back as what they were made from."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hydra_plugins.hydra_ddp_subprocess_launcher.common import quoting
from hydra_plugins.hydra_ddp_subprocess_launcher.common.protocol import TaskId
from hydra_plugins.hydra_ddp_subprocess_launcher.common.quoting import (
    GIVEN_JOBS,
    ComposeArgs,
    overrides_again,
    overrides_of_given_jobs,
    rank_line,
    repeat_line,
    shell_comment,
    shell_words,
)
from hydra_plugins.hydra_ddp_subprocess_launcher.job import program
from hydra_plugins.hydra_ddp_subprocess_launcher.job.program import Program

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


# --- values for Hydra

PYTHON = "/usr/bin/python3"
ODD_OVERRIDES = (
    "lr=0.1",
    "s='a b'",
    'q="it\'s"',
    "+a.b=[1,{c:2}]",
    "t=${now:%Y}",
    "esc=\\'x\\\\",
    "p=100%",
    "nl=a\nb\tc",
    "u=ünïcode €",
    "bytes=\udcff\udc80",
    "ascii=\udcc3\udca4",
    "~gone",
    "k=v w  x",
    "e=",
    "nul=\0",
)
# Anything that a command line can hold: text, and bytes as Python shows them; under an ASCII locale those of text, too.
characters = st.characters(exclude_categories=["Cs"]) | st.characters(min_codepoint=0xDC80, max_codepoint=0xDCFF)
override_strings = st.text(characters, min_size=1)


@given(st.lists(override_strings))
@example(list(ODD_OVERRIDES))
def test_overrides_come_back(overrides: list[str]) -> None:
    """Encoding is inverted by decoding, whatever the overrides hold."""
    encoded = quoting.encode_overrides(overrides)
    assert encoded is not None
    assert quoting.decode_overrides(encoded) == tuple(overrides)


@given(st.lists(override_strings, max_size=4), override_strings)
@example(list(ODD_OVERRIDES), "/runs/it's 100% \udcff/${x}")
@settings(max_examples=50, deadline=None)
def test_a_command_passes_hydras_grammar(overrides: list[str], run_dir: str) -> None:
    """Both values reach the rank's sweeper as they are when Hydra parses the rank's command."""
    command = program.program_command((), Program((PYTHON, "app.py"), "/", "app.py"), (), run_dir, overrides)
    parsed = OverridesParser.create().parse_overrides(list(command[-2:]))
    values = {override.key_or_group: str(override.value()) for override in parsed}
    assert quoting.decode(values["hydra.sweeper.run_dir"]) == run_dir
    assert quoting.decode_overrides(values["hydra.sweeper.overrides"]) == tuple(overrides)


@given(st.one_of(st.none(), override_strings), st.lists(override_strings, min_size=1, max_size=4))
@example("sub/it's \udcff", list(ODD_OVERRIDES))
@settings(max_examples=50, deadline=None)
def test_a_recipe_passes_hydras_grammar(config_name: str | None, hydra_overrides: list[str]) -> None:
    """What a rank needs to compose its config reaches its sweeper as it is."""
    compose_args = ComposeArgs(config_name, tuple(hydra_overrides), TaskId("__main__", "make.<locals>.main", 2))
    parsed = OverridesParser.create().parse_overrides(list(quoting.compose_arguments(compose_args)))
    options = {override.key_or_group.removeprefix("hydra.sweeper."): str(override.value()) for override in parsed}
    assert (
        quoting.read_compose_args(options.get("config_name"), options["hydra_overrides"], options["task"])
        == compose_args
    )


def test_a_rank_with_a_payload_has_no_recipe() -> None:
    """Without the options there is nothing to compose from."""
    assert quoting.read_compose_args(None, None, None) is None


@given(override_strings)
@example("/it's \\' \\\\")
@example("ends with \\\n")
@settings(max_examples=200, deadline=None)
def test_a_quoted_value_passes_hydras_grammar(text: str) -> None:
    """A value comes back as it is; what Hydra would resolve in it is not its business."""
    value = OverridesParser.create().parse_override(f"key={quoting.hydra_quoted(text)}").value()
    assert str(value) == text


def test_common_overrides_stay_readable() -> None:
    """What people write most is to be read in `ps` as it was written."""
    overrides = ("lr=0.1", "model=cnn", "+trainer.devices=[0,1]", "~x", "db@pkg=a", "m=a-b_c", "a.b/c=x:y")
    assert quoting.encode_overrides(overrides) == " ".join(overrides)
