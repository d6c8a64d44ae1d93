"""Overrides and recipes survive the way to a rank, whatever they hold."""

from __future__ import annotations

from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hydra_plugins.hydra_ddp_subprocess_launcher.common import quoting
from hydra_plugins.hydra_ddp_subprocess_launcher.common.protocol import TaskId
from hydra_plugins.hydra_ddp_subprocess_launcher.common.quoting import ComposeArgs
from hydra_plugins.hydra_ddp_subprocess_launcher.job import program
from hydra_plugins.hydra_ddp_subprocess_launcher.job.program import Program

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
