"""What would be released, built and tried as a user meets it: make release-check [RELEASE="--extras s3 gcs"].

The sdist and the wheel are built from what is committed, and the wheel from the sdist, as an installer would.
Their files are compared with the repository's. The wheel is then installed into an empty environment, without
extras, where the README's first example and the command line run; and with each extra into an environment of
its own, where the same example runs again. Those environments see torch in the first one, so that it is
installed once. Ends with exit code 1 and a table where anything failed.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

__all__ = ["build", "first_example", "foreign_in_wheel", "missing_from_sdist", "missing_from_wheel"]

ROOT = Path(__file__).resolve().parents[1]
# Extras for work on ckptfs itself: only `make` installs them.
OURS = frozenset({"dev", "docs", "lab", "test"})
# What a wheel may hold in addition to the package.
_METADATA = re.compile(
    r"ckptfs-[\w.]+\.dist-info/(METADATA|WHEEL|RECORD|entry_points\.txt|licenses/LICENSE)"
)
_BUILD = "import sys, hatchling.build as b; print(b.build_{kind}(sys.argv[1]))"


def first_example(readme: str) -> str:
    """The first Python block of the README: what a new user pastes first."""
    found = re.search(r"^```python\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
    if found is None:
        raise ValueError("README.md has no Python block")
    return found[1]


def committed_files(root: Path = ROOT) -> frozenset[str]:
    """The files of the commit at HEAD, as paths in the repository."""
    listed = _run(["git", "ls-tree", "-r", "--name-only", "-z", "HEAD"], cwd=root)
    return frozenset(name for name in listed.split("\0") if name)


def build(source: Path, into: Path, kind: str, python: str = sys.executable) -> Path:
    """Build an sdist or a wheel (kind) of the tree at source by hatchling; returns its file."""
    into.mkdir(parents=True, exist_ok=True)
    printed = _run([python, "-c", _BUILD.format(kind=kind), str(into)], cwd=source)
    return into / printed.split()[-1]


def unpack(sdist: Path, into: Path) -> Path:
    """Unpack an sdist; returns its one top folder."""
    with tarfile.open(sdist) as archive:
        archive.extractall(into, filter="data")
    return next(into.iterdir())


def missing_from_wheel(wheel: Path, committed: Iterable[str]) -> list[str]:
    """Files of the package that the wheel lacks."""
    held = set(zipfile.ZipFile(wheel).namelist())
    return sorted(name for name in committed if name.startswith("ckptfs/") and name not in held)


def foreign_in_wheel(wheel: Path, committed: Iterable[str]) -> list[str]:
    """Files of the wheel that are neither the package's nor its metadata: tests, caches, files of an editor."""
    known = set(committed)
    names = zipfile.ZipFile(wheel).namelist()
    return sorted(n for n in names if n not in known and not _METADATA.fullmatch(n))


def missing_from_sdist(sdist: Path, committed: Iterable[str]) -> list[str]:
    """Committed files that somebody who builds or tests from the sdist would miss."""
    with tarfile.open(sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {"ckptfs", "tests", "docs", "examples", "benchmarks"}
    top = {
        "README.md",
        "CHANGELOG.md",
        "LICENSE",
        "Makefile",
        "pyproject.toml",
        "constraints-dev.txt",
    }
    return sorted(
        n for n in committed if (n.partition("/")[0] in wanted or n in top) and n not in held
    )


def _run(command: Sequence[str], *, cwd: Path | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(command)[:200]}\nended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    return done.stdout


def _environment(path: Path, below: Path | None = None) -> str:
    """A new virtual environment, which also sees the packages of another; returns its Python."""
    _run([sys.executable, "-m", "venv", str(path)])
    if below is not None:
        packages = next((path / "lib").glob("python*/site-packages"))
        seen = next((below / "lib").glob("python*/site-packages"))
        (packages / "below.pth").write_text(f"{seen}\n")
    return str(path / "bin" / "python")


def _install(python: str, *requirements: str) -> None:
    _run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *requirements])


def _use(python: str, example: str, scratch: Path) -> None:
    """Do what a new user does: the README's first example, and a look at what it left."""
    scratch.mkdir(parents=True, exist_ok=True)
    _run([python, "-W", "error::SyntaxWarning", "-c", example], cwd=scratch)
    listed = _run([python, "-m", "ckptfs", "ls", "run"], cwd=scratch)
    if "step_100" not in listed:
        raise RuntimeError(
            f"`ckptfs ls run` does not show the checkpoint of the example:\n{listed}"
        )
    if (scratch / "ckptfs").exists():
        raise RuntimeError("the example was not run against the installed package")


def _check_contents(sdist: Path, wheel: Path) -> None:
    committed = committed_files()
    for what, names in (
        ("the wheel lacks", missing_from_wheel(wheel, committed)),
        ("the wheel should not hold", foreign_in_wheel(wheel, committed)),
        ("the sdist lacks", missing_from_sdist(sdist, committed)),
    ):
        if names:
            raise RuntimeError(f"{what} {', '.join(names[:10])}")


def _attempt(
    rows: list[tuple[str, str]], what: str, work: Callable[..., None], *args: object
) -> bool:
    """Do one step and note how it ended; the steps that do not depend on it continue."""
    print(f"{what} ...", flush=True)
    try:
        work(*args)
    except (RuntimeError, OSError, ValueError) as error:
        print(error, flush=True)
        rows.append((what, "FAILED"))
        return False
    rows.append((what, "ok"))
    return True


def main(arguments: Sequence[str] | None = None) -> int:
    """Build, compare, install and use; print a row for each step."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    users = sorted(set(project["optional-dependencies"]) - OURS)
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument(
        "--extras",
        nargs="*",
        default=users,
        choices=users,
        help="the extras to try; all of them unless given",
    )
    extras = parser.parse_args(arguments).extras
    example = first_example((ROOT / "README.md").read_text())
    torch = next(
        r
        for r in (ROOT / "constraints-dev.txt").read_text().splitlines()
        if r.startswith("torch==")
    )
    rows: list[tuple[str, str]] = []
    with tempfile.TemporaryDirectory(prefix="ckptfs-release-") as name:
        work = Path(name)
        tree = work / "tree"
        tree.mkdir()
        _run(["sh", "-c", f"git -C '{ROOT}' archive HEAD | tar -x -C '{tree}'"])
        builder = _environment(work / "builder")
        _install(builder, "hatchling>=1.26")
        sdist = build(tree, work / "dist", "sdist", builder)
        wheel = build(unpack(sdist, work / "unpacked"), work / "dist", "wheel", builder)
        print(
            f"{sdist.name}: {sdist.stat().st_size:,} bytes; {wheel.name}: {wheel.stat().st_size:,} bytes"
        )
        _attempt(rows, "contents of the sdist and the wheel", _check_contents, sdist, wheel)
        alone = work / "alone"
        python = _environment(alone)
        if _attempt(rows, "wheel alone: install", _install, python, str(wheel), torch):
            _attempt(
                rows, "wheel alone: README's first example", _use, python, example, work / "use"
            )
            for extra in extras:
                with tempfile.TemporaryDirectory(prefix=f"{extra}-", dir=work) as own:
                    python = _environment(Path(own) / "env", alone)
                    if _attempt(rows, f"[{extra}]: install", _install, python, f"{wheel}[{extra}]"):
                        _attempt(
                            rows,
                            f"[{extra}]: README's first example",
                            _use,
                            python,
                            example,
                            Path(own) / "use",
                        )
    width = max(len(what) for what, _ in rows)
    print("\n".join(f"{what:<{width}}  {how}" for what, how in rows))
    failed = sum(how != "ok" for _, how in rows)
    print(f"release-check: {len(rows) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
