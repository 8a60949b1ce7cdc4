"""The system calls of a small save and of a small load on a local disk are those that the page lists."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import ckptfs
from ckptfs.commit.ownership.claim import claim
from ckptfs.commit.session import Place, start_session
from ckptfs.control.control import SoloControl
from ckptfs.storage.local import LocalStorage, posix
from ckptfs.storage.local.posix import without_mark
from ckptfs.testing.disk import SimulatedDisk
from ckptfs.uri import Uri
from tests.scale.simulation import Sizes, _save
from tests.ticks import until_the_clock_ticks

PAGE = Path(__file__).parents[2] / "docs/scale.md"
ROOT = Path(__file__).parents[2]
ROWS = {"save": "a held save", "load": "a load"}
# Python's functions that make one system call with a name, or that makes something durable.
CALLS = {
    os.fsync: "sync",
    os.fdatasync: "sync",
    os.link: "link",
    os.listdir: "list",
    os.lstat: "stat",
    os.mkdir: "mkdir",
    os.readlink: "readlink",
    os.remove: "unlink",
    os.rename: "rename",
    os.replace: "rename",
    os.rmdir: "rmdir",
    os.scandir: "list",
    os.stat: "stat",
    os.statvfs: "statvfs",
    os.unlink: "unlink",
    os.utime: "utime",
}


class Counted:
    """What this process calls, on every thread that works for the caller.

    Not the touch of the log that follows a commit, which comes from a timer, in this operation or in the next one, and
    not the lease, which is written at its own times.
    """

    def __init__(self) -> None:
        self.found: Counter[str] = Counter()
        sys.addaudithook(self._opened)
        threading.setprofile(self._called)
        sys.setprofile(self._called)

    def _opened(self, event: str, arguments: tuple[object, ...]) -> None:
        if event == "open" and isinstance(arguments[0], str) and _is_callers():
            self.found["open"] += 1

    def _called(self, frame: FrameType, event: str, function: Any) -> None:
        if event == "c_call" and _name_of(function) is not None and _is_callers():
            self.found[str(_name_of(function))] += 1


def _name_of(function: Any) -> str | None:
    try:
        return CALLS.get(function)
    except TypeError:  # not every built-in method can be hashed
        return None


def _is_callers() -> bool:
    thread = threading.current_thread()
    return not isinstance(thread, threading.Timer) and not thread.name.startswith("ckptfs-lease")


def count(top: str) -> dict[str, dict[str, int]]:
    """The calls of a save of a manager that holds its run, and of a load, each the third of its kind.

    What is set here stays for as long as the process lives: call this in a process of its own.
    """
    run, state, counts = Path(top, "run"), {"w": torch.zeros(8)}, dict[str, dict[str, int]]()
    counted = Counted()

    def noted(kind: str) -> None:
        counts[kind] = dict(sorted(counted.found.items()))

    with ckptfs.CheckpointManager(run) as manager:
        until_the_clock_ticks(Path(top))
        for step in (1, 2, 3):
            counted.found.clear()
            manager.save(step, state)
            noted("save")
    newest = ckptfs.latest(run)
    assert newest is not None
    for _ in range(3):
        counted.found.clear()
        ckptfs.load(state, newest.uri)
        noted("load")
    return counts


def _lines() -> list[list[str]]:
    """The cells of every row of every table of the page; an empty first cell is left out."""
    return [
        [cell.strip() for cell in line.strip("|\n ").split("|")]
        for line in PAGE.read_text().splitlines()
        if line.startswith("|")
    ]


def _table() -> tuple[list[str], dict[str, dict[str, int]]]:
    """The columns of the page's table, and its rows."""
    lines = _lines()
    head = next(at for at, cells in enumerate(lines) if cells[-1] == "calls" and "sync" in cells)
    columns = lines[head]  # the first cell is empty
    rows = {
        key: dict(zip(columns, map(int, cells[1:]), strict=True))
        for key, title in ROWS.items()
        for cells in lines[head + 2 : head + 2 + len(ROWS)]
        if cells[0] == title
    }
    return columns, rows


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, int]]:
    """What was counted."""
    top = str(tmp_path_factory.mktemp("calls"))
    code = f"import json; from tests.scale.test_calls import *; print(json.dumps(count({top!r})))"
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    counts: dict[str, dict[str, int]] = json.loads(ran.stdout.splitlines()[-1])
    return counts


@pytest.mark.skipif(not posix._HAS_OPENAT2, reason="this kernel has no openat2")
@pytest.mark.parametrize("kind", ROWS)
def test_a_small_operation_makes_the_calls_that_the_page_lists(
    kind: str, found: dict[str, dict[str, int]]
) -> None:
    """Exactly these: a sync that came back would show here, a directory that is opened twice, and an old page."""
    columns, rows = _table()
    assert set(found[kind]) <= set(columns), "a call of another kind: the table needs a column"
    shown = {name: found[kind].get(name, 0) for name in columns if name != "calls"}
    assert {**shown, "calls": sum(shown.values())} == rows[kind]


class _NamedDisk(SimulatedDisk):
    """Knows which name each file gets that is synced under a partial one."""

    def __init__(self, directory: str) -> None:
        super().__init__(directory)
        self.renamed: dict[str, str] = {}

    def rename(self, source: str, target: str) -> None:
        """rename(2)."""
        super().rename(source, target)
        self.renamed[without_mark(source)] = without_mark(target)


def test_the_syncs_of_a_held_save_are_those_of_the_page(tmp_path: Path) -> None:
    """In order, each with its site. That every one is needed is for tests/crash/test_power_cut.py to show."""
    disk = _NamedDisk(str(tmp_path))
    directory = f"{tmp_path}/run"
    storage = LocalStorage(Uri.parse("file:///data/run"), directory=directory, posix=disk)
    with claim(start_session(SoloControl(), storage, Place(), write=True)) as run:
        until_the_clock_ticks(tmp_path)
        _save(run, Sizes(1, 1), 1)
        before = len(disk.fsyncs)
        _save(run, Sizes(1, 1), 2)
        fsyncs = disk.fsyncs[before:]
    found = []
    for call in fsyncs:
        path = disk.renamed.get(call.path, call.path) if not call.is_dir else f"{call.path}/"
        path = re.sub(r"/tmp/[^/]+$", "/tmp/<entry>", path.removeprefix(f"{directory}/"))
        path = re.sub(r"\d{8}T\d{6}-[0-9a-f]{12}", "<id>", path)
        found.append([f"`{path}`" if path else "the run's directory", f"`{call.site}`"])
    lines = _lines()
    head = next(at for at, cells in enumerate(lines) if cells[0] == "synced")
    rows = lines[head + 2 : head + 2 + len(found)]
    assert found == [[row[0], row[-1]] for row in rows]
    assert all(len(row) == 3 and row[1] for row in rows)
