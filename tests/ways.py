"""The modules that a save and a load of one process pass, in the order of their first calls.

    modules_of("save")   -> ("ckptfs.dcp.api", ...)

They are traced in a process of their own, after a first save and load: imports and caches are no part of it.
"""

from __future__ import annotations

import functools
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parents[1]


@functools.cache
def modules_of(way: str) -> tuple[str, ...]:
    """Return the modules of the package that run in a ``"save"`` or a ``"load"``, in order."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.ways", way],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return tuple(done.stdout.split())


def _traced(act: Callable[[], object]) -> list[str]:
    passed: dict[str, None] = {}

    def note(frame: FrameType, event: str, _: object) -> None:
        name = frame.f_globals.get("__name__", "")
        if event == "call" and name.startswith("ckptfs."):
            passed.setdefault(name)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        act()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return list(passed)


def main(way: str) -> None:
    """Print the modules that a save or a load passes."""
    import torch

    import ckptfs

    state = {"weights": torch.arange(1 << 20, dtype=torch.float32), "step": 3}
    with tempfile.TemporaryDirectory() as home:
        for name in ("first", "traced"):
            uri = f"{home}/{name}/step_1"
            saved = _traced(lambda uri=uri: ckptfs.save(state, uri))  # type: ignore[misc]
            loaded = _traced(lambda uri=uri: ckptfs.load(state, uri))  # type: ignore[misc]
    sys.stdout.write("\n".join(saved if way == "save" else loaded))


if __name__ == "__main__":
    main(sys.argv[1])
