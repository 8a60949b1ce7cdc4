"""Find every text that a person can see, by what it flows into.

    shown({"ckptfs/uri.py": tree, ...})     -> the texts of each module

A text is followed backwards from where it is shown: from the arguments of error constructors, of warnings, log
lines and the functions that print; from click's options; from what functions return as text; from parameters and
dataclass fields that are named for a sentence (reason, why, hint, help, note ...). A name leads to what was assigned,
appended or bound to it; a parameter to the arguments of all calls; a field to all constructors of classes that have
it; a call to what the function returns. Functions and fields are distinguished by name only, so the list has a
text too many here and there, and none too few. A hole of an f-string is {}, and what fills it is followed too.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from ckptfs import errors

__all__ = ["ERRORS", "MIN_WORDS", "shown", "words"]

ERRORS = frozenset(name for name in errors.__all__ if name.endswith("Error"))
LOG_METHODS = frozenset({"warning", "info", "error", "exception", "critical"})
# Calls with a text anywhere among their arguments.
SHOWN = re.compile(
    r"Finding|Damage|Problem|Note|Doubt|Refusal|echo|print|UsageError|BadParameter|ClickException"
)
# Keywords, parameters and fields that hold a sentence.
WRITTEN_IN = re.compile(
    r"(hint|advice|meaning|help|short_help|help_text|epilog|reason|why|message|note|description|doubt|todo)s?"
)
MARKUP = re.compile(r"</?\w+[ >](?!/)")
# Fewer words are a name, a key or a piece of a sentence.
MIN_WORDS = 3
# Calls with a result that has the texts of their arguments.
_PASSED_ON = frozenset(
    {"sorted", "list", "tuple", "set", "reversed", "enumerate", "zip", "str", "chain", "dict", "filter",
     "mask_credentials", "frozenset", "iter", "next"}
)  # fmt: skip
# Methods with a result that has the texts of their object.
_OF_OBJECT = frozenset(
    {"format", "items", "values", "get", "pop", "strip", "rstrip", "lstrip", "removesuffix",
     "removeprefix", "capitalize", "partition", "rpartition", "split", "replace", "copy"}
)  # fmt: skip
_ADDED = frozenset({"append", "extend", "insert", "add", "appendleft", "setdefault", "update"})

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(eq=False)
class _Scope:
    """A module, a class or a function, with what its names are bound to."""

    module: str
    outer: _Scope | None = None
    name: str = ""
    parameters: tuple[str, ...] = ()
    is_class: bool = False
    bound: dict[str, list[ast.expr]] = field(default_factory=lambda: defaultdict(list))


@dataclass(eq=False)
class _Callable:
    """Something to call: its positional parameters or fields, and what it returns."""

    scope: _Scope
    parameters: list[str]
    defaults: dict[str, ast.expr]
    returned: list[tuple[ast.expr, _Scope]] = field(default_factory=list)


def shown(trees: Mapping[str, ast.Module]) -> dict[str, list[str]]:
    """Return the texts that a person can see, by module, sorted."""
    found = _Flow(trees).found
    return {module: sorted(found[module]) for module in trees if found[module]}


def words(text: str) -> list[str]:
    """Return its words: punctuation alone is none."""
    return [word for word in text.split() if re.search(r"[\w}]", word)]


class _Flow:
    """All modules, and the texts found so far."""

    def __init__(self, trees: Mapping[str, ast.Module]) -> None:
        self.found: dict[str, set[str]] = defaultdict(set)
        self.callables: dict[str, list[_Callable]] = defaultdict(list)
        self.with_field: dict[str, list[str]] = defaultdict(list)  # field -> classes
        self.attributes: dict[tuple[str, str], list[tuple[ast.expr, _Scope]]] = defaultdict(list)
        self.calls: dict[str, list[tuple[ast.Call, _Scope]]] = defaultdict(list)
        self.roots: list[tuple[ast.expr, _Scope]] = []
        self._todo: list[tuple[ast.expr, _Scope]] = []
        self._done: set[object] = set()
        for module, tree in trees.items():
            self._index(tree.body, _Scope(module))
        for name, of in [*self.callables.items()]:
            for parameter in {p for one in of for p in (*one.parameters, *one.defaults)}:
                if WRITTEN_IN.fullmatch(parameter):
                    self._parameter(name, parameter)
        for name in [*self.with_field]:
            if WRITTEN_IN.fullmatch(name):
                self._field(name)
        for node, scope in self.roots:
            self._show(node, scope)
        while self._todo:
            node, scope = self._todo.pop()
            for text in self._texts(node, scope, 0):
                self._keep(text, scope)

    # what there is

    def _index(self, nodes: Iterable[ast.AST], scope: _Scope) -> None:
        for node in nodes:
            if isinstance(node, Function):
                self._index_function(node, scope)
            elif isinstance(node, ast.ClassDef):
                self._index_class(node, scope)
            else:
                self._index_binding(node, scope)
                if isinstance(node, ast.Call):
                    self._index_call(node, scope)
                elif isinstance(node, ast.Tuple) and any(_name(e) in ERRORS for e in node.elts):
                    self.roots += [(e, scope) for e in node.elts]  # a row: class, sentence, hint
                self._index(ast.iter_child_nodes(node), scope)

    def _index_function(self, node: Function, scope: _Scope) -> None:
        arguments = node.args
        names = [a.arg for a in (*arguments.posonlyargs, *arguments.args)]
        defaults = dict(
            zip(names[len(names) - len(arguments.defaults) :], arguments.defaults, strict=True)
        )
        for arg, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
            defaults[arg.arg] = default or ast.Constant(None)
        if scope.is_class and not any(_name(d) == "staticmethod" for d in node.decorator_list):
            names = names[1:]
        name = scope.name if node.name == "__init__" else node.name
        inner = _Scope(scope.module, scope, name, (*names, *defaults))
        this = _Callable(inner, names, defaults)
        self.callables[name].append(this)
        for each in _own_nodes(node):
            if isinstance(each, ast.Return | ast.Yield) and each.value is not None:
                this.returned.append((each.value, inner))
        if node.returns is not None and re.search(r"\bstr\b", ast.unparse(node.returns)):
            self.roots += this.returned
        if any("command" in _name(d) or "group" in _name(d) for d in node.decorator_list):
            text = ast.get_docstring(node) or ""
            for paragraph in re.split(r"\n\s*\n", text):
                if "\b" not in paragraph:
                    self._keep(paragraph, scope)
        self._index([*node.decorator_list, *node.args.defaults], scope)
        self._index(node.body, inner)

    def _index_class(self, node: ast.ClassDef, scope: _Scope) -> None:
        inner = _Scope(scope.module, scope, node.name, is_class=True)
        fields, defaults = [], {}
        for statement in node.body:
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                fields.append(statement.target.id)
                if statement.value is not None:
                    defaults[fields[-1]] = statement.value
        for base in node.bases:
            above = [c for c in self.callables.get(_name(base), ()) if c.scope.is_class]
            fields[:0] = above[0].parameters if above else []
        if fields:
            self.callables[node.name].append(_Callable(inner, fields, defaults))
            for name in fields:
                self.with_field[name].append(node.name)
        self._index(node.decorator_list, scope)
        self._index(node.body, inner)

    def _index_binding(self, node: ast.AST, scope: _Scope) -> None:
        match node:
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    self._bind(target, value, scope)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                self._bind(target, value, scope)
            case (
                ast.AugAssign(target=target, value=value)
                | ast.NamedExpr(target=target, value=value)
            ):
                self._bind(target, value, scope)
            case ast.For(target=target, iter=value) | ast.comprehension(target=target, iter=value):
                self._bind(target, value, scope)
            case ast.MatchClass(kwd_attrs=names, kwd_patterns=patterns):
                for name, pattern in zip(names, patterns, strict=True):
                    if isinstance(pattern, ast.MatchAs) and pattern.name:
                        value = ast.Attribute(ast.Constant(None), name, ast.Load())
                        scope.bound[pattern.name].append(value)

    def _bind(self, target: ast.expr, value: ast.expr, scope: _Scope) -> None:
        if isinstance(target, ast.Tuple | ast.List):
            same = isinstance(value, ast.Tuple) and len(value.elts) == len(target.elts)
            for number, each in enumerate(target.elts):
                self._bind(each, value.elts[number] if same else value, scope)  # type: ignore[attr-defined]
        elif isinstance(target, ast.Name):
            scope.bound[target.id].append(value)
        elif isinstance(target, ast.Attribute):
            self.attributes[scope.module, target.attr].append((value, scope))
        elif isinstance(target, ast.Subscript):
            self._bind(target.value, value, scope)

    def _index_call(self, node: ast.Call, scope: _Scope) -> None:
        name = _name(node.func)
        self.calls[name].append((node, scope))
        if name in _ADDED and isinstance(node.func, ast.Attribute):
            for argument in node.args:
                self._bind(node.func.value, argument, scope)
        if name == "AssertionError":
            return  # for who works on ckptfs
        for keyword in node.keywords:
            if WRITTEN_IN.fullmatch(keyword.arg or ""):
                self.roots.append((keyword.value, scope))
        if SHOWN.search(name):
            self.roots += [(a, scope) for a in (*node.args, *(k.value for k in node.keywords))]
        elif name.endswith(("Error", "Warning")) or name in {"warn", *LOG_METHODS}:
            self.roots += [(a, scope) for a in node.args[:1]]

    # where it comes from

    def _show(self, node: ast.expr, scope: _Scope) -> None:
        if id(node) not in self._done:
            self._done.add(id(node))
            self._todo.append((node, scope))

    def _keep(self, source: str, scope: _Scope) -> None:
        text = " ".join(source.split())
        is_prose = len(words(text)) >= MIN_WORDS and re.search(r"[a-z]{2}", text)
        if is_prose and not MARKUP.search(text):
            self.found[scope.module].add(text)

    def _parameter(self, name: str, parameter: str) -> None:
        """Show what is passed for a parameter, or for a field of a class."""
        if (name, parameter) in self._done:
            return
        self._done.add((name, parameter))
        for one in self.callables.get(name, ()):
            if parameter in one.defaults:
                self._show(one.defaults[parameter], one.scope)
            if parameter not in one.parameters:
                continue
            position = one.parameters.index(parameter)
            for call, scope in self.calls.get(name, ()):
                starred = any(isinstance(a, ast.Starred) for a in call.args)
                if position < len(call.args) and not starred:
                    self._show(call.args[position], scope)
        for call, scope in (*self.calls.get(name, ()), *self.calls.get("partial", ())):
            for keyword in call.keywords:
                if keyword.arg == parameter:
                    self._show(keyword.value, scope)

    def _field(self, name: str) -> None:
        if ("field", name) in self._done:
            return
        self._done.add(("field", name))
        for of in self.with_field[name]:
            self._parameter(of, name)
        for call, scope in self.calls.get("replace", ()):
            for keyword in call.keywords:
                if keyword.arg == name:
                    self._show(keyword.value, scope)

    def _returned(self, name: str) -> None:
        if ("returned", name) in self._done:
            return
        self._done.add(("returned", name))
        for one in self.callables.get(name, ()):
            for value, scope in one.returned:
                self._show(value, scope)

    def _texts(self, node: ast.expr, scope: _Scope, depth: int) -> list[str]:
        """What an expression can be, as far as its source says it; what flows into it is shown."""
        match node:
            case ast.Constant(value=str() as text):
                return [text]
            case ast.JoinedStr(values=values):
                return ["".join(self._piece(value, scope) for value in values)]
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                if any(
                    isinstance(side, ast.List | ast.ListComp | ast.Tuple) for side in (left, right)
                ):
                    inside: Iterable[ast.expr] = (left, right)
                else:
                    sides = [self._texts(side, scope, depth) or ["{}"] for side in (left, right)]
                    return ["".join(pair) for pair in itertools.product(*sides)][:50]
            case ast.BinOp(left=left, op=ast.Mod()):
                inside = [left]
            case ast.Name(id=name):
                bound, of = self._lookup(name, scope)
                if depth < 2:
                    return [t for each in bound for t in self._texts(each, of, depth + 1)]
                for each in bound:
                    self._show(each, of)
                return []
            case _:
                inside = [*self._inside(node, scope)]
        return [text for each in inside for text in self._texts(each, scope, depth)]

    def _piece(self, value: ast.expr, scope: _Scope) -> str:
        if isinstance(value, ast.Constant):
            return str(value.value)
        if isinstance(value, ast.FormattedValue):
            self._show(value.value, scope)
        return "{}"

    def _inside(self, node: ast.expr, scope: _Scope) -> Iterator[ast.expr]:
        match node:
            case ast.IfExp(body=body, orelse=orelse):
                yield from (body, orelse)
            case ast.BoolOp(values=parts) | ast.Dict(values=parts):
                yield from parts
            case ast.Tuple(elts=parts) | ast.List(elts=parts) | ast.Set(elts=parts):
                yield from parts
            case ast.GeneratorExp(elt=part) | ast.ListComp(elt=part) | ast.SetComp(elt=part):
                yield part
            case (
                ast.DictComp(value=part)
                | ast.Subscript(value=part)
                | ast.Starred(value=part)
                | ast.NamedExpr(value=part)
                | ast.Await(value=part)
                | ast.YieldFrom(value=part)
            ):
                yield part
            case ast.Attribute(attr=name):
                self._field(name)
                for value, of in self.attributes.get((scope.module, name), ()):
                    self._show(value, of)
                self._returned(name)  # a property
            case ast.Call(func=func, args=args):
                name = _name(func)
                if isinstance(func, ast.Attribute) and name in _OF_OBJECT:
                    yield func.value
                if name in _PASSED_ON or name in {"join", "get", "pop"}:
                    yield from args
                self._returned(name)

    def _lookup(self, name: str, scope: _Scope) -> tuple[list[ast.expr], _Scope]:
        at: _Scope | None = scope
        while at is not None:
            if not at.is_class or at is scope:
                if name in at.parameters:
                    self._parameter(at.name, name)
                if name in at.bound or name in at.parameters:
                    return at.bound.get(name, []), at
            at = at.outer
        return [], scope


def _own_nodes(function: Function) -> Iterator[ast.AST]:
    """The nodes of a function without those of functions inside it."""
    todo: list[ast.AST] = [*function.body]
    while todo:
        node = todo.pop()
        yield node
        if not isinstance(node, Function | ast.ClassDef | ast.Lambda):
            todo += ast.iter_child_nodes(node)


def _name(node: ast.AST) -> str:
    """The last part of a name, of what is called for a call."""
    if isinstance(node, ast.Call):
        return _name(node.func)
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
