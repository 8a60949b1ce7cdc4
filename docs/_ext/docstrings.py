"""Docstrings of ckptfs as reStructuredText, so that they read well in the manual as they do in code.

Args, Returns, Raises, Attributes    a field each, with a list of the names
indented blocks, aligned columns     literal blocks; Python where they are Python
"uri: the run. mode: ..."            a list, where the words are parameters, fields or errors
names of errors and public classes   links
everything else                      text: no character of it is markup but ``this``
"""

import ast
import contextlib
import inspect
import re
import textwrap
from collections.abc import Callable, Iterable

from sections import ENTRIES, parsed
from sphinx.application import Sphinx

import ckptfs

_LITERAL = re.compile(r"(``.+?``)")
_MARKUP = re.compile(r"([\\*`|_])")
_BULLETS = ("- ", "* ")
_ALIGNED = re.compile(r"\S {2,}\S")
_PUBLIC = {name for name in ckptfs.__all__ if name[0].isupper()}
_ERRORS = {name for name in _PUBLIC if name.endswith("Error")}
# What no list item may swallow: it is said of the whole call.
_OF_THE_WHOLE = re.compile(r"(?<=\. )(?=After (?:a crash|an error))")
_CODE = re.compile(r"\bCKPTFS_[A-Z_]+\b|\b[a-z]+(?:_[a-z]+)+\b(?:\(\))?|\b[a-z_]+\(\)")
_CLASS = re.compile(r"\b(" + "|".join(sorted(_PUBLIC, key=len, reverse=True)) + r")(s?)\b")
_TITLES = {"Args": "Parameters"}


def to_rst(text: str, names: Iterable[str] = ()) -> list[str]:
    """Lines of reStructuredText. names: words that may be the label of a list item."""
    label = _labels({*names, *_ERRORS})
    found = parsed(text)
    out = _text(found.text, label)
    for name, lines in found.sections.items():
        if name in ENTRIES:
            out += [f":{_TITLES.get(name, name)}:"]
            out += [f"   * {_label(n)}: {_inline(t)}" for n, t in found.entries[name].items()]
            out += [""]
        elif name in {"Returns", "Yields"}:
            out += [
                f":{name}:",
                *textwrap.indent("\n".join(_text(lines, label)), "   ").splitlines(),
            ]
            out += [""]
        else:
            out += [f".. rubric:: {name}", "", *_text(textwrap.indent(lines, "    "), label)]
    return out


def _text(text: str, label: re.Pattern[str]) -> list[str]:
    out: list[str] = []
    for block in _blocks(text):
        if block[0].lstrip().startswith(_BULLETS):
            out += _bullets(block)
        elif block[0].startswith(" ") or _is_table(block):
            out += _literal(textwrap.dedent("\n".join(block)))
        else:
            out += _paragraph(" ".join(line.strip() for line in block), label)
        out.append("")
    return out


def _blocks(text: str) -> list[list[str]]:
    """Runs of lines that are indented, or that are not; a blank line ends a paragraph only."""
    blocks: list[list[str]] = []
    open_block: list[str] = []
    blank = False
    for line in [*text.expandtabs().splitlines(), ""]:
        if not line.strip():
            blank = True
            continue
        indented = line.startswith(" ")
        same = bool(open_block) and open_block[0].startswith(" ") == indented
        if open_block and not (same and (indented or not blank)):
            blocks.append(open_block)
            open_block = []
        elif open_block and blank:
            open_block.append("")
        open_block.append(line)
        blank = False
    return [*blocks, open_block] if open_block else blocks


def _bullets(block: list[str]) -> list[str]:
    items: list[str] = []
    for line in filter(None, map(str.strip, block)):
        if line.startswith(_BULLETS):
            items.append(line[2:])
        else:
            items[-1] += f" {line}"
    return [f"* {_inline(item)}" for item in items]


def _is_table(block: list[str]) -> bool:
    return len(block) > 1 and sum(bool(_ALIGNED.search(line)) for line in block) * 2 > len(block)


def _literal(code: str) -> list[str]:
    try:
        ast.parse(code)
    except SyntaxError:
        language = "text"
    else:
        language = "python"
    return [f".. code-block:: {language}", "", *textwrap.indent(code, "   ").splitlines()]


def _labels(names: set[str]) -> re.Pattern[str]:
    one = "(?:" + "|".join(sorted(map(re.escape, names), key=len, reverse=True)) + ")"
    return re.compile(rf"(?:^|(?<=[.;:] ))(?P<names>{one}(?:(?:, | and ){one})*): ")


def _paragraph(text: str, label: re.Pattern[str]) -> list[str]:
    """Text; as a list where several words are told of."""
    found = list(label.finditer(text))
    if len(found) < 2:
        return [_inline(text)]
    whole = _OF_THE_WHOLE.search(text, found[-1].end())
    end = whole.start() if whole else len(text)
    before = text[: found[0].start()].strip()
    out = [_inline(before), ""] if before else []
    for match, stop in zip(found, [*(m.start() for m in found[1:]), end], strict=True):
        told = ", ".join(_label(name) for name in re.split(", | and ", match["names"]))
        out.append(f"* {told}: {_inline(text[match.end() : stop].strip().rstrip(';'))}")
    return [*out, "", _inline(text[end:])] if whole else out


def _label(name: str) -> str:
    return _link(name) if name in _PUBLIC else f"**{name}**"


def _inline(text: str) -> str:
    parts = _LITERAL.split(text)
    return "".join(p if p.startswith("``") else _linked(p) for p in parts)


def _linked(text: str) -> str:
    out, at = [], 0
    for match in _CLASS.finditer(text):
        out.append(_plain(text[at : match.start()]))
        out.append(_link(match[1]) + ("\\ s" if match[2] else ""))
        at = match.end()
    return "".join([*out, _plain(text[at:])])


def _link(name: str) -> str:
    return f":py:obj:`{name} <ckptfs.{name}>`"


def _plain(text: str) -> str:
    """Identifiers and variables as code, the rest as it is."""
    out, at = [], 0
    for match in _CODE.finditer(text):
        glued = text[match.start() - 1 : match.start()] + text[match.end() : match.end() + 1]
        if not set(glued) <= set(" ,.;:()"):
            continue  # part of a path or of a word: docs/what_happens.md
        out += [_MARKUP.sub(r"\\\1", text[at : match.start()]), f"``{match[0]}``"]
        end = text[match.end() : match.end() + 1]
        out += ["\\ "] if end and end not in " ,.;:)" else []
        at = match.end()
    return "".join([*out, _MARKUP.sub(r"\\\1", text[at:])])


def names_of(value: object) -> set[str]:
    """Parameters of a callable, and fields and public attributes of a class."""
    names: set[str] = set()
    if callable(value):
        with contextlib.suppress(TypeError, ValueError):  # a builtin has none to tell
            names |= set(inspect.signature(value).parameters)
    if inspect.isclass(value):
        names |= {n for base in value.__mro__ for n in getattr(base, "__annotations__", {})}
        names |= set(dir(value))
        made = inspect.getattr_static(value, "__init__", None)
        if inspect.isfunction(made):
            names |= set(made.__code__.co_names)  # what __init__ sets on self
    return {name for name in names if not name.startswith("_")}


def _process(
    app: Sphinx, what: str, name: str, value: object, options: object, lines: list[str]
) -> None:
    lines[:] = to_rst("\n".join(lines), names_of(value))


def setup(app: Sphinx) -> dict[str, bool]:
    connect: Callable[..., int] = app.connect
    connect("autodoc-process-docstring", _process)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
