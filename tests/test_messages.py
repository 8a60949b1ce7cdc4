"""Every text that a person can see, collected from the syntax tree into tests/golden/messages.txt.

Errors and their hints, warnings, log lines, the help of the command line, the findings of doctor and verify, and
the sentences that functions return for them. A hole of an f-string is {}. After a change of a message:

    python -m tests.test_messages    writes tests/golden/messages.txt
"""

from __future__ import annotations

import ast
import functools
import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from ckptfs import errors
from tests.test_house import DIALECT_OF_PROSE

PACKAGE = Path(__file__).resolve().parents[1] / "ckptfs"
GOLDEN = Path(__file__).parent / "golden" / "messages.txt"
MAX_WORDS = 25
# What is not there yet: these figures may only go down.
LIMITS = {"words of a dialect": 0, "long sentences": 0}

ERRORS = frozenset(name for name in errors.__all__ if name.endswith("Error"))
LOG_METHODS = frozenset({"warning", "info", "error", "exception", "critical"})
# Calls with a text anywhere among their arguments.
SHOWN = re.compile(
    r"Finding|Damage|Problem|Note|Refusal|echo|UsageError|BadParameter|ClickException"
)
WRITTEN_IN = re.compile(r"(hint|advice|meaning|help|short_help|epilog|reason|why|message)s?")
MARKUP = re.compile(r"</?\w+[ >]")
# Fewer words are a name, a key or a piece of a sentence.
MIN_WORDS = 3


class Texts:
    """The texts of one module.

    Args:
        tree: Its syntax tree.
    """

    def __init__(self, tree: ast.Module) -> None:
        self.tree = tree
        self._assigned: dict[str, list[ast.expr]] = defaultdict(list)
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for target in targets:
                    if isinstance(target, ast.Name):
                        self._assigned[target.id].append(node.value)

    def shown(self) -> Iterator[str]:
        """Each text that a person can see, more than once where it is used twice."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call):
                yield from self._of_call(node)
            elif isinstance(node, ast.Tuple) and any(_name(e) in ERRORS for e in node.elts):
                yield from self._of(*node.elts)  # a row of a table: class, sentence, hint
            elif isinstance(node, ast.FunctionDef):
                yield from self._of_function(node)

    def _of_call(self, node: ast.Call) -> Iterator[str]:
        name = _name(node.func)
        for keyword in node.keywords:
            if WRITTEN_IN.fullmatch(keyword.arg or ""):
                yield from self._of(keyword.value)
        if SHOWN.search(name):
            yield from self._of(*node.args, *(keyword.value for keyword in node.keywords))
        elif name == "AssertionError":
            return  # for who works on ckptfs
        elif name.endswith(("Error", "Warning")) or name in {"warn", *LOG_METHODS}:
            yield from self._of(*node.args[:1])

    def _of_function(self, node: ast.FunctionDef) -> Iterator[str]:
        if any("command" in _name(d) or "group" in _name(d) for d in node.decorator_list):
            text = ast.get_docstring(node) or ""
            yield from (" ".join(p.split()) for p in re.split(r"\n\s*\n", text) if "\b" not in p)
        if node.returns is not None and ast.unparse(node.returns) in {"str", "str | None"}:
            for inner in ast.walk(node):
                if isinstance(inner, ast.Return) and inner.value is not None:
                    yield from self._of(inner.value)

    def _of(self, *nodes: ast.expr) -> Iterator[str]:
        for node in nodes:
            for source in self._texts(node, 0):
                text = " ".join(source.split())
                if len(words(text)) >= MIN_WORDS and not MARKUP.search(text):
                    yield text

    def _texts(self, node: ast.expr, depth: int) -> list[str]:
        """What an expression can be, as far as its source says it."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return [node.value]
        if isinstance(node, ast.JoinedStr):
            parts = [
                self._texts(v, depth) if isinstance(v, ast.Constant) else ["{}"]
                for v in node.values
            ]
            return ["".join(itertools.chain(*parts))]
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            sides = [self._texts(side, depth) or ["{}"] for side in (node.left, node.right)]
            return ["".join(pair) for pair in itertools.product(*sides)]
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
            return self._texts(node.left, depth)
        inside: Iterable[ast.expr] = ()
        if isinstance(node, ast.IfExp):
            inside = (node.body, node.orelse)
        elif isinstance(node, ast.BoolOp):
            inside = node.values
        elif isinstance(node, ast.Tuple | ast.List):
            inside = node.elts
        elif isinstance(node, ast.Call) and _name(node.func) == "format":
            inside = [node.func.value] if isinstance(node.func, ast.Attribute) else ()
        elif isinstance(node, ast.Name) and depth < 2:
            inside, depth = self._assigned.get(node.id, ()), depth + 1
        return [text for each in inside for text in self._texts(each, depth)]


def _name(node: ast.expr) -> str:
    """The last part of a name, of what is called for a call."""
    if isinstance(node, ast.Call):
        return _name(node.func)
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def words(text: str) -> list[str]:
    """Return its words: punctuation alone is none."""
    return [word for word in text.split() if re.search(r"[\w}]", word)]


def sentences(text: str) -> list[str]:
    """Return its sentences, and the halves at a semicolon."""
    return re.split(r"(?<=[.;!?])\s+", text)


def dialect_in(text: str) -> list[str]:
    """Return the words of the list in it; code in backticks is not prose."""
    return DIALECT_OF_PROSE.findall(re.sub(r"`[^`]*`", "", text))


@functools.cache
def messages() -> dict[str, list[str]]:
    """The texts of each module, sorted."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        texts = sorted(set(Texts(ast.parse(path.read_text())).shown()))
        if texts:
            found[path.relative_to(PACKAGE.parent).as_posix()] = texts
    return found


def page() -> str:
    """The golden file."""
    return "\n".join("\n".join([f"[{m}]", *texts, ""]) for m, texts in messages().items())


def offences(texts: dict[str, list[str]]) -> dict[str, list[str]]:
    """What breaks each rule."""
    all_of = [(module, text) for module, of in texts.items() for text in of]
    return {
        "words of a dialect": [f"{m}: {w}: {t}" for m, t in all_of for w in dialect_in(t)],
        "long sentences": [
            f"{m}: {s}" for m, t in all_of for s in sentences(t) if len(words(s)) > MAX_WORDS
        ],
    }


@pytest.mark.parametrize("rule", LIMITS)
def test_messages_are_plain_and_short(rule: str) -> None:
    """No figure rises."""
    found = offences(messages())[rule]
    assert len(found) <= LIMITS[rule], "\n".join([f"{len(found)} {rule}:", *found])


def test_every_message_is_in_the_golden_file() -> None:
    """Who changes a message sees it between its neighbours: ``python -m tests.test_messages`` writes the file."""
    assert page() == GOLDEN.read_text()


@pytest.mark.parametrize(
    ("source", "texts"),
    [
        ('raise StateError(f"no key {key!r} in {there}", hint="leave it out")', 2),
        ('raise ValueError("it is not JSON" if bad else "it ends too early")', 2),
        ('hint = "name another file"\nraise errors.StorageError("short text", hint=hint)', 1),
        ('logger.warning("%s is not removed: " + "%s is held", name, name)', 1),
        ('TABLE = {1: (NoSpaceError, "the disk is full", None)}', 1),
        ('Finding("names", _THEME, Verdict.OK, "all names are kept", "", "rename the run")', 2),
        ('click.option("--keep", help="Keep the newest.")', 1),
        (
            '@main.command()\ndef rm():\n    """Delete a checkpoint.\n\n    It asks first.\n    """',
            2,
        ),
        ('def why(self) -> str | None:\n    return "one domain is missing"', 1),
        ('def name(self) -> bytes | None:\n    return find("one domain is missing")', 0),
        ('raise AssertionError("this is not reached")', 0),
    ],
)
def test_texts_are_found(source: str, texts: int) -> None:
    """Wherever the library puts what a person reads."""
    assert len(list(Texts(ast.parse(source)).shown())) == texts


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("the storage was closed meanwhile", 0),
        ("nobody said so", 0),
        (" ".join(["word"] * (MAX_WORDS + 1)), 1),
        ("The end. " + " ".join(["word"] * (MAX_WORDS + 1)), 1),
    ],
)
def test_each_offence_is_counted(text: str, rule: int) -> None:
    """And by its own rule alone."""
    found = list(offences({"m": [text, "`nobody` is code; " + "a word " * 10]}).values())
    assert [len(of) for of in found] == [int(rule == 0), int(rule == 1)]


if __name__ == "__main__":
    GOLDEN.write_text(page())
