"""Tests of data files, streamed or written in windows by several threads: whole or absent."""

from __future__ import annotations

import array
from collections.abc import Callable

import pytest

from ckptfs.errors import (
    IntegrityError,
    NotFoundError,
    StorageError,
)
from ckptfs.storage.base import Storage
from ckptfs.storage.io import FileEngine, ParallelWriter
from ckptfs.testing._conformance.base import (
    SIZES,
    Conformance,
    pattern,
    together,
    write_and_raise,
)

__all__ = ["DataFiles", "ParallelFiles"]


class DataFiles(Conformance):
    """Tests of open_write and open_read."""

    def test_written_files_are_whole(self, store: Storage) -> None:
        """Any mixture of small and large writes arrives in order."""
        data = pattern(5 << 20)
        for size_bytes in SIZES:
            with store.open_write("d/f", size_hint_bytes=size_bytes) as writer:
                sent = 0
                for step in (1, 100, 70_000, 1 << 20, size_bytes):
                    part = memoryview(data)[sent : min(sent + step, size_bytes)]
                    assert writer.write(part) == len(part)
                    sent += len(part)
            assert self.raw_read("d/f") == data[:size_bytes]
        assert self.raw_list() == ["d/f"]

    def test_written_buffers_may_be_reused(self, store: Storage) -> None:
        """The caller may reuse the buffer as soon as write returns, whatever its size."""
        for size_bytes in (10, 2 << 20):
            buffer = bytearray(b"a" * size_bytes)
            with store.open_write("d/f") as writer:
                writer.write(buffer)
                buffer[:] = b"b" * size_bytes
                writer.write(memoryview(buffer))
            assert self.raw_read("d/f") == b"a" * size_bytes + b"b" * size_bytes

    def test_written_views_of_other_types(self, store: Storage) -> None:
        """A view of doubles is written as bytes, and the returned count is in bytes."""
        numbers = array.array("d", [1.5, 2.5, 3.5])
        with store.open_write("d/f") as writer:
            assert writer.write(memoryview(numbers)) == 24
        assert self.raw_read("d/f") == numbers.tobytes()

    def test_invisible_before_close(self, store: Storage) -> None:
        """The key has no file until close returns, and an older file stays readable."""
        writer = store.open_write("d/f")
        writer.write(b"x" * (2 << 20))
        assert not self.raw_exists("d/f")
        writer.close()
        assert self.raw_exists("d/f")
        writer = store.open_write("d/f")
        writer.write(b"newer")
        assert store.read("d/f") == b"x" * (2 << 20)
        writer.close()
        assert self.raw_read("d/f") == b"newer"

    @pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
    @pytest.mark.parametrize("size_bytes", [3, 3 << 20])
    def test_an_error_leaves_nothing(
        self, store: Storage, error: type[BaseException], size_bytes: int
    ) -> None:
        """Leaving the block by an error, Ctrl-C included, leaves nothing behind."""
        with pytest.raises(error):
            write_and_raise(store, "d/f", b"x" * size_bytes, error)
        assert self.raw_list() == []

    def test_an_error_keeps_the_older_file(self, store: Storage) -> None:
        """An aborted rewrite leaves the older file."""
        self.raw_write("d/f", b"older")
        with pytest.raises(RuntimeError):
            write_and_raise(store, "d/f", b"newer" * 500_000, RuntimeError)
        assert self.raw_read("d/f") == b"older"
        assert self.raw_list() == ["d/f"]

    def test_abort_and_close_are_harmless_twice(self, store: Storage) -> None:
        """close, close, abort keeps the file; abort, abort leaves nothing; later writes fail."""
        writer = store.open_write("d/f")
        writer.write(b"x")
        writer.close()
        writer.close()
        writer.abort()
        assert self.raw_read("d/f") == b"x"
        with pytest.raises(StorageError):
            writer.write(b"y")
        writer = store.open_write("d/g")
        writer.abort()
        writer.abort()
        with pytest.raises(StorageError):
            writer.write(b"y")
        assert self.raw_list() == ["d/f"]

    def test_a_dropped_writer_publishes_nothing(self, store: Storage) -> None:
        """A writer that was neither closed nor aborted never shows its bytes under the key."""
        writer = store.open_write("d/f")
        writer.write(b"x")
        del writer
        assert not self.raw_exists("d/f")

    def test_last_writer_of_a_key_wins(self, store: Storage) -> None:
        """Two writers of one key do not mix: the file of the one that closes last is whole."""
        first, second = store.open_write("d/f"), store.open_write("d/f")
        second.write(b"2" * 2_000_000)
        first.write(b"1" * 1_500_000)
        second.close()
        first.close()
        assert self.raw_read("d/f") == b"1" * 1_500_000
        assert self.raw_list() == ["d/f"]

    def test_open_write_needs_its_directory(self, tree: Storage) -> None:
        """A missing parent is NotFoundError, and nothing is made."""
        with pytest.raises(NotFoundError):
            tree.open_write("absent/f")
        assert not self.raw_exists("absent")

    def test_writers_in_many_threads(self, store: Storage) -> None:
        """Eight files that eight threads write at the same time are all whole."""

        def write(index: int) -> Callable[[], None]:
            def call() -> None:
                with store.open_write(f"d/{index}") as writer:
                    for _ in range(20):
                        writer.write(b"%d" % index * 60_000)

            return call

        assert together(*(write(index) for index in range(8))) == [None] * 8
        for index in range(8):
            assert self.raw_read(f"d/{index}") == b"%d" % index * 1_200_000

    # -- open_read -----------------------------------------------------------------------

    def test_ranged_reads(self, store: Storage) -> None:
        """A read of any range fills the given buffer, also a view of another type."""
        data = pattern(3 << 20)
        self.raw_write("d/f", data)
        with store.open_read("d/f") as reader:
            assert reader.size_bytes == len(data)
            for offset, size_bytes in ((0, 0), (0, 1), (5, 1 << 20), (len(data) - 3, 3)):
                buffer = bytearray(size_bytes)
                reader.read_into(offset, memoryview(buffer))
                assert buffer == data[offset : offset + size_bytes]
            numbers = array.array("d", bytes(80))
            reader.read_into(16, memoryview(numbers))
            assert numbers.tobytes() == data[16:96]

    def test_reads_past_the_end(self, store: Storage) -> None:
        """A range beyond the end of the file is IntegrityError, never a partly filled buffer."""
        self.raw_write("d/f", b"12345")
        with store.open_read("d/f") as reader:
            for offset, size_bytes in ((0, 6), (3, 3), (5, 1), (100, 1)):
                with pytest.raises(IntegrityError):
                    reader.read_into(offset, memoryview(bytearray(size_bytes)))

    def test_one_reader_many_threads(self, store: Storage) -> None:
        """Threads that read different ranges through one reader do not disturb each other."""
        data = pattern(4 << 20)
        self.raw_write("d/f", data)
        with store.open_read("d/f") as reader:

            def read(index: int) -> Callable[[], None]:
                def call() -> None:
                    for turn in range(20):
                        offset = (index * 131_071 + turn * 65_537) % (3 << 20)
                        buffer = bytearray(100_000)
                        reader.read_into(offset, memoryview(buffer))
                        assert buffer == data[offset : offset + 100_000]

                return call

            assert together(*(read(index) for index in range(6))) == [None] * 6

    def test_a_closed_reader_says_so(self, store: Storage) -> None:
        """Closing twice does no harm, and reading afterwards is an error."""
        self.raw_write("d/f", b"12345")
        reader = store.open_read("d/f")
        reader.close()
        reader.close()
        with pytest.raises(StorageError):
            reader.read_into(0, memoryview(bytearray(1)))


# -- files in windows ------------------------------------------------------------------------------


_EACH = pytest.mark.parametrize("engine", [None, FileEngine.DIRECT, FileEngine.BUFFERED])


def opened(store: Storage, size_bytes: int, engine: FileEngine | None) -> ParallelWriter:
    """Return a parallel writer of ``d/f``; skip if the store has none."""
    writer = store.open_parallel("d/f", size_bytes=size_bytes, engine=engine)
    if writer is None:
        pytest.skip("this store takes streams only")
    return writer


def windows(writer: ParallelWriter, data: bytes) -> list[tuple[int, list[memoryview]]]:
    """Cut a file into windows, each in pieces of odd sizes, one of them empty."""
    cut: list[tuple[int, list[memoryview]]] = []
    for start in range(0, len(data), writer.window_bytes):
        part = memoryview(data)[start : start + writer.window_bytes]
        cut.append((start, [part[:1], part[1:1], part[1:4099], part[4099:]]))
    return cut


class ParallelFiles(Conformance):
    """Tests of open_parallel."""

    @_EACH
    def test_windows_of_any_order_make_a_file(
        self, store: Storage, engine: FileEngine | None
    ) -> None:
        """Every byte is in its place: sizes around pages and windows, the last window first."""
        probe = opened(store, 0, engine)
        window = probe.window_bytes
        probe.close()
        assert self.raw_read("d/f") == b""
        data = pattern(2 * window + 5000)
        for size_bytes in (1, 4096, 4097, window, window + 1, 2 * window + 4999):
            with opened(store, size_bytes, engine) as writer:
                for start, views in reversed(windows(writer, data[:size_bytes])):
                    writer.write_at(start, iter(views))
            assert self.raw_read("d/f") == data[:size_bytes]
        assert self.raw_list() == ["d/f"]

    @_EACH
    def test_windows_from_threads_make_a_file(
        self, store: Storage, engine: FileEngine | None
    ) -> None:
        """Windows that are written at the same time do not disturb each other."""
        probe = opened(store, 0, engine)
        data = pattern(3 * probe.window_bytes + 77)
        probe.close()
        with opened(store, len(data), engine) as writer:
            assert writer.concurrency >= 1
            calls = [
                lambda start=start, views=views: writer.write_at(start, views)
                for start, views in windows(writer, data)
            ]
            assert together(*calls) == [None] * len(calls)
        assert self.raw_read("d/f") == data

    @_EACH
    def test_windows_are_invisible_before_close(
        self, store: Storage, engine: FileEngine | None
    ) -> None:
        """The key has no file until close returns, and an older file stays."""
        writer = opened(store, 3, engine)
        writer.write_at(0, [memoryview(b"new")])
        assert not self.raw_exists("d/f")
        writer.abort()
        self.raw_write("d/f", b"older")
        writer = opened(store, 3, engine)
        writer.write_at(0, [memoryview(b"new")])
        assert self.raw_read("d/f") == b"older"
        writer.close()
        writer.close()
        writer.abort()
        assert self.raw_read("d/f") == b"new"
        assert self.raw_list() == ["d/f"]

    @_EACH
    def test_a_file_with_a_window_missing_is_not_published(
        self, store: Storage, engine: FileEngine | None
    ) -> None:
        """close refuses a file with a hole, and leaves nothing of it."""
        probe = opened(store, 0, engine)
        size_bytes = probe.window_bytes + 10
        probe.abort()
        with pytest.raises(StorageError), opened(store, size_bytes, engine) as writer:
            writer.write_at(writer.window_bytes, [memoryview(b"0123456789")])
        assert self.raw_list() == []

    @_EACH
    def test_what_the_views_raise_ends_the_file(
        self, store: Storage, engine: FileEngine | None
    ) -> None:
        """An error of the views is raised unchanged; after that the file can only be aborted."""

        def views() -> object:
            yield memoryview(b"abc")
            raise KeyboardInterrupt

        writer = opened(store, 6, engine)
        with pytest.raises(KeyboardInterrupt):
            writer.write_at(0, views())  # type: ignore[arg-type]
        with pytest.raises(StorageError):
            writer.write_at(0, [memoryview(b"abcdef")])
        with pytest.raises(StorageError):
            writer.close()
        writer.abort()
        writer.abort()
        with pytest.raises(StorageError):
            writer.write_at(0, [memoryview(b"abcdef")])
        assert self.raw_list() == []

    @_EACH
    def test_an_error_in_the_block_leaves_nothing_of_windows(
        self, store: Storage, engine: FileEngine | None
    ) -> None:
        """An error in the block (here too many bytes), or a dropped writer, leaves nothing."""
        with pytest.raises(StorageError), opened(store, 4, engine) as writer:
            writer.write_at(0, [memoryview(b"12345")])
        writer = opened(store, 4, engine)
        writer.write_at(0, [memoryview(b"1234")])
        del writer
        assert self.raw_list() == []
