"""What the pages of docs/ import or show of ckptfs: modules, and names in them.

    ``from ckptfs.tools.verifying import verify`` in a Python block or an example  that name
    ``ckptfs.manager.waiting.Watcher`` anywhere in a page                          that name
    ``ckptfs.manager.waiting`` anywhere in a page                                  that it can be imported
    ``.. automodule::``, ``.. autoclass::`` and ``<!-- modules of ckptfs.tools -->``   all that they show

Pages are read and never executed here. docs/reference/public.md is made from the result, so it is no
page that is read: what only this list shows is not public.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["PAGE", "ROOT", "Shown", "module_file", "pages", "shown"]

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reference" / "public.md"

_LOGGER = re.compile(r"logger `ckptfs[\w.]*`")
_DOTTED = re.compile(r"(?<![\w./:+-])ckptfs((?:\.[A-Za-z]\w*)+)")
_FENCE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
_AUTOMODULE = re.compile(r"^\.\. automodule:: (ckptfs[\w.]*)\n((?:   :.*\n)*)", flags=re.MULTILINE)
_MODULES_OF = re.compile(r"^<!-- modules of ([\w.]+)(?: without ([\w, ]+))? -->$", re.MULTILINE)


@dataclass(slots=True)
class Shown:
    """names: dotted, each a class, a function or a value. modules: those that a page names as such."""

    names: set[str] = field(default_factory=set)
    modules: set[str] = field(default_factory=set)

    def add(self, dotted: str) -> None:
        """What a page calls by this name; nothing, where it is no name of ckptfs."""
        home = dotted
        while not module_file(home):
            home = home.rpartition(".")[0]
        first = dotted[len(home) + 1 :].partition(".")[0]
        if not first:
            self.modules.add(home)
        elif home != "ckptfs" and first in names_of(home):
            self.names.add(f"{home}.{first}")


def pages() -> list[Path]:
    """Pages, and the examples next to them."""
    docs = ROOT / "docs"
    found = [*docs.rglob("*.md"), *docs.glob("integrations/*.py"), ROOT / "README.md"]
    return sorted(path for path in found if path != PAGE)


def shown(files: Iterable[Path]) -> Shown:
    """All that these pages show below ``ckptfs``. ``ckptfs.__all__`` is public without a page."""
    found = Shown()
    for file in files:
        text = file.read_text()
        if file.suffix == ".py":
            _add_code(text, found)
            continue
        for block in _FENCE.findall(text):
            _add_code(block, found)
        # A name of a logger is no module, though it is called like one.
        for dotted in _DOTTED.findall(_LOGGER.sub("", text)):
            found.add(f"ckptfs{dotted}")
        for module in _shown_whole(text):
            found.modules.add(module)
            found.names |= {f"{module}.{name}" for name in exported_by(module)}
    return found


def _add_code(text: str, found: Shown) -> None:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "ckptfs":
            for alias in node.names:
                found.add(f"{node.module}.{alias.name}")
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == "ckptfs":
                    found.add(alias.name)


def _shown_whole(text: str) -> Iterator[str]:
    """Modules with all exports documented in the built manual."""
    for module, options in _AUTOMODULE.findall(text):
        if ":members:\n" in options:
            yield module
    for package, without in _MODULES_OF.findall(text):
        yield from modules_of(package, tuple((without or "").split(", ")))


def modules_of(package: str, without: tuple[str, ...]) -> list[str]:
    """As the manual's own extension finds them."""
    sys.path.insert(0, str(ROOT / "docs" / "_ext"))
    try:
        from modules import modules_of as found_by_manual  # type: ignore[import-not-found]
    finally:
        sys.path.pop(0)
    return list(found_by_manual(package, without))


def module_file(dotted: str) -> Path | None:
    """The source of a module or package of ckptfs."""
    base = ROOT.joinpath(*dotted.split("."))
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path.is_file():
            return path
    return None


def names_of(module: str) -> set[str]:
    """What is bound at the top of a module, imports that it re-exports included."""
    file = module_file(module)
    assert file is not None, module
    bound: set[str] = set()
    for node in ast.parse(file.read_text()).body:
        match node:
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                bound.add(node.name)
            case ast.Assign():
                bound |= {t.id for t in node.targets if isinstance(t, ast.Name)}
            case ast.AnnAssign(target=ast.Name(id=name)):
                bound.add(name)
            case ast.ImportFrom() | ast.Import():
                bound |= {alias.asname or alias.name for alias in node.names}
            case _:
                pass
    return bound


def exported_by(module: str) -> list[str]:
    """``__all__`` of a module, read and not imported."""
    file = module_file(module)
    assert file is not None, module
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Assign) and any(
            isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets
        ):
            return list(ast.literal_eval(node.value))
    return []
