"""Public docstrings have the sections of the Google style, and the sections say what the code has.

For every function, class and method of docs/reference/public.md:

    Args        names exactly the parameters, in order; says what None means and the unit of ``_s`` and ``_bytes``,
                and names each value of a Literal
    Returns     or Yields, unless the first sentence says what is returned
    Raises      has every error that the body raises itself, and every error that the text names
    Example     is Python
    Attributes  names exactly the public fields of a class and the members of an enumeration

A docstring of one paragraph that names each parameter in double backticks needs no Args. What a base class
describes is not described again: its parameters and fields in the class, the signature of its methods. The same
holds for the methods of classes of torch and of frameworks, and for parameters after the words "the other
arguments are as for ``name``". A docstring that begins with the page of a manual, ``open(2)``, has its signature
there. Properties and special methods are left alone.

pydoclint and ruff's DOC rules were tried. pydoclint leaves alone every docstring without a section, so a missing
section goes unseen; ruff asks for sections in private functions too; and both refuse an error in Raises that the
body does not raise itself, while nearly all errors here come from the storage below.
"""

from __future__ import annotations

import ast
import builtins
import functools
import re
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

import ckptfs
from ckptfs import errors
from tests.public.shown import ROOT, module_file, pages, shown

Function = ast.FunctionDef | ast.AsyncFunctionDef

_SYSTEM_CALL = re.compile(r"\w+\(\d\)")
_OTHERS = re.compile(r"[Aa]rguments\s+are\s+as\s+for\s+``([\w.]+)``")
_ERROR = re.compile(r"(?<![`\w.])([A-Z]\w*Error)s?\b")
_SAYS_WHAT_IS_RETURNED = re.compile(r"(?:Return|Yield|Whether|True|List|The|An?|Each|Every)\b")
_UNITS = {
    "_s": re.compile(r"\bseconds?\b|\d s\b", re.IGNORECASE),
    "_bytes": re.compile(r"\bbytes?\b", re.IGNORECASE),
}
_OF_OTHERS = {"UnpicklingError"}
_NOT_FOR_CALLERS = {"AssertionError", "NotImplementedError"}
_PLAIN_BASES = {"ABC", "Generic", "NamedTuple", "Protocol", "TypedDict"}
_ENUMS = {"Enum", "IntEnum", "StrEnum", "Flag", "IntFlag"}


def parsed(docstring: str) -> Any:
    """Split a cleaned docstring into its text and its sections, as the manual does."""
    sys.path.insert(0, str(ROOT / "docs" / "_ext"))
    try:
        from sections import parsed as split  # type: ignore[import-not-found]
    finally:
        sys.path.pop(0)
    return split(docstring)


class Sources:
    """Definitions by module and name, wherever a name was imported from."""

    @functools.cached_property
    def _trees(self) -> dict[str, dict[str, ast.AST]]:
        return {}

    def _names(self, module: str) -> dict[str, ast.AST]:
        if module not in self._trees:
            file = module_file(module)
            assert file is not None, module
            found: dict[str, ast.AST] = {}
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.ImportFrom):
                    found |= {a.asname or a.name: node for a in node.names}
            for node in _statements(ast.parse(file.read_text()).body):
                if isinstance(node, Function | ast.ClassDef):
                    found[node.name] = node
                elif isinstance(node, ast.Assign):
                    found |= {t.id: node for t in node.targets if isinstance(t, ast.Name)}
            self._trees[module] = found
        return self._trees[module]

    def find(self, module: str, name: str) -> tuple[str, ast.AST] | None:
        """Return the module that defines a name of ``module``, and the definition."""
        node = self._names(module).get(name)
        if isinstance(node, ast.ImportFrom):
            original = next(a.name for a in node.names if (a.asname or a.name) == name)
            if node.module is None or not node.module.startswith("ckptfs"):
                return None
            return self.find(node.module, original)
        return None if node is None else (module, node)


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Those of a module, and those below an ``if`` or ``try`` that asks what is installed."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            yield from _statements([*node.body, *node.orelse])


SOURCES = Sources()


def public_names() -> Iterator[tuple[str, str]]:
    """Yield the module and the name of everything that docs/reference/public.md lists of Python."""
    homes = {name: ckptfs._HOMES.get(name, "ckptfs.errors") for name in ckptfs.__all__}
    for name, module in homes.items():
        if name != "__version__":
            yield module, name
    for dotted in sorted(shown(pages()).names):
        module, _, name = dotted.rpartition(".")
        yield module, name


def offences() -> list[str]:
    """Return what breaks the rule: dotted name, colon, what is wrong."""
    found: list[str] = []
    done: set[tuple[str, str]] = set()
    for module, name in public_names():
        definition = SOURCES.find(module, name)
        if definition is None:
            continue
        home, node = definition
        documented = [(home, name, node), *_methods(home, node)]
        for place, qualified, one in documented:
            if (place, qualified) in done or not isinstance(one, Function | ast.ClassDef):
                continue
            done.add((place, qualified))
            calls = "." not in qualified or not _is_called_by_others(home, node)
            wrong = wrong_with(place, one, with_signature=calls)
            found += [f"{place}.{qualified}: {why}" for why in wrong]
    assert len(done) > 800
    return found


def _is_called_by_others(module: str, node: ast.AST) -> bool:
    """Whether a class derives from one of torch or of a framework: its methods are described there."""
    for base in node.bases if isinstance(node, ast.ClassDef) else ():
        name = ast.unparse(base).partition("[")[0].rpartition(".")[2]
        found = SOURCES.find(module, name)
        if found is not None and _is_called_by_others(*found):
            return True
        if found is None and name not in _PLAIN_BASES | _ENUMS and _exception(name) is None:
            return True
    return False


def _methods(module: str, node: ast.AST) -> Iterator[tuple[str, str, Function]]:
    """Public methods of a class, those of base classes included: each where the contract is first written."""
    if not isinstance(node, ast.ClassDef):
        return
    above: list[tuple[str, str, Function]] = []
    for base in node.bases:
        found = SOURCES.find(module, base.id) if isinstance(base, ast.Name) else None
        above += _methods(*found) if found is not None else []
    yield from above
    inherited = {name.rpartition(".")[2] for _, name, method in above if ast.get_docstring(method)}
    for method in node.body:
        if not isinstance(method, Function) or method.name.startswith(("_", "test_")):
            continue
        if method.name not in inherited:
            yield module, f"{node.name}.{method.name}", method


def wrong_with(
    module: str, node: Function | ast.ClassDef, *, with_signature: bool = True
) -> list[str]:
    """Return what the docstring of one public definition lacks."""
    docstring = ast.get_docstring(node)
    if isinstance(node, ast.ClassDef):
        return list(_wrong_with_class(module, node, parsed(docstring or "")))
    decorators = {ast.unparse(d).partition("(")[0].rpartition(".")[2] for d in node.decorator_list}
    if docstring is None or decorators & {"overload", "property", "cached_property", "setter"}:
        return []
    found = parsed(docstring)
    wrong = [*_wrong_with_errors(module, node, found), *_wrong_with_example(found)]
    with_signature = with_signature and not _SYSTEM_CALL.match(found.text)
    if with_signature or "Args" in found.sections:
        wrong += _wrong_with_arguments(module, parameters(node), found)
    if with_signature:
        wrong += _wrong_with_result(node, found)
    return wrong


def parameters(node: Function) -> dict[str, tuple[ast.expr | None, ast.expr | None]]:
    """Return annotation and default of each public parameter but ``self`` and ``cls``."""
    args = node.args
    listed = [*args.posonlyargs, *args.args]
    defaults = [*[None] * (len(listed) - len(args.defaults)), *args.defaults]
    both = [*zip(listed, defaults, strict=True)]
    both += [(args.vararg, None)] if args.vararg else []
    both += zip(args.kwonlyargs, args.kw_defaults, strict=True)
    both += [(args.kwarg, None)] if args.kwarg else []
    return {
        arg.arg: (arg.annotation, default)
        for arg, default in both
        if arg.arg not in {"self", "cls"} and not arg.arg.startswith("_")
    }


def _wrong_with_arguments(
    module: str, wanted: dict[str, tuple[ast.expr | None, ast.expr | None]], found: Any
) -> Iterator[str]:
    named = found.entries.get("Args", {})
    elsewhere = {n for other in _OTHERS.findall(found.text) for n in _described_by(module, other)}
    wanted = {n: p for n, p in wanted.items() if n in named or n not in elsewhere}
    if "Args" in found.sections:
        if list(named) != list(wanted):
            yield f"Args has {', '.join(named)}; the parameters are {', '.join(wanted)}"
    elif wanted:
        if "\n\n" in found.text or any(f"``{name}``" not in found.text for name in wanted):
            yield f"no Args: {', '.join(wanted)}"
            return
        named = dict.fromkeys(wanted, found.text)
    for name, (annotation, default) in wanted.items():
        text = named.get(name, "")
        if text:
            yield from _wrong_with_values(module, name, annotation, default, text)


def _described_by(module: str, other: str) -> list[str]:
    """Return the parameters that the docstring of another function or class describes."""
    name, _, method = other.removeprefix("ckptfs.").partition(".")
    home = ckptfs._HOMES[name] if other.startswith("ckptfs.") else module
    found = SOURCES.find(home, name)
    node = None if found is None else found[1]
    if method and isinstance(node, ast.ClassDef):
        node = next((m for m in node.body if isinstance(m, Function) and m.name == method), None)
    if not isinstance(node, Function | ast.ClassDef):
        return []
    return list(parsed(ast.get_docstring(node) or "").entries.get("Args", {}))


def _wrong_with_values(
    module: str, name: str, annotation: ast.expr | None, default: ast.expr | None, text: str
) -> Iterator[str]:
    if isinstance(default, ast.Constant) and default.value is None and "None" not in text:
        yield f"{name}: what None means"
    for ending, unit in _UNITS.items():
        if name.endswith(ending) and not unit.search(text):
            yield f"{name}: its unit"
    missing = [value for value in _literals(module, annotation) if f'"{value}"' not in text]
    if missing:
        yield f"{name}: its values {', '.join(missing)}"


def _literals(module: str, annotation: ast.AST | None) -> Iterator[str]:
    if isinstance(annotation, ast.Name):
        definition = SOURCES.find(module, annotation.id)
        if definition and isinstance(definition[1], ast.Assign):
            yield from _literals(definition[0], definition[1].value)
    elif isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) == "Literal":
        for node in ast.walk(annotation.slice):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value
    elif isinstance(annotation, ast.BinOp):
        yield from _literals(module, annotation.left)
        yield from _literals(module, annotation.right)


def _wrong_with_result(node: Function, found: Any) -> Iterator[str]:
    returned = "None" if node.returns is None else ast.unparse(node.returns)
    if returned in {"None", "NoReturn", "Never", "Self"}:
        if node.returns is not None and {"Returns", "Yields"} & found.sections.keys():
            yield "Returns, and nothing is returned"
    elif not (
        {"Returns", "Yields"} & found.sections.keys() or _SAYS_WHAT_IS_RETURNED.match(found.text)
    ):
        yield f"no Returns: {returned}"


def _wrong_with_errors(module: str, node: Function, found: Any) -> Iterator[str]:
    listed = found.entries.get("Raises", {})
    for name in listed:
        if name not in _OF_OTHERS and not (_exception(name) or SOURCES.find(module, name)):
            yield f"Raises has {name}, which is no error"
    plain = re.sub(
        r"``.*?``", "", "\n".join([found.text, *_without_errors(found)]), flags=re.DOTALL
    )
    wanted = {*_raised_by(node), *(n for n in _ERROR.findall(plain) if hasattr(errors, n))}
    for name in sorted(wanted - _NOT_FOR_CALLERS):
        if not any(_covers(above, name) for above in listed):
            yield f"Raises lacks {name}"


def _wrong_with_example(found: Any) -> Iterator[str]:
    try:
        ast.parse(found.sections.get("Example", ""))
    except SyntaxError:
        yield "Example is no Python"


def _without_errors(found: Any) -> list[str]:
    return [text for name, text in found.sections.items() if name != "Raises"]


def _covers(above: str, name: str) -> bool:
    upper, lower = _exception(above), _exception(name)
    return above == name or (upper is not None and lower is not None and issubclass(lower, upper))


def _exception(name: str) -> type[BaseException] | None:
    value = getattr(errors, name, getattr(builtins, name, None))
    return value if isinstance(value, type) and issubclass(value, BaseException) else None


def _raised_by(node: ast.AST) -> Iterator[str]:
    """Yield names of error classes that a body raises itself, and not by a function inside it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Raise) and child.exc is not None:
            raised = child.exc.func if isinstance(child.exc, ast.Call) else child.exc
            name = ast.unparse(raised).rpartition(".")[2]
            if _exception(name) is not None:
                yield name
        elif not isinstance(child, Function | ast.ClassDef | ast.Lambda):
            yield from _raised_by(child)


def _wrong_with_class(module: str, node: ast.ClassDef, found: Any) -> Iterator[str]:
    made = next((m for m in node.body if isinstance(m, Function) and m.name == "__init__"), None)
    yield from _wrong_with_example(found)
    described = _described_above(module, node)
    wanted = {} if made is None else parameters(made)
    listed = found.entries.get("Args", {})
    wanted = {n: p for n, p in wanted.items() if n in listed or n not in described}
    yield from _wrong_with_arguments(module, wanted, found)
    fields = dict(_fields(node, made))
    named = found.entries.get("Attributes", {})
    missing = [n for n in fields if not (n in named or n in wanted or n in described)]
    if missing:
        yield f"Attributes lacks {', '.join(missing)}"
    if unknown := [n for n in named if n not in fields and n not in _bound(module, node)]:
        yield f"Attributes has {', '.join(unknown)}"
    for name, annotation in fields.items():
        if name in named:
            yield from _wrong_with_values(module, name, annotation, None, named[name])


def _described_above(module: str, node: ast.ClassDef) -> set[str]:
    """Parameters and fields that the docstrings of base classes describe."""
    described: set[str] = set()
    for base in node.bases:
        above = SOURCES.find(module, base.id) if isinstance(base, ast.Name) else None
        if above is not None and isinstance(above[1], ast.ClassDef):
            entries = parsed(ast.get_docstring(above[1]) or "").entries
            described |= {
                name for section in ("Args", "Attributes") for name in entries.get(section, {})
            }
            described |= _described_above(above[0], above[1])
    return described


def _fields(node: ast.ClassDef, made: Function | None) -> Iterator[tuple[str, ast.expr | None]]:
    is_enum = any(ast.unparse(b).rpartition(".")[2] in _ENUMS for b in node.bases)
    for statement in node.body:
        match statement:
            case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation):
                if not name.startswith("_") and "ClassVar" not in ast.unparse(annotation):
                    yield name, annotation
            case ast.Assign(targets=[ast.Name(id=name)]) if is_enum:
                yield name, None
            case _:
                pass
    for inner in ast.walk(made) if made is not None else ():
        match inner:
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                if not name.startswith("_"):
                    yield name, None
            case _:
                pass


def _bound(module: str, node: ast.ClassDef) -> set[str]:
    """Names that a class and its bases bind: properties, methods and fields."""
    found = {m.name for m in node.body if isinstance(m, Function)}
    found |= {
        t.id
        for s in node.body
        if isinstance(s, ast.Assign)
        for t in s.targets
        if isinstance(t, ast.Name)
    }
    found |= {name for name, _ in _fields(node, None)}
    for base in node.bases:
        above = SOURCES.find(module, base.id) if isinstance(base, ast.Name) else None
        if above is not None and isinstance(above[1], ast.ClassDef):
            found |= _bound(above[0], above[1])
    return found


def test_public_docstrings_have_their_sections() -> None:
    """Whatever docs/reference/public.md lists."""
    found = offences()
    assert not found, "\n".join([f"{len(found)} offences:", *found])


WHOLE = '''
def copy(source, size_bytes: int, wait_s: float | None = None, mode: Literal["all", "some"] = "all") -> int:
    """Copy a file.

    Args:
        source: The file.
        size_bytes: Its size in bytes.
        wait_s: How long to wait, in seconds; None waits as long as it takes.
        mode: "all" or "some".

    Returns:
        What was written, in bytes.

    Raises:
        StateError: The size is negative.
        OSError: The file cannot be read.
    """
    if size_bytes < 0:
        raise StateError("negative")
    raise NotFoundError("nothing")
'''
CLASS = '''
class Point:
    """A point.

    Args:
        x: Across.

    Attributes:
        y: Up.
    """

    z: ClassVar[int] = 0

    def __init__(self, x):
        self.x = x
        self.y = 0
        self._hidden = 1
'''


def _wrong(source: str) -> list[str]:
    node = ast.parse(source).body[0]
    assert isinstance(node, Function | ast.ClassDef)
    return wrong_with("ckptfs.errors", node)


def _without(source: str, section: str) -> str:
    return re.sub(rf"    {section}:\n(?: {{8}}.*\n)+", "", source)


@pytest.mark.parametrize(
    ("source", "wrong"),
    [
        (WHOLE, []),
        (CLASS, []),
        (_without(WHOLE, "Args"), ["no Args: source, size_bytes, wait_s, mode"]),
        (_without(WHOLE, "Returns"), ["no Returns: int"]),
        (
            _without(WHOLE, "Raises"),
            ["Raises lacks NotFoundError", "Raises lacks StateError"],
        ),
        (_without(CLASS, "Args"), ["no Args: x"]),
        (_without(CLASS, "Attributes"), ["Attributes lacks y"]),
        (
            WHOLE.replace("        source: The file.\n", ""),
            [
                "Args has size_bytes, wait_s, mode; the parameters are source, size_bytes, wait_s, mode"
            ],
        ),
        (WHOLE.replace("in seconds; None", "None"), ["wait_s: its unit"]),
        (WHOLE.replace("; None waits as long as it takes", ""), ["wait_s: what None means"]),
        (WHOLE.replace("Its size in bytes", "Its size"), ["size_bytes: its unit"]),
        (WHOLE.replace(' or "some"', ""), ["mode: its values some"]),
        (
            WHOLE.replace("    Raises:", "    Example:\n        copy(,\n\n    Raises:"),
            ["Example is no Python"],
        ),
        (
            WHOLE.replace("StateError: The", "StatError: The"),
            ["Raises has StatError, which is no error", "Raises lacks StateError"],
        ),
        (CLASS.replace("        y: Up.", "        y: Up.\n        w: Down."), ["Attributes has w"]),
        ('def pin(step):\n    """Keep ``step``."""', []),
        (
            'def save(uri, run, x):\n    """Save.\n\n    The other arguments are as for ``ckptfs.save``.\n\n    Args:\n        x: One.\n    """',
            [],
        ),
        (
            'def save(uri, run, x):\n    """Save.\n\n    The other arguments are as for ``ckptfs.load``.\n    """',
            ["no Args: x"],
        ),
        ('def pin(step):\n    """Keep it."""', ["no Args: step"]),
        ('def pin(step):\n    """Keep ``step``, or a StateError."""', ["Raises lacks StateError"]),
        ('def stat(fd) -> int:\n    """fstat(2)."""', []),
        ('def size() -> int:\n    """Return the size."""', []),
        ('def size() -> int:\n    """Measure it."""', ["no Returns: int"]),
        ('class Side(Enum):\n    """A side."""\n    LEFT = 1', ["Attributes lacks LEFT"]),
    ],
)
def test_what_a_docstring_lacks_is_seen(source: str, wrong: list[str]) -> None:
    """Each section taken out of a whole docstring, and each thing that a section has to say."""
    assert _wrong(source) == wrong
