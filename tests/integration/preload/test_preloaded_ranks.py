"""Ranks that are forks of a preloader: like new interpreters in all that a program can see, and as easy to end."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
import time
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hydra import version

from support.runner import APPS, MARKER, NOISE_S, PATIENCE_S

if TYPE_CHECKING:
    from support.runner import Runner

FOLDER = APPS / "preload"
# Hydra 1.4 warns of the argument, in every log.
VERSION_BASE = "version_base=None, " if hasattr(version, "base_at_least") else ""
LAUNCH = ("-m", "hydra/launcher=ddp_subprocess")
PACKAGE = "hydra_plugins.hydra_ddp_subprocess_launcher"
# What a forked rank has in its call stack, and among its modules, and a new interpreter has not.
OWN_MODULES = {"ctypes", "ctypes._endian", "_ctypes", "_posixsubprocess", "subprocess", "fcntl", "runpy"}


def launch(runner: Runner, preload: str, *options: str, nproc: int = 1) -> list[str]:
    """Return the arguments of a sweep that is at the same place each time."""
    given = [f"nproc_per_node={nproc}", f"preload={preload}", "master_port=29533", *options]
    launcher = [option if option.startswith("hydra.") else f"hydra.launcher.{option}" for option in given]
    return [*LAUNCH, *launcher, f"hydra.sweep.dir={runner.cwd / 'sweep'}"]


def write(runner: Runner, **files: str) -> Path:
    """Write modules beside app.py, and return that."""
    for name, text in files.items():
        (runner.cwd / f"{name}.py").write_text(text)
    return runner.cwd / "app.py"


def log_of(runner: Runner, job: int = 0, rank: int = 0) -> str:
    return (runner.cwd / "sweep" / str(job) / ".ddp" / f"rank_{rank}.log").read_text()


APP = """
import os, sys
import hydra
from hydra.core.config_store import ConfigStore
NAMES = {names!r}
ConfigStore.instance().store(name="config", node={{"x": 1}})

@hydra.main({version_base}config_path=None, config_name="config")
def main(cfg):
    {body}

if __name__ == "__main__":
    main()
"""
# Where a module was imported: in this process, or before it was forked.
WHERE = """
import importlib
found = {}
for name in NAMES:
    before = name in sys.modules
    try:
        found[name] = [before, importlib.import_module(name).PID == os.getpid()]
    except ImportError as error:
        found[name] = [before, str(error)]
print("FOUND", found)
""".replace("\n", "\n    ")


def app_text(body: str, names: tuple[str, ...] = ()) -> str:
    return APP.format(names=names, body=body, version_base=VERSION_BASE)


def write_app(runner: Runner, body: str = WHERE, names: tuple[str, ...] = (), **modules: str) -> Path:
    return write(runner, app=app_text(body, names), **modules)


def found(log: str) -> Any:
    return eval(log.partition("FOUND ")[2].splitlines()[0])


NOTES_PID = "import os\nPID = os.getpid()\n"


# --- like a new interpreter

HOW = {
    "script": ["facts.py"],
    "flags": ["-O", "-W", "error", "-X", "utf8", "-X", "faulthandler", "facts.py"],
    "isolated": ["-I", "facts.py"],
    "module": ["-m", "pkg.facts"],
    "package": ["-m", "pkg"],
    "folder": ["pkg"],
    "archive": ["app.zip"],
}


@pytest.mark.sample("script")
@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
def test_a_forked_rank_is_like_a_new_interpreter(runner: Runner, how: list[str]) -> None:
    """Names of `__main__`, command, path, streams, environment, signals, descriptors, threads: all are the same."""
    (runner.cwd / "pkg").mkdir()
    for name in ("facts.py", "pkg/facts.py", "pkg/__main__.py"):
        shutil.copyfile(FOLDER / "facts.py", runner.cwd / name)
    (runner.cwd / "pkg" / "__init__.py").touch()
    with zipfile.ZipFile(runner.cwd / "app.zip", "w") as archive:
        archive.write(FOLDER / "facts.py", "__main__.py")
    seen = []
    for preload in ("null", "auto"):
        facts = {"FACTS": str(runner.cwd / "facts"), "PYTHONUNBUFFERED": "", "OMP_NUM_THREADS": "2"}
        ran = runner.python(*how, *launch(runner, preload, nproc=2), env=facts)
        assert ran.returncode == 0, ran.output
        assert ("Preloaded: omegaconf, hydra" in ran.stdout) == (preload == "auto")
        seen.append([json.loads((runner.cwd / f"facts_{rank}").read_text()) for rank in (0, 1)])
        shutil.rmtree(runner.cwd / "sweep")
    for fresh, forked in zip(*seen, strict=True):
        added = {name for name in {*forked.pop("modules")} - {*fresh.pop("modules")} if not name.startswith(PACKAGE)}
        assert added <= OWN_MODULES
        # Ranks have the sweep's command line.
        unequal = r"hydra-ddp-[0-9a-f]{12}|[0-9a-f]{64}|hydra.launcher.preload=\w+"
        assert json.loads(re.sub(unequal, "", json.dumps(forked))) == json.loads(re.sub(unequal, "", json.dumps(fresh)))


EARLY = """
import __main__, faulthandler, logging, os, signal, sys, time
faulthandler.register(signal.SIGUSR1, file=sys.stderr)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGWINCH})
signal.signal(signal.SIGUSR2, lambda number, frame: print("signal", number))
if open("/proc/self/comm").read() == "ddp-preloader\\n":
    time.sleep(3)
"""
EARLY_BODY = """
import logging, signal, threading, time, early
print(early.__main__ is sys.modules["__main__"], early.__main__.main is main, early.__main__.__file__)
print(*map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ())))
print(threading.main_thread().native_id == os.getpid(), threading.main_thread().ident == threading.get_ident())
born = int(open("/proc/self/stat").read().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
age = time.clock_gettime(time.CLOCK_BOOTTIME) - born
print(logging.LogRecord("", 1, "", 1, "", (), None).relativeCreated / 1000 < age + 1)
sys.stdout.flush()
os.kill(os.getpid(), signal.SIGUSR1)
os.kill(os.getpid(), signal.SIGUSR2)
""".replace("\n", "\n    ")


@pytest.mark.parametrize("how", [["app.py"], ["-m", "app"]], ids=["script", "module"])
def test_what_a_module_has_got_hold_of_at_import(runner: Runner, how: list[str]) -> None:
    """The program's `__main__`, handlers in C and Python, the main thread, the time of the start."""
    write_app(runner, EARLY_BODY, early=EARLY)
    logs = []
    for preload in ("null", "[early,hydra]"):
        ran = runner.python(*how, *launch(runner, preload, nproc=1))
        assert ran.returncode == 0, ran.output
        assert ("Preloaded: early, hydra" in ran.stdout) == (preload != "null")
        logs.append(re.sub('^  File ".*\n', "", log_of(runner), flags=re.MULTILINE))
        shutil.rmtree(runner.cwd / "sweep")
    for log in logs:
        first, *others = re.sub("0x[0-9a-f]+", "", log).splitlines()
        assert first == f"True True {runner.cwd / 'app.py'}"
        assert others == [
            str(int(signal.SIGWINCH)),
            "True True",
            "True",
            "Current thread  (most recent call first):",
            "signal 12",
        ]


WAYS = (
    *("well", "fail", "fail_twice", "code", "negative", "text", "none", "interrupt", "at_once", "signal", "syntax"),
    *("thread", "daemon", "busy", "hook", "hook_exit", "at_exit", "stdout"),
)


def test_a_forked_rank_ends_like_a_new_interpreter(runner: Runner) -> None:
    """Exit codes, tracebacks, `atexit`, threads, streams, and files that were left open: all as without preload."""
    plan = " ".join(f"{number}={way}" for number, way in enumerate(WAYS))
    sides = []
    for preload in ("null", "auto"):
        argv = [FOLDER / "ends.py", *launch(runner, preload, "max_parallel_jobs=2", "master_port=null")]
        ran = runner.python(*argv, f"+n=range({len(WAYS)})", env={"WAYS": plan})
        ended = re.findall(r"^ +(\d+)  \+n=\d+ +(\w+) .*? s(?:  (.*))?$", ran.stdout, re.MULTILINE)
        assert len(ended) == len(WAYS), ran.output
        logs = {way: re.sub(" at 0x[0-9a-f]+", "", log_of(runner, job)) for job, way in enumerate(WAYS)}
        kept = {way: (runner.cwd / f"open_{job}").read_text() for job, way in enumerate(WAYS)}
        sides.append((ended, logs, kept))
        shutil.rmtree(runner.cwd / "sweep")
    (fresh_ends, fresh_logs, fresh_kept), (ends, logs, kept) = sides
    assert ends == fresh_ends
    # An interpreter whose hook exits loses what is buffered for files; a forked rank writes it.
    del kept["hook_exit"], fresh_kept["hook_exit"]
    assert kept == fresh_kept
    # An interpreter that printed a traceback keeps what it is about; a forked rank lets go of it.
    for way in WAYS:
        assert logs[way].replace("deleted\n", "") == fresh_logs[way].replace("deleted\n", ""), way
        assert "deleted" in logs[way] or "deleted" not in fresh_logs[way]


def test_an_end_that_others_have_a_part_in(runner: Runner) -> None:
    """What was registered with `atexit` when the interpreter started, as by coverage, is called last, as always."""
    write(runner, sitecustomize="import atexit, os\natexit.register(lambda: os.write(1, b'last of all\\n'))\n")
    path = os.pathsep.join(filter(None, [str(runner.cwd), os.environ.get("PYTHONPATH")]))
    environment = {"WAYS": "0=well 1=code", "PYTHONPATH": path}
    runner.python(FOLDER / "ends.py", *launch(runner, "auto"), "+n=0,1", env=environment)
    for job in (0, 1):
        assert "at exit\nlast of all\n" in log_of(runner, job)
        assert (runner.cwd / f"open_{job}").read_text() == "written at the end"


PROCESSES = """
import inspect, json, multiprocessing, os, pickle, sys, traceback
import hydra

class Thing:
    '''A class of the program itself.'''
    def __init__(self, x):
        self.x = x

def child(queue, thing):
    queue.put((type(thing).__module__, thing.x, os.getpid() != os.getppid(), os.environ["RANK"]))

def double(x):
    return 2 * x

@hydra.main(version_base=None, config_path=None)
def main(cfg):
    for method in ("spawn", "fork", "forkserver"):
        context = multiprocessing.get_context(method)
        queue = context.Queue()
        process = context.Process(target=child, args=(queue, Thing(method)))
        process.start()
        print(method, queue.get(timeout=60))
        process.join()
        with context.Pool(2) as pool:
            print(pool.map(double, [1, 2, 3]))
            pool.close()
            pool.join()
    back = pickle.loads(pickle.dumps(Thing(5)))
    print(type(back) is Thing, inspect.getsource(Thing).splitlines()[1].strip(), inspect.getfile(Thing))
    print(len(multiprocessing.current_process().authkey), "KEY", multiprocessing.current_process().authkey.hex())
    raise ValueError("seen with file and line")

if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize("how", [["app.py"], ["-m", "app"]], ids=["script", "module"])
def test_processes_of_the_program_and_its_own_classes(runner: Runner, how: list[str]) -> None:
    """Every start method of multiprocessing, pickles, sources and tracebacks know the program as `__main__`."""
    write(runner, app=PROCESSES.replace("version_base=None, ", VERSION_BASE))
    ran = runner.python(*how, *launch(runner, "[hydra,multiprocessing.pool]"), "+n=1,2")
    log = log_of(runner)
    for method in ("spawn", "fork", "forkserver"):
        name = "__mp_main__" if method != "fork" else "__main__"
        assert f"{method} ('{name}', '{method}', True, '0')\n[2, 4, 6]" in log, log
    assert f"True '''A class of the program itself.''' {runner.cwd / 'app.py'}" in log
    assert f'File "{runner.cwd / "app.py"}", line 32, in main' in log
    assert "raise ValueError" in log
    assert "ValueError: seen with file and line" in ran.stdout
    keys = {log_of(runner, job).partition("KEY ")[2].splitlines()[0] for job in (0, 1)}
    assert len(keys) == 2


def test_what_the_imports_print_is_in_every_log(runner: Runner) -> None:
    """Output of an import, by Python or C, begins each log, as if it had been imported there."""
    app = write_app(runner, names=("loud",), loud=f"{NOTES_PID}print('hello')\nos.write(2, b'from C\\n')\n")
    ran = runner.python(app, *launch(runner, "[loud]", nproc=2))
    assert ran.returncode == 0, ran.output
    for rank in (0, 1):
        assert log_of(runner, rank=rank) == "hello\nfrom C\nFOUND {'loud': [True, False]}\n"
    assert ran.stdout.count("hello") == 1


# --- what cannot be shared

BAD = {
    "reads_rank": (
        "import inner",
        "preload: reads_rank is left out: inner reads RANK when it is imported, which each rank has",
    ),
    "starts_thread": (
        "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,), name='Busy', daemon=True).start()",
        "preload: starts_thread is left out: importing it starts 1 thread (Busy), which a fork would not have",
    ),
    "fails": ("1 / 0", "preload: fails is left out: importing it fails: ZeroDivisionError: division by zero"),
    "speaks": (
        "raise ImportError('x\\n\\x1b' * 9000)",
        f"preload: speaks is left out: importing it fails: ImportError: {'x ' * 250}...",
    ),
    "speechless": (
        "class Error(Exception):\n def __str__(self): 1 / 0\nraise Error",
        "preload: speechless is left out: importing it fails: Error: its message cannot be made",
    ),
    "exits": ("import sys; sys.exit(3)", "preload: exits is left out: importing it fails: SystemExit: 3"),
    "starts_process": (
        "import subprocess\nP = subprocess.Popen(['sleep', '1000'])",
        "preload: starts_process is left out: importing it starts a process, which would be shared",
    ),
    "uses_gpu": (
        "import tempfile\nF = open(tempfile.mkdtemp() + '/nvidia-uvm', 'w')",
        "preload: uses_gpu is left out: importing it initialises CUDA, which a fork could not use",
    ),
    "opens_file": ("F = open(__file__)", "preload: opens_file is left out: importing it opens "),
    "opens_socket": (
        "import socket\nF = socket.socket()",
        "preload: opens_socket is left out: importing it opens socket:[",
    ),
    "shares_lock": (
        "import multiprocessing\nLOCK = multiprocessing.Lock()",
        "preload: shares_lock is left out: importing it makes a lock of multiprocessing, or other shared memory, which",
    ),
    "copies_stdout": ("F = os.dup(1)", "preload: copies_stdout is left out: importing it opens "),
    "makes_folder": (
        "from tempfile import TemporaryDirectory\nF = TemporaryDirectory(dir='.', prefix='made_')",
        "preload: makes_folder is left out: importing it makes the temporary folder ",
    ),
    "goes_away": ("os.chdir('/')", "preload: goes_away is left out: importing it changes the working directory"),
    "sets_timer": (
        "import signal\nsignal.setitimer(signal.ITIMER_VIRTUAL, 1000)",
        "preload: sets_timer is left out: importing it sets a timer, which a fork would not have",
    ),
    "is_absent": (None, "preload: is_absent is left out: importing it fails: ModuleNotFoundError: No module named"),
}


def test_modules_that_cannot_be_shared_are_left_out(runner: Runner) -> None:
    """Each is named once with its reason; it is imported in the rank, and the others are shared."""
    modules = {name: f"{NOTES_PID}{text}\n" for name, (text, _) in BAD.items()}
    del modules["is_absent"]
    inner = "import os\nRANK = os.environ.get('RANK')\n"
    names = ("good", "reads_rank", "better")
    better = f"{NOTES_PID}LOG, NOWHERE = open('better.log', 'a'), open(os.devnull)\n"
    app = write_app(runner, names=names, good=NOTES_PID, better=better, inner=inner, **modules)
    ran = runner.python(app, *launch(runner, f"[good,{','.join(BAD)},better,hydra]"), "x=1,2")
    assert ran.returncode == 0, ran.output
    said = " ".join(ran.stdout.split())
    for _, words in BAD.values():
        assert said.count(words) == 1, ran.stdout
    assert "Preloaded: good, better, hydra" in said
    for job in (0, 1):
        assert found(log_of(runner, job)) == {
            "good": [True, False],
            "reads_rank": [False, True],
            "better": [True, False],
        }
    assert list(runner.cwd.glob("made_*")) == []
    runner.assert_nothing_left()


CHANGES = """
import os, signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGUSR1, lambda number, frame: None)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
os.umask(0o27)
os.chdir("/")
signal.setitimer(signal.ITIMER_VIRTUAL, 1000)
raise ImportError
"""


def test_a_module_that_is_left_out_has_changed_nothing(runner: Runner) -> None:
    """What it has done to its process before it failed is not there in ranks, which may never import it."""
    body = (
        "import signal; print('FOUND', [str(signal.getsignal(n)) for n in (2, 10, 15)], "
        "signal.pthread_sigmask(signal.SIG_BLOCK, ()), os.umask(0), os.getcwd(), signal.getitimer(1))"
    )
    logs = []
    for preload in ("null", "[good,changes,hydra]"):
        ran = runner.python(write_app(runner, body, good=NOTES_PID, changes=CHANGES), *launch(runner, preload))
        assert ran.returncode == 0, ran.output
        assert ("Preloaded: good, hydra" in ran.stdout) == (preload != "null")
        logs.append(log_of(runner).partition("FOUND")[2])
        shutil.rmtree(runner.cwd / "sweep")
    assert logs[0] == logs[1] != ""


def test_a_module_that_imports_the_program(runner: Runner) -> None:
    """`python -m` warns where its module is imported by then, and fails if that is an error; so it must not be."""
    (runner.cwd / "pkg").mkdir()
    body = "from pkg import data, tools; print('FOUND', [data.PID == os.getpid(), tools.PID == os.getpid()])"
    for name, text in {
        "__init__": "",
        "app": app_text(body),
        "data": f"{NOTES_PID}from pkg.app import main\n",
        "tools": NOTES_PID,
    }.items():
        (runner.cwd / "pkg" / f"{name}.py").write_text(text)
    ran = runner.python("-W", "error::RuntimeWarning", "-m", "pkg.app", *launch(runner, "[pkg.data,pkg.tools]"))
    assert ran.returncode == 0, ran.output
    assert "preload: pkg.data is left out: importing it imports the program itself (pkg.app)" in " ".join(
        ran.stdout.split()
    )
    # Hydra 1.4 warns of what the program registers twice.
    assert found(log_of(runner)) == [True, False]


def test_what_starts_with_the_interpreter(runner: Runner) -> None:
    """What `sitecustomize` does is not put down to a module."""
    text = (
        "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,), name='Busy', daemon=True).start()\n"
    )
    app = write_app(runner, names=("good",), good=NOTES_PID, sitecustomize=text)
    path = os.pathsep.join(filter(None, [str(runner.cwd), os.environ.get("PYTHONPATH")]))
    ran = runner.python(app, *launch(runner, "[good,hydra]"), env={"PYTHONPATH": path})
    assert ran.returncode == 0, ran.output
    said = " ".join(ran.stdout.split())
    why = "what starts with the interpreter (sitecustomize, a .pth file) starts 1 thread (Busy), which a fork would not"
    assert said.count(f"preload: everything is left out: {why} have") == said.count("left out") == 1
    assert "Preloaded: nothing, each rank is a new interpreter" in said
    assert found(log_of(runner)) == {"good": [False, True]}


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)", "ended the preloader: signal 11 (SIGSEGV)"),
        ("import os\nos._exit(4)", "ended the preloader: exit code 4"),
    ],
    ids=["crash", "exit"],
)
def test_an_import_that_ends_the_preloader(runner: Runner, module: str, words: str) -> None:
    """The module is named, and the jobs run as without preload."""
    app = write_app(runner, names=("good",), good=NOTES_PID, bad=module)
    ran = runner.python(app, *launch(runner, "[good,bad]"), "x=1,2")
    assert ran.returncode == 0, ran.output
    assert f"preload: importing bad {words}. From now on each rank is a new interpreter" in " ".join(ran.stdout.split())
    assert "from outside" not in ran.stdout
    assert [found(log_of(runner, job)) for job in (0, 1)] == [{"good": [False, True]}] * 2


@pytest.mark.parametrize("way", ["sys.stdout = None", "sys.stdout.close()", "sys.stdout = sys.stderr = object()"])
def test_an_import_that_takes_stdout_away(runner: Runner, way: str) -> None:
    """The preloader serves all the same, and is not started again and again."""
    app = write_app(
        runner, "import good; sys.exit(0 if good.PID != os.getpid() else 5)", good=NOTES_PID + f"import sys; {way}"
    )
    ran = runner.python(app, *launch(runner, "[good]"), "x=1,2", env={"PYTHONIOENCODING": "utf-8"})
    assert ran.returncode == 0, ran.output
    assert ran.stdout.count("Preloaded: good") == 1
    assert "starting again" not in ran.stdout


def test_what_the_preloader_itself_warns_of(runner: Runner) -> None:
    """Under `-X dev` and `-W error` nothing of it comes to the user's terminal or to a log."""
    app = write_app(runner, "import good; print('body')", good=NOTES_PID)
    ran = runner.python("-X", "dev", "-W", "error", app, *launch(runner, "[good]"), "x=1,2")
    assert ran.returncode == 0, ran.output
    assert ran.stderr == ""
    assert [log_of(runner, job) for job in (0, 1)] == ["body\n"] * 2


def test_nothing_left_to_preload(runner: Runner) -> None:
    """Where no module can be shared, the preloader is a plain spawner, and says so."""
    app = write_app(runner, names=("fails",), fails=f"{NOTES_PID}assert 'RANK' in os.environ\n")
    ran = runner.python(app, *launch(runner, "[fails]"))
    assert ran.returncode == 0, ran.output
    assert "Preloaded: nothing, each rank is a new interpreter" in ran.stdout
    assert found(log_of(runner)) == {"fails": [False, True]}


def test_a_job_with_an_environment_of_its_own(runner: Runner) -> None:
    """It has a new interpreter, which says which variable is why; `env_set` of all jobs is there at the imports."""
    module = f"{NOTES_PID}SEEN = [os.environ.get('FOR_ALL'), os.environ.get('OWN')]\n"
    body = "import reads; print('FOUND', [reads.PID == os.getpid(), *reads.SEEN])"
    app = write_app(runner, body, reads=module)
    sweep = launch(runner, "[reads]")
    ran = runner.python(app, *sweep, "x=1,2", "+hydra.job.env_set={FOR_ALL:all,OMP_NUM_THREADS:3}")
    assert ran.returncode == 0, ran.output
    assert [found(log_of(runner, job)) for job in (0, 1)] == [[False, "all", None]] * 2
    ran = runner.python(app, *sweep, "x=1,2", "+hydra.job.env_set={FOR_ALL:all,OWN:'${hydra:job.num}'}")
    assert ran.returncode == 0, ran.output
    assert [found(log_of(runner, job)) for job in (0, 1)] == [[True, "all", "0"], [True, "all", "1"]]
    assert ran.stdout.count("is not preloaded") == 1
    assert "#0 : is not preloaded: its environment differs in FOR_ALL, OWN (hydra.job.env_set)" in ran.stdout


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("wrapper=[nice]", "hydra.launcher.wrapper has to start a process of its own"),
        ("debug=true", "a debugger wants a process of its own (hydra.launcher.debug=true)"),
    ],
)
def test_options_that_need_an_interpreter_for_each_rank(runner: Runner, option: str, words: str) -> None:
    """The sweep runs as without preload, and says why."""
    app = write_app(runner, names=("good",), good=NOTES_PID, body="import good; assert good.PID == os.getpid()")
    ran = runner.python(app, *launch(runner, "[good]", option))
    assert ran.returncode == 0, ran.output
    assert f"hydra.launcher.preload has no effect: {words}" in ran.stdout


@pytest.mark.sample
def test_the_function_entry(runner: Runner) -> None:
    """A pickled job function runs in a forked rank, too."""
    app = write_app(runner, names=("good",), good=NOTES_PID)
    ran = runner.python(app, *launch(runner, "[hydra,good]", "entry=function", "hydra.job.chdir=true"))
    assert ran.returncode == 0, ran.output
    assert found(log_of(runner)) == {"good": [True, False]}


def test_a_plugin_and_a_module_beside_the_program(runner: Runner) -> None:
    """Hydra finds the plugins of the program's own folder in a forked rank as in a new one."""
    plugin = (
        "from hydra.plugins.search_path_plugin import SearchPathPlugin\n"
        "class Own(SearchPathPlugin):\n"
        "    def manipulate_search_path(self, search_path):\n        print('OWN PLUGIN')\n"
    )
    (runner.cwd / "hydra_plugins" / "own").mkdir(parents=True)
    (runner.cwd / "hydra_plugins" / "own" / "__init__.py").touch()
    (runner.cwd / "hydra_plugins" / "own" / "own.py").write_text(plugin)
    ran = runner.python(write_app(runner, "print('body')"), *launch(runner, "auto"))
    assert ran.returncode == 0, ran.output
    assert log_of(runner) == "OWN PLUGIN\nbody\n"


def test_a_module_that_is_edited_while_the_sweep_runs(runner: Runner) -> None:
    """Ranks go on with what was imported, and the line about changed code does not say otherwise."""
    edit = "open('good.py', 'a').write('NEW = 1\\n')"
    body = f"import good; print('FOUND', [good.PID != os.getpid(), hasattr(good, 'NEW')]); {edit}"
    app = write_app(runner, body, good=NOTES_PID)
    app.write_text(f"import good\n{app.read_text()}")
    ran = runner.python(app, *launch(runner, "[good]"), "x=1,2")
    assert ran.returncode == 0, ran.output
    said = "run the new code, but for what hydra.launcher.preload names, which stays as it was."
    assert said in " ".join(ran.stdout.split())
    assert [found(log_of(runner, job)) for job in (0, 1)] == [[True, False]] * 2


@pytest.mark.parametrize(
    ("edit", "words"),
    [("open('app.py', 'a').write('a b')", "exit code 1"), ("os.remove('app.py')", "exit code 2")],
    ids=["syntax", "gone"],
)
def test_a_program_that_cannot_be_read_any_more(runner: Runner, edit: str, words: str) -> None:
    """The next job fails with what the interpreter says of that."""
    logs = []
    for preload in ("null", "[hydra]"):
        app = write_app(runner, f"{edit} if cfg.x == 1 else None")
        ran = runner.python(app, *launch(runner, preload), "x=1,2")
        assert f"rank 0 failed with {words}" in ran.stdout
        logs.append(log_of(runner, 1))
        shutil.rmtree(runner.cwd / "sweep")
    assert logs[0] == logs[1]


# --- several batches, and processes that are killed

WAIT = """
import time
from pathlib import Path
job = os.environ["HYDRA_DDP_JOB_NUM"]
import good
def parent(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
pids = {"rank": os.getpid(), "keeper": os.getppid(), "preloader": parent(os.getppid()), "shared": good.PID}
if job == "0":
    if os.fork() == 0:
        os.setsid()
        time.sleep(1000)
    os.system("env -i setsid sleep 1000 &")
Path(f"pids_{job}_{os.environ['RANK']}.part").write_text(repr(pids))
os.rename(f"pids_{job}_{os.environ['RANK']}.part", f"pids_{job}_{os.environ['RANK']}")
while job == "0" and "WAIT" in os.environ and not os.path.exists("go"):
    time.sleep(0.02)
""".replace("\n", "\n    ")


def pids_of(runner: Runner, job: int, rank: int = 0) -> dict[str, int]:
    path = runner.cwd / f"pids_{job}_{rank}"
    runner.wait_until(path.exists, what=f"job {job}")
    return eval(path.read_text())  # type: ignore[no-any-return]


def test_the_preloader_is_kept_over_batches(runner: Runner) -> None:
    """Each batch of a sweep forks from the same process, which ends with the program."""
    app = write_app(runner, WAIT, good=NOTES_PID)
    ran = runner.python(app, *launch(runner, "[good]", "hydra.sweeper.max_batch_size=1"), "x=1,2,3")
    assert ran.returncode == 0, ran.output
    assert ran.stdout.count("Launching 1 job") == 3
    assert ran.stdout.count("Preloaded") == 1
    assert len({pids_of(runner, job)["preloader"] for job in (0, 1, 2)}) == 1
    assert all(pids_of(runner, job)["shared"] == pids_of(runner, job)["preloader"] for job in (0, 1, 2))
    assert runner.alive() == {}


class Sweeping:
    """A sweep of two jobs, the first of which waits."""

    def __init__(self, runner: Runner, *options: str, good: str = NOTES_PID) -> None:
        self.runner = runner
        app = write_app(runner, WAIT, good=good)
        argv = [sys.executable, app, *launch(runner, "[good]", *options, nproc=2), "x=1,2"]
        self.process = runner.start(*argv, env={"WAIT": "1"}, start_new_session=True)

    def pids(self) -> dict[str, int]:
        return pids_of(self.runner, 0) | {"other rank": pids_of(self.runner, 0, 1)["rank"]}

    def end(self) -> str:
        stdout, stderr = self.process.communicate(timeout=PATIENCE_S)
        return stdout + stderr


@pytest.mark.parametrize(
    ("who", "status", "words"),
    [
        ("rank", "FAILED", "rank 0 was killed by signal 9 (SIGKILL)"),
        ("other rank", "FAILED", "rank 1 was killed by signal 9 (SIGKILL)"),
        ("keeper", "FAILED", "The process that kept this job was killed"),
        ("preloader", "completed", ""),
    ],
)
def test_whoever_is_killed_leaves_nothing(runner: Runner, who: str, status: str, words: str) -> None:
    """SIGKILL of any process of a job costs at most this job; all below it is gone at once, and the next one runs."""
    sweeping = Sweeping(runner)
    pids = sweeping.pids()
    os.kill(pids[who], signal.SIGKILL)
    killed_at = time.monotonic()
    if who == "preloader":
        time.sleep(0.2)
        (runner.cwd / "go").touch()
    gone = [pid for name, pid in pids.items() if name not in ("preloader", "shared")]
    runner.wait_until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in gone), what="the end of the job")
    assert who == "preloader" or time.monotonic() - killed_at < 1 + NOISE_S
    said = sweeping.end()
    assert re.search(rf"^ +0  x=1 +{status}", said, re.MULTILINE), said
    assert words in " ".join(said.split())
    assert re.search(r"^ +1  x=2 +completed", said, re.MULTILINE), said
    following = pids_of(runner, 1)
    assert following["shared"] == following["preloader"]
    assert (following["preloader"] == pids["preloader"]) == (who != "preloader")
    runner.assert_nothing_left()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -9), (signal.SIGTERM, 143), (signal.SIGINT, -2)])
def test_the_end_of_the_launching_process(runner: Runner, number: int, code: int) -> None:
    """Ranks, keepers and the preloader are gone soon after it, however it ended."""
    sweeping = Sweeping(runner, "grace_period_s=1")
    pids = sweeping.pids()
    sweeping.process.send_signal(number)
    sweeping.end()
    assert sweeping.process.returncode == code
    runner.wait_until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids.values()), 2 + NOISE_S, "the end")
    runner.assert_nothing_left()


SLOW = "import os, time\nfrom pathlib import Path\nPath('importing').touch()\ntime.sleep(1000)\n"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_the_end_of_the_launching_process_while_modules_are_imported(runner: Runner, number: int) -> None:
    """Nobody waits for an import when a sweep is stopped, and nothing of it is left."""
    # A process that a module has started can only be ended by who is still there.
    starts = "" if number == signal.SIGKILL else "import subprocess\nP = subprocess.Popen(['sleep', '1000'])\n"
    sweeping = Sweeping(runner, good=f"{starts}{SLOW}")
    runner.wait_until((runner.cwd / "importing").exists)
    stopped_at = time.monotonic()
    sweeping.process.send_signal(number)
    said = sweeping.end()
    assert time.monotonic() - stopped_at < 2 + NOISE_S
    assert "preload:" not in said
    if number != signal.SIGKILL:
        why = f"the job was ended because the launcher ordered it ({signal.Signals(number).name})"
        assert why in " ".join(said.split())
        assert "from outside" not in said
    runner.assert_nothing_left()


def test_a_preloader_that_is_killed_while_it_imports(runner: Runner) -> None:
    """The jobs run as without preload."""
    app = write_app(
        runner,
        "import good; assert good.PID == os.getpid()",
        good=f"{NOTES_PID}if 'RANK' not in os.environ:\n" + "".join(f"  {x}\n" for x in SLOW.splitlines()),
    )
    process = runner.start(sys.executable, app, *launch(runner, "[good]"))
    runner.wait_until((runner.cwd / "importing").exists)
    (fork_server,) = [pid for pid in runner.alive() if Path(f"/proc/{pid}/comm").read_text() == "ddp-preloader\n"]
    os.kill(fork_server, signal.SIGKILL)
    stdout, stderr = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, stdout + stderr
    assert "preload: importing good ended the preloader: signal 9 (SIGKILL)" in " ".join(stdout.split())


def test_a_command_that_people_can_read(runner: Runner) -> None:
    """`ps` shows a forked rank's own command, and its environment tells whose it is."""
    sweeping = Sweeping(runner)
    pids = sweeping.pids()
    command = Path(f"/proc/{pids['rank']}/cmdline").read_bytes().split(b"\0")
    assert command[:2] == [os.fsencode(sys.executable), os.fsencode(runner.cwd / "app.py")]
    assert b"hydra.sweeper.overrides='x=1'" in command
    environment = Path(f"/proc/{pids['rank']}/environ").read_bytes().split(b"\0")
    assert {b"RANK=0", f"{MARKER}={runner.marker}".encode()} <= set(environment)
    assert Path(f"/proc/{pids['rank']}/comm").read_text().startswith("python")
    (runner.cwd / "go").touch()
    assert "2 completed" in sweeping.end()


# --- torch

TORCH = """
import random
import numpy, torch, uses
torch.manual_seed(3) if cfg.x == 0 else None
numpy.random.seed(3) if cfg.x == 0 else None
random.seed(3) if cfg.x == 0 else None
drawn = [torch.rand(3).tolist(), numpy.random.rand(3).tolist(), random.random()]
first = torch.rand(700, 700, requires_grad=True)
(first @ first.T).relu().sum().backward()
counts = [torch.get_num_threads(), torch.get_num_interop_threads()]
def load(n):
    return torch.utils.data.DataLoader(list(range(n)), batch_size=2, num_workers=2)
loaded = [batch.tolist() for batch in load(6)]
print("FOUND", [uses.PID != os.getpid(), drawn, first.grad.sum().item(), counts, loaded])
""".replace("\n", "\n    ")
USES_TORCH = f"{NOTES_PID}import torch\nX = torch.rand(500, 500, requires_grad=True)\n(X @ X).sum().backward()\n"


@pytest.mark.torch
def test_random_numbers_and_threads_of_torch(runner: Runner) -> None:
    """With a seed a forked rank draws and adds up what a new interpreter does, with as many threads, although a module
    has used torch at import; without one no two ranks draw the same."""
    app = write_app(runner, TORCH, uses=USES_TORCH)
    sides = []
    for preload in ("null", "[numpy,torch,torch.distributed,uses,hydra]"):
        ran = runner.python(app, *launch(runner, preload, nproc=2), "x=0,1,2", env={"OMP_NUM_THREADS": "4"})
        assert ran.returncode == 0, ran.output
        sides.append([found(log_of(runner, job, rank)) for job in (0, 1, 2) for rank in (0, 1)])
        shutil.rmtree(runner.cwd / "sweep")
    fresh, forked = sides
    assert [one[0] for one in fresh] == [False] * 6
    assert [one[0] for one in forked] == [True] * 6
    assert [one[1:] for one in forked[:2]] == [one[1:] for one in fresh[:2]]
    assert [one[3:] for one in forked] == [one[3:] for one in fresh]
    for kind in range(3):
        assert len({json.dumps(one[1][kind]) for one in forked[2:]}) == 4


@pytest.mark.torch
def test_auto_preloads_torch(runner: Runner) -> None:
    """Nothing of torch, or of what it imports where that is installed, such as tqdm, speaks against sharing it."""
    program = app_text("print('FOUND', [SHARED, torch.rand(3).sum().item() > 0])")
    # At the first line of the program, which itself imports torch.
    head = "import sys\nSHARED = 'torch' in sys.modules\nimport numpy, torch\n"
    ran = runner.python(write(runner, app=head + program), *launch(runner, "auto", nproc=2), "x=0,1")
    assert ran.returncode == 0, ran.output
    assert "left out" not in ran.output
    assert "Preloaded: numpy, torch, torch.distributed, omegaconf, hydra" in ran.stdout
    assert [found(log_of(runner, job, rank)) for job in (0, 1) for rank in (0, 1)] == [[True, True]] * 4


@pytest.mark.torch
def test_a_module_that_starts_threads_by_torch(runner: Runner) -> None:
    """Torch with more threads than one at import is found out, and what it was asked for is left out alone."""
    many = USES_TORCH.replace("X =", "torch.set_num_threads(3)\nX =")
    app = write_app(
        runner,
        names=("many", "torch"),
        many=many,
        body="import many, torch; print('FOUND', [many.PID == os.getpid(), torch.rand(9).sum() > 0])",
    )
    ran = runner.python(app, *launch(runner, "[torch,many]"))
    assert ran.returncode == 0, ran.output
    words = r"preload: many is left out: importing it starts \d threads, which a fork would not have"
    assert re.search(words, " ".join(ran.stdout.split())), ran.stdout
    assert "Preloaded: torch" in ran.stdout
    assert log_of(runner).startswith("FOUND [True,")
