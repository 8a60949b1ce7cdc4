"""Mistakes to plant in the package, one at a time, to see that a test fails.

``tests/mutants/<floor>/<slug>.toml`` holds one:

    what = "the mistake, as a sentence"
    where = "Attempt.abandon"        # the qualified name of the function or class, in whatever module
    find = "if self._seal_tried:"    # text inside of it, the smallest that carries the mistake
    replace = "if False:"
    tests = ["tests/commit/test_protocol.py::test_after_the_seal"]   # pytest's arguments

``find`` of several lines matches whole lines. Its indentation does not matter, so a function that
moves to another class or module is found as before.
"""

from __future__ import annotations

import ast
import functools
import re
import textwrap
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["FLOORS", "HERE", "ROOT", "Mistake", "Planted", "load", "plant"]

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FLOORS = (
    "storage",
    "topology",
    "commit",
    "dcp",
    "manager",
    "api",
    "integrations",
    "tools",
    "bench",
    "cli",
)
_KEYS = {"what", "where", "find", "replace", "tests"}

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True, slots=True)
class Mistake:
    """One mistake, as its file says it."""

    name: str  # "<floor>/<slug>"
    what: str
    where: str
    find: str
    replace: str
    tests: tuple[str, ...]

    @property
    def floor(self) -> str:
        """The directory of its file."""
        return self.name.partition("/")[0]


@dataclass(frozen=True, slots=True)
class Planted:
    """A file of the package, relative to its root, with a mistake in it."""

    path: Path
    source: str


def load(home: Path = HERE) -> list[Mistake]:
    """Every mistake, in the order of the floors."""
    found = [_read(path) for path in sorted(home.glob("*/*.toml"))]
    return sorted(found, key=lambda m: (FLOORS.index(m.floor), m.name))


def _read(path: Path) -> Mistake:
    said = tomllib.loads(path.read_text())
    name = f"{path.parent.name}/{path.stem}"
    if said.keys() != _KEYS or not said["tests"]:
        raise ValueError(f"{name} has to say exactly {', '.join(sorted(_KEYS))}")
    tests = tuple(said["tests"])
    return Mistake(name, said["what"], said["where"], said["find"], said["replace"], tests)


def plant(mistake: Mistake, package: Path = ROOT / "ckptfs") -> Planted:
    """The one file that the mistake changes. ValueError where its text is not there exactly once."""
    last = mistake.where.rpartition(".")[2]
    heads = (f"def {last}(", f"class {last}(", f"class {last}:", f"def {last}[", f"class {last}[")
    matches: list[Planted] = []
    for path, source in _sources(package):
        if not any(head in source for head in heads):
            continue
        for start, end in _spans(source).get(mistake.where, ()):
            for changed in _changes(source[start:end], mistake):
                whole = source[:start] + changed + source[end:]
                matches.append(Planted(path.relative_to(package), whole))
    if len(matches) != 1:
        raise ValueError(f"{mistake.name}: {len(matches)} places in {mistake.where}, not one")
    return matches[0]


@functools.cache
def _sources(package: Path) -> tuple[tuple[Path, str], ...]:
    """Every file of the package, read once for all mistakes."""
    return tuple((path, path.read_text()) for path in sorted(package.rglob("*.py")))


@functools.cache
def _spans(source: str) -> dict[str, list[tuple[int, int]]]:
    """Where the definitions of each qualified name stand: whole lines, decorators among them."""
    starts = [0]
    for line in source.split("\n"):  # as ast counts them, which splitlines() does not
        starts.append(starts[-1] + len(line) + 1)
    spans: dict[str, list[tuple[int, int]]] = {}
    for node, name in _definitions(ast.parse(source), ""):
        first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
        spans.setdefault(name, []).append((starts[first - 1], starts[node.end_lineno or first]))
    return spans


def _definitions(node: ast.AST, prefix: str) -> Iterator[tuple[Definition, str]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Definition):
            name = f"{prefix}{child.name}"
            yield child, name
            yield from _definitions(child, f"{name}.")
        else:
            yield from _definitions(child, prefix)


def _changes(text: str, mistake: Mistake) -> Iterator[str]:
    find = textwrap.dedent(mistake.find).strip("\n")
    replace = textwrap.dedent(mistake.replace).strip("\n")
    for match in re.finditer(_pattern(find), text, flags=re.MULTILINE):
        indent = match["indent"] or ""
        first, *rest = replace.split("\n")
        lines = [indent + first, *(indent + line if line else "" for line in rest)]
        yield text[: match.start()] + "\n".join(lines) + text[match.end() :]


def _pattern(find: str) -> str:
    lines = find.split("\n")
    if len(lines) == 1:
        # A piece of a line; a replacement of several lines is for a whole one.
        return rf"(?P<indent>^[ ]*(?={re.escape(find)}$))?{re.escape(find)}"
    rest = [rf"(?P=indent){re.escape(line)}" if line else "" for line in lines[1:]]
    return r"^(?P<indent>[ ]*)" + "\n".join([re.escape(lines[0]), *rest]) + "$"
