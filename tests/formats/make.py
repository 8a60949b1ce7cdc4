"""Write the golden files of ``tests/formats`` again: ``make formats``.

    v1/             one file for everything that format version 1 of ckptfs writes by itself
    torch-<x.y.z>/  a checkpoint written by that version's own checkpoint package on two ranks

They are committed and change only when the golden values do. A later format of ckptfs, or of torch,
gets a directory of its own and the old ones stay.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from pathlib import Path

import torch

from tests.compat.overlay import VERSIONS, overlay_for
from tests.compat.stock import run_stock
from tests.formats.state import RANKS
from tests.formats.values import golden

__all__ = ["make_torch", "make_version_1"]


def make_version_1(home: Path) -> None:
    """Encode every golden value into home/v1."""
    (home / "v1").mkdir(exist_ok=True)
    for item in golden():
        (home / "v1" / item.file).write_bytes(item.encode(item.value))


def make_torch(home: Path) -> None:
    """Save the golden state with every pinned version and the installed one, below home."""
    overlays: dict[str, Path | None] = {wheel.version: overlay_for(wheel) for wheel in VERSIONS}
    overlays[torch.__version__.partition("+")[0]] = None
    with tempfile.TemporaryDirectory() as scratch:
        for version, overlay in overlays.items():
            name = f"torch-{version}"
            made = Path(scratch, name)
            run_stock("save", made, ranks=RANKS, overlay=overlay)
            run_stock("load", made, ranks=1, overlay=overlay)
            shutil.rmtree(home / name, ignore_errors=True)
            shutil.copytree(made, home / name)
            logging.getLogger(__name__).info("wrote %s", home / name)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    make_version_1(Path(__file__).parent)
    make_torch(Path(__file__).parent)
