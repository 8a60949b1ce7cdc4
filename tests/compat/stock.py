"""Start stock torch jobs, of the installed torch or of an overlay, and wait for all their ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Literal

__all__ = ["run_stock"]

_ROOT = Path(__file__).resolve().parents[2]


def run_stock(
    verb: Literal["save", "load"],
    directory: Path,
    *,
    ranks: int = 1,
    overlay: Path | None = None,
    timeout_s: float = 120.0,
) -> None:
    """Save or load the golden state in directory with `ranks` processes; AssertionError with the
    output of every failed rank. The directory is given to torch as a relative path, so that the
    checkpoint carries no trace of where it was made.
    """
    store = directory.with_suffix(".store")
    extra = [] if overlay is None else [str(overlay)]
    command = [sys.executable, "-m", "tests.formats.state", verb, directory.name]
    env = {**os.environ, "PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            [*command, str(rank), str(ranks), *extra],
            cwd=directory.parent,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        outputs = [process.communicate(timeout=timeout_s)[0] for process in started]
    finally:
        for process in started:
            process.kill()  # no effect on one that ended
        store.unlink(missing_ok=True)
    failed = [text for process, text in zip(started, outputs, strict=True) if process.returncode]
    assert not failed, "\n".join(failed)
