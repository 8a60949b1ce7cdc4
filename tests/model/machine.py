"""Generators as automata: the search needs processes that can be copied, compared and gone back to.

    Machine(make)             make() starts one program
    .start                    number of its first node
    .op(node)                 the operation it waits with, or None: it has ended
    .step(node, reply)        the node after that reply

A node is one *local state*: equal code position, locals, closures and evaluation stack (a loop's
iterator lives there) in every suspended frame. Two histories that lead to equal local states share
a node, which is what keeps the search small. A generator cannot be copied, so the second way out of
a node replays the node's history on a fresh one.
"""

from __future__ import annotations

import enum
import gc
import itertools
import types
from collections.abc import Callable, Generator
from dataclasses import fields, is_dataclass
from typing import Any

from ckptfs.commit.log.saves import Saves
from tests.model.disk import Failed

__all__ = ["Machine", "canonical", "forget"]

_CONSTANTS = (str, bytes, int, float, bool, type(None), type, types.CodeType)
_ITERATORS: tuple[type, ...] = (
    type(iter([])),
    type(iter(())),
    type(iter({}.values())),
    type(iter({})),
)


def canonical(value: Any) -> Any:
    """A hashable stand-in for a value; equal exactly when a program could not tell them apart."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    # Half of a search is spent here: what is done with a type is decided once.
    convert = _CONVERTERS.get(kind)
    if convert is None:
        convert = _CONVERTERS[kind] = _converter(kind, value)
    return convert(value)


def _converter(kind: type, example: Any) -> Callable[[Any], Any]:
    """What makes a stand-in for values of exactly this type; the first row that fits."""
    for kinds, convert in _ROWS:
        if issubclass(kind, kinds):
            return convert
    if is_dataclass(example) and not isinstance(example, type):
        names = tuple(field.name for field in fields(example))
        whole = _dataclass_of(kind, names)
        return _once(whole) if kind.__dataclass_params__.frozen else whole  # type: ignore[attr-defined]
    raise TypeError(f"the search cannot compare a {kind.__name__}: {example!r}")


def _dataclass_of(kind: type, names: tuple[str, ...]) -> Callable[[Any], Any]:
    return lambda value: (kind, *[canonical(getattr(value, name)) for name in names])


class _Number(int):
    """Of a stand-in that was met: equal to no value of a program."""

    __slots__ = ()

    __hash__ = int.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other


def _once(convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The same stand-ins by numbers; the one of a value that cannot change is made once.

    What programs hold most of is what they read of a log, and each of their states holds the same values.
    """

    def number(value: Any) -> Any:
        known = _KNOWN.get(id(value))
        if known is not None:
            return known[1]
        made = convert(value)
        found = _NUMBERS.get(made)
        if found is None:
            found = _NUMBERS[made] = _Number(len(_NUMBERS))
        if len(_KNOWN) == _MOST_KNOWN:
            _KNOWN.clear()
        if _lasts(value):
            _KNOWN[id(value)] = (value, found)  # it is held, so its id stays its own
        return found

    return number


def _lasts(value: Any) -> bool:
    """Whether nothing in a value can change."""
    kind = type(value)
    if kind in _PLAIN or id(value) in _KNOWN or isinstance(value, (enum.Enum, *_CONSTANTS, Saves)):
        return True
    if isinstance(value, (tuple, frozenset)):
        return all(map(_lasts, value))
    if is_dataclass(kind) and kind.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        return all(_lasts(getattr(value, field.name)) for field in fields(kind))
    return False


def forget() -> None:
    """Drop the values that earlier machines met; no machine may be in use."""
    _KNOWN.clear()
    _NUMBERS.clear()


_MOST_KNOWN = 50_000
# Values that cannot change, by their ids, with their stand-ins; and the numbers of stand-ins.
_KNOWN: dict[int, tuple[Any, Any]] = {}
_NUMBERS: dict[Any, _Number] = {}


def _itself(value: Any) -> Any:
    return value


def _cell(cell: types.CellType) -> Any:
    try:
        return canonical(cell.cell_contents)
    except ValueError:
        return "empty"


def _function(function: types.FunctionType) -> Any:
    return (
        function.__code__,
        canonical(function.__defaults__),
        canonical(function.__kwdefaults__),
        tuple(_cell(c) for c in function.__closure__ or ()),
    )


def _generator(generator: types.GeneratorType[Any, Any, Any]) -> Any:
    frame = generator.gi_frame
    if frame is None:
        return ("ended", generator.gi_code)
    local = tuple((k, canonical(v)) for k, v in sorted(frame.f_locals.items()))
    # The evaluation stack has no name: the garbage collector sees it, and with it the iterators of
    # running loops and the generator that this one delegates to.
    stack = tuple(
        canonical(r)
        for r in gc.get_referents(generator)
        if isinstance(r, (types.GeneratorType, itertools.count, *_ITERATORS))
    )
    return (frame.f_code, frame.f_lasti, local, stack)


# In order: an enum may be a str or an int as well.
_ROWS: tuple[tuple[Any, Callable[[Any], Any]], ...] = (
    (enum.Enum, _itself),
    (tuple, lambda value: (type(value), *map(canonical, value))),
    (_CONSTANTS, _itself),
    (list, lambda value: ("list", *map(canonical, value))),
    (
        (dict, types.MappingProxyType),
        lambda value: ("dict", *[(canonical(k), canonical(v)) for k, v in value.items()]),
    ),
    # Which of them a decision walks is part of what a program can tell.
    (Saves, _once(lambda value: ("saves", canonical(dict(value)), *value.living))),
    ((set, frozenset), lambda value: ("set", frozenset(map(canonical, value)))),
    (BaseException, lambda value: (type(value), *map(canonical, value.args))),
    (types.FunctionType, _function),
    (
        types.MethodType,
        lambda value: ("method", canonical(value.__func__), canonical(value.__self__)),
    ),
    (types.CellType, lambda value: ("cell", _cell(value))),
    (types.GeneratorType, _generator),
    (itertools.count, lambda value: ("count", repr(value))),
    (_ITERATORS, lambda value: ("iterator", canonical(value.__reduce__()))),
    (types.BuiltinFunctionType, _itself),
)
_PLAIN = frozenset({str, bytes, int, float, bool, type(None)})
_CONVERTERS: dict[type, Callable[[Any], Any]] = {}


class Machine:
    """The lazily built automaton of one program."""

    def __init__(self, name: str, make: Callable[[], Generator[Any, Any, Any]]) -> None:
        self.name = name
        self._make = make
        self._numbers: dict[Any, int] = {}
        self._ops: list[Any] = []
        self._values: dict[int, Any] = {}
        self._histories: list[tuple[Any, ...] | None] = []
        self._live: dict[int, Generator[Any, Any, Any]] = {}
        self._edges: dict[tuple[int, Any], int] = {}
        program = make()
        self.start = self._arrive(program, lambda: next(program), None)

    def op(self, node: int) -> Any:
        """The operation that the program waits with at ``node``; None when it has ended."""
        return self._ops[node]

    def value(self, node: int) -> Any:
        """What an ended program returned (or the exception that ended it)."""
        return self._values[node]

    def step(self, node: int, reply: Any) -> int:
        """The node that ``reply`` leads to."""
        key = (node, reply)
        found = self._edges.get(key)
        if found is None:
            program = self._live.pop(node, None) or self._replay(node)
            found = self._arrive(program, lambda: _answer(program, reply), (node, reply))
            self._edges[key] = found
        return found

    def _arrive(
        self, program: Generator[Any, Any, Any], go: Callable[[], Any], edge: tuple[int, Any] | None
    ) -> int:
        try:
            op = go()
        except StopIteration as stop:
            op, key, value = None, ("returned", canonical(stop.value)), stop.value
        except AssertionError:
            raise
        except Exception as error:  # noqa: BLE001 - what a program dies of is its result
            op, key, value = None, ("raised", canonical(error)), error
        else:
            key, value = canonical(program), None
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self._ops)
            self._ops.append(op)
            self._histories.append(edge)
            if op is None:
                self._values[number] = value
            else:
                self._live[number] = program
        return number

    def _replay(self, node: int) -> Generator[Any, Any, Any]:
        replies = []
        edge = self._histories[node]
        while edge is not None:
            replies.append(edge[1])
            edge = self._histories[edge[0]]
        program = self._make()
        next(program)
        for reply in reversed(replies):
            _answer(program, reply)
        return program

    def ends(self) -> dict[str, int]:
        """How the program may end, and in how many local states: a scenario with processes that never
        reach their point proves nothing.
        """
        counts: dict[str, int] = {}
        for value in self._values.values():
            text = repr(value) if isinstance(value, BaseException) else str(value)
            counts[text] = counts.get(text, 0) + 1
        return counts

    @property
    def size(self) -> int:
        """How many local states were met."""
        return len(self._ops)


def _answer(program: Generator[Any, Any, Any], reply: Any) -> Any:
    if isinstance(reply, Failed):
        return program.throw(reply.error())
    # Lists travel as tuples so that they can be compared.
    return program.send(list(reply) if type(reply) is tuple else reply)
