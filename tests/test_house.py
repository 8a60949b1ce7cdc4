"""The layout of the package: ``ls -R`` shows where a change belongs, and a name has one meaning.

Each figure counts what breaks a rule. Where a rule does not hold yet, ``LIMITS`` has the count of today: lower
it after a clean-up, and never raise it.
"""

from __future__ import annotations

import ast
import functools
import re
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.ways import modules_of

PACKAGE = Path(__file__).resolve().parents[1] / "ckptfs"
MAX_MODULES = 15
MAX_LINES = 800
# Modules that are started by name: nothing has to import them.
ENTRY_POINTS = frozenset({"ckptfs.__main__"})
# Words that stand in identifiers for something that has a standard term.
DIALECT = frozenset(
    [
        "told",
        "said",
        "asked",
        "laid",
        "heed",
        "lanes",
        "desk",
        "hall",
        "ground",
        "rally",
        "crew",
        "flight",
        "blanks",
        "shelves",
        "lately",
        "bury",
        "mourned",
        "farewell",
        "hire",
        "hired",
        "seat",
        "spread",
        "tale",
        "bell",
        "fate",
        "mine",
        "theirs",
        "beside",
        "kept",
        "bare",
        "whole",
        "over",
        "aside",
        "room",
        "feed",
        "spared",
        "stand_in",
        "word_of",
        "tell_nobody",
        "heard",
        "landing",
        "corner",
        "taken",
        "looked",
        "holding",
        "seen",
        "rest",
        "going",
        "powers",
        "verdicts",
        "doomed",
        "there",
    ]
)

# Words of a private dialect in prose, most of them for something that plain English says with a subject and a verb:
# "it is told" for "the error says", "beside" for "next to" or "in addition to", "goes on" for "continues".
DIALECT_OF_PROSE = re.compile(
    r"\b(?:told|tells|beside|nobody|whoever|whose|of which|meanwhile|lets? go|heard|heed\w*|unasked|anew|stands"
    r"|go on|goes on|going on|gone on|went on|lies|lie|for ever|as ever|lately|dearer|what it failed of)\b",
    re.IGNORECASE,
)
# Pages that are made: docs/reference/public.md comes from docstrings.
MADE = frozenset({"docs/reference/public.md"})
# Folders next to the package with docstrings and comments that avoid the same words.
AROUND = ("benchmarks", "examples", "tests")

LIMITS = {
    "modules that are too many in their folder": 3,
    "modules that are too long": 0,
    "modules that one neighbour alone imports": 28,
    "file names that stand in several folders": 10,
    "class names that are defined in several modules": 27,
    "identifiers with a word of no field": 63,
    "words of a dialect in docstrings": 4,
    "words of a dialect in comments": 0,
    "words of a dialect in pages": 0,
    "words of a dialect in docstrings around the package": 0,
    "words of a dialect in comments around the package": 0,
    "words of a dialect in the Makefile": 0,
}

# Modules that one save and one load of a single process pass; the goal is 30 and 20.
WAYS = {"save": 58, "load": 51}

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def figures(package: Path) -> dict[str, list[str]]:
    """Return what breaks each rule, one item per offence."""
    trees = {path: ast.parse(path.read_text()) for path in sorted(package.rglob("*.py"))}
    modules = [path for path in trees if path.name != "__init__.py"]
    around = [path for name in AROUND for path in sorted((package.parent / name).rglob("*.py"))]
    return dict(
        zip(
            LIMITS,
            (
                list(_crowded(modules)),
                [str(p) for p in modules if len(p.read_text().splitlines()) > MAX_LINES],
                list(_imported_once(package, trees)),
                _repeated((path.stem, str(path)) for path in modules),
                _repeated((name, str(path)) for path in trees for name in _classes(trees[path])),
                list(_dialect(trees)),
                list(_dialect_of_docstrings(trees.items())),
                list(_dialect_of_comments(trees)),
                dialect_of_pages(package.parent),
                list(_dialect_of_docstrings((p, ast.parse(p.read_text())) for p in around)),
                list(_dialect_of_comments(around)),
                list(_dialect_of_makefile(package.parent / "Makefile")),
            ),
            strict=True,
        )
    )


def _crowded(modules: list[Path]) -> Iterator[str]:
    for folder, count in Counter(path.parent for path in modules).items():
        yield from [f"{folder} has {count}"] * (count - MAX_MODULES)


def _imported_once(package: Path, trees: dict[Path, ast.Module]) -> Iterator[str]:
    names = {
        path: ".".join(path.relative_to(package.parent).with_suffix("").parts).removesuffix(
            ".__init__"
        )
        for path in trees
    }
    known = set(names.values())
    importers: dict[str, set[str]] = defaultdict(set)
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.ImportFrom) or node.module is None:
                continue
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                importers[full if full in known else node.module].add(names[path])
    for path, name in names.items():
        by = importers[name]
        if path.name == "__init__.py" or name in ENTRY_POINTS or len(by) != 1:
            continue
        only = next(iter(by))
        if only.rpartition(".")[0] == name.rpartition(".")[0]:
            yield f"{name} (by {only})"


def _classes(tree: ast.Module) -> set[str]:
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


def _repeated(named: Iterator[tuple[str, str]]) -> list[str]:
    places: dict[str, list[str]] = defaultdict(list)
    for name, where in named:
        places[name].append(where)
    return [f"{name}: {', '.join(places[name])}" for name in places if len(places[name]) > 1]


def _dialect(trees: dict[Path, ast.Module]) -> Iterator[str]:
    for path, tree in trees.items():
        identifiers = [path.stem]
        for node in ast.walk(tree):
            if isinstance(node, Definition):
                identifiers.append(node.name)
            elif isinstance(node, ast.arg):
                identifiers.append(node.arg)
        for identifier in identifiers:
            # "in flight" is a term of networks and of the glossary; "flight" alone is none.
            words = _words(identifier.replace("in_flight", ""))
            yield from (f"{path}: {identifier}" for word in words if word in DIALECT)


def _words(identifier: str) -> list[str]:
    return [word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", identifier)]


def _dialect_of_docstrings(trees: Iterable[tuple[Path, ast.Module]]) -> Iterator[str]:
    for path, tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | Definition):
                for word in dialect_in(ast.get_docstring(node) or ""):
                    yield f"{path}, {getattr(node, 'name', 'the module')}: {word}"


def _dialect_of_comments(paths: Iterable[Path]) -> Iterator[str]:
    for path in paths:
        with path.open() as file:
            for token in tokenize.generate_tokens(file.readline):
                if token.type == tokenize.COMMENT:
                    for word in dialect_in(token.string.lstrip("# ")):
                        yield f"{path}, line {token.start[0]}: {word}"


def _dialect_of_makefile(makefile: Path) -> Iterator[str]:
    """Its comments, and what it prints: a recipe names variables and files."""
    lines = makefile.read_text().splitlines() if makefile.exists() else []
    for number, line in enumerate(lines, 1):
        said = re.match(r"\s*#(.*)|\t@echo \"(.*)\"$", line)
        for word in dialect_in((said[1] or said[2] or "") if said else ""):
            yield f"{makefile}, line {number}: {word}"


def dialect_of_pages(root: Path) -> list[str]:
    """Return each word of the dialect in the pages below root, with its page."""
    below = [page for name in ("docs", *AROUND, ".github") for page in (root / name).rglob("*.md")]
    pages = [*root.glob("*.md"), *below]
    named = {page.relative_to(root).as_posix(): page for page in sorted(pages)}
    return [
        f"{name}: {word}"
        for name, page in named.items()
        if name not in MADE
        for word in dialect_in(page.read_text())
    ]


def dialect_in(text: str) -> list[str]:
    """Return the words of the dialect in prose: code, comments, targets of links and quotations are none."""
    text = re.sub(r"(?ms)^ *```.*?^ *```", "", text)
    text = re.sub(r"(?s)<!--.*?-->", "", text)
    text = re.sub(r"``.*?``|`[^`]*`|\]\([^)]*\)|\"[^\"\n]*\"", "", text, flags=re.DOTALL)
    return DIALECT_OF_PROSE.findall(" ".join(text.split()))


@functools.cache
def _found() -> dict[str, list[str]]:
    return figures(PACKAGE)


@pytest.mark.parametrize("rule", LIMITS)
def test_the_house_stays_in_order(rule: str) -> None:
    """No figure rises."""
    found = _found()[rule]
    assert len(found) <= LIMITS[rule], "\n".join([f"{len(found)} {rule}:", *found])


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("It goes\non, and nobody is told.", 3),
        ('Say `told`, ``whose`` or "meanwhile".', 0),
        ("[nobody](told.md#told), Whose", 2),
        ("```text\nnobody\n```\n<!-- told -->\nThe overtold lied.", 0),
    ],
)
def test_words_are_found_in_prose_alone(text: str, count: int) -> None:
    """Over the end of a line too; code and quotations are left alone."""
    assert len(dialect_in(text)) == count


def test_the_map_shows_every_room() -> None:
    """CONTRIBUTING.md has a line for each folder of the package, and for none that is gone."""
    text = (PACKAGE.parent / "CONTRIBUTING.md").read_text()
    shown, floor = set(), ""
    for upper, room in re.findall(r"^\| (?:`(\w+)/`)? *\| (?:`(\w+)/`)? *\|", text, re.MULTILINE):
        floor = upper or floor
        shown.add(f"{floor}/{room}".rstrip("/"))
    folders = {path.parent.relative_to(PACKAGE) for path in PACKAGE.rglob("__init__.py")} - {Path()}
    rooms = {str(f) for f in folders if len(f.parts) < 3 and not f.name.startswith("_")}
    assert shown - {""} == rooms


def test_the_recipes_name_files_that_are_there() -> None:
    """The recipes of CONTRIBUTING.md lead to existing files and folders."""
    text = (PACKAGE.parent / "CONTRIBUTING.md").read_text()
    recipes = text.partition("\n## Recipes\n")[2].partition("\n## ")[0]
    named = set(re.findall(r"`((?:ckptfs|docs|tests)/[\w/.-]+)`", recipes))
    assert len(named) > 25
    wanted = {path for path in named if not re.search(r"\bX\b|test_X", path)}
    assert [path for path in sorted(wanted) if not (PACKAGE.parent / path).exists()] == []


def _package(folder: Path, **sources: str) -> Path:
    package = folder / "ckptfs"
    for name, source in sources.items():
        path = package / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return package


def test_an_orderly_package_has_no_offence(tmp_path: Path) -> None:
    """Otherwise a limit of 0 could not be reached."""
    package = _package(
        tmp_path,
        api="from ckptfs.low.files import read\n",
        low__files="class Reader: ...\ndef read(path): ...\n",
        low__names="from ckptfs.low.files import Reader\nclass Name: ...\n",
    )
    assert not any(figures(package).values())


SIXTEEN = {f"low__m{number}": "" for number in range(MAX_MODULES + 1)}


@pytest.mark.parametrize(
    ("rule", "sources", "count"),
    [
        (0, SIXTEEN, 1),
        (1, {"long": "x = 1\n" * (MAX_LINES + 1), "short": "x = 1\n" * MAX_LINES}, 1),
        (2, {"low__a": "from ckptfs.low import b\n", "low__b": ""}, 1),
        (2, {"low__a": "from ckptfs.low.b import x\n", "low__b": "x = 1\n", "c": ""}, 1),
        (
            2,
            {
                "low__a": "from ckptfs.low.b import x\n",
                "low__b": "",
                "c": "from ckptfs.low import b\n",
            },
            0,
        ),
        (3, {"low__names": "", "high__names": "", "high__files": ""}, 1),
        (4, {"a": "class _State: ...\n", "b": "class _State: ...\nclass Other: ...\n"}, 1),
        (5, {"told": ""}, 1),
        (5, {"a": "def look_aside(seat): ...\nclass BareRoom: ...\n"}, 4),
        (5, {"a": "def roommate(override): ...\n"}, 0),
        (5, {"a": "def take_flight(max_in_flight): ...\n"}, 1),
        (6, {"a": '"""Nobody."""\ndef f(): "What lies beside."\nclass C: "`told`"\n'}, 3),
        (7, {"a": "x = 1  # nobody reads it\ny = 'told'\n"}, 1),
    ],
)
def test_each_offence_is_counted(
    tmp_path: Path, rule: int, sources: dict[str, str], count: int
) -> None:
    """Of each kind, planted in a small package."""
    found = list(figures(_package(tmp_path, **sources)).values())
    assert len(found[rule]) == count


@pytest.mark.parametrize(
    ("rule", "file", "text", "count"),
    [
        (8, "README.md", "Nobody.\n", 1),
        (8, "CHANGELOG.md", "* It goes\n  on.\n", 1),
        (8, "SECURITY.md", "Whoever reports.\n", 1),
        (8, "docs/guide/a.md", "What lies there.\n", 1),
        (8, "docs/reference/public.md", "told\n", 0),
        (8, "benchmarks/README.md", "| what | beside |\n", 1),
        (9, "tests/low/test_a.py", 'def test_a():\n    """Nobody is told."""\n', 2),
        (9, "benchmarks/a.py", '"""ckptfs beside stock."""\n', 1),
        (9, "examples/demo/a.py", 'class A:\n    """``told``, whose."""\n', 1),
        (10, "tests/a.py", "told = 1  # told\n# nobody\n", 2),
        (10, "benchmarks/a.py", "# whose\n", 1),
        (10, "examples/a.py", 'x = "# whose"\n', 0),
        (11, "Makefile", "# Made anew.\na: beside\n\trm -f $$beside\n", 1),
        (11, "Makefile", 'help:\n\t@echo "make a    anew (ROWS=\\"told\\")"\n', 1),
    ],
)
def test_words_are_found_around_the_package(
    tmp_path: Path, rule: int, file: str, text: str, count: int
) -> None:
    """In each place where prose is held, planted next to a package without an offence."""
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    found = figures(_package(tmp_path, a="x = 1\n"))
    assert [len(items) for items in found.values()] == [
        count if n == rule else 0 for n in range(len(LIMITS))
    ]


@pytest.mark.parametrize("way", WAYS)
def test_a_way_passes_no_more_modules(way: str) -> None:
    """To follow a save or a load, a reader opens no more modules than today; fewer lower the figure."""
    passed = modules_of(way)
    assert len(passed) <= WAYS[way], passed
