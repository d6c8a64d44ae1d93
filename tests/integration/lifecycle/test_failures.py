"""Results and faults: what a job's end means, what is left behind, and what the sweep does next."""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
import sys
import uuid
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra.experimental.callbacks
import pytest
from omegaconf import OmegaConf

from support.notes import (
    BEHAVE,
    Notes,
    alive,
    assert_nothing_left,
    behave,
    behaving,
    descendants,
    finish,
    is_running,
    line_of,
    seconds_until,
    state_of,
    write_talk,
)

if TYPE_CHECKING:
    from support.runner import Runner

GRACE_S = 1
GRACE = f"hydra.launcher.grace_period_s={GRACE_S}"
# No test waits for so long: what is over sooner did not wait for it.
LONG_GRACE = "hydra.launcher.grace_period_s=3600"
RECORDING = "hydra/sweeper=recording"
AT_ONCE = "hydra.launcher.max_parallel_jobs=2"


def pids(notes: Notes) -> list[int]:
    return [note["pid"] for note in notes.ranks()]


def all_gone(notes: Notes) -> bool:
    return not any(is_running(pid) for pid in pids(notes))


def job_folders(runner: Runner) -> set[str]:
    return {path.name for path in (runner.cwd / "sweep").iterdir() if path.name.isdigit()}


# --- a rank that fails


@pytest.mark.sample("raise")
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        pytest.param("raise", ["ValueError: broken: plain", r"behave\.py", "raise_error"], id="raise"),
        pytest.param("kill:SIGKILL", ["SIGKILL", "out of memory"], id="SIGKILL"),
        pytest.param("kill:SIGSEGV", ["SIGSEGV"], id="SIGSEGV"),
        pytest.param("exit:3", [r"code\W+3\b"], id="exit-code"),
    ],
)
def test_the_first_failing_rank_ends_its_job_and_the_sweep_goes_on(
    runner: Runner, fault: str, words: list[str]
) -> None:
    """Rank 1 fails while rank 0 sleeps for an hour: FAILED without waiting for it, and the next job runs."""
    ran, notes = behave(
        runner, "x=0,1", "+j0.r0=[note:ready,hang]", f"+j0.r1=[wait:ready,note:failing,{fault}]", GRACE, RECORDING
    )
    assert ran.returncode != 0
    assert notes.statuses() == ["FAILED", "COMPLETED"]
    assert notes.places() == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert notes.places("end") == [(1, 0), (1, 1)]
    said = notes.returns()[0]["text"]
    assert "rank 1" in ran.output
    for word in words:
        assert re.search(word, said, re.IGNORECASE), said
        assert re.search(word, ran.output, re.IGNORECASE), ran.output
    assert_nothing_left(runner)


def test_the_message_has_file_and_line_of_the_user(runner: Runner) -> None:
    """A plain script without a decorator: the message has the failing line of user code, and the log's path."""
    ran, _ = behave(runner, "+r1=raise")
    assert f'{BEHAVE.name}", line {line_of("raises plain")}, in raise_error' in ran.output
    log = runner.cwd / "sweep" / "0" / ".ddp" / "rank_1.log"
    assert str(log) in ran.output
    assert "ValueError: broken: plain" in log.read_text()


def test_a_rank_that_ends_well_without_an_outcome_has_failed(runner: Runner) -> None:
    """`os._exit(0)` of either rank stores no outcome, which is a failure that says so."""
    ran, notes = behave(runner, "x=0,1,2", "+j0.r0=exit:0", "+j1.r1=exit:0", GRACE, RECORDING)
    assert notes.statuses() == ["FAILED", "FAILED", "COMPLETED"]
    for index, rank in enumerate((0, 1)):
        said = notes.returns()[index]["text"].lower()
        assert f"rank {rank}" in said
        assert re.search(r"outcome|exit code 0|ended with 0", said), said
    assert ran.returncode != 0


def test_exit_codes_mean_what_they_say(runner: Runner) -> None:
    """`sys.exit(0)` and `sys.exit(None)` complete a job, `sys.exit(3)` and a text fail that job only."""
    ran, notes = behave(
        runner,
        "x=0,1,2,3,4",
        "+j0.all=leave:0",
        "+j1.all=leave:None",
        "+j2.all=leave:3",
        "+j3.all=leave:stop_here",
        RECORDING,
    )
    assert notes.statuses() == ["COMPLETED", "COMPLETED", "FAILED", "FAILED", "COMPLETED"]
    assert [result["value"] for result in notes.returns()[:2]] == ["None", "None"]
    assert re.search(r"code\W+3\b", notes.returns()[2]["text"])
    assert "stop_here" in ran.output
    assert ran.returncode != 0


def test_leaving_rank_1_alone_counts_as_well(runner: Runner) -> None:
    """`sys.exit(3)` in rank 1 alone fails the job, whatever rank 0 returned."""
    _, notes = behave(runner, "+r0=return:7", "+r1=leave:3", RECORDING)
    assert notes.statuses() == ["FAILED"]
    assert "rank 1" in notes.returns()[0]["text"].lower()


def test_a_bad_exit_beats_a_stored_outcome_while_others_work(runner: Runner) -> None:
    """A rank that stored its outcome and then ends with 5 fails the job as long as another one runs."""
    _, notes = behave(runner, "+r0=[return:7,atexit:5]", "+r1=hang", GRACE, RECORDING)
    assert notes.statuses() == ["FAILED"]
    assert re.search(r"code\W+5\b", notes.returns()[0]["text"])
    assert_nothing_left(runner)


def test_a_crash_in_tear_down_after_all_outcomes_completes(runner: Runner) -> None:
    """After every rank stored a good outcome a bad exit code is a warning, and the value counts."""
    ran, notes = behave(runner, "+r0=[wait:body_0_1,atexit_last:5,return:7]", RECORDING)
    assert notes.statuses() == ["COMPLETED"]
    assert notes.returns()[0]["value"] == "7"
    assert ran.returncode == 0
    assert re.search(r"code\W+5\b", ran.output), ran.output


def test_every_failure_is_said_and_every_log_has_its_traceback(runner: Runner) -> None:
    """Three failing jobs of five: each is named in the output with its reason, and is in its own log."""
    ran, notes = behave(
        runner, "x=10,11,12,13,14", "+j0.r0=raise:r10", "+j2.r1=raise:r12", "+j4.r0=raise:r14", GRACE, RECORDING
    )
    assert notes.statuses() == ["FAILED", "COMPLETED", "FAILED", "COMPLETED", "FAILED"]
    assert ran.returncode != 0
    for job, rank, reason in ((0, 0, "r10"), (2, 1, "r12"), (4, 0, "r14")):
        # Once when it happens, once in the table at the end.
        assert ran.output.count(f"broken: {reason}") >= 2, ran.output
        log = runner.cwd / "sweep" / str(job) / ".ddp" / f"rank_{rank}.log"
        assert f"broken: {reason}" in log.read_text()


# --- exceptions across the process border


def test_odd_exceptions_do_not_hurt_the_launcher(runner: Runner) -> None:
    """Exceptions that cannot be rebuilt or printed keep the user's file, line and cause in the text."""
    kinds = ["plain", "two", "chain", "locked", "notext"] + (["group"] if sys.version_info >= (3, 11) else [])
    jobs = ",".join(str(index) for index in range(len(kinds)))
    ran, notes = behave(
        runner, f"x={jobs}", *(f"+j{index}.all=raise:{kind}" for index, kind in enumerate(kinds)), GRACE, RECORDING
    )
    results = dict(zip(kinds, notes.returns(), strict=True))
    assert notes.statuses() == ["FAILED"] * len(kinds), ran.output
    for kind, result in results.items():
        where = f'{BEHAVE.name}", line {line_of(f"raises {kind}")}'
        assert where in ran.output, f"{kind}: {ran.output}"
        assert where in result["text"], f"{kind}: {result['text']}"
    assert "first and second" in results["two"]["text"]
    assert "TwoArgumentsError" in results["two"]["text"]
    assert "NoTextError" in results["notext"]["text"]
    assert "has a lock" in results["locked"]["text"]
    for part in ("KeyError: 'the cause'", "direct cause", "OSError: the effect"):
        assert part in results["chain"]["text"]
        assert part in ran.output
    if "group" in results:
        assert "one of them" in results["group"]["text"]


def test_the_exception_is_the_users_own_where_it_can_be_rebuilt(runner: Runner) -> None:
    """A built-in exception comes back as itself, one of `__main__` as the launching process's own class."""
    _, notes = behave(runner, "x=0,1", "+j0.all=raise:plain", "+j1.all=raise:notext", RECORDING)
    assert [(result["module"], result["type"]) for result in notes.returns()] == [
        ("builtins", "ValueError"),
        ("__main__", "NoTextError"),
    ]


# --- values


@pytest.mark.sample
def test_values_keep_their_types(runner: Runner) -> None:
    """Rank 0's value comes back with its type, and one that cannot be pickled says so in a job that completed."""
    wanted = {"7": "7", "0.25": "0.25", "word": "'word'", "none": "None", "enum": "<Kind.GOOD: 'good'>"}
    given = {"7": "7", "0.25": "0.25", "word": "'word'", "none": "None", "enum": "enum", "lock": "lock"}
    overrides = [f'+j{index}.r0="return:{value}"' for index, value in enumerate(given.values())]
    ran, notes = behave(
        runner, "x=" + ",".join(str(index) for index in range(len(given))), "+r1=return:999", *overrides, RECORDING
    )
    assert ran.returncode == 0, ran.output
    assert notes.statuses() == ["COMPLETED"] * len(given)
    results = dict(zip(given, notes.returns(), strict=True))
    assert {name: results[name]["value"] for name in wanted} == wanted
    assert results["enum"]["module"] == "__main__"
    assert "lock" in results["lock"]["value"]
    assert [result["overrides"][0] for result in notes.returns()] == [f"x={index}" for index in range(len(given))]
    assert [result["job_num"] for result in notes.returns()] == list(range(len(given)))


@pytest.mark.sample
def test_optuna_gets_the_value_of_rank_0(runner: Runner) -> None:
    """Six trials on two ranks: both ranks of a trial see equal values, the study's are rank 0's."""
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    ran, notes = behave(
        runner,
        "hydra/sweeper=optuna",
        "hydra.sweeper.n_trials=6",
        "hydra.sweeper.n_jobs=2",
        "x=interval(0.0,4.0)",
        "+r0=square",
        "+r1=return:999",
    )
    assert ran.returncode == 0, ran.output
    assert notes.places() == [(job, rank) for job in range(6) for rank in (0, 1)]
    seen = [{notes.read(f"body_{job}_{rank}")["x"] for rank in (0, 1)} for job in range(6)]
    assert all(len(values) == 1 for values in seen)
    values = [(values.pop() - 2) ** 2 for values in seen]
    assert len(set(values)) == 6
    results = OmegaConf.load(runner.cwd / "sweep" / "optimization_results.yaml")
    assert OmegaConf.select(results, "best_value") == pytest.approx(min(values))
    assert (len(notes.ranks()), len(notes.all("process"))) == (12, 13)


def test_optuna_goes_on_after_a_failed_trial(runner: Runner) -> None:
    """With `max_failure_rate` a failed trial is Optuna's to count, and the study goes on."""
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    ran, notes = behave(
        runner,
        "hydra/sweeper=optuna",
        "hydra.sweeper.n_trials=3",
        "hydra.sweeper.n_jobs=3",
        "hydra.sweeper.max_failure_rate=0.5",
        "x=interval(0.0,4.0)",
        "+j1.r1=raise",
        "+r0=square",
        GRACE,
    )
    assert ran.returncode == 0, ran.output
    assert notes.places("end")[-2:] == [(2, 0), (2, 1)]


# --- callbacks


def callback_lines(notes: Notes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (notes.folder / "callbacks.jsonl").read_text().splitlines()]


@pytest.mark.sample
def test_callbacks_fire_as_with_the_basic_launcher(runner: Runner) -> None:
    """Each event comes as often as with the basic launcher, with the state that the sweep's start stored."""
    recorder = "+hydra.callbacks.recorder._target_=behave_callbacks.RecordingCallback"
    # Hydra 1.4 has it no more.
    pickling = hasattr(hydra.experimental.callbacks, "PickleJobInfoCallback")
    pickles = ["+hydra.callbacks.pickles._target_=hydra.experimental.callbacks.PickleJobInfoCallback"] * pickling
    ran, notes = behave(runner, "x=0,1", "+all=return:5", recorder, *pickles)
    assert ran.returncode == 0, ran.output
    ours = callback_lines(notes)

    basic = Notes(runner.cwd / "basic_notes")
    basic.folder.mkdir()
    sweep_dir = f"hydra.sweep.dir={runner.cwd / 'basic'}"
    argv: tuple[str | Path, ...] = (
        BEHAVE,
        "-m",
        "hydra/launcher=basic",
        sweep_dir,
        "x=0,1",
        "+all=return:5",
        recorder,
        *pickles,
    )
    assert runner.python(*argv, env={"BEHAVE_DIR": str(basic.folder)}).returncode == 0

    def keys(lines: list[dict[str, Any]]) -> list[tuple[str, int | None, bool | None, str | None]]:
        return [(line["event"], line.get("num"), line.get("task_function"), line.get("status")) for line in lines]

    assert keys(ours) == keys(callback_lines(basic))
    assert Counter(line["event"] for line in ours) == {
        "on_multirun_start": 1,
        "on_job_start": 2,
        "on_job_end": 2,
        "on_multirun_end": 1,
    }
    launching = ours[0]["pid"]
    assert {line["stored"] for line in ours} == {f"stored in process {launching}"}
    for line in ours:
        assert (line["rank"] == "0") == line["event"].startswith("on_job"), line
        assert (line["pid"] == launching) == line["event"].startswith("on_multirun"), line
    for job in ("0", "1"):
        names = {path.name for path in (runner.cwd / "basic" / job / ".hydra").iterdir()}
        assert {path.name for path in (runner.cwd / "sweep" / job / ".hydra").iterdir()} == names
        for stored in (runner.cwd / "sweep" / job / ".hydra").glob("job_return.pickle"):
            assert pickle.loads(stored.read_bytes()).return_value == 5


def test_a_failing_task_reaches_on_job_end(runner: Runner) -> None:
    """`on_job_end` is called with status FAILED when rank 0's task raises, as with the basic launcher."""
    recorder = "+hydra.callbacks.recorder._target_=behave_callbacks.RecordingCallback"
    _, notes = behave(runner, "+r0=raise", recorder, GRACE)
    assert [line["status"] for line in callback_lines(notes) if line["event"] == "on_job_end"] == ["FAILED"]


# --- what a job leaves behind


@pytest.mark.sample("ok")
@pytest.mark.parametrize("ending", ["ok", "raise", "kill:SIGKILL"])
def test_grandchildren_are_gone_before_the_next_job(runner: Runner, ending: str) -> None:
    """Children by Popen, setsid, `env -i` and a double fork are gone once the job is over."""
    seconds = f"1000.{uuid.uuid4().int % 10**12}"
    _, notes = behave(
        runner, "x=0,1", f"+j0.r0=[children:{seconds},note:made,{ending}]", "+j0.r1=ok", f"+j1.r0=look:{seconds}", GRACE
    )
    assert notes.has("made")
    assert notes.read("end_1_0")["value"] == "[]"


def test_a_failed_job_leaves_no_zombies(runner: Runner) -> None:
    """While the next job runs there is no zombie below the launching process."""
    with behaving(
        runner, "x=0,1", "+j0.r0=[children:1000.5,hang]", "+j0.r1=raise", "+j1.r0=[note:next,wait:go]", GRACE
    ) as (process, notes):
        runner.wait_until(lambda: notes.has("next"), what="job 1")
        zombies = [pid for pid in descendants(process.pid) if state_of(pid)[0] == "Z"]
        (notes.folder / "go.json").write_text("{}")
        code, _ = finish(process)
        assert zombies == []
        assert code != 0


def test_a_surviving_rank_gets_sigterm_first(runner: Runner) -> None:
    """When rank 1 fails, rank 0's own SIGTERM handler runs, and the blame stays with rank 1.

    The grace period is a limit, not a delay.
    """
    ran, notes = behave(runner, "+r0=[signal:SIGTERM,note:ready,hang]", "+r1=[wait:ready,raise]", LONG_GRACE, RECORDING)
    assert notes.read("signal_SIGTERM_0_0")["count"] == 1
    assert re.search(r"rank 1\b.*(fail|rais|exit|end)", ran.output)
    assert "ValueError: broken: plain" in notes.returns()[0]["text"]


def test_a_rank_that_blocks_sigterm_is_killed_after_the_grace_time(runner: Runner) -> None:
    """A rank that blocks SIGTERM and SIGINT lives through the grace time, and is gone after it."""
    _, notes = behave(runner, "+r0=[block,note:ready,hang]", "+r1=[wait:ready,note:failing,raise]", GRACE, RECORDING)
    assert notes.read("returns")["ended"] - notes.read("failing")["time"] > GRACE_S - 0.1
    assert all_gone(notes)


def test_a_job_ends_when_all_its_ranks_have_ended(runner: Runner) -> None:
    """Rank 1 works longer than rank 0, and the next job starts only after rank 1's end."""
    _, notes = behave(runner, "x=0,1", "+j0.r1=sleep:1")
    last = notes.read("end_0_1")["time"]
    assert notes.read("end_0_0")["time"] < last
    for rank in (0, 1):
        pid = notes.read(f"body_1_{rank}")["pid"]
        assert notes.read(f"process_{pid}")["time"] > last


def test_exit_timeout_ends_a_job_whose_ranks_stay_behind(runner: Runner) -> None:
    """Rank 1 returned, rank 0 stays for ever: with `exit_timeout_s` the job fails and rank 0 is named."""
    ran, notes = behave(runner, "+r0=hang", "hydra.launcher.exit_timeout_s=5", GRACE, RECORDING)
    assert notes.statuses() == ["FAILED"]
    assert "rank 0" in notes.returns()[0]["text"].lower()
    assert "exit_timeout_s" in ran.output
    assert notes.read("returns")["ended"] - notes.read("end_0_1")["time"] > 5 - 0.1


@pytest.mark.sample
def test_timeout_min_ends_a_job_as_failed(runner: Runner) -> None:
    """A job that takes longer than `timeout_min` is FAILED with that reason, and the next one runs."""
    ran, notes = behave(runner, "x=0,1", "+j0.all=hang", "hydra.launcher.timeout_min=0.25", GRACE, RECORDING)
    assert notes.statuses() == ["FAILED", "COMPLETED"]
    assert "timeout_min" in ran.output


# --- the launching process, the spawner and the keeper


@pytest.mark.sample("0.01")
@pytest.mark.parametrize("after_s", [0.01, 0.5, 2.0])
def test_kill_9_of_the_launching_process_leaves_nothing(runner: Runner, after_s: float) -> None:
    """SIGKILL of the launching process at any time after the ranks started leaves nothing, whatever the grace time."""
    with behaving(runner, "x=0,1", "+all=[ignore,hang]", LONG_GRACE) as (process, notes):
        runner.wait_until(lambda: len(alive(runner, b"RANK=")) >= (1 if after_s < 0.1 else 2), what="the ranks' start")
        seconds_until(lambda: False, at_most_s=after_s)
        process.kill()
        assert_nothing_left(runner)
        finish(process)
        assert [job for job, _ in notes.places() if job != 0] == []


@pytest.mark.sample("2-130")
@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)],
    ids=str,
)
def test_a_signal_ends_all_ranks_and_starts_no_more(runner: Runner, number: signal.Signals, code: int) -> None:
    """Ranks that ignore SIGINT and SIGTERM are gone after the grace time, and queued jobs never start."""
    with behaving(runner, "x=0,1,2,3", "+all=[ignore,note:ready,hang]", AT_ONCE, GRACE) as (process, notes):
        runner.wait_until(lambda: len(notes.places()) == 4 and notes.has("ready"), what="four bodies")
        os.kill(process.pid, number)
        said_code, output = finish(process)
        assert all_gone(notes)
        assert said_code == code, output
        assert notes.places() == [(0, 0), (0, 1), (1, 0), (1, 1)]
        assert job_folders(runner) == {"0", "1"}
        assert_nothing_left(runner)


def test_a_second_ctrl_c_kills_at_once(runner: Runner) -> None:
    """Two SIGINTs do not wait for a grace time of an hour."""
    with behaving(runner, "+all=[ignore,hang]", "+r0=[ignore,note:ready,hang]", LONG_GRACE) as (process, notes):
        runner.wait_until(lambda: len(notes.places()) == 2 and notes.has("ready"), what="two bodies")
        os.kill(process.pid, signal.SIGINT)
        seconds_until(lambda: False, at_most_s=0.5)
        assert not all_gone(notes)
        os.kill(process.pid, signal.SIGINT)
        assert finish(process)[0] == 130
        assert all_gone(notes)


def test_ctrl_c_in_job_2_of_5_is_no_failed_job(runner: Runner) -> None:
    """Ctrl-C of the whole foreground group in job 2: jobs 3 and 4 have no folder, exit code 130."""
    with behaving(runner, "x=0,1,2,3,4", "+j2.all=hang", GRACE) as (process, notes):
        runner.wait_until(lambda: len(notes.places()) == 6, what="the bodies of job 2")
        os.killpg(process.pid, signal.SIGINT)
        code, output = finish(process)
        assert code == 130, output
        assert job_folders(runner) == {"0", "1", "2"}
        assert notes.places("end") == [(0, 0), (0, 1), (1, 0), (1, 1)]
        # It has said what has become of the jobs, and how to go on; where it was, is of no use to anybody.
        assert "Stopped by SIGINT: 3 of 5 jobs did not complete" in output
        _, _, after = output.partition("\nRun what failed, and what was not run:\n")
        assert " hydra.launcher.resume=unfinished " in after.splitlines()[0]
        assert "Traceback" not in output


@pytest.mark.parametrize("ending", ["caught", "HYDRA_FULL_ERROR", "hook"])
def test_ctrl_c_is_a_keyboard_interrupt(runner: Runner, ending: str) -> None:
    """It can be caught around `main()`; a hook of the program's own sees it; HYDRA_FULL_ERROR shows where it was."""
    caught = "try:\n    main()\nexcept KeyboardInterrupt as error:\n    sys.exit(f'caught {type(error).__name__}')"
    before = "sys.excepthook = lambda kind, *_: print('hook saw', kind.__name__)" if ending == "hook" else ""
    app = write_talk(runner, before, program=caught if ending == "caught" else "main()")
    argv = ["-m", "hydra/launcher=ddp_subprocess", "until=never", f"hydra.sweep.dir={runner.cwd / 'sweep'}"]
    env = {"TALK_DIR": str(runner.cwd), **({ending: "1"} if ending == "HYDRA_FULL_ERROR" else {})}
    with runner.start(sys.executable, app, *argv, env=env) as process:
        runner.wait_until((runner.cwd / "ran.jsonl").exists, what="the job")
        os.kill(process.pid, signal.SIGINT)
        code, output = finish(process)
    assert code == (1 if ending == "caught" else 130)
    words = {"caught": "caught KeyboardInterrupt", "hook": "hook saw KeyboardInterrupt"}
    assert words.get(ending, "Traceback") in output


def test_user_signals_reach_every_rank_once(runner: Runner) -> None:
    """SIGUSR1 to the launching process runs each rank's handler once and changes nothing else."""
    steps = [f"+r{rank}=[signal:SIGUSR1,note:ready{rank},wait:go]" for rank in range(2)]
    with behaving(runner, *steps) as (process, notes):
        runner.wait_until(lambda: notes.has("ready0") and notes.has("ready1"), what="two handlers that are set")
        os.kill(process.pid, signal.SIGUSR1)
        runner.wait_until(lambda: len(notes.all("signal_SIGUSR1")) == 2, what="two handlers")
        seconds_until(lambda: False, at_most_s=0.3)
        (notes.folder / "go.json").write_text("{}")
        code, output = finish(process)
        assert code == 0, output
        assert [note["count"] for note in notes.all("signal_SIGUSR1")] == [1, 1]


@pytest.mark.parametrize("lost", ["keeper", "spawner"])
def test_a_lost_helper_process_costs_at_most_one_job(runner: Runner, lost: str) -> None:
    """SIGKILL of a job's keeper fails that job only; of the spawner, not even that."""
    with behaving(runner, "x=0,1", "+j0.all=[ignore,wait:go]", RECORDING) as (process, notes):
        runner.wait_until(lambda: len(notes.places()) == 2, what="two bodies")
        keeper = state_of(notes.read("body_0_0")["pid"])[1]
        assert keeper == state_of(notes.read("body_0_1")["pid"])[1]
        spawner = state_of(keeper)[1]
        assert spawner != process.pid
        assert state_of(spawner)[1] == process.pid
        os.kill(keeper if lost == "keeper" else spawner, signal.SIGKILL)
        if lost == "keeper":
            first = pids(notes)
            runner.wait_until(lambda: not any(is_running(pid) for pid in first), what="the end of job 0")
        (notes.folder / "go.json").write_text("{}")
        finish(process)
        assert notes.statuses() == ["FAILED" if lost == "keeper" else "COMPLETED", "COMPLETED"]
        assert_nothing_left(runner)
