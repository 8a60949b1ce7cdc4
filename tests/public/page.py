"""docs/reference/public.md: made of the code, read back, and compared.

A section is a heading, a sentence, and one block of lines; what is before the first ``(`` or ``: ``
of a line is a name, the rest is what it looks like.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import ckptfs
from tests.public import commands, documents, python, told
from tests.public.shown import PAGE, Shown, pages, shown

__all__ = ["SECTIONS", "Section", "differences", "made", "read", "write"]

WRITE = "make public"

_NAME = re.compile(r"^(.*?)(?=\(|: |$)")
_BLOCK = re.compile(r"^## (.+)\n\n(?:(?!## ).*\n)*?```text\n((?:.*\n)*?)```", re.MULTILINE)

_TOP = f"""\
# What is public

Names, signatures, options, fields and metrics that stay until the changelog says otherwise: all of
`ckptfs.__all__`, and whatever else a page of this manual imports, names or documents. A name that is not
here is ckptfs's own, and may change or go with any version.

This page is made of the code by `{WRITE}`. A test compares the two: what vanished from the code, or looks
different, is found before it is released. Names of people's own data are `*`.
"""


@dataclass(frozen=True, slots=True)
class Section:
    """title: the heading, which names it. about: the sentence below. lines: makes its lines."""

    title: str
    about: str
    lines: Callable[[], Iterable[str]]


def _python() -> Iterator[Section]:
    found = shown(pages())
    yield Section("`ckptfs`", "`ckptfs.__all__`: signatures, members, bases.", _top_names)
    for package in sorted({name.split(".")[1] for name in found.names}):
        yield Section(
            f"`ckptfs.{package}`",
            f"Names below `ckptfs.{package}` that pages show.",
            functools.partial(_names_in, package, found),
        )
    yield Section("Modules", "Can be imported by these names.", lambda: _modules(found))


def _top_names() -> Iterator[str]:
    for name in ckptfs.__all__:
        if name == "__version__":
            yield "__version__: str"
        else:
            yield from python.lines_of(name, getattr(ckptfs, name))


def _names_in(package: str, found: Shown) -> Iterator[str]:
    start = f"ckptfs.{package}"
    for dotted in sorted(found.names):
        if not dotted.startswith(f"{start}."):
            continue
        module, _, name = dotted.rpartition(".")
        if package == "integrations":  # its frameworks need not be here
            lines = python.read_lines_of(module, name)
        else:
            lines = python.lines_of(name, python.imported(dotted))
        inner = module.removeprefix(start).lstrip(".")
        yield from (f"{inner}.{line}" if inner else line for line in lines)


def _modules(found: Shown) -> Iterator[str]:
    homes = {dotted.rpartition(".")[0] for dotted in found.names}
    yield from sorted(found.modules | homes)


SECTIONS: tuple[Section, ...] = (
    *_python(),
    Section("Command line", "Commands, arguments, options.", commands.commands),
    Section("Exit codes", "Codes, and the code of each error.", told.exit_codes),
    Section(
        "Fields of `--json`",
        "Fields may be added. `[]` is each element of a list; an `error` is the same everywhere.",
        documents.fields,
    ),
    Section("Metrics", "`MetricsListener`, then `PrometheusTextfile`.", told.metrics),
    Section("OpenTelemetry", "Spans and metrics with their attributes.", told.spans_and_metrics),
    Section(
        "Loggers",
        "Every logger of ckptfs is one of these or below it.",
        lambda: told.loggers(pages()),
    ),
    Section("Variables of the environment", "Read by ckptfs.", lambda: told.variables(pages())),
    Section("Entry points and extras", "Of the package.", told.entry_points),
)


def made(section: Section) -> dict[str, str]:
    """Name to the rest of its line, as the code is now."""
    return _parsed(section.lines())


def read() -> dict[str, dict[str, str]]:
    """The same by title, as the page has it."""
    return {title: _parsed(text.splitlines()) for title, text in _BLOCK.findall(PAGE.read_text())}


def _parsed(lines: Iterable[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for line in lines:
        match = _NAME.match(line)
        name = line if match is None else match[1]
        found[name] = f"{found[name]} and {line}" if name in found else line
    return found


def differences(before: dict[str, str], now: dict[str, str]) -> list[str]:
    """What a page and the code disagree about, each with its name."""
    gone = [f"vanished: {line}" for name, line in before.items() if name not in now]
    other = [
        f"changed: {line}\n     now: {now[name]}"
        for name, line in before.items()
        if now.get(name, line) != line
    ]
    return [*gone, *other, *(f"new: {line}" for name, line in now.items() if name not in before)]


def write() -> None:
    """The page again."""
    parts = [_TOP]
    for section in SECTIONS:
        lines = "\n".join(section.lines())
        parts.append(f"## {section.title}\n\n{section.about}\n\n```text\n{lines}\n```\n")
    PAGE.write_text("\n".join(parts))
