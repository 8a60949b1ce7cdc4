"""Signatures of public Python names, one line each, the same on every machine and Python.

    save(state_dict: StateDict, uri: str, *, step: int | None = None, ...) -> SaveResult
    Restored(uri: str, step: int | None, ...)
    Restored.uri: str
    Run.release(self) -> None
    NoSpaceError is: StorageError, CkptfsError, OSError, Exception

Adapters of frameworks are read as syntax: their frameworks need not be installed.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import functools
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import ckptfs
from tests.public.shown import module_file

__all__ = ["imported", "lines_of", "module", "read_lines_of"]

# Special methods by which a class is used; the others say how it is made.
_USED = ("__call__", "__contains__", "__enter__", "__exit__", "__getitem__", "__iter__", "__len__")
_PLAIN = (str, int, float, bool, bytes, tuple, frozenset, type(None))
_SHORT = 60  # a longer text is for people: its words may change
_NO_BASES = {"object", "Generic", "Protocol", "ABC"}


class _Text:
    """Makes ``inspect`` print a text as it is."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def lines_of(name: str, value: Any) -> Iterator[str]:
    """A class with its members, a function, or a value."""
    if inspect.isclass(value):
        if not issubclass(value, enum.Enum):
            yield name + _signature(value)
        if bases := _bases(value):
            yield f"{name} is: {', '.join(bases)}"
        for member, found in sorted(_members(value).items()):
            yield from _member(f"{name}.{member}", found)
    elif inspect.isroutine(value) or isinstance(value, functools.partial):
        yield name + _signature(value)
    elif inspect.ismodule(value):
        yield f"{name}: a module"
    elif isinstance(value, _PLAIN):
        yield f"{name}: {_constant(value)}"
    else:
        yield f"{name}: {_steady(repr(value)) if _is_type(value) else type(value).__name__}"


def _signature(value: Callable[..., Any]) -> str:
    try:
        real = inspect.signature(value)
    except (TypeError, ValueError):
        return "(...)"  # of a builtin: an exception that has no __init__ of ours
    empty = inspect.Parameter.empty
    parameters = [
        p.replace(
            annotation=p.annotation if p.annotation is empty else _Text(_annotation(p.annotation)),
            default=p.default if p.default is empty else _Text(_steady(repr(p.default))),
        )
        for p in real.parameters.values()
        if not p.name.startswith("_")  # ckptfs's own
    ]
    returned = real.return_annotation
    if returned is not inspect.Signature.empty:
        returned = _Text(_annotation(returned))
    return str(real.replace(parameters=parameters, return_annotation=returned))


def _annotation(annotation: Any) -> str:
    if isinstance(annotation, str):
        return annotation.strip("'\"")
    return _steady(inspect.formatannotation(annotation))


def _steady(text: str) -> str:
    """Without addresses, and with names of types as they are written."""
    text = re.sub(r" at 0x[0-9a-f]+", "", text)
    text = re.sub(r"<class '([\w.]+)'>", r"\1", text)
    text = re.sub(r"<(?:function|bound method) ([\w.<>]+)[^<>]*>", r"\1", text)
    return " ".join(text.split())


def _constant(value: Any) -> str:
    text = _steady(repr(value))
    return type(value).__name__ + (f" = {text}" if len(text) <= _SHORT else "")


def _is_type(value: Any) -> bool:
    return hasattr(value, "__args__") or hasattr(value, "__supertype__")


def _bases(value: type) -> list[str]:
    """What an ``except`` or ``isinstance`` may name: public classes, and those of others."""
    found = []
    for base in value.__mro__[1:]:
        ours = base.__module__.partition(".")[0] == "ckptfs"
        public = base.__name__ in ckptfs.__all__ if ours else base.__name__ not in _NO_BASES
        if public and not base.__name__.startswith("_"):
            found.append(base.__name__)
    return found


def _members(value: type) -> dict[str, Any]:
    """Public names that ckptfs defines in a class or in what it derives from."""
    found: dict[str, Any] = {}
    for base in reversed(value.__mro__):
        if base.__module__.partition(".")[0] != "ckptfs":
            continue
        named = {**dict.fromkeys(inspect.get_annotations(base)), **vars(base)}
        for name, member in named.items():
            is_test = name.startswith("test_")
            if (not name.startswith("_") or name in _USED) and not is_test:
                found[name] = (base, member)
    return found


def _member(name: str, found: tuple[type, Any]) -> Iterator[str]:
    base, member = found
    short = name.rpartition(".")[2]
    annotated = inspect.get_annotations(base).get(short)
    match member:
        case enum.Enum():
            yield f"{name}: {_steady(repr(member.value))}"
        case property(fget=getter) if getter is not None:
            yield f"{name}: property{_result(getter)}"
        case functools.cached_property(func=getter):
            yield f"{name}: property{_result(getter)}"
        case classmethod(__func__=function) | staticmethod(__func__=function):
            kind = "classmethod" if isinstance(member, classmethod) else "staticmethod"
            yield f"{name}{_signature(function)} {kind}"
        case FunctionType():
            yield name + _signature(member)
        case type():
            yield f"{name}: a class"
        case _ if annotated is not None:
            yield f"{name}: {_annotation(annotated)}"
        case _PlainValue():
            yield f"{name}: {_constant(member)}"
        case _:
            yield f"{name}: {type(member).__name__}"


def _result(getter: Callable[..., Any]) -> str:
    returned = inspect.signature(getter).return_annotation
    return "" if returned is inspect.Signature.empty else f" -> {_annotation(returned)}"


class _PlainMeta(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _PLAIN) and not dataclasses.is_dataclass(instance)


class _PlainValue(metaclass=_PlainMeta):
    """A pattern that any plain value matches."""


# -- as syntax -------------------------------------------------------------------------------------


def read_lines_of(module: str, name: str) -> Iterator[str]:
    """The same for a module that cannot be imported everywhere."""
    node = _definition(module, name)
    match node:
        case ast.ClassDef():
            methods = _methods(module, node)
            yield name + _arguments(methods.get("__init__"))
            yield f"{name} is: {', '.join(ast.unparse(base) for base in node.bases)}"
            for method, function in sorted(methods.items()):
                if not method.startswith("_") or method in _USED:
                    kinds = [ast.unparse(d) for d in function.decorator_list]
                    yield f"{name}.{method}{_arguments(function)}{''.join(f' {k}' for k in kinds)}"
        case ast.FunctionDef():
            yield name + _arguments(node)
        case ast.Assign(value=value):
            yield f"{name}: {ast.unparse(value)}"
        case _:
            yield f"{name}: there"


def _definition(module: str, name: str) -> ast.stmt | None:
    file = module_file(module)
    assert file is not None, module
    tree = ast.parse(file.read_text())
    # Definitions may stand below an ``if`` that looks whether the framework is there.
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef(name=found) | ast.FunctionDef(name=found) if found == name:
                return node
            case ast.Assign(targets=[ast.Name(id=found)]) if found == name:
                return node
            case _:
                pass
    return None


def _methods(module: str, node: ast.ClassDef) -> dict[str, ast.FunctionDef]:
    """Its own, and those of base classes in the same module."""
    found: dict[str, ast.FunctionDef] = {}
    for base in reversed(node.bases):
        above = _definition(module, base.id) if isinstance(base, ast.Name) else None
        if isinstance(above, ast.ClassDef):
            found |= _methods(module, above)
    return found | {n.name: n for n in node.body if isinstance(n, ast.FunctionDef)}


def _arguments(function: ast.FunctionDef | None) -> str:
    if function is None:
        return "(...)"
    returned = "" if function.returns is None else f" -> {ast.unparse(function.returns)}"
    return f"({ast.unparse(function.args)}){returned}"


def imported(dotted: str) -> Any:
    """The value of a dotted name."""
    home, _, name = dotted.rpartition(".")
    return getattr(importlib.import_module(home), name)


def module(dotted: str) -> None:
    """Import it."""
    importlib.import_module(dotted)
