"""Calls on plain files are known to be under way: which, and at which path. Real ones, on named pipes."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptfs.storage.inflight import WatchedFile, in_task, new_task, oldest_call, remove_tree, walk

PIPE_BYTES = 1 << 20  # more than a pipe holds


def opens(path: str) -> None:
    """It has no writer yet."""
    WatchedFile(path).close()


def reads(path: str) -> None:
    """Its writer says nothing yet."""
    with WatchedFile(path) as file:
        file.read(1)


def reads_into(path: str) -> None:
    """As ``reads``."""
    with WatchedFile(path) as file:
        file.readinto(bytearray(1))


def writes(path: str) -> None:
    """Its reader reads nothing yet."""
    with WatchedFile(path, "wb") as file:
        data = memoryview(bytes(PIPE_BYTES))
        while data:
            data = data[file.write(data) :]


@pytest.mark.parametrize(
    ("act", "opened", "told"),
    [
        (opens, False, "open of"),
        (reads, True, "read of"),
        (reads_into, True, "read of"),
        (writes, True, "write of"),
    ],
)
def test_a_call_that_does_not_return_is_told_with_its_path(
    tmp_path: Path, act: Callable[[str], None], *, opened: bool, told: str
) -> None:
    """As soon as it is under way, and no more when it has returned."""
    path = str(tmp_path / "pipe")
    os.mkfifo(path)
    other = os.open(path, os.O_RDWR) if opened else -1

    def work() -> None:
        with in_task(part):
            act(path)

    part = new_task()
    thread = threading.Thread(target=work)
    thread.start()
    while (waited := oldest_call(part)) is None or not waited.text.startswith(told):
        assert thread.is_alive()
    assert waited.text == f"{told} {path}"
    if act is writes:
        left = PIPE_BYTES
        while left:  # no read more than there are bytes: it would hang
            left -= len(os.read(other, left))
    else:
        other = other if opened else os.open(path, os.O_RDWR)
        os.write(other, b"xx")
    thread.join()
    os.close(other)
    assert oldest_call(part) is None


def test_a_tree_goes_as_far_as_it_can(tmp_path: Path) -> None:
    """Files, directories and links in it; what a link leads to stays, and so does a link itself."""
    top, kept = tmp_path / "top", tmp_path / "kept"
    (top / "a" / "b").mkdir(parents=True)
    (top / "a" / "file").write_text("x")
    kept.mkdir()
    (kept / "file").write_text("x")
    (top / "link").symlink_to(kept)
    (tmp_path / "alias").symlink_to(kept)
    assert [folder for folder, _, _ in walk(str(top))] == [str(top), f"{top}/a", f"{top}/a/b"]
    for path in (top, tmp_path / "alias", tmp_path / "absent"):
        remove_tree(str(path))
    assert {path.name for path in tmp_path.iterdir()} == {"kept", "alias"}
    assert (kept / "file").exists()
