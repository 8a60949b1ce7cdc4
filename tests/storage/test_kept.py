"""Files on their way that outlive their writer: what the next one finds, and who is kept out."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ckptfs.errors import AlreadyExistsError, UnsupportedError
from ckptfs.storage.local import LocalStorage
from ckptfs.storage.memory import MemoryStorage
from ckptfs.uri import Uri

SIZE_BYTES = 3 << 20


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    """A directory."""
    return LocalStorage(Uri.parse(tmp_path))


def test_what_was_written_before_an_abort_is_there_for_the_next(
    storage: LocalStorage, tmp_path: Path
) -> None:
    """It is read back, skipped and completed; nothing is visible before, nothing is left after."""
    first = storage.open_kept("a", size_bytes=SIZE_BYTES)
    first.write(b"x" * (2 << 20))
    first.abort()
    assert not (tmp_path / "a").exists()
    with storage.open_kept("a", size_bytes=SIZE_BYTES) as second:
        assert second.there_bytes == 2 << 20
        seen = bytearray(2 << 20)
        second.read_there(0, memoryview(seen))
        assert set(seen) == {ord("x")}
        second.skip(1 << 20)
        second.write(b"y" * (2 << 20))
    assert (tmp_path / "a").read_bytes() == b"x" * (1 << 20) + b"y" * (2 << 20)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_another_file_that_is_aborted_gives_its_space_back_though_its_name_is_held(
    storage: LocalStorage, tmp_path: Path
) -> None:
    """An NFS client holds what it could not send, of a full export for one, as .nfs... after its removal."""
    writer = storage.open_write("a")
    writer.write(b"x" * (2 << 20))
    (partial,) = tmp_path.iterdir()
    held = tmp_path / ".nfs1"
    os.link(partial, held)
    writer.abort()
    assert list(tmp_path.iterdir()) == [held]
    assert held.stat().st_blocks == 0


def test_what_is_longer_than_the_file_is_cut_at_its_end(
    storage: LocalStorage, tmp_path: Path
) -> None:
    """Leftovers of another size do not become part of it."""
    first = storage.open_kept("a", size_bytes=SIZE_BYTES)
    first.write(b"x" * SIZE_BYTES)
    first.abort()
    with storage.open_kept("a", size_bytes=5) as second:
        assert second.there_bytes == 5
        second.write(b"short")
    assert (tmp_path / "a").read_bytes() == b"short"


def test_names_as_long_as_the_filesystem_takes_are_kept_too(
    storage: LocalStorage, tmp_path: Path
) -> None:
    """Found again by the same name, and not by another that begins like it."""
    name = "\u00e4" * 126 + "bin"
    first = storage.open_kept(name, size_bytes=SIZE_BYTES)
    first.write(b"x" * SIZE_BYTES)
    first.abort()
    with storage.open_kept(name[:-1] + "m", size_bytes=1) as other:
        assert other.there_bytes == 0
        other.write(b"y")
    with storage.open_kept(name, size_bytes=SIZE_BYTES) as second:
        assert second.there_bytes == SIZE_BYTES
        second.skip(SIZE_BYTES)
    assert (tmp_path / name).read_bytes() == b"x" * SIZE_BYTES


def test_one_writer_at_a_time(storage: LocalStorage) -> None:
    """The second gets an error, and the first is not disturbed."""
    with storage.open_kept("a", size_bytes=3) as first:
        with pytest.raises(AlreadyExistsError, match="another process is writing"):
            storage.open_kept("a", size_bytes=3)
        first.write(b"abc")
    assert storage.read("a") == b"abc"


def test_elsewhere_it_is_an_ordinary_file() -> None:
    """Nothing to skip, nothing left of an abort."""
    memory = MemoryStorage(Uri.parse("memory://kept/run"))
    memory.make_dir("")
    first = memory.open_kept("a", size_bytes=3)
    first.write(b"ab")
    first.abort()
    with memory.open_kept("a", size_bytes=3) as second:
        assert second.there_bytes == 0
        with pytest.raises(UnsupportedError):
            second.skip(1)
        second.write(b"abc")
    assert memory.read("a") == b"abc"
