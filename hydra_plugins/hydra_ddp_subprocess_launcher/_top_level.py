"""What a program does when it is imported that only a rank can do right: read from its source, nothing is run."""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Collection, Iterator
from dataclasses import dataclass

_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


@dataclass(frozen=True)
class ConfigValue:
    """A value of a config that is made from an environment variable when the config's class is imported.

    Attributes:
        place: File and line.
        name: Name of the field.
        variable: Name of the variable.
    """

    place: str
    name: str
    variable: str


@functools.cache
def _parsed(path: str) -> ast.Module | None:
    try:
        with open(path, "rb") as file:
            return ast.parse(file.read())
    except (OSError, ValueError, SyntaxError):
        return None  # A zip file, a notebook, or no longer there.


def find_calls(path: str, function: str) -> list[int]:
    """Return the lines in which a file calls a function outside of all functions."""
    tree = _parsed(path)
    nodes = _run_at_import(tree) if tree is not None else ()
    return sorted(node.lineno for node in nodes if isinstance(node, ast.Call) and _name(node.func) == function)


def config_values_from(cls: type, variables: Collection[str]) -> list[ConfigValue]:
    """Return the fields of a class whose defaults are made from one of these environment variables."""
    try:
        path = inspect.getsourcefile(cls)
    except TypeError:
        path = None
    tree = None if path is None else _parsed(path)
    if path is None or tree is None:
        return []
    found = []
    known = _variables_of_names(tree, variables)
    for definition in ast.walk(tree):
        if isinstance(definition, ast.ClassDef) and definition.name == cls.__name__:
            for statement in definition.body:
                variable = _read(getattr(statement, "value", None), variables, known)
                if variable is not None:
                    found.append(ConfigValue(f"{path}:{statement.lineno}", _target(statement), variable))
    return found


def _run_at_import(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, _Function):
            yield child
            yield from _run_at_import(child)


def _variables_of_names(tree: ast.Module, variables: Collection[str]) -> dict[str, str]:
    """Return the names of the module that hold what was read from a variable."""
    known: dict[str, str] = {}
    for node in _run_at_import(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign):
            variable = _read(node.value, variables, known)
            if variable is not None:
                known[_target(node)] = variable
    return known


def _read(node: ast.AST | None, variables: Collection[str], known: dict[str, str]) -> str | None:
    """Return the variable that an expression is made from; None: none of these."""
    # What lambdas do counts as well: a default_factory is called where the config is composed.
    for part in ast.walk(node) if node is not None else ():
        key: ast.AST | None = None
        if isinstance(part, ast.Subscript) and _name(part.value) == "environ":
            key = part.slice
        elif isinstance(part, ast.Call) and part.args and _reads_environment(part.func):
            key = part.args[0]
        elif isinstance(part, ast.Name) and part.id in known:
            return known[part.id]
        if isinstance(key, ast.Constant) and key.value in variables:
            return str(key.value)
    return None


def _reads_environment(function: ast.AST) -> bool:
    if isinstance(function, ast.Attribute) and function.attr == "get":
        return _name(function.value) == "environ"
    return _name(function) == "getenv"


def _name(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _target(statement: ast.AST) -> str:
    targets = getattr(statement, "targets", None) or [getattr(statement, "target", None)]
    return targets[0].id if isinstance(targets[0], ast.Name) else ""
