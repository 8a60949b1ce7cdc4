"""HDFS through pyarrow: up to the missing library, and over pyarrow's local filesystem in its place."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from ckptfs.commit.advisory import with_log
from ckptfs.commit.entries import Pin
from ckptfs.commit.log import Appended, Refused, append, make_log
from ckptfs.commit.ops import drive
from ckptfs.errors import MissingDriverError, TransientError, UnsupportedError
from ckptfs.storage.base import Storage
from ckptfs.storage.hdfs_arrow import ArrowClient
from ckptfs.storage.registry import open_storage
from ckptfs.storage.webhdfs import WebHdfsStorage
from ckptfs.testing.conformance import StorageConformance
from ckptfs.uri import Uri

arrow: Any = import_module("pyarrow.fs")  # it ships no types


def test_without_libhdfs_the_error_says_what_to_set() -> None:
    """hdfs:// without Java or libhdfs: MissingDriverError that names the variables and the other way."""
    store = open_storage("hdfs://127.0.0.1:1/run", {"retry_s": 0})
    with pytest.raises((MissingDriverError, TransientError)) as caught:
        store.read("f")
    if isinstance(caught.value, TransientError):
        pytest.skip("libhdfs is installed here")
    for word in ("JAVA_HOME", "HADOOP_HOME", "CLASSPATH", "webhdfs://"):
        assert word in str(caught.value)


def test_a_forked_java_machine_is_refused() -> None:
    """A client that was opened in another process is an error at once, not a hang."""
    client = ArrowClient(Uri.parse("hdfs://nn/run"), {"host": "nn"})
    client._opened = (os.getpid() + 1, object())
    with pytest.raises(UnsupportedError, match="spawn"):
        client.read("/run/f")


class _Local:
    """pyarrow's local filesystem in the place of its HDFS one: the same interface; parents are made
    by the open of a file, as on HDFS.
    """

    def __init__(self) -> None:
        self._inner = arrow.LocalFileSystem()

    def open_output_stream(self, path: str) -> Any:
        """A file to write."""
        self._inner.create_dir(os.path.dirname(path), recursive=True)
        return self._inner.open_output_stream(path)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._inner, name)


class _LocalClient(ArrowClient):
    def _connect(self) -> Any:
        return _Local()


class TestArrow(StorageConformance):
    """The pyarrow way, over pyarrow's local filesystem."""

    def make_storage(self, place: Path) -> Storage:
        self.place = place / "run"
        root = Uri.parse(f"hdfs://nn{self.place}")
        return WebHdfsStorage(root, _LocalClient(root, {"host": "nn"}))

    def raw_write(self, key: str, data: bytes) -> None:
        path = self.place / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def raw_read(self, key: str) -> bytes:
        return (self.place / key).read_bytes()

    def raw_exists(self, key: str) -> bool:
        return (self.place / key).exists()

    def raw_list(self) -> list[str]:
        return sorted(
            path.relative_to(self.place).as_posix()
            for path in self.place.rglob("*")
            if path.is_file()
        )


def test_the_pyarrow_way_keeps_an_advisory_log(tmp_path: Path) -> None:
    """pyarrow's move replaces what is in the way, so no exclusive create is claimed, and two writers
    of one number both keep their entry.
    """
    root = Uri.parse(f"hdfs://nn{tmp_path}/run")
    store = WebHdfsStorage(root, _LocalClient(root, {"host": "nn"}))
    assert not store.capabilities.exclusive_create
    assert not store.capabilities.atomic_replace
    logs = [with_log(store, store.capabilities, write=True) for _ in range(2)]
    drive(make_log(), logs[0])
    for who, log in enumerate(logs):
        done: Appended | Refused[str] = drive(
            append(lambda _, w=str(who): Pin(w), write_id=str(who)),  # type: ignore[misc]
            log,
        )
        assert isinstance(done, Appended)
    names = [entry.name for entry in store.list(".ckptfs/log")]
    assert len(names) == 2
    assert {name.partition(".")[2] for name in names} == {"0", "1"}
