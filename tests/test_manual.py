"""The built manual: whole, by itself, and nothing public is missing in it.

``make docs`` runs it over what it has built in build/docs; ``make test`` leaves it out. Where that is not
there or older than its sources, it is built first, as ``make docs`` does it: warnings are errors.
"""

from __future__ import annotations

import ast
import html
import importlib
import inspect
import re
import subprocess
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

import ckptfs

pytestmark = pytest.mark.timeout(
    1800
)  # the first test builds the manual, five minutes on a busy machine

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
BUILT = ROOT / "build" / "docs"
WHOLE = BUILT / ".whole"  # made last, by a build without a warning


def _sources() -> Iterator[Path]:
    yield from DOCS.rglob("*.*")
    yield from (ROOT / "ckptfs").rglob("*.py")
    yield from ROOT.glob("*.md")
    yield from (ROOT / "benchmarks").rglob("*.*")


def _is_stale() -> bool:
    if not WHOLE.exists():
        return True
    built = WHOLE.stat().st_mtime
    return any(p.stat().st_mtime > built for p in _sources() if "__pycache__" not in p.parts)


@dataclass(frozen=True)
class Manual:
    """What was built: HTML by path below the root, and the names that it documents."""

    pages: dict[str, str]

    @cached_property
    def ids(self) -> dict[str, set[str]]:
        """Anchors of each page."""
        return {path: set(re.findall(r'\bid="([^"]+)"', text)) for path, text in self.pages.items()}

    @cached_property
    def names(self) -> set[str]:
        """Dotted names in the inventory."""
        data = (BUILT / "objects.inv").read_bytes()
        for _ in range(4):
            data = data.partition(b"\n")[2]
        lines = zlib.decompress(data).decode().splitlines()
        return {line.split(" ", 1)[0] for line in lines if " py:" in line}


@pytest.fixture(scope="session")
def manual() -> Manual:
    """The manual, built if it has to be."""
    if _is_stale():
        WHOLE.unlink(missing_ok=True)
        asked = "--fail-on-warning --keep-going --quiet --jobs auto docs build/docs"
        done = subprocess.run(
            [sys.executable, "-m", "sphinx", *asked.split()],
            check=False,
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        WHOLE.touch()
    return Manual({str(p.relative_to(BUILT)): p.read_text() for p in BUILT.rglob("*.html")})


@pytest.fixture(scope="module")
def extension() -> Iterator[Any]:
    """Imports a module of docs/_ext."""
    sys.path.insert(0, str(DOCS / "_ext"))
    yield importlib.import_module
    sys.path.remove(str(DOCS / "_ext"))


def test_every_public_name_is_documented(manual: Manual) -> None:
    """``ckptfs.__all__`` is in the inventory, name by name."""
    assert {f"ckptfs.{n}" for n in ckptfs.__all__} - {"ckptfs.__version__"} <= manual.names


@pytest.mark.parametrize("package", ["ckptfs.tools", "ckptfs.bench", "ckptfs.testing"])
def test_functions_and_classes_for_programs_are_documented(
    package: str, manual: Manual, extension: Any
) -> None:
    """So is whatever a module of tools, bench and testing exports, and has a docstring."""
    missing = []
    for module in map(importlib.import_module, extension("modules").modules_of(package)):
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.isclass(value) or inspect.isfunction(value):
                known = {f"{module.__name__}.{name}", f"{value.__module__}.{name}"}
                missing += [] if known & manual.names else [f"{module.__name__}.{name}"]
    assert missing == []


def test_every_page_of_the_docs_became_a_page(manual: Manual) -> None:
    """A Markdown file that Sphinx does not see would have links and code without a check."""
    pages = {str(p.relative_to(DOCS).with_suffix(".html")) for p in DOCS.rglob("*.md")}
    assert len(pages) > 60
    assert pages <= manual.pages.keys()


def test_nothing_is_loaded_from_elsewhere(manual: Manual) -> None:
    """Scripts, styles, fonts and pictures are next to the pages: no network, no telemetry."""
    loaded = re.compile(
        r"<(?:script|img|iframe|source|video|audio|embed|object|input|use)\b[^>]*?"
        r"\b(?:src|data|xlink:href)=\"([^\"]+)\"|<link\b[^>]*?\bhref=\"([^\"]+)\""
    )
    found = {a or b for text in manual.pages.values() for a, b in loaded.findall(text)}
    assert any(link.endswith(".css") or ".css?" in link for link in found)
    foreign = re.compile(r"(?:[a-z]+:)?//")
    assert {link for link in found if foreign.match(link)} == set()
    for style in BUILT.rglob("*.css"):
        assert re.findall(r"(?:@import|url\()\s*[\"']?(?:https?:)?//", style.read_text()) == [], (
            style
        )


def test_every_link_inside_leads_somewhere(manual: Manual) -> None:
    """To a page that is there, and to a place in it; tests that guarantees name are pages too."""
    broken, to_tests = [], 0
    for path, text in manual.pages.items():
        for link in set(re.findall(r'<(?:a|link)\b[^>]*?\bhref="([^"]*)"', text)):
            if re.match(r"[a-z]+:|#$", link) or not link:
                continue
            target, _, anchor = unquote(re.sub(r"\?v=\w+$", "", link)).partition("#")
            there = (BUILT / path).parent.joinpath(target).resolve() if target else BUILT / path
            name = str(there.relative_to(BUILT))
            to_tests += name.startswith("_source/tests/")
            if not there.exists() or (anchor and anchor not in manual.ids.get(name, {anchor})):
                broken.append(f"{path}: {link}")
    assert broken == []
    assert to_tests > 300


def _words(text: str) -> list[str]:
    return sorted(re.findall(r"[^\s|]*[A-Za-z]{2}[^\s|]*", text))


def test_pictures_are_drawn_with_every_word(manual: Manual) -> None:
    """Each diagram of the concepts is an SVG with its description and all of its text."""
    told = re.findall(
        r"^```\{svgbob\} (.+)\n((?:.*\n)*?)```", (DOCS / "concepts.md").read_text(), re.MULTILINE
    )
    drawn = re.findall(
        r'<svg role="img" aria-label="([^"]+)"(.*?)</svg>', manual.pages["concepts.html"], re.DOTALL
    )
    assert len(told) >= 5
    assert [label for label, _ in drawn] == [label for label, _ in told]
    for (_, text), (_, svg) in zip(told, drawn, strict=True):
        shown = " ".join(re.findall(r"<text [^>]*>([^<]+)</text>", svg))
        assert _words(html.unescape(shown)) == _words(text)


def test_the_first_minutes_were_executed() -> None:
    """docs/first-run.md shows what came out of ``make first-run`` and holds no placeholder."""
    assert "to be pasted" not in (DOCS / "first-run.md").read_text()


def test_a_link_out_of_docs_is_found_again(extension: Any) -> None:
    """In a page of the manual: sources as pages of their own, files that are pages by their page."""
    rewritten = extension("repository").rewritten
    page = "docs/howto/a.md"
    for link, becomes in {
        "../../tests/x.py#test_y": "repository:/tests/x.py#test_y",
        "../../CHANGELOG.md#unreleased": "../changelog.md#unreleased",
        "../../README.md": "../index.md",
        "../api.md#runs": "../api.md#runs",
        "b_example.py": "repository:/docs/howto/b_example.py",
        "https://pytorch.org/x": "https://pytorch.org/x",
        "../../benchmarks/results/a.svg": "../../benchmarks/results/a.svg",
        "#here": "#here",
    }.items():
        assert rewritten(f"[x]({link})", page, "howto/a") == f"[x]({becomes})"
    code = "```sh\n[x](../../README.md)\n```\n"
    assert rewritten(code, page, "howto/a") == code
    assert rewritten("[x](docs/api.md)", "CHANGELOG.md", "changelog") == "[x](api.md)"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("uri: the run. mode: which.", ["* **uri**: the run.", "* **mode**: which."]),
        ("Asks ``uri: x`` only. Nothing: else.", ["Asks ``uri: x`` only. Nothing: else."]),
        ("uri: the one.", ["uri: the one."]),
        ("a*b _c_ |d| `e`", [r"a\*b \_c\_ \|d\| \`e\`"]),
        ("keep_latest and CKPTFS_X", ["``keep_latest`` and ``CKPTFS_X``"]),
        ("Told:\n\n    save(x)\n", ["Told:", "", ".. code-block:: python", "", "   save(x)"]),
        ("Not:\n\n    - a b;\n      c;\n    - d.", ["Not:", "", "* a b; c;", "* d."]),
        ("one   two\nthree four\nfive  six", None),
        ("raises FencedError.", ["raises :py:obj:`FencedError <ckptfs.FencedError>`."]),
        (
            "Call.\n\nArgs:\n    uri: the *one*\n        of two.\n    mode: which.\n\nReturns:\n    A list:\n    all.",
            [
                "Call.",
                "",
                ":Parameters:",
                r"   * **uri**: the \*one\* of two.",
                "   * **mode**: which.",
                "",
                ":Returns:",
                "   A list: all.",
            ],
        ),
        (
            "Raises:\n    FencedError: newer.\n    OSError: else.",
            [
                ":Raises:",
                "   * :py:obj:`FencedError <ckptfs.FencedError>`: newer.",
                "   * **OSError**: else.",
            ],
        ),
        (
            "Example:\n    x = 1",
            [".. rubric:: Example", "", ".. code-block:: python", "", "   x = 1"],
        ),
        (
            "uri: a. mode: b. After a crash nothing is lost.",
            ["* **uri**: a.", "* **mode**: b.", "", "After a crash nothing is lost."],
        ),
    ],
)
def test_docstrings_become_what_they_look_like(
    text: str, expected: list[str] | None, extension: Any
) -> None:
    """Lists of parameters, literal blocks, links; no letter of a docstring is taken for markup."""
    made = extension("docstrings").to_rst(text, {"uri", "mode"})
    if expected is None:
        assert made[0] == ".. code-block:: text"
    else:
        assert made[: len(expected)] == expected


def test_every_docstring_of_the_library_can_be_shown(extension: Any) -> None:
    """No module docstring loses a word on its way into the manual."""
    to_rst = extension("docstrings").to_rst
    for file in (ROOT / "ckptfs").rglob("*.py"):
        text = ast.get_docstring(ast.parse(file.read_text())) or ""
        shown = re.sub(r" <ckptfs\.\w+>`\\ ", "", "\n".join(to_rst(text)))
        words = set(re.findall(r"[A-Za-z]{4,}", text))
        assert {word for word in words if word not in shown} == set(), file
