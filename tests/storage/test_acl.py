"""Default ACLs of a shared directory reach everything that is made in it."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptfs.storage.local import LocalStorage
from ckptfs.uri import Uri

FRIEND = 4242
_TAGS = {"owner": 0x01, "user": 0x02, "group": 0x04, "mask": 0x10, "other": 0x20}
_NOBODY = 0xFFFFFFFF


def _acl() -> bytes:
    """Owner, group and user FRIEND may do all, others nothing; as the kernel stores it."""
    entries = [("owner", 7, _NOBODY), ("user", 7, FRIEND), ("group", 7, _NOBODY)]
    entries += [("mask", 7, _NOBODY), ("other", 0, _NOBODY)]
    return struct.pack("<I", 2) + b"".join(
        struct.pack("<HHI", _TAGS[tag], bits, who) for tag, bits, who in entries
    )


def _bits_of(path: Path, which: str) -> dict[tuple[int, int], int]:
    raw = os.getxattr(path, f"system.posix_acl_{which}")
    return {(tag, who): bits for tag, bits, who in struct.iter_unpack("<HHI", raw[4:])}


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[Path]:
    """A directory with a default ACL, under a umask that would shut the group out."""
    place = tmp_path / "shared"
    place.mkdir()
    try:
        os.setxattr(place, "system.posix_acl_default", _acl())
    except OSError as error:
        pytest.skip(f"no POSIX ACLs here: {error}")
    before = os.umask(0o077)
    yield place
    os.umask(before)


def test_default_acls_are_inherited_by_files_and_directories(shared: Path) -> None:
    """A named user of the directory's default ACL may use what every way of writing makes."""
    storage = LocalStorage(Uri.parse(str(shared / "run")))
    storage.make_dir(".ckptfs/tmp")
    storage.make_dir(".ckptfs/log")
    storage.create(".ckptfs/log/0", b"entry", staging=".ckptfs/tmp/w")
    storage.replace("lease", b"alive")
    with storage.open_write("data") as writer:
        writer.write(b"bytes")
    run = shared / "run"
    for directory in (run, run / ".ckptfs", run / ".ckptfs/log"):
        assert _bits_of(directory, "default")[_TAGS["user"], FRIEND] == 7
    for file in (run / ".ckptfs/log/0", run / "lease", run / "data"):
        bits = _bits_of(file, "access")
        # Files are made 0666: the mask leaves read and write of what the ACL grants.
        assert bits[_TAGS["user"], FRIEND] & bits[_TAGS["mask"], _NOBODY] == 6
        assert file.stat().st_mode & 0o007 == 0
