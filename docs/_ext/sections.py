"""The sections of a docstring in the Google style, for the manual and for tests/test_docstrings.py."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

HEADINGS = ("Args", "Returns", "Yields", "Raises", "Attributes", "Example", "Examples", "Note")
ENTRIES = ("Args", "Raises", "Attributes")  # sections that are a list of names with a text each

_HEADING = re.compile(rf"^({'|'.join(HEADINGS)}):$")
_ENTRY = re.compile(r"^(?P<name>\*{0,2}[\w.]+): (?=\S)")


@dataclass(slots=True)
class Docstring:
    """text: what precedes the sections. sections: the lines of each. entries: name to text of each list."""

    text: str
    sections: dict[str, str] = field(default_factory=dict)
    entries: dict[str, dict[str, str]] = field(default_factory=dict)


def parsed(docstring: str) -> Docstring:
    """Split a cleaned docstring. A line that is not indented ends a section."""
    blocks: dict[str, list[str]] = {"": []}
    name = ""
    for line in docstring.splitlines():
        heading = _HEADING.match(line)
        if heading:
            name = heading[1]
            blocks.setdefault(name, [])
            continue
        if line and not line.startswith(" "):
            name = ""
        blocks[name].append(line[4:] if name else line)
    found = Docstring("\n".join(blocks.pop("")).strip())
    for name, lines in blocks.items():
        found.sections[name] = "\n".join(lines).strip("\n")
        if name in ENTRIES:
            found.entries[name] = dict(_entries(lines))
    return found


def _entries(lines: list[str]) -> Iterator[tuple[str, str]]:
    name, words = "", []
    for line in lines:
        start = _ENTRY.match(line)
        if start:
            if name:
                yield name, " ".join(words)
            name, words = start["name"].lstrip("*"), [line[start.end() :]]
        elif line.strip():
            words.append(line.strip())
    if name:
        yield name, " ".join(words)
