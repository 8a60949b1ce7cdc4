"""The public surface: what is exported, that it is documented, and that importing it is light."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ckptfs

ROOT = Path(__file__).resolve().parents[1]
API_PAGE = ROOT / "docs" / "api.md"
PUBLIC = sorted(set(ckptfs.__all__) - {"__version__"})


def _checker_sees() -> dict[str, str]:
    """Return name -> module of the imports that only a type checker executes."""
    tree = ast.parse(Path(ckptfs.__file__).read_text())
    (block,) = (n for n in tree.body if isinstance(n, ast.If))
    return {
        alias.name: node.module or ""
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def test_type_checkers_and_python_see_the_same_names() -> None:
    """The lazy names, the imports for type checkers and __all__ are one list."""
    assert _checker_sees() == ckptfs._HOMES
    assert set(ckptfs.__all__) >= set(ckptfs._HOMES)
    assert list(ckptfs.__all__) == sorted(ckptfs.__all__)
    assert set(ckptfs.__all__) <= set(dir(ckptfs))


@pytest.mark.parametrize("name", PUBLIC)
def test_each_name_is_there_and_says_what_it_is(name: str) -> None:
    """It can be imported, it has a docstring, and its home is ckptfs."""
    value = getattr(ckptfs, name)
    assert value.__module__.startswith("ckptfs")
    assert (inspect.getdoc(value) or "").strip()


def test_each_name_has_its_entry_in_the_api_page() -> None:
    """docs/api.md has a heading or a table row for every public name, and for nothing else."""
    entries = re.findall(r"^(?:#+ |\| )`(?!CKPTFS_)(\w+)", API_PAGE.read_text(), flags=re.MULTILINE)
    assert sorted(entries) == PUBLIC


@pytest.mark.parametrize("name", [n for n in PUBLIC if n.islower()])
def test_signatures_in_the_api_page_are_the_real_ones(name: str) -> None:
    """The parameters and defaults that docs/api.md shows are those of the function."""
    found = re.search(rf"^#+ `{name}(\(.*\))`", API_PAGE.read_text(), flags=re.MULTILINE)
    assert found, f"docs/api.md has no signature of {name}"
    real = inspect.signature(getattr(ckptfs, name))
    bare = real.replace(
        parameters=[p.replace(annotation=p.empty) for p in real.parameters.values()],
        return_annotation=inspect.Signature.empty,
    )
    assert found[1] == str(bare)


def test_an_unknown_name_is_an_attribute_error() -> None:
    """A misspelt name fails as it does in any module; hasattr works."""
    with pytest.raises(AttributeError, match="sav_e"):
        ckptfs.sav_e  # noqa: B018 - the look-up is the test
    assert not hasattr(ckptfs, "sav_e")


def test_import_is_light() -> None:
    """``import ckptfs`` brings neither torch nor a storage library."""
    asked = (
        "import sys, ckptfs; ckptfs.CkptfsError; ckptfs.__version__;"
        "heavy = {'torch', 'numpy', 'fsspec', 'rich', 'click'} & set(sys.modules);"
        "sys.exit(', '.join(sorted(heavy)))"
    )
    found = subprocess.run(
        [sys.executable, "-c", asked], check=False, cwd=ROOT, capture_output=True, text=True
    )
    assert found.stderr.strip() == ""
