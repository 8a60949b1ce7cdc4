"""Links that leave docs/, so that the same pages read well here and in a repository viewer.

    ../CHANGELOG.md                       its page of the manual, which has the file's text
    ../tests/x.py#test_y, example.py      the file's source as a page, with an anchor for each name
    a directory                           plain text

A page of ``PAGES`` is a stub in docs/: a heading, and for repository viewers a link to the file
that is shown in its place here.
"""

import ast
import html
import posixpath
import re
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[2]
# Page of the manual -> file of the repository whose text it is.
PAGES = {
    "changelog": "CHANGELOG.md",
    "contributing": "CONTRIBUTING.md",
    "benchmarks": "benchmarks/README.md",
}
_FILES = {**{path: f"docs/{page}.md" for page, path in PAGES.items()}, "README.md": "docs/index.md"}
_LINK = re.compile(r"(?P<before>\]\()(?P<path>[^)\s#]+)(?P<anchor>#[^)\s]*)?(?=\))")
_IMAGES = (".svg", ".png")
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*:")
_SOURCE = "_source/"


def rewritten(text: str, file: str, page: str) -> str:
    """``text`` of a file of the repository, its links as they must be in ``docs/<page>.md``."""
    out, fenced = [], False
    for line in text.splitlines(keepends=True):
        fence = line.lstrip().startswith("```")
        fenced ^= fence
        if fence or fenced:
            out.append(line)
        else:
            out.append(_LINK.sub(lambda found: _moved(found, file, page), line))
    return "".join(out)


def _moved(found: re.Match[str], file: str, page: str) -> str:
    path, anchor = found["path"], found["anchor"] or ""
    if _SCHEME.match(path):
        return found[0]
    target = posixpath.normpath(posixpath.join(posixpath.dirname(file), path))
    target = _FILES.get(target, target)
    if target.endswith(_IMAGES) or (target.startswith("docs/") and target.endswith(".md")):
        here = posixpath.dirname(f"docs/{page}")
        return f"{found['before']}{posixpath.relpath(target, here)}{anchor}"
    return f"{found['before']}repository:/{target}{anchor}"


def _read(app: Sphinx, docname: str, source: list[str]) -> None:
    file = PAGES.get(docname, f"docs/{docname}.md")
    text = (ROOT / file).read_text() if docname in PAGES else source[0]
    if docname in PAGES:
        app.env.note_dependency(str(ROOT / file))
    source[0] = rewritten(text, file, docname)


def _resolve(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    for node in list(doctree.findall(nodes.reference)):
        uri = node.get("refuri", "")
        if not uri.startswith("repository:/"):
            continue
        path, _, anchor = uri.removeprefix("repository:/").partition("#")
        if (ROOT / path).is_file():
            there = app.builder.get_relative_uri(docname, _SOURCE + path)
            node["refuri"] = f"{there}#{anchor}" if anchor else there
            node["internal"] = True
        else:
            node.replace_self(nodes.inline("", "", *node.children))


def _linked_files(app: Sphinx) -> set[str]:
    found = set()
    for docname in app.env.found_docs:
        file = PAGES.get(docname, f"docs/{docname}.md")
        text = rewritten((ROOT / file).read_text(), file, docname)
        found |= set(re.findall(r"\]\(repository:/([^)#\s]+)", text))
    return {path for path in found if (ROOT / path).is_file()}


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{path}</title>
<meta name="viewport" content="width=device-width,initial-scale=1">
<link rel="stylesheet" href="{up}_static/pygments.css">
<link rel="stylesheet" href="{up}_static/styles/furo.css">
<link rel="stylesheet" href="{up}_static/manual.css">
</head><body data-theme="auto" class="source"><p><a href="{up}index.html">{project}</a> / {path}</p>
{body}
</body></html>
"""


def _write_sources(app: Sphinx, exception: Exception | None) -> None:
    """A page for each file; small ones, without the manual's navigation, which costs most of a page."""
    if exception is not None or app.builder.format != "html":
        return
    for path in sorted(_linked_files(app)):
        text = (ROOT / path).read_text()
        language = {".py": "python", ".json": "json", ".sh": "bash"}.get(Path(path).suffix, "text")
        body = app.builder.highlighter.highlight_block(text, language)
        page = Path(app.outdir, f"{_SOURCE}{path}.html")
        page.parent.mkdir(parents=True, exist_ok=True)
        up = "../" * f"{_SOURCE}{path}".count("/")
        shown = _anchored(body, text) if language == "python" else body
        page.write_text(
            _PAGE.format(path=html.escape(path), up=up, project=app.config.project, body=shown)
        )


def _anchored(body: str, text: str) -> str:
    """The highlighted source with an anchor at every function and class."""
    names = {
        node.lineno: node.name
        for node in ast.walk(ast.parse(text))
        if isinstance(node, (ast.FunctionDef, ast.ClassDef))
    }
    lines = body.split("\n")
    for number, name in names.items():
        at = lines[number - 1].find("<pre>") + len("<pre>") if number == 1 else 0
        line = lines[number - 1]
        lines[number - 1] = f'{line[:at]}<span class="target" id="{name}"></span>{line[at:]}'
    return "\n".join(lines)


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", _read)
    app.connect("doctree-resolved", _resolve)
    app.connect("build-finished", _write_sources)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
