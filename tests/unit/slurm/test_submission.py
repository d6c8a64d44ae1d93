"""A job on its way to a cluster: where its id belongs, and what of it is sent."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

from hydra_plugins.hydra_ddp_subprocess_launcher.common import quoting
from hydra_plugins.hydra_ddp_subprocess_launcher.common.protocol import JOB_ID_TOKEN
from hydra_plugins.hydra_ddp_subprocess_launcher.job.environment import error_file
from support.starts import launch_spec, submitted


def test_settled() -> None:
    """Wherever the id's place is held, there is the id: in the run directory, the command, variables and files."""
    run_dir = f"/sweep/of_{JOB_ID_TOKEN}"
    job = submitted(Path("/x"), run_dir)
    spec = launch_spec(
        run_dir, 2, argv=("python", f"run_dir={run_dir}"), env_set={"A": f"id {JOB_ID_TOKEN}", "B": "plain"}
    )
    settled = replace(job, spec=spec).with_job_id("7_1")
    assert settled.spec.run_dir == settled.payload.run_dir == "/sweep/of_7_1"
    assert settled.spec.argv == ("python", "run_dir=/sweep/of_7_1")
    assert settled.spec.env_set == {"A": "id 7_1", "B": "plain"}
    assert error_file(settled.spec, 0).startswith("/sweep/of_7_1/")
    assert settled.payload.job_id == "7_1"
    assert JOB_ID_TOKEN not in repr(settled)


def test_a_job_whose_directory_does_not_depend_on_the_id() -> None:
    """It is sent as it is, but for the id."""
    job = submitted(Path("/x"))
    assert job.with_job_id("7").spec == job.spec
    assert job.with_job_id("7").payload.job_id == "7"


def test_it_can_be_sent() -> None:
    """It comes through a pickle as it was."""
    job = submitted(Path("/x"), seed="42")
    assert pickle.loads(pickle.dumps(job)) == job


def test_no_quoting_changes_the_place_of_the_id() -> None:
    """Neither a shell's nor that of a rank's command."""
    assert quoting.shell_words([JOB_ID_TOKEN]) == JOB_ID_TOKEN
    assert quoting.hydra_quoted(JOB_ID_TOKEN).strip("'") == JOB_ID_TOKEN
    assert quoting.decode(JOB_ID_TOKEN) == JOB_ID_TOKEN
