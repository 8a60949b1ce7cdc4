"""Reference of every module of a package, without a list that could be forgotten.

``<!-- modules of ckptfs.tools -->`` in a page becomes a section for each module that has an
``__all__``, in alphabetical order. A repository viewer shows the sentence around it.
"""

import ast
import re
from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[2]
_MARK = re.compile(
    r"^<!-- modules of (?P<package>[\w.]+)(?: without (?P<out>[\w, ]+))? -->$", re.MULTILINE
)


def modules_of(package: str, without: tuple[str, ...] = ()) -> list[str]:
    """Dotted names of the modules of a package that say what they export.

    A package in it stands for its modules, where it exports something itself.
    """
    directory = ROOT / package.replace(".", "/")
    found = [*directory.glob("[a-z]*.py"), *directory.glob("[a-z]*/__init__.py")]
    names = {(f.parent if f.name == "__init__.py" else f).stem: f for f in found}
    return [f"{package}.{n}" for n in sorted(names) if n not in without and _exports(names[n])]


def _exports(file: Path) -> bool:
    return any(
        isinstance(node, ast.Assign)
        and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets)
        for node in ast.parse(file.read_text()).body
    )


def _sections(found: re.Match[str]) -> str:
    without = tuple((found["out"] or "").split(", "))
    return "\n".join(
        f"## `{name}`\n\n```{{eval-rst}}\n.. automodule:: {name}\n   :members:\n```\n"
        for name in modules_of(found["package"], without)
    )


def _read(app: Sphinx, docname: str, source: list[str]) -> None:
    source[0] = _MARK.sub(_sections, source[0])


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", _read, priority=600)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
