"""The open system calls of small operations on a local disk are those that the page lists."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import ckptfs
from ckptfs.storage.local import posix

PAGE = Path(__file__).parents[2] / "docs/design/0020-no-kept-descriptors.md"
ROWS = {"save": "a save with", "latest": "`latest`", "load": "a load"}
WAYS = ["openat2", "openat2, the root behind a link", "without openat2"]


def count(top: str, way: str) -> dict[str, int]:
    """Count the opens of a save, of ``latest`` and of a load, each the second of its kind in this process.

    An audit hook stays for as long as its process lives: call this in a process of its own.
    """
    counts, place = dict[str, int](), Path(top, "place")
    place.mkdir()
    run = place / "run"
    if way == WAYS[1]:
        Path(top, "alias").symlink_to("place")
        run = Path(top, "alias", "run")
    posix._HAS_OPENAT2 = way != WAYS[2]
    opened = list[str]()

    def hear(event: str, arguments: tuple[object, ...]) -> None:
        # A relative name is one in an open directory. Python's own modules and /proc are absolute and elsewhere.
        # The touch of the log that follows a commit comes from a timer, in this operation or in the next one.
        if isinstance(threading.current_thread(), threading.Timer):
            return
        if event == "open" and isinstance(arguments[0], str):
            name = arguments[0]
            if not name.startswith("/") or name.startswith(top):
                opened.append(name)

    sys.addaudithook(hear)
    state = {"w": torch.zeros(8)}
    with ckptfs.CheckpointManager(run) as manager:
        for step in (1, 2):
            opened.clear()
            manager.save(step, state)
            counts["save"] = len(opened)
    for _ in range(2):
        opened.clear()
        newest = ckptfs.latest(run)
        counts["latest"] = len(opened)
        opened.clear()
        assert newest is not None
        ckptfs.load(state, newest.uri)
        counts["load"] = len(opened)
    return counts


def _listed(way: str) -> dict[str, int]:
    lines = [
        [cell.strip() for cell in line.strip("|\n ").split("|")]
        for line in PAGE.read_text().splitlines()
        if line.startswith("|")
    ]
    column = lines[0].index(way)
    return {
        key: int(cells[column])
        for key, begin in ROWS.items()
        for cells in lines
        if cells[0].startswith(begin)
    }


@pytest.mark.parametrize("way", WAYS)
def test_small_operations_open_no_more_than_the_page_lists(tmp_path: Path, way: str) -> None:
    """A directory that is opened at each step of a path would show here, and so would a page that is old."""
    if way != WAYS[2] and not posix._HAS_OPENAT2:
        pytest.skip("this kernel has no openat2")
    code = f"import json; from tests.scale.test_opens import *; print(json.dumps(count({str(tmp_path)!r}, {way!r})))"
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    found, listed = json.loads(ran.stdout.splitlines()[-1]), _listed(way)
    assert found.keys() == listed.keys()
    for key, opens in found.items():
        # Some files are looked for by names that are made by chance.
        assert opens <= listed[key] + 2, f"{key}: {opens} and not {listed[key]}"
        assert opens >= listed[key] - 5, f"{key}: {opens}, the page is old"
