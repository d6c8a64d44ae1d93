"""The one pickler for what passes between the launching process and its ranks, and one for within a process."""

from __future__ import annotations

import io
import marshal
import pickle
import sys
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import IO, Any

import cloudpickle

_MAIN = "__main__"
# Place of the state in what `__reduce__` returns.
_STATE = 2


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Take a class or function by name whenever that name finds the same object again, by value otherwise.

    cloudpickle does so for modules that can be imported, but takes everything of `__main__` by value, and a class of
    which each process has its own copy fails `isinstance`. A rank's `__main__` is the user's program, so its names
    hold. Code keeps its file name, which cloudpickle drops, so that tracebacks show the user's lines.
    """

    def __init__(self, file: IO[bytes], main: Mapping[str, Any] | None) -> None:
        super().__init__(file)
        self._main = main

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, CodeType):
            return marshal.loads, (marshal.dumps(obj),)
        if self._main is not None and isinstance(obj, type | FunctionType) and obj.__module__ == _MAIN:
            path = tuple(obj.__qualname__.split("."))
            if _look_up(self._main, path) is obj:
                return _from_main, (path,)
        reduced = super().reducer_override(obj)
        if isinstance(obj, type) and isinstance(reduced, tuple) and len(reduced) > _STATE:
            # cloudpickle forgets in which function or class a class was made.
            attributes, slots = reduced[_STATE]
            state = ({**attributes, "__qualname__": obj.__qualname__}, slots)
            reduced = (*reduced[:_STATE], state, *reduced[_STATE + 1 :])
        return reduced


def _look_up(namespace: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    found = namespace.get(path[0])
    for name in path[1:]:
        found = getattr(found, name, None)
    return found


def _from_main(path: tuple[str, ...]) -> Any:
    found = _look_up(vars(sys.modules[_MAIN]), path)
    if found is None:
        raise pickle.UnpicklingError(f"the program's __main__ has no {'.'.join(path)}")
    return found


def dumps(obj: object, main: Mapping[str, Any] | None) -> bytes:
    """Pickle an object for another process of the same Python.

    Args:
        obj: Anything but what has no meaning elsewhere, such as locks and open files.
        main: Namespace of the program's `__main__` where the reader runs the same program; None: take what is
            defined there by value.
    """
    with io.BytesIO() as file:
        _Pickler(file, main).dump(obj)
        return file.getvalue()


loads = pickle.loads


def program_namespace(task_function: Any) -> Mapping[str, Any]:
    """Return the names of the program's `__main__`.

    Under a profiler `sys.modules["__main__"]` is the profiler, and only the program's own functions know its names.
    """
    names: Mapping[str, Any] = getattr(task_function, "__globals__", {})
    return names if names.get("__name__") == _MAIN else vars(sys.modules[_MAIN])


@dataclass(frozen=True)
class LocalPickle:
    """An object, pickled and compressed, for this process; classes and functions stay the very same objects.

    By value they would come back as copies, or worse, overwrite the live ones.

    Attributes:
        data: The pickle, which names classes and functions by their place in `objects`.
        objects: Those, each once.
    """

    data: bytes
    objects: tuple[object, ...]

    @classmethod
    def of(cls, obj: object) -> LocalPickle:
        """Pickle an object.

        Raises:
            Exception: whatever its parts raise when they are pickled.
        """
        with io.BytesIO() as file:
            pickler = _LocalPickler(file)
            pickler.dump(obj)
            return cls(zlib.compress(file.getvalue(), level=1), tuple(pickler.objects))

    def load(self) -> Any:
        """Return a new object like it."""
        return _LocalUnpickler(io.BytesIO(zlib.decompress(self.data)), self.objects).load()


class _LocalPickler(pickle.Pickler):
    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.objects: list[object] = []
        self._places: dict[int, int] = {}

    def persistent_id(self, obj: object) -> int | None:
        if not isinstance(obj, type | FunctionType):
            return None
        place = self._places.setdefault(id(obj), len(self.objects))
        if place == len(self.objects):
            self.objects.append(obj)
        return place


class _LocalUnpickler(pickle.Unpickler):
    def __init__(self, file: IO[bytes], objects: Sequence[object]) -> None:
        super().__init__(file)
        self._objects = objects

    def persistent_load(self, pid: int) -> object:
        return self._objects[pid]
