"""Windows of a local file: what the kernel may refuse, do by halves or break, and what is left then."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from ckptfs.errors import NoSpaceError, StorageError
from ckptfs.storage.io import FileEngine, ParallelWriter
from ckptfs.storage.local import LocalStorage
from ckptfs.storage.local.posix import DirectAlignment, Posix, takes_direct
from ckptfs.testing._conformance.base import pattern
from ckptfs.uri import Uri

ERRORS = [
    errno.EINTR,
    errno.EAGAIN,
    errno.ENOSPC,
    errno.EIO,
    errno.EINVAL,
    errno.EDQUOT,
    errno.EOPNOTSUPP,
    errno.ESTALE,
]


class Breaking(Posix):
    """The real kernel; its n-th call of a file on its way fails, or is done by half.

    short: writes take half of what they are given, and odd numbers of bytes. Refused are direct
    writes, from the one of that number on.
    """

    def __init__(self, number: int = 0, code: int = 0, *, short: bool = False) -> None:
        self.number, self.code, self.short = number, code, short
        self.refuse_direct_from: int | None = None
        self.calls: list[str] = []
        self.direct_writes = 0
        self._direct: set[int] = set()
        self._lock = threading.Lock()

    def _call(self, name: str) -> None:
        with self._lock:
            self.calls.append(name)
            if len(self.calls) == self.number:
                raise OSError(self.code, os.strerror(self.code))

    def open(self, path: str, flags: int, mode: int = 0o666, *, dir_fd: int | None = None) -> int:
        if ".partial-" in path:
            self._call("open")
        fd = super().open(path, flags, mode, dir_fd=dir_fd)
        if flags & os.O_DIRECT:
            self._direct.add(fd)
        return fd

    def allocate(self, fd: int, size_bytes: int) -> None:
        self._call("allocate")
        super().allocate(fd, size_bytes)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._call("pwritev")
        if fd in self._direct:
            self.direct_writes += 1
            if (
                self.refuse_direct_from is not None
                and self.direct_writes >= self.refuse_direct_from
            ):
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        if self.short:
            size = sum(map(len, buffers))
            half = max(1, size // 2)
            page = half - half % 4096
            if fd in self._direct:
                half = page or size
            first = b"".join(buffers)[:half]
            if fd in self._direct:
                return super().pwritev(fd, [buffers[0][:half]], offset)
            return super().pwritev(fd, [memoryview(first)], offset)
        return super().pwritev(fd, buffers, offset)

    def write_behind(self, fd: int, offset: int, size_bytes: int) -> None:
        self._call("write_behind")
        super().write_behind(fd, offset, size_bytes)

    def fsync(self, fd: int) -> None:
        self._call("fsync")
        super().fsync(fd)

    def close(self, fd: int) -> None:
        self._direct.discard(fd)
        super().close(fd)  # close(2) releases the descriptor, whatever it answers
        self._call("close")

    def rename(self, source: str, target: str) -> None:
        self._call("rename")
        super().rename(source, target)


def write(place: Path, posix: Posix, data: bytes, engine: FileEngine | None) -> ParallelWriter:
    """Write ``f`` in windows, each of a few odd views."""
    storage = LocalStorage(Uri.parse(str(place)), posix=posix)
    writer = storage.open_parallel("f", size_bytes=len(data), engine=engine)
    assert writer is not None
    with writer:
        for start in range(0, len(data), writer.window_bytes):
            part = memoryview(data)[start : start + writer.window_bytes]
            writer.write_at(start, [part[:5], part[5:70_001], part[70_001:]])
    return writer


def takes_direct_here(place: Path) -> bool:
    """Whether this directory's filesystem really takes direct writes."""
    posix = Breaking()
    write(place, posix, pattern(10_000)[:10_000], FileEngine.DIRECT)
    return posix.direct_writes > 0


@pytest.mark.parametrize("engine", [FileEngine.DIRECT, FileEngine.BUFFERED])
@pytest.mark.parametrize("code", ERRORS, ids=errno.errorcode.get)
def test_a_failure_of_any_call_leaves_a_whole_file_or_none(
    tmp_path: Path, engine: FileEngine, code: int
) -> None:
    """Each system call of a file in two windows fails once: either the file is there with all its
    bytes, or a typed error is raised and nothing is left.
    """
    counted = Breaking()
    (tmp_path / "counted").mkdir()
    probe = write(tmp_path / "counted", counted, b"", engine)
    data = pattern(probe.window_bytes + 9001)[: probe.window_bytes + 9001]
    counted = Breaking()
    write(tmp_path / "counted", counted, data, engine)
    assert {"open", "pwritev", "fsync", "close", "rename"} <= set(counted.calls)
    for number in range(1, len(counted.calls) + 1):
        place = tmp_path / str(number)
        place.mkdir()
        failed: StorageError | None = None
        try:
            write(place, Breaking(number, code), data, engine)
        except StorageError as error:
            failed = error
        assert os.listdir(place) == ([] if failed else ["f"]), counted.calls[number - 1]
        assert str(place) in str(failed) if failed else (place / "f").read_bytes() == data


def test_an_allocation_that_a_signal_interrupts_is_asked_for_again(tmp_path: Path) -> None:
    """EINTR of fallocate, which Python does not call again by itself, fails no save."""
    if not takes_direct_here(tmp_path):
        pytest.skip("no direct writes here")
    data = pattern(5000)[:5000]
    posix = Breaking(3, errno.EINTR)  # open, open, allocate
    assert write(tmp_path, posix, data, FileEngine.DIRECT).engine is FileEngine.DIRECT
    assert posix.calls[2:4] == ["allocate", "allocate"]
    assert (tmp_path / "f").read_bytes() == data


@pytest.mark.parametrize("engine", [FileEngine.DIRECT, FileEngine.BUFFERED])
def test_short_writes_are_gone_on_with(tmp_path: Path, engine: FileEngine) -> None:
    """Writes that take half of what they get, also in the middle of a view, end in a whole file."""
    for size in (1, 4097, 100_003, (8 << 20) + 5):
        data = pattern(size)[:size]
        write(tmp_path, Breaking(short=True), data, engine)
        assert (tmp_path / "f").read_bytes() == data


@pytest.mark.parametrize("first", [1, 2, 3])
def test_a_place_that_refuses_direct_writes_half_way_gets_the_rest_otherwise(
    tmp_path: Path, first: int
) -> None:
    """EINVAL at the first, second or third direct write: the file is whole, and the writer says how."""
    if not takes_direct_here(tmp_path):
        pytest.skip("no direct writes here")
    posix = Breaking()
    posix.refuse_direct_from = first
    size = (20 << 20) + 1
    data = pattern(size)[:size]
    writer = write(tmp_path, posix, data, FileEngine.DIRECT)
    assert (tmp_path / "f").read_bytes() == data
    assert writer.engine is FileEngine.BUFFERED
    assert writer.direct_bytes == (first - 1) * writer.window_bytes
    assert posix.direct_writes == first


def test_what_a_direct_write_leaves_of_a_page_is_written_from_the_pages_start(
    tmp_path: Path,
) -> None:
    """After a direct write that ends inside a page no other write begins inside one: the page cache
    would have the first half as it was before.
    """
    if not takes_direct_here(tmp_path):
        pytest.skip("no direct writes here")
    buffered: list[int] = []

    class InsideAPage(Breaking):
        def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            if fd in self._direct:
                return min(super().pwritev(fd, buffers, offset), 9000)
            buffered.append(offset)
            return super().pwritev(fd, buffers, offset)

    data = pattern(50_000)[:50_000]
    writer = write(tmp_path, InsideAPage(), data, FileEngine.DIRECT)
    assert (tmp_path / "f").read_bytes() == data
    assert buffered == [8192]
    assert writer.direct_bytes == 8192


@pytest.mark.parametrize("engine", [FileEngine.DIRECT, FileEngine.BUFFERED])
def test_who_writes_into_a_broken_file_is_told_what_broke_it(
    tmp_path: Path, engine: FileEngine
) -> None:
    """Of several threads the one that found the disk full may report last: the others say the same."""

    class Full(Posix):
        def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    storage = LocalStorage(Uri.parse(str(tmp_path)), posix=Full())
    writer = storage.open_parallel("f", size_bytes=5000, engine=engine)
    assert writer is not None
    for _ in range(2):
        with pytest.raises(NoSpaceError):
            writer.write_at(0, [memoryview(bytes(5000))])
    with pytest.raises(StorageError):
        writer.close()
    writer.abort()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("engine", [FileEngine.DIRECT, FileEngine.BUFFERED])
def test_a_file_that_is_given_up_leaves_no_descriptor_open(
    tmp_path: Path, engine: FileEngine
) -> None:
    """As many calls of close(2) as of open(2), also when a write failed."""
    posix = Breaking()
    storage = LocalStorage(Uri.parse(str(tmp_path)), posix=posix)
    writer = storage.open_parallel("f", size_bytes=5000, engine=engine)
    assert writer is not None
    writer.abort()
    assert posix.calls.count("open") == posix.calls.count("close")


def test_a_large_file_on_a_disk_is_written_past_the_page_cache(tmp_path: Path) -> None:
    """All whole pages go direct, in one call a window, and only what is left of the last does not."""
    if not takes_direct_here(tmp_path):
        pytest.skip("no direct writes here")
    posix = Breaking()
    size = (24 << 20) + 4096 + 7
    data = pattern(size)[:size]
    writer = write(tmp_path, posix, data, None)
    assert writer.engine is FileEngine.DIRECT
    assert writer.direct_bytes == size - 7
    assert posix.calls.count("pwritev") == 5
    assert posix.direct_writes == 4
    assert (tmp_path / "f").read_bytes() == data


def test_a_small_file_is_one_buffered_write(tmp_path: Path) -> None:
    """A file of a few bytes costs what it did: open, write, fsync, close, rename."""
    posix = Breaking()
    assert write(tmp_path, posix, b"small", None).engine is FileEngine.BUFFERED
    assert posix.calls == ["open", "pwritev", "write_behind", "fsync", "close", "rename"]


def test_many_small_views_are_few_calls(tmp_path: Path) -> None:
    """Ten thousand views are written by ten calls through the page cache, and by two direct."""
    views = [bytes([n % 251]) * 100 for n in range(10_000)]
    for engine, most in ((FileEngine.BUFFERED, 10), (FileEngine.DIRECT, 2)):
        posix = Breaking()
        storage = LocalStorage(Uri.parse(str(tmp_path)), posix=posix)
        writer = storage.open_parallel("f", size_bytes=1_000_000, engine=engine)
        assert writer is not None
        with writer:
            writer.write_at(0, map(memoryview, views))
        assert posix.calls.count("pwritev") <= most
        assert (tmp_path / "f").read_bytes() == b"".join(views)


@pytest.mark.parametrize(
    ("told", "fs_type", "tries", "takes"),
    [
        (DirectAlignment(512, 512), None, False, True),
        (DirectAlignment(4, 4096), 0xEF53, False, True),
        (DirectAlignment(0, 0), 0xEF53, True, False),  # tmpfs, and files with data in their inode
        (DirectAlignment(512, 1 << 20), None, True, False),
        (None, 0xEF53, False, True),  # ext4 on a kernel that does not tell
        (None, 0x6969, False, False),  # NFS
        (None, 0x6969, True, True),
        (None, None, False, False),
    ],
)
def test_which_places_are_written_direct(
    told: DirectAlignment | None, fs_type: int | None, tries: bool, takes: bool
) -> None:
    """What the kernel says decides; where it says nothing, the kind of filesystem or the caller."""
    assert takes_direct(told, fs_type, try_unreported=tries) is takes


def test_a_mount_without_renames_takes_streams_only(tmp_path: Path) -> None:
    """A mounted bucket may take bytes in their order only: it has no parallel writer."""

    class LikeABucket(Posix):
        def rename(self, source: str, target: str) -> None:
            if os.path.isdir(source):
                raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
            super().rename(source, target)

    storage = LocalStorage(Uri.parse(str(tmp_path / "run")), posix=LikeABucket())
    storage.make_dir("")
    assert storage.open_parallel("f", size_bytes=10) is None
