"""Files written in windows by several threads: whole or absent, like those that are streamed."""

from __future__ import annotations

import pytest

from ckptfs.errors import StorageError
from ckptfs.storage.base import Storage
from ckptfs.storage.io import Engine, ParallelWriter
from ckptfs.testing._conformance.base import Conformance, pattern, together

__all__ = ["ParallelFiles"]

_EACH = pytest.mark.parametrize("engine", [None, Engine.DIRECT, Engine.BUFFERED])


def opened(store: Storage, size_bytes: int, engine: Engine | None) -> ParallelWriter:
    """A writer of ``d/f``; skips where the store has none."""
    writer = store.open_parallel("d/f", size_bytes=size_bytes, engine=engine)
    if writer is None:
        pytest.skip("this store takes streams only")
    return writer


def windows(writer: ParallelWriter, data: bytes) -> list[tuple[int, list[memoryview]]]:
    """The file cut into windows, each in pieces of odd sizes with an empty one among them."""
    cut: list[tuple[int, list[memoryview]]] = []
    for start in range(0, len(data), writer.window_bytes):
        part = memoryview(data)[start : start + writer.window_bytes]
        cut.append((start, [part[:1], part[1:1], part[1:4099], part[4099:]]))
    return cut


class ParallelFiles(Conformance):
    """open_parallel."""

    @_EACH
    def test_windows_of_any_order_make_a_file(self, store: Storage, engine: Engine | None) -> None:
        """Around pages and windows, last window first: every byte is where it belongs."""
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
    def test_windows_from_threads_make_a_file(self, store: Storage, engine: Engine | None) -> None:
        """Windows written at once do not disturb each other."""
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
        self, store: Storage, engine: Engine | None
    ) -> None:
        """Nothing is under the key until close returns, and an older file stays."""
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
        self, store: Storage, engine: Engine | None
    ) -> None:
        """close refuses a hole, and leaves nothing of it."""
        probe = opened(store, 0, engine)
        size_bytes = probe.window_bytes + 10
        probe.abort()
        with pytest.raises(StorageError), opened(store, size_bytes, engine) as writer:
            writer.write_at(writer.window_bytes, [memoryview(b"0123456789")])
        assert self.raw_list() == []

    @_EACH
    def test_what_the_views_raise_ends_the_file(
        self, store: Storage, engine: Engine | None
    ) -> None:
        """An error while bytes are fetched comes out as it is; then the file can only be aborted."""

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
        self, store: Storage, engine: Engine | None
    ) -> None:
        """Leaving the block by an error leaves nothing (here: more bytes than were told); so does
        a writer that is dropped.
        """
        with pytest.raises(StorageError), opened(store, 4, engine) as writer:
            writer.write_at(0, [memoryview(b"12345")])
        writer = opened(store, 4, engine)
        writer.write_at(0, [memoryview(b"1234")])
        del writer
        assert self.raw_list() == []
