"""Several jobs at once, each on its own devices, in one sweep and between sweeps. A device is an id; no GPU needed."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hydra_plugins.hydra_ddp_subprocess_launcher.resources.devices import FOLDER, DeviceLocks
from support.notes import (
    BEHAVE,
    Notes,
    alive,
    assert_nothing_left,
    assert_one_clear_error,
    behave,
    behave_environment,
    descendants,
    finish,
    state_of,
)
from support.runner import APPS, NOISE_S, PATIENCE_S, Runner

if TYPE_CHECKING:
    import subprocess

VARIABLE = "CUDA_VISIBLE_DEVICES"
RECORDING = "hydra/sweeper=recording"
MakeIds = Callable[[int], list[str]]
# An option, so that what is waited for in vain does not hang the tests.
LIMIT = "hydra.launcher.timeout_min=3"
SIZED = "hydra.launcher.nproc_per_node=${oc.select:size,1}"
PER_RANK = "hydra.launcher.devices_per_rank=${oc.select:wide,1}"


@pytest.fixture
def new_ids() -> Iterator[Callable[[int], list[str]]]:
    """Make ids of devices that no other sweep on this machine has."""
    stem = f"GPU-{uuid.uuid4().hex[:8]}"
    yield lambda count: [f"{stem}-{number}" for number in range(count)]
    for left in Path(FOLDER).glob(f"*{stem}*"):
        left.unlink()


def devices(ids: list[str]) -> str:
    return f"hydra.launcher.devices=[{','.join(ids)}]"


def seen(notes: Notes, job: int, rank: int = 0) -> str:
    return notes.environment(job, rank)[VARIABLE]


def spans(notes: Notes) -> dict[int, tuple[float, float]]:
    """Return when the first process of each job began and its last body ended, Unix time in seconds."""
    found: dict[int, tuple[float, float]] = {}
    for body in notes.all("body"):
        began = notes.read(f"process_{body['pid']}")["time"]
        ended = notes.read(f"end_{body['job']}_{body['rank']}")["time"]
        first, last = found.get(body["job"], (began, ended))
        found[body["job"]] = min(first, began), max(last, ended)
    return found


def most_at_once(*sweeps: Notes) -> int:
    """Return the most jobs that ran at one moment, and check that no two of them had a device in common."""
    jobs = [(*span, set(seen(notes, job).split(","))) for notes in sweeps for job, span in spans(notes).items()]
    most = 0
    for began, _, _ in jobs:
        now = [ids for first, last, ids in jobs if first <= began < last]
        assert len(set().union(*now)) == sum(map(len, now)), now
        most = max(most, len(now))
    return most


# --- one sweep


@pytest.mark.sample
def test_five_jobs_on_two_sets(runner: Runner, new_ids: MakeIds) -> None:
    """Five jobs of varied length on four ids, two each: no device twice, at most two jobs at once, all done."""
    ids = new_ids(4)
    lengths = [f"+j{job}.all=sleep:{seconds}" for job, seconds in enumerate((0.9, 0.2, 0.5, 0.1, 0.4))]
    ran, notes = behave(runner, "x=0,1,2,3,4", *lengths, devices(ids), RECORDING)
    assert ran.returncode == 0, ran.output
    assert notes.statuses() == ["COMPLETED"] * 5
    assert most_at_once(notes) == 2
    for job in range(5):
        # The whole set, in order, for both ranks: `cuda:LOCAL_RANK` is right.
        assert seen(notes, job, 0) == seen(notes, job, 1)
        assert seen(notes, job).split(",") in (ids[:2], ids[2:])
        assert {notes.environment(job, rank)["CUDA_DEVICE_ORDER"] for rank in (0, 1)} == {"PCI_BUS_ID"}
    assert (
        "Launching 5 jobs, 2 at a time, 2 ranks each, devices [" + "] [".join((",".join(ids[:2]), ",".join(ids[2:])))
        in ran.output
    )


def test_short_jobs_pass_a_long_one(runner: Runner, new_ids: MakeIds) -> None:
    """Of a long job and three short ones on two sets, all short ones run beside the long one, no sub-batches."""
    ran, notes = behave(runner, "x=0,1,2,3", "+j0.all=wait:end_3_0", devices(new_ids(2)), RECORDING, LIMIT, nproc=1)
    assert notes.statuses() == ["COMPLETED"] * 4, ran.output
    assert most_at_once(notes) == 2


def test_failed_jobs_give_their_devices_back(runner: Runner, new_ids: MakeIds) -> None:
    """Whatever becomes of a job, the next one gets its devices."""
    (one,) = new_ids(1)
    faults = ["+j0.all=raise", "+j1.all=exit:3", "+j2.all=kill:SIGKILL", "+j3.all=[children:9871,raise]"]
    _, notes = behave(runner, "x=0,1,2,3,4", *faults, devices([one]), RECORDING, nproc=1)
    assert notes.statuses() == ["FAILED"] * 4 + ["COMPLETED"]
    assert seen(notes, 4) == one


def test_jobs_that_share_a_device(runner: Runner, new_ids: MakeIds) -> None:
    """With `jobs_per_device=3` three jobs are on one device, and never four."""
    (one,) = new_ids(1)
    together = [f"+j{job}.all=[wait:body_0_0,wait:body_1_0,wait:body_2_0,sleep:0.2]" for job in range(3)]
    ran, notes = behave(
        runner, f"x={','.join(map(str, range(6)))}", *together, devices([one]), "hydra.launcher.jobs_per_device=3",
        RECORDING, LIMIT, nproc=1,
    )  # fmt: skip
    assert notes.statuses() == ["COMPLETED"] * 6, ran.output
    assert {seen(notes, job) for job in range(6)} == {one}
    times = spans(notes)
    assert max(sum(first <= began < last for first, last in times.values()) for began, _ in times.values()) == 3


def test_fewer_jobs_than_devices(runner: Runner, new_ids: MakeIds) -> None:
    """`max_parallel_jobs` bounds what the devices would allow."""
    ran, notes = behave(
        runner, "x=0,1,2", "+all=sleep:0.2", devices(new_ids(3)), "hydra.launcher.max_parallel_jobs=1", nproc=1
    )
    assert ran.returncode == 0
    assert most_at_once(notes) == 1


@pytest.mark.sample("3,5,7")
@pytest.mark.parametrize("visible", ["3,5,7", "MIG-a,MIG-b", "GPU-8a5b-1,GPU-8a5b-2"])
def test_what_the_launching_process_may_see(runner: Runner, visible: str) -> None:
    """The parent's visible devices are given out one by one, with the ids as they are."""
    ids = visible.split(",")
    together = [f"+j{job}.all=wait:body_{len(ids) - 1}_0" for job in range(len(ids))]
    jobs = ",".join(map(str, range(len(ids))))
    _, notes = behave(runner, f"x={jobs}", *together, RECORDING, LIMIT, nproc=1, env={VARIABLE: visible})
    assert notes.statuses() == ["COMPLETED"] * len(ids)
    assert [seen(notes, job) for job in range(len(ids))] == ids


def test_another_variable(runner: Runner) -> None:
    """On other hardware another variable shows a job its devices, and CUDA's stays as it was."""
    name = "HIP_VISIBLE_DEVICES"
    env = {name: "2,4", VARIABLE: "7"}
    _, notes = behave(runner, f"hydra.launcher.device_env_var={name}", RECORDING, env=env)
    assert notes.statuses() == ["COMPLETED"]
    assert (notes.environment(0, 1)[name], seen(notes, 0)) == ("2,4", "7")


@pytest.mark.parametrize(
    ("options", "env", "words"),
    [
        (["hydra.launcher.devices=[0]"], {VARIABLE: "3,5,7"}, ["'0'", f"{VARIABLE}=3,5,7"]),
        (["hydra.launcher.devices=[a,b]", "hydra.launcher.nproc_per_node=3"], {}, ["3 ranks", "only 2 devices"]),
        (["hydra.launcher.nproc_per_node=3"], {VARIABLE: "0,1"}, ["3 ranks", "only 2 devices"]),
        (["hydra.launcher.devices=[a,b]", "+size=1,4", SIZED], {}, ["Job 1 (x=1 +size=4)", "4 ranks", "only 2"]),
        (["hydra.launcher.devices=[a,b]", PER_RANK, "+wide=3"], {}, ["devices_per_rank=3 takes 3", "only 2 devices"]),
        (["hydra.launcher.devices=[a,b]", PER_RANK, "+wide=1,3"], {}, ["Job 1 (x=1 +wide=3)", "takes 3 devices"]),
        (["hydra.launcher.devices=[a,b]", "hydra.launcher.min_free_memory_gb=1"], {}, ["min_free_memory_gb=1", "NVML"]),
    ],
)
def test_what_can_never_run(runner: Runner, options: list[str], env: dict[str, str], words: list[str]) -> None:
    """It is one clear error before any job, not after hours."""
    ran, notes = behave(runner, "x=1,2,4", *options, nproc=1, env=env)
    assert_one_clear_error(ran, *words)
    assert notes.places() == []


def test_more_devices_than_can_be_locked(runner: Runner, new_ids: MakeIds) -> None:
    """A job with more locks than a process can be handed is one clear failure, and nothing is tried for ever."""
    many = new_ids(300)
    _, notes = behave(runner, "+size=300,1", SIZED, devices(many), RECORDING, nproc=1)
    assert notes.statuses() == ["FAILED", "COMPLETED"]
    assert "about 248 devices at most" in notes.returns()[0]["text"]


def test_a_size_of_its_own_for_each_job(runner: Runner, new_ids: MakeIds) -> None:
    """With an interpolation each job has the ranks and devices that its own config asks for, and small ones pass."""
    ids = new_ids(3)
    ran, notes = behave(runner, "+size=2,3,1", SIZED, "+j0.all=wait:end_2_0", devices(ids), RECORDING, LIMIT)
    assert notes.statuses() == ["COMPLETED"] * 3, ran.output
    assert [notes.environment(job, 0)["WORLD_SIZE"] for job in range(3)] == ["2", "3", "1"]
    assert [seen(notes, job).split(",") for job in range(3)] == [ids[:2], ids, ids[2:]]
    assert "Launching 3 jobs, 3 at a time, 1-3 ranks each, devices" in ran.output


def test_several_devices_for_a_rank(runner: Runner, new_ids: MakeIds) -> None:
    """Each job has as many devices as its ranks use together by its own config, all of which each rank sees."""
    ids = new_ids(4)
    sizes = ["+size=1,2", SIZED, "+wide=1,2", PER_RANK]
    ran, notes = behave(runner, *sizes, "x=0", devices(ids), RECORDING, LIMIT)
    assert notes.statuses() == ["COMPLETED"] * 4, ran.output
    wanted = {0: (1, 1), 1: (1, 2), 2: (2, 1), 3: (2, 2)}
    for job, (ranks, per_rank) in wanted.items():
        assert notes.environment(job, 0)["WORLD_SIZE"] == str(ranks)
        assert {len(seen(notes, job, rank).split(",")) for rank in range(ranks)} == {ranks * per_rank}
    most_at_once(notes)
    assert "Launching 4 jobs, 4 at a time, 1-2 ranks on 1-4 devices each" in ran.output


def test_auto_with_several_devices_for_a_rank(runner: Runner, new_ids: MakeIds) -> None:
    """`auto` is one rank for so many devices; what is left of the pool over the ranks is given to no job."""
    ids = new_ids(5)
    ran, notes = behave(
        runner, devices(ids), "hydra.launcher.nproc_per_node=auto", "hydra.launcher.devices_per_rank=2", RECORDING
    )
    assert notes.statuses() == ["COMPLETED"], ran.output
    assert notes.environment(0, 1)["WORLD_SIZE"] == "2"
    assert [seen(notes, 0, rank).split(",") for rank in (0, 1)] == [ids[:4]] * 2


def test_a_size_that_shows_late(runner: Runner, new_ids: MakeIds) -> None:
    """A sweeper that does not compose first: the job that does not fit fails alone, before its turn."""
    (one, two) = new_ids(2)
    ran, notes = behave(
        runner, "hydra/sweeper=unchecked", SIZED, devices([one, two]), LIMIT,
        env={"BEHAVE_OVERRIDES": "+size=1;+size=2;+size=3;+size=1"},
    )  # fmt: skip
    assert notes.statuses() == ["COMPLETED", "COMPLETED", "FAILED", "COMPLETED"]
    assert "A job of 3 ranks does not fit" in notes.returns()[2]["text"]
    assert ran.output.index("does not fit") < ran.output.index("#1 :")


def test_jobs_are_composed_ahead(runner: Runner) -> None:
    """A job that does not compose fails while the first one runs, and a file edited by then changes no job."""
    (runner.cwd / "conf").mkdir()
    for name in ("base", "one", "two"):
        (runner.cwd / "conf" / f"{name}.yaml").write_text(f"x: 0\nname: {name}\n")
    app = runner.cwd / "app.py"
    app.write_text(
        f"import sys\nsys.path.insert(0, {str(APPS)!r})\nimport behave, hydra\n\n\n"
        "@hydra.main(version_base=None, config_path='conf', config_name='base')\ndef main(cfg):\n"
        "    return behave.act(cfg)\n\n\nif __name__ == '__main__':\n    main()\n"
    )
    argv = [
        sys.executable, app, "-m", "hydra/launcher=ddp_subprocess", "hydra/sweeper=unchecked",
        f"hydra.sweep.dir={runner.cwd / 'sweep'}", "+j0.all=wait:go", "hydra.launcher.nproc_per_node=1",
    ]  # fmt: skip
    env = behave_environment(runner, BEHAVE_OVERRIDES="x=1;x=3 name=given;x=4;+one@_here_=none", PYTHONPATH=str(APPS))
    notes = Notes(runner.cwd / "notes")
    with runner.start(*argv, env=env) as process:
        assert process.stdout is not None
        said = ""
        # The last one to be composed.
        while "#3 : FAILED" not in said:
            line = process.stdout.readline()
            assert line, said
            said += line
        assert said.index("#0 : x=1") < said.index("#3 : FAILED")
        (runner.cwd / "conf" / "base.yaml").write_text("x: 0\nname: edited\n")
        (notes.folder / "go.json").write_text("{}")
        finish(process)
    assert notes.statuses() == ["COMPLETED", "COMPLETED", "COMPLETED", "FAILED"]
    assert [notes.read(f"body_{job}_0")["config"]["name"] for job in range(3)] == ["base", "given", "base"]


# --- several sweeps


@contextmanager
def sweeping(folder: Path, *overrides: str) -> Iterator[tuple[subprocess.Popen[str], Runner, Notes]]:
    """Have a sweep with one rank a job run meanwhile, in a folder of its own."""
    folder.mkdir()
    runner = Runner(folder)
    process = runner.start(
        sys.executable,
        BEHAVE,
        "-m",
        "hydra/launcher=ddp_subprocess",
        "hydra.launcher.nproc_per_node=1",
        f"hydra.sweep.dir={folder / 'sweep'}",
        RECORDING,
        LIMIT,
        *overrides,
        env=behave_environment(runner),
    )
    with process:
        try:
            yield process, runner, Notes(folder / "notes")
        finally:
            process.kill()


@pytest.mark.sample
def test_two_sweeps_on_the_same_devices(tmp_path: Path, new_ids: MakeIds) -> None:
    """Two sweeps started together share the devices without ever having one twice; who waits says for whom."""
    ids = devices(new_ids(2))
    jobs = ("x=0,1,2,3", "+all=sleep:0.2", ids)
    with sweeping(tmp_path / "a", *jobs) as (one, _, notes), sweeping(tmp_path / "b", *jobs) as (two, _, others):
        (code, output), (other_code, other_output) = finish(one), finish(two)
    assert code == other_code == 0, output + other_output
    # Once for each device, however often it changes hands.
    assert max(Counter(re.findall(r"Waiting .*", output)).values(), default=0) <= 1
    assert notes.statuses() == others.statuses() == ["COMPLETED"] * 4
    assert most_at_once(notes, others) <= 2
    waits = re.findall(
        r"Waiting for device (\S+): it is held by process (\d+), sweep (\S+)$", output + other_output, re.MULTILINE
    )
    assert waits
    for device, pid, sweep in waits:
        assert device in ids
        assert (int(pid), sweep) in ((one.pid, str(tmp_path / "a/sweep")), (two.pid, str(tmp_path / "b/sweep")))


@pytest.mark.parametrize("killed", ["launcher", "launcher and keeper"], ids=["launcher", "both"])
def test_devices_of_a_killed_sweep(tmp_path: Path, killed: str, new_ids: MakeIds) -> None:
    """After `kill -9` a sweep's devices are free at once when its last process has ended, and never before."""
    ids = new_ids(2)
    locks = DeviceLocks("the test")
    names = [f"{VARIABLE}={one}" for one in ids]
    jobs = ("x=0,1", "+all=[ignore,children:9872,hang]", devices(ids))
    with sweeping(tmp_path / "a", *jobs) as (process, runner, notes):
        runner.wait_until(lambda: len(notes.places()) == 2, what="two bodies")
        runner.wait_until(lambda: sum("9872" in line for line in alive(runner).values()) >= 2, what="grandchildren")
        assert not any(map(locks.obtain, names))
        pids = [process.pid]
        if killed != "launcher":
            rank = notes.read("body_0_0")["pid"]
            pids.insert(0, int(Path(f"/proc/{rank}/stat").read_text().rpartition(")")[2].split()[1]))
        for pid in pids:
            os.kill(pid, 9)
        ended: float | None = None
        deadline = time.monotonic() + PATIENCE_S
        obtained = 0
        while obtained < len(names):
            obtained = sum(map(locks.obtain, names))
            assert time.monotonic() < deadline
            left = {pid for pid in alive(runner) if pid != process.pid}
            if not left and ended is None:
                ended = time.monotonic()
            time.sleep(0.01)
        free = time.monotonic()
        assert_nothing_left(runner, timeout_s=0.1)
        assert ended is None or free - ended < 1 + NOISE_S


def test_a_process_that_nobody_found(tmp_path: Path, new_ids: MakeIds) -> None:
    """A grandchild that outlives spawner and keeper keeps its job's device from the next job while it lives."""
    (one,) = new_ids(1)
    locks = DeviceLocks("the test")
    jobs = ("x=0,1", "+j0.all=[children:9873,note:ready,hang]", devices([one]))
    with sweeping(tmp_path / "a", *jobs) as (process, runner, notes):
        runner.wait_until(lambda: notes.has("ready"), what="grandchildren")
        keeper = state_of(notes.read("body_0_0")["pid"])[1]
        left = [pid for pid in descendants(keeper) if b"9873" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        for pid in (state_of(keeper)[1], keeper):
            os.kill(pid, 9)
        assert process.stdout is not None
        while "Waiting for device" not in process.stdout.readline():
            assert process.poll() is None
        assert notes.places() == [(0, 0)]
        assert not locks.acquire(f"{VARIABLE}={one}")
        for pid in left:
            # They are this test's own; some were found by their environment.
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)
        finish(process)
        assert notes.statuses() == ["FAILED", "COMPLETED"]


def test_a_sweep_within_a_rank(runner: Runner, new_ids: MakeIds) -> None:
    """With `allow_nested` the inner sweep has the devices of its rank's job, and does not wait for its own parent."""
    env = {"BEHAVE_AGAIN": "1", "BEHAVE_INNER": "hydra.launcher.allow_nested=true"}
    _, notes = behave(runner, "+j0.r0=sweep:inner", devices(new_ids(2)), RECORDING, LIMIT, env=env)
    assert notes.statuses() == ["COMPLETED"]
    inner = notes.read("inner")
    assert inner["code"] == 0, inner["output"]
    assert "1 job, 1 at a time, 2 ranks each, devices [" in inner["output"]


def test_one_job_does_not_hold_the_devices_of_another(tmp_path: Path, new_ids: MakeIds) -> None:
    """While one job runs, the device of another that has ended can be had by others, also where both began together."""
    ids = new_ids(2)
    locks = DeviceLocks("the test")
    jobs = ("x=0,1", "+j0.all=wait:body_1_0", "+j1.all=wait:go", devices(ids))
    with sweeping(tmp_path / "a", *jobs) as (process, runner, notes):
        runner.wait_until(lambda: notes.places() == [(0, 0), (1, 0)], what="two bodies")
        runner.wait_until(lambda: locks.acquire(f"{VARIABLE}={ids[0]}"), what="the device of job 0")
        assert not locks.acquire(f"{VARIABLE}={ids[1]}")
        (notes.folder / "go.json").write_text("{}")
        assert finish(process)[0] == 0
        assert locks.acquire(f"{VARIABLE}={ids[1]}")


def test_ctrl_c_while_waiting_for_devices(tmp_path: Path, new_ids: MakeIds) -> None:
    """A sweep that waits for the devices of another one is ended by Ctrl-C as ever, and the other goes on."""
    jobs = ("+all=wait:go", devices(new_ids(1)))
    with sweeping(tmp_path / "a", *jobs) as (one, runner, notes):
        runner.wait_until(lambda: notes.places() == [(0, 0)], what="the first sweep's body")
        with sweeping(tmp_path / "b", *jobs) as (two, _, others):
            assert two.stdout is not None
            while "Waiting for device" not in two.stdout.readline():
                assert two.poll() is None
            two.send_signal(signal.SIGINT)
            assert finish(two)[0] == 130
            assert others.places() == []
        (notes.folder / "go.json").write_text("{}")
        assert finish(one)[0] == 0


def test_sweeps_that_do_not_lock(tmp_path: Path, new_ids: MakeIds) -> None:
    """With `lock_devices=false` two sweeps can be on one device, if both will."""
    jobs = ("+all=wait:go", devices(new_ids(1)), "hydra.launcher.lock_devices=false")
    with sweeping(tmp_path / "a", *jobs) as (one, runner, notes), sweeping(tmp_path / "b", *jobs) as (two, _, others):
        runner.wait_until(lambda: notes.places() == others.places() == [(0, 0)], what="both bodies")
        for found in (notes, others):
            (found.folder / "go.json").write_text("{}")
        assert finish(one)[0] == finish(two)[0] == 0


def test_a_restart_keeps_its_devices(tmp_path: Path, new_ids: MakeIds) -> None:
    """Between two starts of a job nobody else gets its devices."""
    ids = new_ids(1)
    locks = DeviceLocks("the test")
    jobs = ("+all=raise", devices(ids), "hydra.launcher.max_restarts=3")
    folder = tmp_path / "a"
    with sweeping(folder, *jobs) as (process, runner, notes):
        runner.wait_until(lambda: notes.places() == [(0, 0)], what="the first start")
        while not (folder / "sweep/0/.ddp/earlier_2").exists():
            assert process.poll() is None
            assert not locks.acquire(f"{VARIABLE}={ids[0]}")
        finish(process)
    assert locks.acquire(f"{VARIABLE}={ids[0]}")


# --- memory


def test_devices_that_are_busy(runner: Runner, new_ids: MakeIds) -> None:
    """With `min_free_memory_gb` a busy device gets no job, and one whose memory is freed late gets them then."""
    uuids = new_ids(2)
    state = runner.cwd / "devices.json"

    def write_state(*free_gb: float) -> None:
        part = state.with_suffix(".part")
        content = [{"uuid": one, "free": int(free * 10**9)} for one, free in zip(uuids, free_gb, strict=True)]
        part.write_text(json.dumps(content))
        part.rename(state)

    write_state(3, 4)
    folder = runner.cwd / "modules"
    folder.mkdir()
    (folder / "pynvml.py").write_text(
        f"import json, sys\nsys.path.insert(0, {str(APPS.parent)!r})\n"
        "from support.fake_nvml import FakeDevice, FakeNvml\n"
        f"class Nvml(FakeNvml):\n    @property\n    def devices(self):\n"
        f"        return [FakeDevice(**one) for one in json.load(open({str(state)!r}))]\n"
        "    @devices.setter\n    def devices(self, value):\n        pass\n\n"
        "sys.modules['pynvml'] = Nvml([])\n"
    )
    argv = [
        sys.executable, BEHAVE, "-m", "hydra/launcher=ddp_subprocess", "hydra.launcher.nproc_per_node=1",
        f"hydra.sweep.dir={runner.cwd / 'sweep'}", "hydra.launcher.min_free_memory_gb=20", "x=0,1", RECORDING,
    ]  # fmt: skip
    env = behave_environment(runner, PYTHONPATH=f"{folder}:{APPS}")
    notes = Notes(runner.cwd / "notes")
    with runner.start(*argv, env=env) as process:
        assert process.stdout is not None
        said = ""
        while "device 1: it has less than hydra.launcher.min_free_memory_gb=20 free" not in said:
            line = process.stdout.readline()
            assert line, said
            said += line
        assert notes.places() == []
        assert "device 0: it has less than" in said
        write_state(3, 60)
        code, _ = finish(process)
    assert code == 0
    assert [seen(notes, job) for job in range(2)] == ["1", "1"]
    # By their UUIDs, devices are the same ones in a sweep that knows them by other ids.
    assert set(uuids) <= {path.name for path in Path(FOLDER).iterdir()}
