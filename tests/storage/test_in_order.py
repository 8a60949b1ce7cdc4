"""Large files that are written in order past the page cache: what the kernel may refuse or do by halves."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from ckptfs.errors import StorageError
from ckptfs.storage.io import DataWriter, buffer_pool, is_aligned
from ckptfs.storage.local import LocalStorage
from ckptfs.storage.local.writers import resumable_name
from ckptfs.testing._conformance.base import pattern
from ckptfs.uri import Uri
from tests.storage.test_direct import ERRORS, Breaking, takes_direct_here

LARGE = (16 << 20) + 4096 + 7
PIECES = (1, 4096, 70_001, 3 << 20, 9 << 20)


@pytest.fixture(autouse=True)
def _takes_direct(tmp_path: Path) -> None:
    if not takes_direct_here(tmp_path):
        pytest.skip("no direct writes here")
    (tmp_path / "f").unlink()


def storage_at(place: Path, posix: Breaking | None = None) -> LocalStorage:
    """A directory over the real kernel, or over one that fails."""
    return LocalStorage(Uri.parse(str(place)), posix=posix or Breaking())


def pieces(data: bytes) -> Iterator[memoryview]:
    """All of ``data``, in pieces of every size that there may be."""
    at, number = 0, 0
    while at < len(data):
        end = at + PIECES[number % len(PIECES)]
        yield memoryview(data)[at:end]
        at, number = end, number + 1


def holds(path: Path, data: bytes) -> bool:
    """Whether a file has these bytes. (An assertion over so many would take minutes to say how they differ.)"""
    return path.read_bytes() == data


def write(writer: DataWriter, data: bytes) -> None:
    """Write and close."""
    with writer:
        for piece in pieces(data):
            writer.write(piece)


def test_whole_pages_of_a_large_file_go_past_the_page_cache(tmp_path: Path) -> None:
    """All but the last seven bytes, 8 MiB in a call, whatever the pieces are."""
    posix, data = Breaking(), pattern(LARGE)[:LARGE]
    write(storage_at(tmp_path, posix).open_write("f", size_hint_bytes=LARGE), data)
    assert posix.direct_writes == 3
    assert posix.calls == [
        *["open", "open", "pwritev", "pwritev", "pwritev"],
        *["close", "fsync", "close", "rename"],
    ]
    assert holds(tmp_path / "f", data)


@pytest.mark.parametrize("size", [None, (8 << 20) - 1])
def test_a_file_that_is_small_or_of_unknown_size_goes_through_it(
    tmp_path: Path, size: int | None
) -> None:
    """It is opened once, and nothing is written directly."""
    posix = Breaking()
    write(storage_at(tmp_path, posix).open_write("f", size_hint_bytes=size), bytes(5 << 20))
    assert posix.calls.count("open") == 1
    assert posix.direct_writes == 0


@pytest.mark.parametrize("size", [0, 1, 4096, 5000])
def test_a_file_smaller_than_was_said_is_whole(tmp_path: Path, size: int) -> None:
    """The size is a hint."""
    data = pattern(size)[:size]
    write(storage_at(tmp_path).open_write("f", size_hint_bytes=LARGE), data)
    assert holds(tmp_path / "f", data)


def test_aligned_memory_is_written_from_where_it_is(tmp_path: Path) -> None:
    """No staging buffer: what is written is the memory that was passed, and its rest goes in the end."""
    addresses: list[bool] = []

    class Looking(Breaking):
        def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            addresses.append(buffers[0].obj is memory.obj)
            return super().pwritev(fd, buffers, offset)

    data = pattern(LARGE)[:LARGE]
    with buffer_pool().buffer(LARGE) as memory:
        memory[:LARGE] = data
        assert is_aligned(memory)
        assert not is_aligned(memory[1:])
        assert not is_aligned(memoryview(data))
        with storage_at(tmp_path, Looking()).open_write("f", size_hint_bytes=LARGE) as writer:
            writer.write(memory[:LARGE])
    assert addresses == [True]
    assert holds(tmp_path / "f", data)


@pytest.mark.parametrize("code", ERRORS, ids=errno.errorcode.get)
@pytest.mark.parametrize("kept", [False, True])
def test_a_failure_of_any_call_leaves_a_whole_file_or_none(
    tmp_path: Path, code: int, kept: bool
) -> None:
    """Each system call fails once: either the file is there with all its bytes, or a typed error is raised."""
    size = (8 << 20) + 9001
    data = pattern(size)[:size]

    def attempt(place: Path, posix: Breaking) -> None:
        place.mkdir()
        storage = storage_at(place, posix)
        opened = (
            storage.open_kept("f", size_bytes=size)
            if kept
            else storage.open_write("f", size_hint_bytes=size)
        )
        write(opened, data)

    counted = Breaking()
    attempt(tmp_path / "counted", counted)
    assert counted.direct_writes == 2
    for number in range(1, len(counted.calls) + 1):
        place = tmp_path / str(number)
        failed: StorageError | None = None
        try:
            attempt(place, Breaking(number, code))
        except StorageError as error:
            failed = error
        left = [] if failed else ["f"]
        assert [n for n in os.listdir(place) if not n.startswith(".partial-kept")] == left
        assert str(place) in str(failed) if failed else holds(place / "f", data)


def test_short_writes_are_continued(tmp_path: Path) -> None:
    """Writes that take half of what they get end in a whole file."""
    data = pattern(LARGE)[:LARGE]
    write(storage_at(tmp_path, Breaking(short=True)).open_write("f", size_hint_bytes=LARGE), data)
    assert holds(tmp_path / "f", data)


@pytest.mark.parametrize("first", [1, 2, 3])
def test_a_filesystem_that_refuses_direct_writes_gets_the_rest_through_the_page_cache(
    tmp_path: Path, first: int
) -> None:
    """EINVAL at the first, second or third direct write: the file is whole, and no other is tried."""
    posix, data = Breaking(), pattern(2 * LARGE)[: 2 * LARGE]
    posix.refuse_direct_from = first
    write(storage_at(tmp_path, posix).open_write("f", size_hint_bytes=len(data)), data)
    assert holds(tmp_path / "f", data)
    assert posix.direct_writes == first


def test_after_a_direct_write_that_ends_inside_a_page_its_start_is_written_again(
    tmp_path: Path,
) -> None:
    """Or the page cache could write the page back with an old first half."""
    offsets: list[int] = []

    class InsideAPage(Breaking):
        def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            return min(super().pwritev(fd, buffers, offset), 9000)

        def seek(self, fd: int, offset: int) -> None:
            offsets.append(offset)
            super().seek(fd, offset)

    data = pattern(LARGE)[:LARGE]
    write(storage_at(tmp_path, InsideAPage()).open_write("f", size_hint_bytes=LARGE), data)
    assert holds(tmp_path / "f", data)
    assert offsets == [8192]


@pytest.mark.parametrize("first", [0, 5, 4096, (1 << 20) + 100, 9 << 20])
def test_an_unfinished_file_is_continued_from_any_byte(tmp_path: Path, first: int) -> None:
    """What an earlier process left up to there stays, and whole pages after it go past the page cache."""
    data = pattern(LARGE)[:LARGE]
    earlier = storage_at(tmp_path).open_kept("f", size_bytes=LARGE)
    earlier.write(data[:first])
    earlier.write(bytes(3 << 20))
    earlier.flush()
    earlier.abort()
    direct_bytes: list[int] = []

    class Counting(Breaking):
        def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            direct_bytes.append(super().pwritev(fd, buffers, offset))
            return direct_bytes[-1]

    writer = storage_at(tmp_path, Counting()).open_kept("f", size_bytes=LARGE)
    assert writer.there_bytes == first + (3 << 20)
    seen = bytearray(first)
    writer.read_there(0, memoryview(seen))
    assert bool(seen == data[:first])
    writer.skip(first)
    write(writer, data[first:])
    assert sum(direct_bytes) == LARGE - 7 - (first + -first % 4096)
    assert holds(tmp_path / "f", data)


def test_another_file_under_the_name_of_an_unfinished_one_is_not_written(tmp_path: Path) -> None:
    """The name can be guessed: what somebody put there between two opens stays as it is."""
    other = tmp_path / "other"
    other.write_bytes(b"precious")

    class Racing(Breaking):
        def open(
            self, path: str, flags: int, mode: int = 0o666, *, dir_fd: int | None = None
        ) -> int:
            if flags & os.O_DIRECT:
                os.replace(path, tmp_path / "ours")
                os.link(other, path)
            return super().open(path, flags, mode, dir_fd=dir_fd)

    posix = Racing()
    writer = storage_at(tmp_path, posix).open_kept("f", size_bytes=LARGE)
    writer.write(bytes(9 << 20))
    writer.abort()
    assert posix.direct_writes == 0
    assert other.read_bytes() == b"precious"
    assert os.path.exists(resumable_name(str(tmp_path / "f")))


@pytest.mark.parametrize("kept", [False, True])
def test_a_file_that_is_given_up_leaves_no_descriptor_and_no_buffer(
    tmp_path: Path, kept: bool
) -> None:
    """As many calls of close(2) as of open(2), and the staging buffer is back in the pool."""
    posix = Breaking()
    storage = storage_at(tmp_path, posix)
    with buffer_pool().buffer(8 << 20):
        before = len(buffer_pool()._free)
        writer = (
            storage.open_kept("f", size_bytes=LARGE)
            if kept
            else storage.open_write("f", size_hint_bytes=LARGE)
        )
        writer.write(b"x")
        writer.abort()
        assert len(buffer_pool()._free) == max(before, 1)
    assert posix.calls.count("open") == posix.calls.count("close") == 2


def test_a_mount_that_is_used_like_an_object_store_is_written_through_the_page_cache(
    tmp_path: Path,
) -> None:
    """A mounted bucket may take bytes in no other way."""

    class LikeABucket(Breaking):
        def rename(self, source: str, target: str) -> None:
            if os.path.isdir(source):
                raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
            super().rename(source, target)

    posix = LikeABucket()
    storage = LocalStorage(Uri.parse(str(tmp_path / "run")), posix=posix)
    storage.make_dir("")
    write(storage.open_write("f", size_hint_bytes=LARGE), pattern(LARGE)[:LARGE])
    assert posix.direct_writes == 0
