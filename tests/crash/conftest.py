"""A directory in memory: a process that dies needs no disk, and fsync costs nothing there."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def memory_path(tmp_path: Path) -> Iterator[Path]:
    """Like tmp_path, in memory where the machine has such a place."""
    if not os.path.isdir("/dev/shm"):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="crash-", dir="/dev/shm") as path:
        yield Path(path)
