"""Hard links on a mounted filesystem: what each answer of the kernel's becomes."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from ckptfs.errors import AccessError, AnswerLostError, StorageError, UnsupportedError
from ckptfs.storage.local import LocalStorage
from ckptfs.storage.local.posix import Posix
from ckptfs.uri import Uri


class Refusing(Posix):
    """A kernel that answers link(2) with one errno."""

    def __init__(self, number: int) -> None:
        self.number = number

    def link(self, source: str, target: str) -> None:
        """Refused."""
        raise OSError(self.number, os.strerror(self.number))


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        *((n, UnsupportedError) for n in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP)),
        (errno.EACCES, AccessError),
        (errno.EIO, AnswerLostError),
    ],
)
def test_each_answer_is_told_apart(tmp_path: Path, number: int, kind: type[StorageError]) -> None:
    """Another filesystem, a sticky owner, too many links: "not between these two", so that a caller
    writes instead; a lost answer is reported as one.
    """
    (tmp_path / "f").write_bytes(b"x")
    storage = LocalStorage(Uri.parse(tmp_path), posix=Refusing(number))
    with pytest.raises(StorageError) as caught:
        storage.link("f", "g")
    assert type(caught.value) is kind
    assert not (tmp_path / "g").exists()


def test_two_filesystems_are_not_linked(tmp_path: Path) -> None:
    """The kernel's own EXDEV: a link into /dev/shm is UnsupportedError."""
    if not os.path.isdir("/dev/shm") or os.stat("/dev/shm").st_dev == os.stat(tmp_path).st_dev:
        pytest.skip("one filesystem here")
    (tmp_path / "f").write_bytes(b"x")
    source = os.path.realpath(tmp_path / "f").lstrip("/")
    with pytest.raises(UnsupportedError):
        LocalStorage(Uri.parse("/")).link(source, f"dev/shm/ckptfs-{os.getpid()}")
