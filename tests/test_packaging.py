"""What a fresh clone and a user install: ranges for users, exact pins for contributors."""

from __future__ import annotations

import importlib
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import ckptfs

ROOT = Path(__file__).resolve().parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
PINS = [
    line
    for line in (ROOT / "constraints-dev.txt").read_text().splitlines()
    if line and not line.startswith("#")
]
_PIN = r"[\w.-]+==[\d.]+(b\d+)?(\.post\d+)?"
_OURS = ("dev", "test", "lab", "docs", "bench")


def test_pins_are_exact_and_portable() -> None:
    """Every line is name==version: no index, no path, no build that only one machine has."""
    assert [line for line in PINS if not re.fullmatch(_PIN, line)] == []
    assert "torch==2.13.0" in PINS


def test_everything_that_contributors_install_is_pinned() -> None:
    """No requirement of the package or of its dev extras floats on a fresh clone."""
    pinned = {canonicalize_name(line.partition("==")[0]) for line in PINS}
    asked = [*PROJECT["dependencies"], *(r for e in _OURS for r in EXTRAS[e])]
    names = {canonicalize_name(Requirement(text).name) for text in asked} - {"ckptfs"}
    assert names <= pinned


def test_users_get_ranges() -> None:
    """A dependency has a lower bound and no upper one: others resolve with it."""
    texts = [*PROJECT["dependencies"], *(r for extra in EXTRAS.values() for r in extra)]
    requirements = [Requirement(text) for text in texts if not text.startswith("ckptfs[")]
    odd = [str(r) for r in requirements if [s.operator for s in r.specifier] != [">="]]
    assert odd == []
    assert not any("boto" in str(r) for r in requirements)


def test_the_fast_extra_stands_without_s3fs() -> None:
    """[fast] brings one client library, and that is not s3fs."""
    assert [Requirement(text).name for text in EXTRAS["fast"]] == ["obstore"]


@pytest.mark.parametrize("target", PROJECT["entry-points"]["ckptfs.backends"].values())
def test_entry_points_lead_somewhere(target: str) -> None:
    """Each backend that the package registers can be loaded and called."""
    module, _, name = target.partition(":")
    assert callable(getattr(importlib.import_module(module), name))


def test_the_version_is_one() -> None:
    """The changelog speaks of the version that the package has."""
    assert f"({ckptfs.__version__})" in (ROOT / "CHANGELOG.md").read_text()


def test_the_types_are_shipped() -> None:
    """py.typed is in the package, so that a user's mypy reads the annotations."""
    assert (ROOT / "ckptfs" / "py.typed").is_file()
