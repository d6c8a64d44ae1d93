"""One pickler between processes, by name where the name holds; another within a process, where objects stay."""

from __future__ import annotations

import pickle
import sys
import textwrap
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, make_dataclass
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import pytest

from hydra_plugins.hydra_ddp_subprocess_launcher.job import frozen_config
from hydra_plugins.hydra_ddp_subprocess_launcher.job.frozen_config import LocalPickle

if TYPE_CHECKING:
    from support.runner import Ran, Runner

# A program as the user writes it. `dump` stores objects of its `__main__`; `load`, in another process of the same
# program, says what came back.
PROGRAM = """
import dataclasses, enum, functools, pathlib, sys
from hydra_plugins.hydra_ddp_subprocess_launcher.job import frozen_config as _pickling

class Colour(enum.Enum):
    RED = 1

@dataclasses.dataclass
class Model:
    colour: Colour = Colour.RED
    @dataclasses.dataclass
    class Part:
        size: int = 1
    def double(self):
        return 2
    @staticmethod
    def triple():
        return 3

class Broken(Exception):
    pass

def work(x):
    return x + 1

def decorate(function):
    @functools.wraps(function)
    def wrapper(x):
        return function(x) * 10
    return wrapper

@decorate
def decorated(x):
    return x

def shadowed():
    return "old"
old = shadowed
def shadowed():
    return "new"

Dynamic = dataclasses.make_dataclass("Elsewhere", [("a", int, 3)])
make_adder = lambda n: (lambda x: x + n)
add_five = make_adder(5)

def objects():
    return {
        "class": Model, "instance": Model(), "nested": Model.Part, "enum": Colour.RED, "function": work,
        "method": Model().double, "static": Model.triple, "decorated": decorated, "error": Broken("b"),
        "old": old, "dynamic": Dynamic, "value": Dynamic(7), "closure": add_five,
    }

if __name__ == "__main__":
    where, data = pathlib.Path(sys.argv[1]), None
    if sys.argv[2] == "dump":
        where.write_bytes(_pickling.dumps(objects(), globals()))
    elif sys.argv[2] == "dump by value":
        where.write_bytes(_pickling.dumps(objects(), None))
    else:
        got = _pickling.loads(where.read_bytes())
        assert got["class"] is Model
        assert isinstance(got["instance"], Model) and got["instance"] == Model()
        assert got["nested"] is Model.Part
        assert got["enum"] is Colour.RED
        assert got["function"] is work
        assert type(got["method"].__self__) is Model and got["method"]() == 2
        assert got["static"] is Model.triple
        assert got["decorated"] is decorated
        assert type(got["error"]) is Broken
        assert got["old"] is not shadowed and got["old"]() == "old"
        assert got["dynamic"] is not Dynamic and got["dynamic"].__name__ == "Elsewhere"
        assert type(got["value"]) is got["dynamic"] and got["value"].a == 7
        assert got["closure"](1) == 6 and got["closure"] is not add_five
        print("all there")
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """The program above, as a file."""
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def test_by_name_in_the_same_program(runner: Runner, program: Path, tmp_path: Path) -> None:
    """What the program's `__main__` defines under its own name comes back as the same object, all else by value."""
    data = tmp_path / "data.pkl"
    assert runner.python(program, data, "dump").output == ""
    # A name that leads to the object is all that travels.
    assert b"Broken" in data.read_bytes()
    assert runner.python(program, data, "load").output == "all there\n"


def test_by_value_for_another_program(runner: Runner, program: Path, tmp_path: Path) -> None:
    """Without a program in the reader, everything of `__main__` travels by value and works there."""
    data, reader = tmp_path / "data.pkl", tmp_path / "reader.py"
    assert runner.python(program, data, "dump by value").output == ""
    reader.write_text(
        textwrap.dedent("""
            import pathlib, sys
            from hydra_plugins.hydra_ddp_subprocess_launcher.job import frozen_config as _pickling
            got = _pickling.loads(pathlib.Path(sys.argv[1]).read_bytes())
            print(got["function"](1), got["instance"].double(), got["decorated"](2), got["nested"]().size)
            print(got["class"].__qualname__, got["nested"].__qualname__, type(got["error"]).__name__, got["enum"])
            print(isinstance(got["instance"], got["class"]), got["instance"].colour is got["enum"])
        """)
    )
    assert runner.python(reader, data).output.splitlines() == [
        "2 2 20 1",
        "Model Model.Part Broken Colour.RED",
        "True True",
    ]


def test_a_name_that_the_reader_lacks(runner: Runner, program: Path, tmp_path: Path) -> None:
    """A reader whose `__main__` lacks the name says which."""
    data, reader = tmp_path / "data.pkl", tmp_path / "reader.py"
    runner.python(program, data, "dump")
    reader.write_text(
        "import pathlib, sys\nfrom hydra_plugins.hydra_ddp_subprocess_launcher.job import frozen_config as _pickling\n"
        "_pickling.loads(pathlib.Path(sys.argv[1]).read_bytes())\n"
    )
    ran = runner.python(reader, data)
    assert ran.returncode == 1
    assert "UnpicklingError: the program's __main__ has no Model" in ran.stderr


def importable(x: int) -> int:
    return x + 1


class Importable:
    """A class of a module that another process can import."""


@pytest.mark.parametrize("obj", [importable, Importable, int, textwrap.dedent, Path, Enum, Mapping])
@pytest.mark.parametrize("main", [None, {}])
def test_importable_things_stay_themselves(obj: object, main: Mapping[str, Any] | None) -> None:
    """What can be imported travels by name, with a program or without."""
    assert frozen_config.loads(frozen_config.dumps(obj, main)) is obj


def load_elsewhere(runner: Runner, obj: object, code: str) -> list[str]:
    """Return the lines that `code` prints in another process, where `got` is what came of an object.

    In this process cloudpickle would know the very classes again.
    """
    data = runner.cwd / "data.pkl"
    data.write_bytes(frozen_config.dumps(obj, None))
    lines = [
        "import pathlib, sys, traceback",
        "from hydra_plugins.hydra_ddp_subprocess_launcher.job import frozen_config as _pickling",
        "got = _pickling.loads(pathlib.Path(sys.argv[1]).read_bytes())",
        textwrap.dedent(code),
    ]
    ran: Ran = runner.python("-c", "\n".join(lines), data)
    assert ran.stderr == ""
    return ran.stdout.splitlines()


def test_classes_without_a_module(runner: Runner) -> None:
    """A class made at run time, such as hydra-zen's, comes back whole: fields, defaults, values, methods, names."""
    made = make_dataclass("Made", [("b", list[int]), ("a", int, 3)], namespace={"total": lambda self: self.a + 1})

    @dataclass
    class Local:
        """A class made in a function."""

        x: int = 0

    code = """
        value, made, local = got
        print(value, type(value) is made, made([]).a, value.total())
        print(local.__module__, local.__qualname__, local.__doc__, local(4).x, repr(local(5)))
    """
    name = "test_classes_without_a_module.<locals>.Local"
    assert load_elsewhere(runner, (made([2], 1), made, Local), code) == [
        "Made(b=[2], a=1) True 3 2",
        f"{__name__} {name} A class made in a function. 4 {name}(x=5)",
    ]


def test_other_kinds_of_local_classes(runner: Runner) -> None:
    """Slots, enums, abstract, generic and exception classes made in a function travel by value, names and all."""

    class Slotted:
        __slots__ = ("x",)

    class Kind(Enum):
        ONE = 1

    class Abstract(ABC):
        @abstractmethod
        def run(self) -> int: ...

    class Concrete(Abstract):
        def run(self) -> int:
            return 1

    element = TypeVar("element")

    class Box(Generic[element]):
        def get(self) -> str:
            return "got"

    class Broken(ValueError):
        pass

    code = """
        print(*(cls.__qualname__.rsplit(".", 1)[-1] for cls in got))
        print({cls.__qualname__.rsplit(".", 1)[0] for cls in got})
        slotted, kind, abstract, concrete, box, broken = got
        print(slotted.__slots__, kind(1) is kind.ONE, issubclass(concrete, abstract), concrete().run())
        print(abstract.__abstractmethods__, box[int]().get(), repr(broken("no")))
    """
    assert load_elsewhere(runner, (Slotted, Kind, Abstract, Concrete, Box, Broken), code) == [
        "Slotted Kind Abstract Concrete Box Broken",
        "{'test_other_kinds_of_local_classes.<locals>'}",
        "('x',) True True 1",
        "frozenset({'run'}) got Broken('no')",
    ]


def test_a_local_function_keeps_its_file(runner: Runner) -> None:
    """Code that travels by value, and code within it, keeps its file's name: a traceback shows the user's line."""

    def fails() -> None:
        def inner() -> None:
            raise ValueError("here")

        inner()

    code = """
        try:
            got()
        except ValueError as error:
            for frame in traceback.extract_tb(error.__traceback__)[1:]:
                print(frame.filename, frame.name, frame.line, sep="|")
    """
    assert load_elsewhere(runner, fails, code) == [
        f"{__file__}|fails|inner()",
        f'{__file__}|inner|raise ValueError("here")',
    ]


def numbers() -> Iterator[int]:
    yield 1


@pytest.mark.parametrize("obj", [threading.Lock(), sys.stdout, numbers()], ids=["lock", "file", "generator"])
def test_what_has_no_meaning_elsewhere(obj: object) -> None:
    """A lock, an open file or a generator cannot be pickled."""
    with pytest.raises((TypeError, pickle.PicklingError)):
        frozen_config.dumps(obj, None)


def test_a_module_travels_by_name() -> None:
    """A config or a function may refer to a module."""
    assert frozen_config.loads(frozen_config.dumps(sys, None)) is sys


# --- the program's namespace


def test_the_namespace_of_a_function_of_main() -> None:
    """Under a profiler `__main__` is the profiler; the program's own function has the program's names."""
    names = {"__name__": "__main__", "x": 1}
    exec("def function(): pass", names)
    assert frozen_config.program_namespace(names["function"]) is names


@pytest.mark.parametrize("task", [importable, SimpleNamespace(), len])
def test_the_namespace_of_anything_else(task: object) -> None:
    """A function of another module, or a callable object, tells nothing: then it is what `__main__` has."""
    assert frozen_config.program_namespace(task) is vars(sys.modules["__main__"])


# --- within a process


def test_local_pickles_keep_identity() -> None:
    """Classes and functions come back as the very same objects, also those that no name finds; values are copies."""
    made = make_dataclass("Made", [("a", int)])
    value: list[Any] = [made([1]), made, lambda: 3, importable, int, (made(2), made)]
    back = LocalPickle.of(value).load()
    assert back[0] == value[0] and back[0] is not value[0] and back[0].a is not value[0].a
    assert type(back[0]) is made
    assert back[1] is made and back[2] is value[2] and back[3] is importable and back[4] is int
    assert type(back[5][0]) is made and back[5][1] is made


def test_local_pickles_one_after_another() -> None:
    """Pickles can be loaded in any order, and more than once."""
    classes = [make_dataclass(f"Made{n}", [("a", int)]) for n in range(5)]
    pickles = [LocalPickle.of((cls, cls(n))) for n, cls in enumerate(classes)]
    for number in (3, 0, 4, 0):
        cls, value = pickles[number].load()
        assert cls is classes[number] and value == cls(number)


def test_a_local_pickle_keeps_what_it_names() -> None:
    """An object that only the pickle refers to stays alive, so that its place is never given to another one."""
    pickles = [LocalPickle.of(make_dataclass(f"Made{n}", [("a", int, n)])) for n in range(50)]
    assert [one.load()().a for one in pickles] == list(range(50))
