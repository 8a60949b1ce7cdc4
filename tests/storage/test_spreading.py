"""How many files a rank writes at once, and that they are one checkpoint."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import ckptfs
from ckptfs.storage.local import storage
from ckptfs.storage.local.posix import Posix, core_count
from ckptfs.storage.local.storage import files_at_once

TMPFS, RAMFS, EXT4, NFS = 0x01021994, 0x858458F6, 0xEF53, 0x6969
GB = 1 << 30


class Told(Posix):
    """A kernel that says this of every filesystem."""

    def __init__(self, fs_type: int | None) -> None:
        self.told = fs_type
        self.open_fds = 0

    def open(self, path: str, flags: int, mode: int = 0o666, *, dir_fd: int | None = None) -> int:
        self.open_fds += 1
        return super().open(path, flags, mode, dir_fd=dir_fd)

    def close(self, fd: int) -> None:
        self.open_fds -= 1
        super().close(fd)

    def fs_type(self, fd: int) -> int | None:
        del fd
        return self.told


@pytest.fixture
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a larger machine."""
    monkeypatch.setattr(storage, "core_count", lambda: 8)


@pytest.mark.usefixtures("eight_cores")
@pytest.mark.parametrize(
    ("fs_type", "size_bytes", "expected"),
    [
        (TMPFS, GB, 4),
        (RAMFS, GB, 4),
        (TMPFS, 3 * (64 << 20), 3),
        (TMPFS, 2 * (64 << 20) - 1, 1),
        (TMPFS, 0, 1),
        (EXT4, GB, 1),
        (NFS, GB, 1),
        (None, GB, 1),
    ],
)
def test_several_files_in_memory_and_one_elsewhere(
    tmp_path: Path, fs_type: int | None, size_bytes: int, expected: int
) -> None:
    """Up to four, none smaller than 64 MiB for it; nothing stays open."""
    posix = Told(fs_type)
    assert files_at_once(posix, str(tmp_path), size_bytes) == expected
    assert posix.open_fds == 0


@pytest.mark.usefixtures("eight_cores")
def test_a_directory_that_cannot_be_opened_gets_one_file(tmp_path: Path) -> None:
    """It is a hint: the write will tell what is wrong."""
    assert files_at_once(Told(TMPFS), str(tmp_path / "absent"), GB) == 1


def test_the_kernel_says_what_is_in_memory() -> None:
    """On this machine's own tmpfs, by the real system calls."""
    fd = os.open("/dev/shm", os.O_RDONLY)
    found = Posix().fs_type(fd)
    os.close(fd)
    if found != TMPFS:
        pytest.skip("/dev/shm is no tmpfs here")
    assert files_at_once(Posix(), "/dev/shm", GB) == min(core_count(), 4)


def test_what_several_files_hold_is_one_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written by default into three files, read back by ckptfs and by stock torch; asked for, one."""
    monkeypatch.setattr(storage, "core_count", lambda: 3)
    monkeypatch.setattr(storage, "_MIN_FILE_BYTES", 1000)
    monkeypatch.setattr(Posix, "fs_type", lambda *_: TMPFS)
    state: dict[str, Any] = {
        f"t{n}": torch.arange(n, n + 1000, dtype=torch.float32) for n in range(7)
    }
    state["object"] = {"epoch": 3}
    ckptfs.save(state, tmp_path / "run/step_1")
    ckptfs.save(state, tmp_path / "run/step_2", threads=1)
    names = [
        sorted(path.name for path in (tmp_path / f"run/step_{step}").rglob("*.distcp"))
        for step in (1, 2)
    ]
    assert names == [["__0_0.distcp", "__0_1.distcp", "__0_2.distcp"], ["__0_0.distcp"]]
    for load in (
        lambda out: ckptfs.load(out, tmp_path / "run/step_1"),
        lambda out: dcp.load(out, checkpoint_id=tmp_path / "run/step_1"),
    ):
        out: dict[str, Any] = {
            key: torch.zeros_like(value) for key, value in state.items() if key != "object"
        }
        out["object"] = {"epoch": 0}
        load(out)
        assert all(torch.equal(out[key], state[key]) for key in out if key != "object")
        assert out["object"] == {"epoch": 3}


def test_ramfs_is_known(tmp_path: Path) -> None:
    """The kernel's number of a real ramfs, with its highest bit set, is that of ramfs."""
    place = tmp_path / "ramfs"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "ramfs", "none", place], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no mount: {mounted.stderr.decode().strip()}")
    try:
        fd = os.open(place, os.O_RDONLY)
        try:
            assert Posix().fs_type(fd) == RAMFS
        finally:
            os.close(fd)
        assert files_at_once(Posix(), str(place), GB) == files_at_once(Told(RAMFS), "/", GB)
    finally:
        subprocess.run(["umount", place], check=True)
