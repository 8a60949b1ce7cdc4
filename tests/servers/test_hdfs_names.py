"""HDFS as a storage: who may do what, addresses, names, readers and processes, on a real one."""

from __future__ import annotations

import contextlib
import http.client
import os
import pickle
from collections.abc import Callable, Iterator

import pytest

from ckptfs.errors import AccessError, NotFoundError, StaleError, StorageError, TransientError
from ckptfs.storage.webhdfs import open_webhdfs
from ckptfs.uri import Uri
from tests.lab.server import Server
from tests.servers.hdfs_raw import Place, RawHdfs, write_file

pytestmark = pytest.mark.hdfs


@pytest.fixture
def place(hdfs: Server) -> Iterator[Place]:
    """A fresh directory, removed afterwards."""
    fresh = Place(hdfs)
    yield fresh
    fresh.raw.ask("DELETE", "DELETE", fresh.root.path, recursive="true")


# -- addresses and rights --------------------------------------------------------------------------


def test_a_datanode_whose_name_does_not_resolve(place: Place) -> None:
    """The NameNode sends us to a name that is unknown here: the error says so and names data_proxy,
    which also cures it.
    """
    place.write("f", b"x")
    unknown = {"127.0.0.1": "datanode.invalid"}
    # data_proxy maps the NameNode's URL as well: the first match only, so that it stays reachable.
    host = Uri("webhdfs", f"localhost:{place.root.authority.rpartition(':')[2]}", place.root.path)
    store = open_webhdfs(host, place.server.storage_options(data_proxy=unknown, retry_s=0.2))
    for attempt in (lambda: store.read("f"), lambda: store.replace("g", b"x")):
        with pytest.raises(TransientError) as caught:
            attempt()
        assert "datanode.invalid" in str(caught.value)
        assert "data_proxy" in str(caught.value)
    cured = place.server.storage_options(data_proxy={"127.0.0.1": "localhost"})
    assert open_webhdfs(host, cured).read("f") == b"x"


def test_the_port_of_the_rpc_is_no_webhdfs(place: Place) -> None:
    """The port that hdfs:// uses: an error that says which one is wanted, and no "not found"."""
    rpc = place.server.environment["LAB_HDFS_RPC"].removeprefix("hdfs://")
    store = open_webhdfs(Uri("webhdfs", rpc, place.root.path), {"user": "root", "retry_s": 0})
    with pytest.raises(StorageError) as caught:
        store.stat("f")
    assert not isinstance(caught.value, NotFoundError)
    assert "dfs.namenode.http-address" in str(caught.value)


def test_who_may_not(place: Place) -> None:
    """Another user: AccessError that names the user and the directory, on every kind of change."""
    place.write("d/f", b"x")
    place.raw.ask("PUT", "SETPERMISSION", place.root.path, permission="755")
    somebody = RawHdfs(place.root.authority, "somebody")
    if somebody.ask("PUT", "MKDIRS", f"{place.root.path}/d/probe")[0] == http.client.OK:
        pytest.skip("this HDFS runs with dfs.permissions.enabled=false")
    store = place.open(user="somebody")
    attempts: list[Callable[[], None]] = [
        lambda: store.create("log/0", b"x", staging="tmp/w"),
        lambda: store.replace("d/f", b"y"),
        lambda: write_file(store, "d/g", b"y" * (3 << 20)),
        lambda: store.remove("d/f"),
        lambda: store.remove_tree("d"),
    ]
    for attempt in attempts:
        with pytest.raises(AccessError, match="somebody"):
            attempt()
    assert place.files() == ["d/f"]


# -- names and readers -----------------------------------------------------------------------------


def test_a_replaced_file_is_not_read_in_its_place(place: Place) -> None:
    """A reader that is open while another file comes to stand under the key gets StaleError, never
    the bytes of the other one.
    """
    store = place.open()
    store.replace("f", b"old" * 1000)
    with store.open_read("f") as reader:
        first = bytearray(10)
        reader.read_into(0, memoryview(first))
        assert first == (b"old" * 4)[:10]
        store.replace("f", b"new" * 1000)
        with pytest.raises(StaleError):
            reader.read_into(10, memoryview(bytearray(10)))


def test_directories_go_with_their_last_key(place: Place) -> None:
    """Here only keys exist: the directory of the last removed key goes, one with a neighbour stays,
    the root stays, and a file that was taken for a directory is not touched.
    """
    for key in ("a/b/c/f", "a/g", "x/y/1", "x/y/2", "file"):
        place.write(key, b"x")
    store = place.open()
    store.remove("a/b/c/f")
    assert not place.exists("a/b")
    assert place.exists("a/g")
    store.remove_many(["x/y/1", "x/y/2", "x/y/3"])
    assert not place.exists("x")
    with contextlib.suppress(StorageError):
        store.remove("file/below")
    with contextlib.suppress(StorageError):
        store.remove_tree("file/below")
    assert place.files() == ["a/g", "file"]
    store.remove_tree("a")
    store.remove("file")
    assert place.raw.exists(place.root.path)


def test_a_removed_directory_does_not_stop_a_writer(place: Place) -> None:
    """The directory of a key is removed, empty, between two creates: it is made again."""
    store = place.open()
    store.create("log/0", b"x", staging="tmp/w")
    store.remove("log/0")
    assert not place.exists("log")
    store.create("log/1", b"y", staging="tmp/w")
    assert place.files() == ["log/1"]


def test_odd_names(place: Place) -> None:
    """Blanks, signs and letters of other alphabets arrive as they are. (No percent sign: before
    Hadoop 3 a DataNode decodes names twice.)
    """
    store = place.open()
    names = ["a b", "a+b&c=d", "#1", "ä-ß", "日本", "a;b", "a'\"b", "~x", "[y]"]
    for name in names:
        store.replace(f"d/{name}", name.encode())
    assert [entry.name for entry in store.list("d")] == sorted(names)
    for name in names:
        assert store.read(f"d/{name}") == name.encode()
        store.remove(f"d/{name}")
    assert place.files() == []


def test_a_forked_child_and_a_pickle_have_clients_of_their_own(place: Place) -> None:
    """A storage that was used before a fork works in the child, and one that was pickled elsewhere."""
    store = place.open()
    store.replace("f", b"x")
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            store.replace("of the child", store.read("f"))
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0
    assert store.read("of the child") == b"x"
    assert pickle.loads(pickle.dumps(store)).read("f") == b"x"
