"""The docs are true: their Python runs, their links lead somewhere, each guarantee has its test.

Python blocks of a page run in order, in one namespace, in an empty directory. A block that cannot
run says so in the line before it, with the reason: ``<!-- not run: it needs a GPU -->``.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
# The index and the list of names show none.
REFERENCE = [
    p for p in PAGES if p.parent.name == "reference" and p.stem not in {"README", "public"}
]
GUARANTEES = ROOT / "docs" / "guarantees.md"
WAITING = "Not held by a test yet"
THREATS = ROOT / "docs" / "threat-model.md"
NOT_PROMISED = "What is not promised"

_NOT_RUN = re.compile(r"<!-- not run: (?P<reason>\S.{7,}) -->")
# What a fence may be marked with besides python: shown, never executed. Those in braces are the
# manual's: pictures, and docstrings.
_SHOWN = {"text", "sh", "diff", "toml", "json", "{svgbob}", "{eval-rst}"}


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block: its language, its text, its first line, why it is not run."""

    language: str
    text: str
    line: int
    not_run: str | None


@functools.cache
def _tokens(page: Path) -> list[Token]:
    return MarkdownIt().enable("table").parse(page.read_text())


def _blocks(tokens: list[Token]) -> list[Block]:
    blocks = []
    before: Token | None = None
    for token in tokens:
        if token.type == "fence" and token.map:
            reason = _NOT_RUN.match(before.content.strip()) if before is not None else None
            blocks.append(
                Block(
                    token.info.partition(" ")[0],
                    token.content,
                    token.map[0] + 1,
                    reason and reason["reason"],
                )
            )
        before = token if token.type == "html_block" else None
    return blocks


def _links(tokens: list[Token]) -> list[str]:
    return [
        str(child.attrs["href" if child.type == "link_open" else "src"])
        for token in tokens
        for child in token.children or ()
        if child.type in {"link_open", "image"}
    ]


@functools.cache
def _anchors(page: Path) -> set[str]:
    tokens = _tokens(page)
    titles = [b.content for a, b in pairwise(tokens) if a.type == "heading_open"]
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@functools.cache
def _tests_in(module: Path) -> set[str]:
    return set(re.findall(r"^ *(?:async )?(?:def|class) (\w+)", module.read_text(), re.MULTILINE))


def _broken(link: str, page: Path) -> str | None:
    """Return why a link leads nowhere; None when it leads somewhere or out of the repository."""
    if re.match(r"[a-z]+:", link):
        return None
    path, _, anchor = unquote(link).partition("#")
    target = (page.parent / path).resolve() if path else page
    if not target.is_relative_to(ROOT) or not target.exists():
        return f"{link}: there is no such file"
    if anchor and target.suffix == ".md" and anchor not in _anchors(target):
        return f"{link}: {target.name} has no such heading"
    if anchor and target.suffix == ".py" and anchor not in _tests_in(target):
        return f"{link}: {target.name} has no such test"
    return None


def _run(blocks: list[Block], page: Path) -> dict[str, Any]:
    namespace: dict[str, Any] = {"__name__": page.stem}
    for block in blocks:
        if block.language == "python" and block.not_run is None:
            # Empty lines in front make a traceback name the line of the page.
            code = compile("\n" * block.line + block.text, str(page), "exec")
            exec(code, namespace)  # noqa: S102 - the docs of this repository
    return namespace


@pytest.fixture
def logging_as_before() -> Iterator[None]:
    """A page that sets levels and handlers sets them for the whole process: what runs after it would hear less."""
    names = ("", *(name for name in logging.root.manager.loggerDict if name.startswith("ckptfs")))
    loggers = [logging.getLogger(name) for name in names]
    before = [(logger, logger.level, [*logger.handlers]) for logger in loggers]
    yield
    for logger, level, handlers in before:
        logger.setLevel(level)
        logger.handlers[:] = handlers


page_by_page = pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))


@page_by_page
@pytest.mark.usefixtures("logging_as_before")
def test_python_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every Python block runs as it is, or says why it is not run."""
    monkeypatch.chdir(tmp_path)
    _run(_blocks(_tokens(page)), page)


@pytest.mark.parametrize("page", REFERENCE, ids=lambda p: p.stem)
def test_each_page_of_the_reference_has_an_example_that_runs(page: Path) -> None:
    """Signatures and sections alone do not show how the names of a page go together."""
    blocks = _blocks(_tokens(page))
    assert [b for b in blocks if b.language == "python" and b.not_run is None]


@page_by_page
def test_each_block_says_what_it_is(page: Path) -> None:
    """A block without a language, or with an unknown one, could be code that is never run."""
    odd = [b.line for b in _blocks(_tokens(page)) if b.language not in {"python", *_SHOWN}]
    assert odd == []


@page_by_page
def test_links_lead_somewhere(page: Path) -> None:
    """Relative links reach a file, its heading or its test."""
    assert [why for link in _links(_tokens(page)) if (why := _broken(link, page))] == []


def test_the_readme_is_short() -> None:
    """At most 700 words, as ``wc -w`` counts them: the rest has pages of its own."""
    assert len((ROOT / "README.md").read_text().split()) <= 700


def test_make_targets_in_the_docs_exist() -> None:
    """What a page asks a contributor to make is in the Makefile."""
    rules = re.findall(r"^([a-z0-9 -]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    made = {name for names in rules for name in names.split()}
    told = {
        target
        for page in PAGES
        for target in re.findall(r"(?:`|^)make ([a-z0-9-]+)", page.read_text(), re.MULTILINE)
    }
    assert told
    assert told <= made


def _guarantees(page: Path = GUARANTEES) -> list[tuple[str, str, list[str]]]:
    """Return (heading, text, tests linked to) of each item of a page of promises."""
    items = []
    heading, inside = "", 0
    tokens = _tokens(page)
    for before, token in pairwise(tokens):
        inside += {"list_item_open": 1, "list_item_close": -1}.get(token.type, 0)
        if before.type == "heading_open":
            heading = token.content
        elif token.type == "inline" and inside:
            items.append((heading, token.content, [x for x in _links([token]) if ".py#test_" in x]))
    return items


def test_each_guarantee_links_to_its_test() -> None:
    """No promise without a test function that holds it; what has one is promised."""
    items = _guarantees()
    assert len(items) > 20
    assert [text for head, text, tests in items if head != WAITING and not tests] == []
    assert [text for head, text, tests in items if head == WAITING and tests] == []


def test_each_sentence_of_the_threat_model_links_to_its_test() -> None:
    """The same of what is promised against strangers; what is not promised has none."""
    items = _guarantees(THREATS)
    promised = [item for item in items if item[0] != NOT_PROMISED]
    assert len(promised) > 15
    assert len(items) > len(promised)
    assert [text for _, text, tests in promised if not tests] == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("```python\nassert False\n```", "run"),
        ("<!-- not run: it needs a GPU -->\n```python\nassert False\n```", "shown"),
        ("<!-- not run: -->\n```python\nassert False\n```", "run"),
        ("<!-- not run: it needs a GPU -->\n\ntext\n\n```python\nassert False\n```", "run"),
    ],
)
def test_only_a_reason_right_before_a_block_spares_it(text: str, expected: str) -> None:
    """The opt-out needs a reason and belongs to one block."""
    blocks = _blocks(MarkdownIt().parse(text))
    if expected == "shown":
        _run(blocks, ROOT / "example.md")
    else:
        with pytest.raises(AssertionError):
            _run(blocks, ROOT / "example.md")


@pytest.mark.parametrize(
    "link",
    [
        "docs/missing.md",
        "README.md#no-such-heading",
        "tests/test_docs.py#test_nobody_wrote",
        "../outside.md",
    ],
)
def test_a_broken_link_would_be_seen(link: str) -> None:
    """Missing files, headings and tests, and links out of the repository, are found."""
    assert _broken(link, ROOT / "README.md")
