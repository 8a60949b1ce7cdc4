"""hdfs:// through fsspec and pyarrow: up to the missing library, and over pyarrow's local filesystem in its
place.
"""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from ckptfs.commit.log.advisory_log import with_log
from ckptfs.commit.log.append import Appended, RefusedAppend, append, make_log
from ckptfs.commit.log.entries import Pin
from ckptfs.commit.operations import drive
from ckptfs.errors import (
    AnswerLostError,
    MissingDriverError,
    StorageError,
    UnsupportedError,
    UriError,
)
from ckptfs.storage.base import Storage
from ckptfs.storage.fsspec_store import FsspecStorage
from ckptfs.storage.registry import open_storage
from ckptfs.testing.conformance import StorageConformance

arrow: Any = import_module("pyarrow.fs")  # it ships no types


class _LocalFiles:
    """pyarrow's local filesystem in the place of its HDFS one: the same interface; parents are made
    by the open of a file, as on HDFS, and every error of a look is "not found".
    """

    def __init__(self, **options: Any) -> None:
        self._inner = arrow.LocalFileSystem()
        self.options = options
        self.failing: OSError | None = None

    def open_output_stream(self, path: str, **more: Any) -> Any:
        """A file to write."""
        self._inner.create_dir(os.path.dirname(path), recursive=True)
        return self._inner.open_output_stream(path, **more)

    def open_input_file(self, path: str) -> Any:
        """A file to read."""
        if self.failing:
            raise self.failing
        return self._inner.open_input_file(path)

    def move(self, source: str, target: str) -> None:
        """Over what is there."""
        if self.failing:
            raise self.failing
        self._inner.move(source, target)

    def get_file_info(self, asked: Any) -> Any:
        """Of a list of paths, or what a selector finds."""
        if self.failing and isinstance(asked, list):
            return [arrow.FileInfo(path, arrow.FileType.NotFound) for path in asked]
        return self._inner.get_file_info(asked)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._inner, name)


@pytest.fixture
def local_files(monkeypatch: pytest.MonkeyPatch) -> list[_LocalFiles]:
    """Every filesystem that was made for hdfs:// since, all of them local."""
    made: list[_LocalFiles] = []

    def make(**options: Any) -> _LocalFiles:
        made.append(_LocalFiles(**options))
        return made[-1]

    monkeypatch.setattr(arrow, "HadoopFileSystem", make)
    return made


def test_without_libhdfs_the_error_says_what_to_set() -> None:
    """hdfs:// without Java or libhdfs: MissingDriverError that names the variables and the other way."""
    store = open_storage("hdfs://127.0.0.1:1/run")
    with pytest.raises((MissingDriverError, StorageError)) as caught:
        store.read("f")
    if not isinstance(caught.value, MissingDriverError):
        pytest.skip("libhdfs is installed here")
    for word in ("JAVA_HOME", "HADOOP_HOME", "CLASSPATH", "webhdfs://"):
        assert word in str(caught.value)


def test_a_forked_java_machine_is_refused(local_files: list[_LocalFiles], tmp_path: Path) -> None:
    """A forked child of a process that used hdfs:// gets an error at once, not a hang."""
    del local_files
    store = open_storage(f"hdfs://nn{tmp_path}/run")
    store.replace("f", b"x")
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            store.read("f")
        except UnsupportedError as error:
            status = 0 if "spawn" in str(error) else 2
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0
    assert store.read("f") == b"x"


@pytest.mark.parametrize(
    ("uri", "options", "made"),
    [
        ("hdfs:///tmp", {}, {"host": "default", "port": 0, "user": None}),
        ("hdfs://eve@ns1/tmp?replication=2", {}, {"host": "ns1", "user": "eve", "replication": 2}),
        ("fsspec+hdfs://nn:8020/tmp", {"kerb_ticket": "/t"}, {"port": 8020, "kerb_ticket": "/t"}),
    ],
)
def test_libhdfs_gets_its_own_options(
    local_files: list[_LocalFiles], uri: str, options: dict[str, Any], made: dict[str, Any]
) -> None:
    """hdfs:///path is the configured filesystem, a nameservice has no port, a query is text."""
    open_storage(uri, options).list("")
    assert local_files[-1].options.items() >= made.items()


@pytest.mark.parametrize("name", ["token", "buffer_size", "retry_s", "use_https"])
def test_an_option_that_would_do_nothing_is_refused(name: str) -> None:
    """fsspec's class swallows any name: an unknown one is a UriError before anything is connected."""
    with pytest.raises(UriError, match=f"'{name}'"):
        open_storage("hdfs://nn/r", {name: "1"})


def test_a_number_that_is_none_is_refused() -> None:
    """Before anything is connected."""
    with pytest.raises(UriError, match="replication"):
        open_storage("hdfs://nn/r", {"replication": "many"})


def test_a_file_that_cannot_be_looked_at_is_not_absent(
    local_files: list[_LocalFiles], tmp_path: Path
) -> None:
    """pyarrow answers "not found" to every error of a look: the real one is raised, not NotFoundError."""
    store = open_storage(f"hdfs://nn{tmp_path}/run")
    store.replace("f", b"x")
    local_files[-1].failing = OSError(255, "Unknown error 255: no connection to the NameNode")
    for ask in (store.stat, store.open_read, lambda key: store.read_small(key, 10)):
        with pytest.raises(StorageError) as caught:
            ask("f")
        assert not isinstance(caught.value, FileNotFoundError)


def test_a_move_that_may_have_happened_is_in_doubt(
    local_files: list[_LocalFiles], tmp_path: Path
) -> None:
    """A Java exception without an errno says nothing of the change that met it."""
    store = open_storage(f"hdfs://nn{tmp_path}/run")
    writer = store.open_write("f")
    local_files[-1].failing = OSError(255, "Unknown error 255")
    with pytest.raises(AnswerLostError):
        writer.close()
    writer.abort()


class TestHdfsThroughFsspec(StorageConformance):
    """hdfs://, over pyarrow's local filesystem."""

    @pytest.fixture(autouse=True)
    def _local(self, local_files: list[_LocalFiles]) -> None:
        del local_files

    def make_storage(self, place: Path) -> Storage:
        self.place = place / "run"
        return open_storage(f"hdfs://nn{self.place}")

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


def test_hdfs_keeps_an_advisory_log(local_files: list[_LocalFiles], tmp_path: Path) -> None:
    """pyarrow's move replaces what is in the way, so no exclusive create is claimed, and two writers
    of one number both keep their entry.
    """
    del local_files
    store = open_storage(f"hdfs://nn{tmp_path}/run")
    assert isinstance(store, FsspecStorage)
    assert not store.capabilities.exclusive_create
    assert not store.capabilities.atomic_replace
    logs = [with_log(store, store.capabilities, write=True) for _ in range(2)]
    drive(make_log(), logs[0])
    for who, log in enumerate(logs):
        done: Appended | RefusedAppend[str] = drive(
            append(lambda _, w=str(who): Pin(w), write_id=str(who)),  # type: ignore[misc]
            log,
        )
        assert isinstance(done, Appended)
    names = [entry.name for entry in store.list(".ckptfs/log")]
    assert len(names) == 2
    assert {name.partition(".")[2] for name in names} == {"0", "1"}
