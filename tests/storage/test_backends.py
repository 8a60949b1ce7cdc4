"""Opening by URI, the model's borders, simulated nodes, and fsspec's two kinds."""

from __future__ import annotations

import gc
import io
import multiprocessing
import os
import pickle
import re
from importlib import import_module
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractBufferedFile

from ckptfs.errors import (
    AlreadyExistsError,
    AnswerLostError,
    MissingDriverError,
    StorageError,
    TransientError,
    UnsupportedError,
    UriError,
)
from ckptfs.storage import registry
from ckptfs.storage.base import Storage
from ckptfs.storage.clients import choose
from ckptfs.storage.fsspec_store import FsspecStorage
from ckptfs.storage.local import LocalStorage
from ckptfs.storage.memory import STORES, MemoryStorage
from ckptfs.storage.registry import open_storage
from ckptfs.testing.conformance import StorageConformance
from ckptfs.testing.nodes import node_directory, this_node
from ckptfs.uri import Uri

# -- the registry ----------------------------------------------------------------------


def test_schemes_lead_to_their_backends(tmp_path: Path) -> None:
    """Paths, file://, memory:// and what fsspec knows."""
    assert isinstance(open_storage(str(tmp_path)), LocalStorage)
    assert isinstance(open_storage(tmp_path), LocalStorage)
    assert isinstance(open_storage(f"ckptfs+file://{tmp_path}"), LocalStorage)
    assert isinstance(open_storage(Uri.parse("memory://name/run")), MemoryStorage)
    assert isinstance(open_storage("fsspec+memory:///x"), FsspecStorage)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("nosuch://x/y", "no backend knows nosuch://"),
        ("file+nosuch://x/y", "no backend knows"),
        ("s3://***@bucket/run", "masked"),
        ("memory://name/run?shape=round", "filesystem or object"),
        ("memory://name/run?size=3", "no option 'size'"),
    ],
)
def test_what_cannot_be_opened_says_why(text: str, told: str) -> None:
    """One UriError with the URI and what to do."""
    with pytest.raises(UriError) as caught:
        open_storage(text)
    assert told in str(caught.value)


def test_a_directory_takes_no_options(tmp_path: Path) -> None:
    """A misspelt option is an error, not ignored."""
    with pytest.raises(UriError, match="anon"):
        open_storage(tmp_path, {"anon": True})


@pytest.mark.parametrize(
    ("text", "extra"),
    [("s3://b/k", "s3"), ("gs://b/k", "gcs"), ("abfs://b@a.x/k", "azure"), ("hdfs:///k", "hdfs")],
)
def test_a_missing_driver_names_the_extra(
    text: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MissingDriverError is a UriError and an ImportError, and says what to install."""

    def missing(protocol: str) -> None:
        raise ImportError(protocol)

    monkeypatch.setattr(import_module("fsspec.registry"), "get_filesystem_class", missing)
    monkeypatch.setattr(choose, "find_spec", lambda name: None)
    with pytest.raises(MissingDriverError) as caught:
        open_storage(text)
    assert f"pip install 'ckptfs[{extra}]'" in str(caught.value)
    assert isinstance(caught.value, ImportError)


def third_party(uri: Uri, storage_options: dict[str, Any]) -> Storage:
    """What an entry point leads to."""
    STORES.drop(uri.authority)
    storage = MemoryStorage(uri)
    storage.options = storage_options  # type: ignore[attr-defined]
    return storage


def test_third_parties_are_found_by_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    """Group ckptfs.backends, name = protocol; the query and the options reach the factory."""
    points = {
        "myown": EntryPoint("myown", f"{__name__}:third_party", "ckptfs.backends"),
        "broken": EntryPoint("broken", "no.such.module:x", "ckptfs.backends"),
    }

    def entry_points(*, group: str, name: str) -> list[EntryPoint]:
        assert group == "ckptfs.backends"
        return [points[name]] if name in points else []

    monkeypatch.setattr(registry, "entry_points", entry_points)
    monkeypatch.setattr(EntryPoint, "load", _load)
    storage = open_storage("myown://name/run?a=1&b=2", {"b": "3"})
    assert storage.options == {"a": "1", "b": "3"}  # type: ignore[attr-defined]
    with pytest.raises(MissingDriverError):
        open_storage("broken://x/y")


def _load(point: EntryPoint) -> object:
    if point.name == "broken":
        raise ImportError("no.such.module")
    return third_party


# -- the model -------------------------------------------------------------------------


def test_the_model_refuses_several_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """WORLD_SIZE above 1 is refused when it is opened; 1 is a world of one."""
    monkeypatch.setenv("WORLD_SIZE", "1")
    open_storage("memory://name/run")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for text in ("memory://name/run", "fsspec+memory:///run"):
        with pytest.raises(UriError, match="one process"):
            open_storage(text)


def _use(storage: Storage) -> str:
    try:
        storage.list("")
    except UriError as error:
        return str(error)
    return "used"


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_the_model_does_not_travel(method: str) -> None:
    """Forked or pickled into another process: its first use is a clear UriError."""
    storage = open_storage("memory://travels/run")
    storage.make_dir("")
    context = multiprocessing.get_context(method)
    with context.Pool(1) as pool:
        assert "belongs to the process" in pool.apply(_use, (storage,))
    assert _use(pickle.loads(pickle.dumps(storage))) == "used"


def test_stores_have_names_and_one_shape() -> None:
    """One name is one store, whatever its root; its shape is fixed by the first use."""
    STORES.drop("shared")
    one = open_storage("memory://shared/run")
    one.make_dir("sub")
    one.replace("sub/f", b"x")
    assert open_storage("memory://shared/run/sub").read("f") == b"x"
    with pytest.raises(UriError, match="shape"):
        open_storage("memory://shared/run", {"shape": "object"})


# -- simulated nodes -------------------------------------------------------------------


def test_nodes_have_disks_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One URI, one text, another directory on every node, at any depth below the mark."""
    text = f"nodes+file://{tmp_path}/@node/run"
    for node in ("a", "b"):
        monkeypatch.setenv("CKPTFS_NODE", node)
        storage = open_storage(text)
        storage.make_dir("sub")
        storage.replace("sub/f", node.encode())
        assert str(storage.root) == text
        assert open_storage(f"{text}/sub").read("f") == node.encode()
        assert (tmp_path / node / "run/sub/f").read_bytes() == node.encode()
        again = pickle.loads(pickle.dumps(storage))
        assert again.read("sub/f") == node.encode()


def test_which_node_this_is() -> None:
    """CKPTFS_NODE, then GROUP_RANK, then "0"; a node is one component."""
    assert this_node({"CKPTFS_NODE": "a", "GROUP_RANK": "1"}) == "a"
    assert this_node({"GROUP_RANK": "1"}) == "1"
    assert this_node({}) == "0"
    plain = Uri.parse("nodes+file:///tmp/x")
    assert node_directory(plain, "a") == "/tmp/x/a"
    for bad in ("", "..", "a/b"):
        with pytest.raises(UriError):
            node_directory(plain, bad)


# -- fsspec ----------------------------------------------------------------------------


class BucketFile(AbstractBufferedFile):  # type: ignore[misc]
    """An upload: its parts are nowhere until it is committed."""

    def _initiate_upload(self) -> None:
        self.parts = io.BytesIO()

    def _upload_chunk(self, final: bool = False) -> bool:  # noqa: FBT002 - fsspec's signature
        self.parts.write(self.buffer.getvalue())
        if final and self.autocommit:
            self.commit()
        return True

    def commit(self) -> None:
        self.fs.backing.pipe_file(self.path, self.parts.getvalue())

    def discard(self) -> None:
        self.parts = io.BytesIO()


class Bucket(fsspec.AbstractFileSystem):  # type: ignore[misc]
    """An object store as fsspec's clients are: conditional PUT, uploads committed at the end.

    fails: what the next PUT raises, after it was done.
    """

    protocol = "oss"
    backing = MemoryFileSystem(global_store=False, skip_instance_cache=True)
    honours_condition = True
    fails: Exception | None = None

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        return BucketFile(self, path, mode, **kwargs)

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        if mode == "create" and self.honours_condition and self.backing.exists(path):
            raise FileExistsError(path)
        self.backing.pipe_file(path, value)
        failure, type(self).fails = self.fails, None
        if failure is not None:
            raise failure

    def cat_file(self, path: str, start: Any = None, end: Any = None, **_: Any) -> bytes:
        return bytes(self.backing.cat_file(path, start, end))

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        found: dict[str, Any] = self.backing.info(path)
        return found

    def ls(self, path: str, detail: bool = True, **_: Any) -> Any:  # noqa: FBT002
        return self.backing.ls(path, detail=detail)

    def rm_file(self, path: str) -> None:
        self.backing.rm_file(path)

    def rm(self, path: str, recursive: bool = False, maxdepth: Any = None) -> None:  # noqa: FBT002
        self.backing.rm(path, recursive=recursive, maxdepth=maxdepth)


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> type[Bucket]:
    """A fresh bucket store behind oss://."""

    class Fresh(Bucket):
        backing = MemoryFileSystem(global_store=False, skip_instance_cache=True)

    monkeypatch.setitem(import_module("fsspec.registry")._registry, "oss", Fresh)
    return Fresh


class TestFsspecBucket(StorageConformance):
    """The way that S3, GCS and Azure take through fsspec."""

    @pytest.fixture(autouse=True)
    def _bucket(self, bucket: type[Bucket]) -> None:
        self.backing = bucket.backing

    def make_storage(self, place: Path) -> Storage:
        return open_storage("oss://bucket/run")

    def raw_write(self, key: str, data: bytes) -> None:
        self.backing.pipe_file(f"/bucket/run/{key}", data)

    def raw_read(self, key: str) -> bytes:
        return bytes(self.backing.cat_file(f"/bucket/run/{key}"))

    def raw_exists(self, key: str) -> bool:
        return bool(self.backing.exists(f"/bucket/run/{key}".rstrip("/")))

    def raw_list(self) -> list[str]:
        return sorted(name.removeprefix("/bucket/run/") for name in self.backing.find("/bucket"))

    def test_create_race_has_one_winner(self, exclusive: Storage) -> None:
        """The stand-in's condition is two steps of Python: racing it would test the stand-in."""
        exclusive.create("d/0", b"x", staging="tmp/w")
        with pytest.raises(AlreadyExistsError):
            exclusive.create("d/0", b"x", staging="tmp/w")


def test_a_server_that_ignores_the_condition_is_found_out(bucket: type[Bucket]) -> None:
    """The client passes it on, the server does not care: the probe sees it before the first entry."""
    bucket.honours_condition = False
    storage = open_storage("oss://bucket/run")
    assert storage.capabilities.exclusive_create
    with pytest.raises(UnsupportedError):
        storage.create("log/0", b"x", staging="tmp/w")
    assert not storage.capabilities.exclusive_create
    assert bucket.backing.find("/bucket") == []


class ServerDisconnectedError(Exception):
    """As aiohttp's: no OSError."""


@pytest.mark.parametrize(
    "failure", [TimeoutError(), ServerDisconnectedError("gone"), OSError(104, "reset")]
)
def test_network_failures_of_a_put_leave_it_open(bucket: type[Bucket], failure: Exception) -> None:
    """The PUT was done and the answer lost: AnswerLostError, never a plain failure."""
    storage = open_storage("oss://bucket/run")
    storage.create("log/0", b"x", staging="")
    bucket.fails = failure
    with pytest.raises(AnswerLostError):
        storage.create("log/1", b"x", staging="")
    with pytest.raises(AlreadyExistsError):
        storage.create("log/1", b"x", staging="")


def test_a_refusal_that_arrives_as_einval(bucket: type[Bucket]) -> None:
    """Some servers' failed condition is EINVAL: distinguished from a real one by what is there."""
    storage = open_storage("oss://bucket/run")
    storage.create("log/0", b"x", staging="")
    bucket.backing.pipe_file("/bucket/run/log/1", b"other")
    bucket.honours_condition = False

    def refuse(*_: object, **__: object) -> None:
        raise OSError(22, "PreconditionFailed")

    bucket.pipe_file = refuse  # type: ignore[method-assign]
    for data in (b"x", b"other"):
        with pytest.raises(AlreadyExistsError):
            storage.create("log/1", data, staging="")
    with pytest.raises(StorageError) as caught:
        storage.create("log/2", b"x", staging="")
    assert not isinstance(caught.value, AlreadyExistsError)


def test_credentials_stay_out_of_errors_and_tracebacks(bucket: type[Bucket]) -> None:
    """A client's message with a signed URL is masked, and not chained into the traceback."""
    storage = open_storage("oss://user:hunter2@bucket/run")
    bucket.fails = ServerDisconnectedError("PUT https://u:hunter2@host/k?sig=hunter2")
    with pytest.raises(AnswerLostError) as caught:
        storage.replace("f", b"x")
    assert "hunter2" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


@pytest.mark.parametrize("kind", [ValueError, OSError, PermissionError, TimeoutError])
def test_credentials_stay_out_of_failed_reads(
    bucket: type[Bucket], monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    """Nor do they come through any other kind of error that a client may raise."""

    def refuse(*_: object, **__: object) -> None:
        raise kind("GET https://u:hunter2@host/k?sig=hunter2")

    monkeypatch.setattr(bucket, "cat_file", refuse)
    with pytest.raises(StorageError) as caught:
        open_storage("oss://bucket/run").read("f")
    assert "hunter2" not in str(caught.value)
    assert caught.value.__cause__ is None


@pytest.mark.usefixtures("bucket")
def test_storage_options_survive_pickling() -> None:
    """Endpoint and credentials are with the client again on the other side."""
    storage = open_storage("oss://bucket/run?endpoint=here", {"key": "k"})
    storage.replace("f", b"x")
    again = pickle.loads(pickle.dumps(storage))
    assert again.read("f") == b"x"
    assert again._client.fs.storage_options["key"] == "k"
    assert again._client.fs.storage_options["endpoint"] == "here"
    assert again._client.fs.storage_options["use_listings_cache"] is False


@pytest.mark.usefixtures("bucket")
def test_a_fork_gets_a_client_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fsspec's event loop does not survive a fork: another pid, another client."""
    storage = FsspecStorage(Uri.parse("oss://bucket/run"))
    first = storage._client.fs
    assert storage._client.fs is first
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert storage._client.fs is not first


@pytest.mark.parametrize("raised", [None, KeyboardInterrupt])
def test_uploads_of_many_parts(bucket: type[Bucket], raised: type[BaseException] | None) -> None:
    """Parts that were sent before an abort are no truncated object; without one all are there."""
    storage = open_storage("oss://bucket/run")
    writer = storage.open_write("f")
    for _ in range(3):
        writer.write(b"x" * (17 << 20))
    assert bucket.backing.find("/bucket") == []
    if raised is None:
        writer.close()
        assert storage.stat("f").size_bytes == 51 << 20
    else:
        writer.__exit__(raised, raised(), None)
        assert bucket.backing.find("/bucket") == []


@pytest.mark.parametrize("parts", [0, 1, 3])
def test_an_abort_completes_no_upload_and_leaves_none_pending(
    bucket: type[Bucket], monkeypatch: pytest.MonkeyPatch, parts: int
) -> None:
    """Some clients complete the upload with its last part, when the stream is closed: an aborted file
    is not closed, neither at once nor by the collector, and its upload is given back.
    """
    pending: set[str] = set()

    class Eager(BucketFile):
        def _initiate_upload(self) -> None:
            super()._initiate_upload()
            pending.add(self.path)

        def _upload_chunk(self, final: bool = False) -> bool:  # noqa: FBT002
            super()._upload_chunk(final)
            if final:
                super().commit()
                pending.discard(self.path)
            return True

        def commit(self) -> None:
            assert self.closed  # the last part did it

        def discard(self) -> None:
            super().discard()
            pending.discard(self.path)

    def opened(fs: Bucket, path: str, mode: str = "rb", **kwargs: Any) -> Eager:
        return Eager(fs, path, mode, **kwargs)

    monkeypatch.setattr(bucket, "_open", opened)
    storage = open_storage("oss://bucket/run")
    writer = storage.open_write("f")
    for _ in range(parts):
        writer.write(b"x" * (17 << 20))
    assert len(pending) == bool(parts)
    writer.abort()
    assert not pending, "parts stay in the bucket and are paid for"
    # The client keeps its files, so that they are collected with it: in a job, at its end.
    del writer, storage
    bucket.clear_instance_cache()
    gc.collect()
    assert bucket.backing.find("/bucket") == [], "a truncated object stands under the key"
    storage = open_storage("oss://bucket/run")
    with storage.open_write("f") as whole:
        whole.write(b"whole")
    assert storage.read("f") == b"whole"


def test_reads_that_fail_are_transient(
    bucket: type[Bucket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read that timed out changed nothing: TransientError."""

    def slow(*_: object, **__: object) -> None:
        raise TimeoutError

    monkeypatch.setattr(bucket, "cat_file", slow)
    with pytest.raises(TransientError):
        open_storage("oss://bucket/run").read("f")


@pytest.mark.parametrize("root", ["fsspec+memory:///patterns/run", "oss://bucket/run"])
@pytest.mark.parametrize("name", ["step_[1]", "step_*", "step_[!x]"])
@pytest.mark.usefixtures("bucket")
def test_a_name_is_no_pattern(root: str, name: str) -> None:
    """A name with letters of a glob is written, read and removed as it is, and no other with it."""
    storage = open_storage(root)
    for folder in ("step_1", name):
        storage.replace(f"{folder}/a", folder.encode())
        with storage.open_write(f"{folder}/d/b") as writer:
            writer.write(b"x")
    assert storage.read(f"{name}/a") == name.encode()
    storage.remove_many([f"{name}/a", f"{name}/absent"])
    storage.remove_tree(name)
    storage.remove_tree(name)
    assert [entry.name for entry in storage.list("")] == ["step_1"]
    assert storage.read("step_1/a") == b"step_1"
    assert storage.read("step_1/d/b") == b"x"
    storage.remove_tree("step_1")
    assert storage.list("") == []


def test_many_names_go_in_one_request(bucket: type[Bucket]) -> None:
    """Known names are removed together where the client can, absent ones too."""
    asked: list[object] = []

    def rm(self: Bucket, path: Any, recursive: bool = False, maxdepth: Any = None) -> None:  # noqa: FBT002
        asked.append(path)
        for name in path:
            if self.backing.exists(name):
                self.backing.rm_file(name)

    bucket.rm = rm  # type: ignore[method-assign]
    storage = open_storage("oss://bucket/run")
    for name in "abc":
        storage.replace(name, b"x")
    storage.remove_many(["a", "b", "absent"])
    assert [entry.name for entry in storage.list("")] == ["c"]
    assert len(asked) == 1


def test_a_client_that_lists_by_letters_removes_no_other_tree(bucket: type[Bucket]) -> None:
    """A name that only begins alike stays, also where the client's find lists it."""

    def find(self: Bucket, path: str, **_: Any) -> dict[str, Any]:
        return {name: {} for name in self.backing.find("/") if name.strip("/").startswith(path)}

    bucket.find = find
    storage = open_storage("oss://bucket/run")
    for key in ("step_1/a", "step_10/a"):
        storage.replace(key, b"x")
    storage.remove_tree("step_1")
    assert bucket.backing.find("/") == ["/bucket/run/step_10/a"]


def test_options_of_other_clients_are_refused(tmp_path: Path) -> None:
    """What would do nothing through one stream is an error, not ignored."""
    with pytest.raises(UriError, match="concurrency"):
        open_storage(f"fsspec+file://{tmp_path}", {"concurrency": 4})


@pytest.mark.parametrize("taken", ["ckptfs+s3:", "s3:", "gs:"])
def test_a_uri_that_a_program_took_for_a_path_is_warned_of(tmp_path: Path, taken: str) -> None:
    """`./s3:/bucket/run` is a directory on this machine: what comes to ckptfs like that is an error."""
    with pytest.warns(UserWarning, match=f"used the URI {re.escape(taken)}//"):
        open_storage(tmp_path / taken / "bucket" / "run").close()
    open_storage(tmp_path / "s3" / "run").close()
