"""Files of ``ckptfs+X://``: what is published when a file is closed, and what an exception leaves."""

from __future__ import annotations

import contextlib
import gc
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from ckptfs.errors import StorageError
from ckptfs.integrations.fsspec import FileCheckpoints
from ckptfs.integrations.fsspec.files import PublishedFile
from ckptfs.storage.base import DataWriter


class Interrupted(Exception):  # noqa: N818 - what a program raises in the middle of a file
    """Something went wrong in the middle."""


Opens = Callable[[str], Any]

# Each way to open, and the bytes that it takes.
OPENS: dict[str, tuple[Opens, Any]] = {
    "fs.open": (lambda url: fs().open(url, "wb"), b"half"),
    "fs.open, text": (lambda url: fs().open(url, "w"), "half"),
    "fs.open, gzip": (lambda url: fs().open(url, "wb", compression="gzip"), b"half"),
    "fs.open, gzip text": (lambda url: fs().open(url, "w", compression="gzip"), "half"),
    "fsspec.open": (lambda url: fsspec.open(url, "wb"), b"half"),
    "fsspec.open, text": (lambda url: fsspec.open(url, "w"), "half"),
    "fsspec.open, gzip": (lambda url: fsspec.open(url, "wb", compression="gzip"), b"half"),
    "contextlib.closing": (lambda url: contextlib.closing(fs().open(url, "wb")), b"half"),
    "io.TextIOWrapper": (lambda url: io.TextIOWrapper(fs().open(url, "wb")), "half"),
}


def fs() -> FileCheckpoints:
    """The filesystem of this process."""
    return FileCheckpoints()


def stacked(opened: Any, data: Any) -> None:
    """An exception after a file was entered into an ExitStack."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(opened).write(data)
        raise Interrupted


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A file that is not there."""
    return f"ckptfs+file://{tmp_path}/dir/file"


def raises(error: Exception) -> None:
    """The exception, as from the middle of a program."""
    raise error


def test_close_publishes_while_an_error_is_handled(url: str) -> None:
    """``close()`` in an except block publishes the file, as Python's own files do: the fallback that a
    handler writes is not lost.
    """
    file = fs().open(url, "wb")
    try:
        raises(KeyError("no such metric"))
    except KeyError:
        file.write(b"fallback")
        file.close()
    assert fs().cat(url) == b"fallback"


@pytest.mark.parametrize("mode", ["w", "wb"])
@pytest.mark.parametrize("compression", [None, "gzip"])
def test_close_publishes_in_except_and_finally(
    url: str, mode: str, compression: str | None
) -> None:
    """In an except block and in a finally block that an exception leaves, text and compressed files are
    published by ``close()`` too: nothing but a ``with`` block takes a file back.
    """
    data: Any = "whole" if mode == "w" else b"whole"

    def finally_closed() -> None:
        file = fs().open(f"{url}.finally", mode, compression=compression)
        try:
            file.write(data)
            raise Interrupted
        finally:
            file.close()

    with pytest.raises(Interrupted):
        finally_closed()
    file = fs().open(f"{url}.except", mode, compression=compression)
    try:
        raise Interrupted
    except Interrupted:
        file.write(data)
        file.close()
    for name in ("finally", "except"):
        with fs().open(f"{url}.{name}", "rb", compression=compression) as read:
            assert read.read() == b"whole"


def test_close_of_a_fsspec_open_file_publishes_in_except(url: str) -> None:
    """``fsspec.open(...).open()`` closed in an except block is published, by ``OpenFile.close`` too."""
    opened = fsspec.open(url, "wb")
    file: Any = opened.open()
    try:
        raise Interrupted
    except Interrupted:
        file.write(b"whole")
        opened.close()
    assert fs().cat(url) == b"whole"


@pytest.mark.parametrize("how", OPENS)
def test_a_with_block_that_an_error_leaves_publishes_nothing(url: str, how: str) -> None:
    """A with block of the file, or of a wrapper that closes the file and passes no reason on, leaves
    nothing when an exception leaves it, and the file when it is left normally.
    """
    opens, data = OPENS[how]

    def write(target: str, *, error: bool) -> None:
        with opens(target) as file:
            file.write(data)
            if error:
                raise Interrupted

    with pytest.raises(Interrupted):
        write(url, error=True)
    assert not fs().exists(url)
    with pytest.raises(Interrupted):
        stacked(opens(url), data)
    assert not fs().exists(url)
    try:
        raise Interrupted
    except Interrupted:
        write(url, error=False)
    assert fs().exists(url)


def test_a_file_opened_by_an_exit_is_published(url: str) -> None:
    """An ``__exit__`` that writes an emergency file of its own publishes it: the error was there when the
    file was opened.
    """

    class Rescue:
        def __enter__(self) -> None:
            """Nothing yet."""

        def __exit__(self, *_: object) -> None:
            file = fs().open(url, "wb")
            file.write(b"rescued")
            file.close()

    with pytest.raises(Interrupted), Rescue():
        raise Interrupted
    assert fs().cat(url) == b"rescued"


@pytest.mark.parametrize("how", [how for how in OPENS if how.startswith("fs.open")])
def test_a_dropped_file_leaves_nothing(url: str, how: str) -> None:
    """A file, text and compressed ones too, that is collected without ``close()`` is not published."""
    opens, data = OPENS[how]
    file = opens(url)
    file.write(data)
    del file
    gc.collect()
    assert not fs().exists(url)


class Full(DataWriter):
    """A place without space."""

    aborted = False

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Never."""
        raise StorageError("no space")

    def close(self) -> None:
        """Never reached."""
        raise AssertionError("a file whose write failed was published")

    def abort(self) -> None:
        """Leave nothing."""
        self.aborted = True


def test_close_after_a_failed_write_is_an_error() -> None:
    """Bytes that were not written are missing, so nothing is published, and ``close()`` says so to a
    program that caught the first error; a with block raises the first error alone.
    """

    def closed() -> Iterator[Full]:
        full = Full()
        file = PublishedFile(full, "name")
        with contextlib.suppress(StorageError):
            file.write(b"x")
        yield full
        file.close()

    writing = closed()
    full = next(writing)
    with pytest.raises(StorageError, match="nothing was published"):
        next(writing)
    assert full.aborted
    with pytest.raises(StorageError, match="no space"), PublishedFile(Full(), "name") as file:
        file.write(b"x")
