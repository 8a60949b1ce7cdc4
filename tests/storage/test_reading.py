"""Local files are read right, from the page cache or past it, whatever the kernel answers."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptfs.errors import IntegrityError, StorageError
from ckptfs.storage.io import buffer_pool
from ckptfs.storage.local.posix import DirectAlignment, Posix
from ckptfs.storage.local.reader import LocalReader
from ckptfs.uri import Uri
from tests.measures import descriptors_below

KIB, MIB = 1 << 10, 1 << 20
PAGE = 4096
_DIRECT = getattr(os, "O_DIRECT", 0)
Cached = Callable[[int], bool]  # page number -> whether the page cache has it


class Kernel(Posix):
    """The real one, but for what is said to be cached, and for what a script does to a call.

    marks: pages at which the kernel would begin to read ahead, cached or not: no answer without a wait
    until somebody read them with one. Direct reads are taken everywhere; they are aligned, or EINVAL.
    """

    def __init__(
        self,
        cached: Cached = lambda _: False,
        script: Callable[[str, int], int | None] = lambda _name, _count: None,
        marks: Iterable[int] = (),
    ) -> None:
        self.cached = cached
        self.marks = set(marks)
        self.script = script
        self.names: list[str] = []
        self.direct_fds: set[int] = set()

    def _told(self, name: str, buffers: Sequence[memoryview]) -> Sequence[memoryview]:
        """The call's turn: it may raise, or be cut to fewer bytes."""
        self.names.append(name)
        limit = self.script(name, len(self.names))
        return buffers if limit is None else _cut(buffers, limit)

    def open(self, path: str, flags: int, mode: int = 0o666, *, dir_fd: int | None = None) -> int:
        is_direct = bool(flags & _DIRECT)
        self._told("open_direct" if is_direct else "open", ())
        fd = super().open(path, flags & ~_DIRECT, mode, dir_fd=dir_fd)
        if is_direct:
            self.direct_fds.add(fd)
        return fd

    def fstat(self, fd: int) -> os.stat_result:
        self._told("fstat", ())
        return super().fstat(fd)

    def direct_alignment(self, fd: int) -> DirectAlignment | None:
        self._told("direct_alignment", ())
        return DirectAlignment(512, 512)

    def advise_random(self, fd: int) -> None:
        self._told("advise_random", ())

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        is_direct = fd in self.direct_fds
        buffers = self._told("preadv_direct" if is_direct else "preadv", buffers)
        size = sum(map(len, buffers))
        if is_direct and (offset % 512 or (size % 512 and offset + size < os.fstat(fd).st_size)):
            raise OSError(errno.EINVAL, "not aligned")
        done = super().preadv(fd, buffers, offset)
        if not is_direct:
            self.marks -= set(range(offset // PAGE, -(-(offset + done) // PAGE)))
        return done

    def preadv_cached(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        buffers = self._told("preadv_cached", buffers)
        end = offset
        while (
            self.cached(page := end // PAGE)
            and page not in self.marks
            and end < offset + sum(map(len, buffers))
        ):
            end += PAGE - end % PAGE
        if end == offset:
            raise OSError(errno.EAGAIN, "not there")
        return super().preadv(fd, _cut(buffers, end - offset), offset)


def _cut(buffers: Sequence[memoryview], size: int) -> list[memoryview]:
    cut = []
    for buffer in buffers:
        cut.append(buffer[:size])
        size -= len(cut[-1])
    return [buffer for buffer in cut if len(buffer)]


# After so many bytes the pattern begins again.
_ROUND = bytes((at * 7 + at // 251) % 256 for at in range(251 * 256))
DATA = (_ROUND * 50)[: 3 * MIB + 777]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file that holds DATA."""
    place = tmp_path_factory.mktemp("reading") / "f"
    place.write_bytes(DATA)
    return str(place)


def reader(path: str, kernel: Posix) -> LocalReader:
    """A reader of it."""
    return LocalReader(kernel, Uri.parse(path), path)


def read(open_: LocalReader, offset: int, sizes: Sequence[int]) -> bytes:
    """Bytes from there, through buffers of these sizes."""
    parts = [bytearray(size) for size in sizes]
    open_.read_views(offset, [memoryview(part) for part in parts])
    return b"".join(parts)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(st.tuples(st.integers(0, len(DATA)), st.integers(0, 2 * MIB)), max_size=4),
    st.sets(st.integers(0, len(DATA) // PAGE), max_size=20),
    st.booleans(),
    st.lists(st.one_of(st.none(), st.integers(1, 3 * MIB)), max_size=12),
    st.lists(st.integers(0, 300 * KIB), max_size=5),
    st.sets(st.integers(0, len(DATA) // PAGE), max_size=8),
)
def test_any_range_is_read_right_from_cache_and_disk(
    path: str,
    ranges: list[tuple[int, int]],
    pages: set[int],
    inverted: bool,
    limits: list[int | None],
    splits: list[int],
    marks: set[int],
) -> None:
    """Whatever is cached, however short the answers and wherever a range begins: its bytes."""
    left = iter(limits)

    def short(name: str, _: int) -> int | None:
        return next(left, None) if name.startswith("preadv") else None

    kernel = Kernel(lambda page: (page in pages) != inverted, short, marks)
    with reader(path, kernel) as open_:
        for offset, most in ranges:
            size = min(most, len(DATA) - offset)
            sizes = [part for part in splits if part <= size]
            while sum(sizes) > size:
                sizes.pop()
            sizes.append(size - sum(sizes))
            assert read(open_, offset, sizes) == DATA[offset : offset + size]


NUMBERS = [errno.EINTR, errno.EAGAIN, errno.EIO, errno.EINVAL, errno.ESTALE, errno.ENOMEM]


@pytest.mark.parametrize("number", NUMBERS, ids=errno.errorcode.get)
@pytest.mark.parametrize("is_cached", [True, False])
def test_a_failure_at_any_call_is_cured_or_typed(path: str, number: int, is_cached: bool) -> None:
    """Each call of opening and reading fails in turn: right bytes or StorageError, no descriptor kept."""

    def act(kernel: Kernel) -> bytes:
        with reader(path, kernel) as open_:
            return read(open_, 100, [MIB, 70, len(DATA) - MIB - 170])

    clean = Kernel(lambda _: is_cached)
    assert act(clean) == DATA[100:]
    cured = 0
    for nth in range(1, len(clean.names) + 1):

        def script(name: str, count: int, nth: int = nth) -> None:
            if count == nth:
                raise OSError(number, os.strerror(number))

        # An OSError of opening is made a typed one by the storage that opens.
        allowed = OSError if clean.names[nth - 1] in ("open", "fstat") else StorageError
        with contextlib.suppress(allowed):
            assert act(Kernel(lambda _: is_cached, script)) == DATA[100:]
            cured += 1
        assert descriptors_below(path) == []
    # Opening may fail; reading has another way, but for a disk that cannot.
    assert cured >= len(clean.names) - 2 - (number in (errno.EIO, errno.EINVAL, errno.ENOMEM))


@pytest.mark.parametrize("number", [errno.EIO, errno.EINTR, errno.EAGAIN])
def test_a_disk_that_always_fails_is_a_typed_error(path: str, number: int) -> None:
    """No way of reading works: StorageError with the file's name, not an endless loop."""

    def script(name: str, _: int) -> None:
        if name.startswith("preadv"):
            raise OSError(number, os.strerror(number))

    with reader(path, Kernel(script=script)) as open_, pytest.raises(StorageError) as caught:
        read(open_, 0, [2 * MIB])
    assert path in str(caught.value)


@pytest.mark.parametrize("size", [0, 1, PAGE, MIB + 5, len(DATA) - 1])
@pytest.mark.parametrize("is_cached", [True, False])
def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path, size: int, is_cached: bool) -> None:
    """It is cut before each of the calls in turn: the right bytes, or IntegrityError."""
    place = tmp_path / "f"

    def act(nth: int | None) -> tuple[bytes, list[str]]:
        place.write_bytes(DATA)

        def script(name: str, count: int) -> None:
            if count == nth:
                os.truncate(place, size)

        kernel = Kernel(lambda _: is_cached, script)
        with reader(str(place), kernel) as open_:
            return read(open_, 0, [len(DATA)]), kernel.names

    _, names = act(None)
    told = 0
    for nth in range(3, len(names) + 1):  # it is open, and its size known
        told += 1
        with contextlib.suppress(IntegrityError):
            assert act(nth)[0] == DATA
            told -= 1
    assert told


def test_a_file_that_grows_while_it_is_read(tmp_path: Path) -> None:
    """More bytes at its end change nothing of those that were asked for."""
    place = tmp_path / "f"
    place.write_bytes(DATA)

    def script(name: str, count: int) -> None:
        with place.open("ab") as file:
            file.write(b"more" * count)

    with reader(str(place), Kernel(script=script)) as open_:
        assert read(open_, 5, [len(DATA) - 5]) == DATA[5:]


def test_what_is_cached_is_never_read_from_the_disk(path: str) -> None:
    """Two questions, then one call for each step; no direct descriptor, no second copy."""
    kernel = Kernel(lambda _: True)
    with reader(path, kernel) as open_:
        memory = memoryview(bytearray(3 * MIB))
        steps = [*open_.read_steps(0, memory, MIB)]
    assert memory == DATA[: 3 * MIB]
    assert steps == [3 * MIB]  # the first is asked for whole: nothing was known
    assert kernel.names == ["open", "fstat", *["preadv_cached"] * 3]
    with reader(path, kernel) as open_:
        read(open_, 0, [MIB])
        kernel.names.clear()
        assert [*open_.read_steps(0, memory, MIB)] == [MIB, 2 * MIB, 3 * MIB]
    assert kernel.names == ["preadv_cached"] * 3


@pytest.mark.parametrize("marks", [[300], [300, 301, 500], [256, 511]], ids=str)
def test_a_mark_of_readahead_is_not_taken_for_the_end_of_the_cache(
    path: str, marks: list[int]
) -> None:
    """Where the kernel wants to read ahead it is let wait for one page, and the rest is a copy again."""
    kernel = Kernel(lambda _: True, marks=marks)
    with reader(path, kernel) as open_:
        read(open_, 0, [MIB])
        kernel.names.clear()
        memory = memoryview(bytearray(MIB))
        assert [*open_.read_steps(MIB, memory, MIB)] == [MIB]
        assert memory == DATA[MIB : 2 * MIB]
        assert open_.direct_bytes == 0
        assert open_.threads <= len(os.sched_getaffinity(0))
    assert kernel.names.count("preadv") == len(marks)
    assert set(kernel.names) == {"preadv", "preadv_cached"}
    assert not kernel.marks


def test_a_range_with_holes_is_read_past_the_cache_before_long(path: str) -> None:
    """Every second page is missing: a few are waited for, the rest is one direct read."""
    kernel = Kernel(lambda page: page % 2 == 0)
    with reader(path, kernel) as open_:
        assert read(open_, 0, [2 * MIB]) == DATA[: 2 * MIB]
        assert open_.direct_bytes > 2 * MIB - 10 * PAGE
    assert kernel.names.count("preadv") <= 4


def test_where_the_cached_part_ends_nothing_is_waited_for(path: str) -> None:
    """The first MiB is cached, nothing behind it: the rest is one direct read."""
    kernel = Kernel(lambda page: page < MIB // PAGE)
    with reader(path, kernel) as open_:
        assert read(open_, 0, [2 * MIB]) == DATA[: 2 * MIB]
        assert open_.direct_bytes == MIB
    assert "preadv" not in kernel.names


def test_what_was_only_read_ahead_leads_no_further_through_the_cache(path: str) -> None:
    """A small read has the kernel read ahead, and leave a mark; no read follows it into the cold file."""
    ahead = 64

    class ReadsAhead(Kernel):
        """A read that waits for a page gets those behind it too, with a mark among them."""

        def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            done = super().preadv(fd, buffers, offset)
            if fd not in self.direct_fds:
                first = (offset + done) // PAGE
                there.update(range(offset // PAGE, first + ahead))
                self.marks.add(first + ahead // 2)
            return done

    there: set[int] = set()
    with reader(path, ReadsAhead(lambda page: page in there)) as open_:
        assert read(open_, 0, [100]) == DATA[:100]
        assert read(open_, 100, [2 * MIB]) == DATA[100 : 2 * MIB + 100]
        assert open_.direct_bytes > 2 * MIB - 2 * ahead * PAGE


@pytest.mark.parametrize("first_bytes", [0, 5 * PAGE + 700, 3 * MIB + 17], ids=str)
def test_pages_that_were_only_asked_for_make_no_file_cached(
    tmp_path: Path, first_bytes: int
) -> None:
    """Who asks for a page of a cold file has the kernel bring that one; a save leaves the last one. Loaded a
    second time, the file is read past the cache as it was the first time: nothing is waited for.
    """
    window, windows = 8 * MIB, 20
    size = first_bytes + window * windows
    large = tmp_path / "large"
    with large.open("wb") as file:
        file.truncate(size)
    there = {(size - 1) // PAGE}

    class Brings(Kernel):
        """A page that was not there is, for the next who asks."""

        def preadv_cached(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            try:
                return super().preadv_cached(fd, buffers, offset)
            except OSError:
                there.add(offset // PAGE)
                raise

    for _ in range(2):
        kernel = Brings(lambda page: page in there)
        with reader(str(large), kernel) as open_:
            for number in range(windows):
                read(open_, first_bytes + number * window, [window])
            assert open_.direct_bytes >= size - first_bytes - 2 * windows * PAGE
        assert "preadv" not in kernel.names


@pytest.mark.parametrize(
    ("offset", "skip", "size", "calls"),
    [
        (PAGE, 0, 2 * MIB, [True]),
        (PAGE, 0, 2 * MIB + 5, [True, False]),  # the last page goes through a buffer
        (PAGE + 1, 0, 2 * MIB, [False]),
        (PAGE, 1, 2 * MIB, [False]),
    ],
)
def test_aligned_memory_is_read_into_without_a_copy(
    path: str, offset: int, skip: int, size: int, calls: list[bool]
) -> None:
    """Whole pages of a cold file go where they belong at once; all else through a staging buffer."""
    into: list[bool] = []

    class Watching(Kernel):
        def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            if fd in self.direct_fds:
                into.append(buffers[0].obj is memory.obj)
            return super().preadv(fd, buffers, offset)

    with buffer_pool().buffer(size + skip) as memory, reader(path, Watching()) as open_:
        view = memory[skip : skip + size]
        open_.read_into(offset, view)
        assert bool(view == DATA[offset : offset + size])
        assert open_.direct_bytes == size
    assert into == calls


@pytest.mark.parametrize("number", [1, 2])
def test_aligned_memory_is_filled_where_direct_reads_stop_half_way(path: str, number: int) -> None:
    """Refused, or short by some bytes: the rest is read otherwise, and all of it is right."""

    def refuse(name: str, _: int) -> int | None:
        if name == "preadv_direct":
            seen.append(name)
            if len(seen) == number:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            return PAGE + 100
        return None

    seen: list[str] = []
    with buffer_pool().buffer(len(DATA)) as memory, reader(path, Kernel(script=refuse)) as open_:
        open_.read_into(0, memory[: len(DATA)])
        assert bool(memory[: len(DATA)] == DATA)


def test_what_is_not_cached_is_read_past_the_cache(path: str) -> None:
    """A cold window is one direct read; small ranges, and where others read the same, are not."""
    kernel = Kernel()
    with reader(path, kernel) as open_:
        assert read(open_, 3, [2 * MIB]) == DATA[3 : 2 * MIB + 3]
        assert open_.direct_bytes == 2 * MIB
        assert kernel.names.count("preadv_direct") == 1
        assert read(open_, 9, [MIB - 1]) == DATA[9 : MIB + 8]
        assert open_.direct_bytes == 2 * MIB
    kernel = Kernel()
    with reader(path, kernel) as open_:
        open_.keep_cached()
        assert read(open_, 3, [2 * MIB]) == DATA[3 : 2 * MIB + 3]
    assert kernel.names == ["open", "fstat", "preadv"]


def test_a_name_that_another_file_took_is_not_read_past_the_cache(tmp_path: Path) -> None:
    """The direct descriptor is opened later, by name: what it opens must be the same file."""
    place = tmp_path / "f"
    place.write_bytes(DATA)
    with reader(str(place), Kernel()) as open_:
        (tmp_path / "g").write_bytes(bytes(len(DATA)))
        os.replace(tmp_path / "g", place)
        assert read(open_, 0, [2 * MIB]) == DATA[: 2 * MIB]
        assert open_.direct_bytes == 0


@pytest.mark.parametrize(
    ("cached", "least"),
    [(lambda _: True, 1), (lambda _: False, 4), (lambda page: page < 256, 4)],
    ids=["cached", "not cached", "in part"],
)
def test_only_a_reader_that_waits_is_worth_more_threads_than_cores(
    path: str, cached: Cached, least: int
) -> None:
    """One core: one thread before anything was read, and while all is in the page cache; then four."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        with reader(path, Kernel(cached)) as open_:
            assert open_.threads == 1
            assert read(open_, 0, [2 * MIB]) == DATA[: 2 * MIB]
            assert open_.threads == least
    finally:
        os.sched_setaffinity(0, before)


def test_a_filesystem_that_does_not_tell_what_is_cached_is_read_by_all_threads(path: str) -> None:
    """EOPNOTSUPP: whether it waits is unknown, so it is read as if it did."""

    def script(name: str, _count: int) -> int | None:
        if name == "preadv_cached":
            raise OSError(errno.EOPNOTSUPP, "not here")
        return None

    with reader(path, Kernel(script=script)) as open_:
        assert read(open_, 0, [2 * MIB]) == DATA[: 2 * MIB]
        assert open_.threads == open_.concurrency
