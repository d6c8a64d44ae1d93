"""Make errors.md from what the package raises and warns of: `python docs/errors.py`. A test says when it is old.

What is to be filled in stands in capitals, by the name that it has in the source. The first sentence of a message says
what happened and why, the rest what to do.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

PAGE = Path(__file__).with_name("errors.md")
PACKAGE = Path(__file__).parent.parent / "hydra_plugins/hydra_ddp_subprocess_launcher"
ERRORS = ("LauncherError", "OptionError", "StartError", "FreezeError", "JobFailedError", "CommandError")
WARNINGS = ("warning", "error")
# What stands on the page under another name than in the source, and for what functions return.
SPOKEN = {
    "strerror": "reason",
    "filename": "file",
    "number": "job",
    "getcwd": "directory",
    "names": "variable",
    "variables": "variable",
    "_target_": "the sweeper",
    "_METADATA": "one of these",
    "count": "n jobs",
    "most": "n",
    "MOST_HELD": "n",
}
RETURNED = {
    "how_to_cancel": "Cancel it by scancel JOB_ID",
    "in_words": "When and how it ended.",
    "who_is_left": "process PID",
}
# A message with fewer words of its own than these only hands on another one; so does one that begins with another.
LEAST_WORDS = 3
LEAST_AFTER_ANOTHER = 4
# These write to stderr what Python itself would say.
AS_PYTHON = ("_as_main",)
SECTIONS = {
    "Options": ("_settings", "_cluster", "_schedule", "_prepare", "_devices", "_line", "_debug", "_locks", "_hub"),
    "How the sweep is started": (
        "ddp_subprocess_launcher",
        "_environment",
        "_machine",
        "_entry",
        "_program",
        "_rank",
        "_sources",
        "_footprint",
    ),
    "Directories and earlier runs": (
        "_claim",
        "_books",
        "_describe",
        "_files",
        "_journal",
        "_ledger",
        "_resume",
        "_unnoted",
    ),
    "The config of a job": ("_freeze", "_plan"),
    "Ports": ("_port",),
    "Jobs": ("_jobs", "_results", "_ending", "_progress", "_summary", "_running", "_node", "_preload"),
    "Several nodes": ("_gathering", "_follower", "_part", "_nodes"),
    "On a cluster": ("_submitit", "_submitted", "_submitting", "_cluster_link", "_cluster_job"),
    "hydra-ddp": ("_cli", "_following", "_status", "_stopping", "_timeline_picture", "_watching"),
}
HEAD = """\
<!-- Made by docs/errors.py from the sources of the package. Do not edit. -->
# Messages

All errors and warnings of the launcher and of `hydra-ddp`. What is filled in stands here in capitals: a path, a number,
a value. What to do in general is under [logs and debugging](logs-and-debugging.md#a-job-has-failed).

## A job has failed

The message ends with the last lines of the rank that failed first, or its traceback, then the path of its log and a
command that repeats it.

| What is said | What happened | What to do |
|---|---|---|
| RANK failed with exit code N | it raised, or called `sys.exit(N)`; the traceback follows | mend that |
| RANK failed: ERROR | the same; it was still on its way out when the launcher ended it | mend that |
| RANK was killed by signal 9 (SIGKILL) | the system, or somebody, killed it | often it is out of memory: see `dmesg`, and the memory limit of the container or allocation |
| RANK was killed by signal N (NAME) | a crash in C code (SIGSEGV, SIGBUS, SIGABRT), or somebody's `kill` | start it with `PYTHONFAULTHANDLER=1`; its Python stack is then in its log |
| RANK ended with exit code 0 but did not finish the job | it left before `main()` was done, as by `os._exit(0)`, or never called this sweep's `hydra.main` function | let it return, or raise |
| RANK failed: its outcome cannot be stored: REASON: FOLDER | the disk is full, or the run directory cannot be written any more | make room, and go on with `resume=failed` |
| The run directory RUN_DIR cannot be used any more: REASON | the disk is full, or somebody removed the directory or its files while the job ran | mend that, and go on with `resume=failed` |
| RANK could not be started: REASON | the system refused it, or there is no such command in `wrapper` | mend that |
| RANK failed, and its process had not ended 1 s later | after its error the tear-down waited, often for the other ranks | mend the error; the stacks in its log tell where it waited |
| …; RANKS were then ended by the launcher | they would have waited for the one that failed | nothing |
| This rank lost a peer, which is seldom the cause | another rank went away first, and left no word of its own | see `hydra-ddp logs JOB all` |
| Each rank has started processes of its own | `torch.multiprocessing.spawn` or `strategy=ddp_spawn` within a rank | the launcher starts the ranks: call the function directly, or use `strategy=ddp` |
| the job was ended because the time limit (timeout_min) was reached | it hangs, or needs longer | see the Python stacks at the end of the logs; raise `timeout_min` |
| the job was ended because ranks went on after the first had ended (exit_timeout_s) | one returned early and others did not follow | the same, with `exit_timeout_s` |
| the job was ended because the launcher ordered it | Ctrl-C, `hydra-ddp stop`, `max_failures`, or `check_config=error`, as it says | go on later with `resume=unfinished` |
| the job was ended because its keeper got a signal | somebody sent SIGTERM to all processes, as a cluster does at the end of an allocation | ask for more time, and go on with `resume=unfinished` |
| the job was ended because the launching process is gone | it was killed, or its machine is gone | go on with `resume=unfinished` |
| the job was ended because the cluster wants its nodes back | preemption, or a time limit of the cluster | it is queued again where the cluster allows that |
| the job was ended because the process that kept it was killed from outside | `kill -9` of the keeper, or the system out of memory | start it again |
| the job was ended because another node of it failed | a rank there failed, or its launching process has gone; the message names the node | see the logs of its ranks |
| the job was ended because another node of it is silent | that node, its network or the file system is down | see after that node |
"""


def constants() -> dict[str, str]:
    """Return the texts that have a name of their own in a module."""
    found = {}
    for file in PACKAGE.glob("*.py"):
        for one in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(one, ast.Assign) and isinstance(one.value, ast.Constant) and isinstance(one.value.value, str):
                found[ast.unparse(one.targets[0])] = one.value.value
    return found


CONSTANTS = constants()


def messages() -> dict[str, list[str]]:
    """Return the messages of each module, in the order of its source."""
    found = {}
    for file in sorted(PACKAGE.glob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        if file.stem in AS_PYTHON:
            continue
        said = [one for one in dict.fromkeys(_messages(tree)) if _is_own(one)]
        if said:
            found[file.stem] = said
    return found


def _is_own(message: str) -> bool:
    words = sum(word.islower() for word in re.findall(r"[A-Za-z]+", message))
    return words >= (LEAST_AFTER_ANOTHER if re.match("[A-Z]{2}", message) else LEAST_WORDS)


def _messages(tree: ast.Module) -> Iterator[str]:
    functions = {one.name: one for one in ast.walk(tree) if isinstance(one, ast.FunctionDef)}
    calls = [one for one in ast.walk(tree) if isinstance(one, ast.Call)]
    for call in sorted(calls, key=lambda one: (one.lineno, one.col_offset)):
        name = call.func.id if isinstance(call.func, ast.Name) else ""
        if name in ERRORS or ast.unparse(call.func) == "sys.stderr.write":
            yield from _texts(call.args[0], functions)
        elif _warns(call):
            yield from _texts(call, functions)


def _warns(call: ast.Call) -> bool:
    of = call.func
    return isinstance(of, ast.Attribute) and of.attr in WARNINGS and ast.unparse(of.value) == "_log"


def _texts(made: ast.expr, functions: dict[str, ast.FunctionDef]) -> Iterator[str]:
    """Return what an expression can be as a text; nothing for one that is handed over from elsewhere."""
    if isinstance(made, ast.Call) and _warns(made):
        first, *others = made.args
        text = CONSTANTS[first.id] if isinstance(first, ast.Name) else ast.literal_eval(first)
        names = map(spoken, others)
        # What is hung on to a word is there in some cases only.
        yield _tidy(re.sub(r"([a-z]?)%[sdg]", lambda at: at[1] or next(names), text))
    elif isinstance(made, ast.Constant | ast.JoinedStr):
        yield _tidy(_filled(made))
    elif isinstance(made, ast.Call) and isinstance(made.func, ast.Name) and made.func.id in functions:
        returned = (one for one in ast.walk(functions[made.func.id]) if isinstance(one, ast.Return))
        for one in sorted(returned, key=lambda one: one.lineno):
            if one.value is not None:
                yield from _texts(one.value, functions)


def _filled(made: ast.expr) -> str:
    if isinstance(made, ast.Constant):
        return str(made.value)
    assert isinstance(made, ast.JoinedStr)
    text = ""
    for part in made.values:
        if isinstance(part, ast.Constant):
            text += str(part.value)
        # What is hung on to a word or a sentence is there in some cases only.
        elif re.search(r"([a-z]|\)\.?)$", text) is None:
            text += spoken(part.value)  # type: ignore[attr-defined]
    return text


def spoken(made: ast.expr) -> str:
    """Return in one word what is filled in for an expression."""
    if isinstance(made, ast.Constant):
        return str(made.value)
    if isinstance(made, ast.Call) and ast.unparse(made.func) in ("counted", "numbered"):
        count, noun = made.args if ast.unparse(made.func) == "counted" else made.args[::-1]
        return f"{spoken(count)} {spoken(noun)}s"
    called = ast.unparse(made.func).rpartition(".")[2] if isinstance(made, ast.Call) else ""
    if called in RETURNED:
        return RETURNED[called]
    name = _name_within(made)
    if name in CONSTANTS and not name.startswith("__"):
        return CONSTANTS[name]
    return SPOKEN.get(name, name.strip("_")).upper()


def _name_within(made: ast.expr) -> str:
    """Return the name that says most about what an expression gives."""
    if isinstance(made, ast.Name):
        return made.id
    if isinstance(made, ast.Attribute):
        return made.attr
    if isinstance(made, ast.Call):
        # As in `', '.join(names)` or `shown(line)`, but for `config.get(name)` and `os.getcwd()`.
        of = made.func
        within = of.value if isinstance(of, ast.Attribute) and of.attr == "get" else made.args[0] if made.args else of
        return _name_within(within)
    if isinstance(made, ast.Subscript):
        key = made.slice.value if isinstance(made.slice, ast.Constant) else None
        return key if isinstance(key, str) else _name_within(made.value)
    if isinstance(made, ast.BinOp):
        return _name_within(made.left)
    if isinstance(made, ast.IfExp):
        return _name_within(made.orelse if isinstance(made.body, ast.Constant) else made.body)
    return _name_within(made.values[0]) if isinstance(made, ast.BoolOp) else "…"


def _tidy(text: str) -> str:
    return " ".join(text.split())


def halves(message: str) -> tuple[str, str]:
    """Return what happened, and what to do; empty where a message does not say that."""
    # Not at the dot of `e.g.`, `.ddp` or an option.
    parts = re.split(r"(?<=[^.][.!?])\s+", message, maxsplit=1)
    return parts[0], parts[1] if len(parts) > 1 else ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


def page() -> str:
    """Return the whole page."""
    said = messages()
    parts = [HEAD]
    for title, modules in SECTIONS.items():
        rows = dict.fromkeys(halves(message) for module in modules for message in said.get(module, []))
        if rows:
            parts.append(f"\n## {title}\n\n| What is said | What to do, or what follows |\n|---|---|\n")
            parts += [f"| {_cell(what)} | {_cell(todo)} |\n" for what, todo in rows]
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
