"""The checkpoint package of another torch, laid over the one that is installed.

    wheel of torch X, pinned by hash  --pip download-->  scratch  --three paths of it-->  overlay
    torch.distributed.__path__ = [overlay, installed]    so that torch.distributed.checkpoint is X's

A second torch takes a second environment of gigabytes and, for most versions, a GPU build. Reading
and writing checkpoints is Python: the package ``torch.distributed.checkpoint`` with the two modules
that it is tied to. Laid over an installed torch they run as they did at home. What this cannot show
is a difference in C++ (dtypes, zip serialisation, collectives).

The smallest wheel of each version is the one for macOS; nothing native in it is used. Overlays are
kept in ``.venv/compat`` next to the environment that they belong to.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

__all__ = ["VERSIONS", "Wheel", "overlay_for"]

# What X's torch.distributed.checkpoint shares private names with.
_PARTS = (
    "torch/distributed/checkpoint/",
    "torch/distributed/_shard/",
    "torch/distributed/_state_dict_utils.py",
)


@dataclass(frozen=True, slots=True)
class Wheel:
    """One release: its version, the sha256 of the wheel taken, the platform tag of that wheel."""

    version: str
    sha256: str
    platform: str


VERSIONS = (
    Wheel(
        "2.6.0",
        "94fc63b3b4bedd327af588696559f68c264440e2503cc9e6954019473d74ae21",
        "macosx_11_0_arm64",
    ),
    Wheel(
        "2.10.0",
        "418997cb02d0a0f1497cf6a09f63166f9f5df9f3e16c8a716ab76a72127c714f",
        "macosx_11_0_arm64",
    ),
    Wheel(
        "2.15.0",
        "e808b63d616a43b326e1a5677d45a2e5babe7a8ce27edb03ddb48e7dd9b6d663",
        "macosx_14_0_arm64",
    ),
)


def overlay_for(wheel: Wheel, root: Path | None = None) -> Path:
    """Return the folder to put first in ``torch.distributed.__path__``; fetched at the first call.

    root: where overlays are kept, by default ``compat`` in this environment. pip refuses a wheel with a
    hash other than the pinned one, and nothing is unpacked. Safe to call from several
    processes: the overlay appears by one rename.
    """
    target = (root or Path(sys.prefix) / "compat") / f"torch-{wheel.version}"
    if not target.is_dir():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            unpacked = Path(scratch, "overlay")
            _unpack(_download(wheel, Path(scratch)), unpacked)
            try:
                unpacked.rename(target)
            except OSError:
                if not target.is_dir():  # else another process was first; it made the same
                    raise
    return target / "torch" / "distributed"


def _download(wheel: Wheel, scratch: Path) -> Path:
    """Fetch the one wheel, checked against its hash by pip."""
    pin = scratch / "pin.txt"
    pin.write_text(f"torch=={wheel.version} --hash=sha256:{wheel.sha256}\n")
    subprocess.run(
        [
            sys.executable,
            *("-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"),
            *("--only-binary=:all:", "--implementation", "cp", "--python-version", "3.11"),
            *("--platform", wheel.platform, "--require-hashes", "-r", str(pin)),
            *("--dest", str(scratch)),
        ],
        check=True,
    )
    (found,) = scratch.glob("torch-*.whl")
    return found


def _unpack(wheel: Path, target: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.startswith(_PARTS) and name.endswith(".py"):
                archive.extract(name, target)
