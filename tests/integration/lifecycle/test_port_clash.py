"""What happens when somebody takes the port of a job after all."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from support.runner import Runner

# Rank 0 listens as torch's TCPStore does, and says what it says; the first time, the program itself has taken the port.
APP = """
import os, socket
import hydra

@hydra.main(version_base="1.3", config_path=None)
def main(cfg):
    port = int(os.environ["MASTER_PORT"])
    if os.environ["RANK"] != "0":
        return
    with open(os.path.join({folder!r}, "ports"), "a") as file:
        file.write(f"{{port}}\\n")
    print("attempt on", port)
    if {taken} and (cfg.always or open(os.path.join({folder!r}, "ports")).read().count("\\n") == 1):
        named = port if cfg.ours else 6006
        raise RuntimeError(f"The server socket has failed to bind. port: {{named}}, code: -98, name: EADDRINUSE, "
                           "message: address already in use")
    with socket.create_server(("127.0.0.1", port)):
        return port

if __name__ == "__main__":
    main()
"""


@pytest.mark.sample("once")
@pytest.mark.parametrize(
    ("always", "ours", "starts", "returncode"),
    [
        pytest.param(False, True, 2, 0, id="once"),
        pytest.param(True, True, 2, 1, id="again and again"),
        pytest.param(False, False, 1, 1, id="another port"),
    ],
)
def test_a_job_whose_port_was_taken_starts_once_more(
    runner: Runner, tmp_path: Path, always: bool, ours: bool, starts: int, returncode: int
) -> None:
    """The group starts on another port, once; a job that fails for another reason, or another port, does not."""
    app = tmp_path / "app.py"
    app.write_text(APP.format(folder=str(tmp_path), taken=True))
    ran = runner.sweep(app, f"+always={always}", f"+ours={ours}")
    ports = (tmp_path / "ports").read_text().split()
    assert (len(ports), ran.returncode) == (starts, returncode), ran.output
    assert len(set(ports)) == starts
    assert ran.output.count("was taken") == starts - 1
    folder = runner.cwd / "sweep" / "0" / ".ddp"
    earlier = sorted(entry.name for entry in folder.iterdir() if entry.name.startswith("earlier"))
    assert earlier == ["earlier_0"][: starts - 1]
    if earlier:
        assert ports[0] in (folder / "earlier_0" / "rank_0.log").read_text()


def test_rank_0_can_listen_on_the_reserved_port(runner: Runner, tmp_path: Path) -> None:
    """The reservation keeps others away, not rank 0."""
    app = tmp_path / "app.py"
    app.write_text(APP.format(folder=str(tmp_path), taken=False))
    ran = runner.sweep(app, "+always=false", "+ours=true")
    assert ran.returncode == 0, ran.output
