"""HDFS as a storage, where a fake would prove nothing: a real NameNode and DataNode, cut in between.

The conformance suite is in test_hdfs_conformance.py, rights and names are in test_hdfs_names.py, saves
and loads in test_hdfs_commit.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ckptfs.errors import (
    AlreadyExistsError,
    AnswerLostError,
    StorageError,
    TransientError,
)
from ckptfs.storage.webhdfs import WebHdfsStorage
from ckptfs.testing.conformance import together
from tests import lab
from tests.faults.proxy import (
    LOSE,
    At,
    FaultProxy,
    Gate,
    Hold,
    HttpFault,
    Nth,
    Reset,
    Truncate,
)
from tests.lab.process import REPOSITORY
from tests.lab.server import Server
from tests.servers.hdfs_raw import Place, write_file

pytestmark = pytest.mark.hdfs

WAIT_S = 120.0
RENAME = "*op=RENAME*"


@pytest.fixture
def place(hdfs: Server) -> Iterator[Place]:
    """A fresh directory, removed afterwards."""
    fresh = Place(hdfs)
    yield fresh
    fresh.raw.ask("DELETE", "DELETE", fresh.root.path, recursive="true")


@pytest.fixture
def proxy(hdfs: Server) -> Iterator[FaultProxy]:
    """A proxy before the NameNode, without faults; DataNodes are reached directly."""
    with FaultProxy(hdfs.endpoint) as opened:
        yield opened


# -- row 26: a directory renamed onto another moves into it ----------------------------------------


def test_row26_a_rename_of_a_directory_excludes_nobody(place: Place) -> None:
    """Two committers rename their directories to one name: HDFS answers both that it is done, and the
    second is inside the first. Ours rename files, refused if the name is taken: one wins.
    """
    for who in "ab":
        place.write(f"attempt-{who}/f", who.encode())
    answers = [
        json.loads(
            place.raw.ask(
                "PUT",
                "RENAME",
                f"{place.root.path}/attempt-{who}",
                destination=f"{place.root.path}/step_1",
            )[1]
        )
        for who in "ab"
    ]
    assert answers == [{"boolean": True}] * 2, "the failure that this row is about is gone"
    assert place.files() == ["step_1/attempt-b/f", "step_1/f"]

    store = place.open()
    store.create("log/0", b"a", staging="tmp/a")
    with pytest.raises(AlreadyExistsError):
        store.create("log/0", b"b", staging="tmp/b")
    assert store.read("log/0") == b"a"


def test_nothing_moves_into_a_directory(place: Place) -> None:
    """Where a directory is under the key, create, replace and a closing writer fail, and leave
    nothing in it.
    """
    place.write("taken/f", b"x")
    store = place.open()
    writes: list[Callable[[], None]] = [
        lambda: store.create("taken", b"x", staging="tmp/a"),
        lambda: store.replace("taken", b"x"),
        lambda: write_file(store, "taken", b"x"),
    ]
    for write in writes:
        with pytest.raises(StorageError):
            write()
        assert place.files() == ["taken/f"]


# -- answers that are lost or late ---------------------------------------------------------------


def test_a_lost_answer_of_the_rename_is_settled(place: Place, proxy: FaultProxy) -> None:
    """The rename happened and its answer did not arrive: it is asked again, finds its source gone,
    and the create returns; nothing is left over.
    """
    place.make_dir("log")
    proxy.plan.add(HttpFault("PUT", RENAME, Nth(1), LOSE))
    store = place.open(proxy)
    store.create("log/0", b"entry", staging="tmp/w")
    assert len(proxy.requests("PUT", RENAME)) == 2
    proxy.plan.add(HttpFault("PUT", RENAME, Nth(1), LOSE))
    store.replace("hint", b"new")
    assert (store.read("log/0"), store.read("hint")) == (b"entry", b"new")
    assert place.files() == ["hint", "log/0"]


def test_a_lost_answer_is_told_when_the_time_is_over(place: Place, proxy: FaultProxy) -> None:
    """Without time to ask again: AnswerLostError. The same create again says "exists", what is
    there is ours, and what the first try left is gone.
    """
    place.make_dir("log")
    proxy.plan.add(HttpFault("PUT", RENAME, Nth(1), LOSE))
    store = place.open(proxy, retry_s=0)
    with pytest.raises(AnswerLostError, match=f"127.0.0.1:{proxy.port}"):
        store.create("log/0", b"entry", staging="tmp/w")
    with pytest.raises(AlreadyExistsError):
        store.create("log/0", b"entry", staging="tmp/w")
    assert store.read("log/0") == b"entry"
    assert place.files() == ["log/0"]


def test_a_rename_that_arrives_late_changes_nothing(place: Place, proxy: FaultProxy) -> None:
    """A rename is held up, its client gives up waiting, asks again and wins; when the first one
    arrives at last its source is gone, and the key keeps what it had or what came after.
    """
    gate = Gate()
    proxy.plan.add(HttpFault("PUT", RENAME, Nth(1), Hold(gate, At.BEFORE)))
    store = place.open(proxy, request_timeout_s=1)
    store.replace("hint", b"first")
    assert gate.reached.is_set()
    place.open().replace("hint", b"second")
    gate.release.set()
    assert proxy.settle(WAIT_S)
    assert store.read("hint") == b"second"
    assert place.files() == ["hint"]


def test_a_refused_create_that_lost_an_answer_does_not_win_later(
    place: Place, proxy: FaultProxy
) -> None:
    """A create with its rename held up loses to another one, takes its source away, and the late
    rename cannot replace the winner, even after the winner is deleted.
    """
    gate = Gate()
    place.make_dir("log")
    proxy.plan.add(HttpFault("PUT", RENAME, Nth(1), Hold(gate, At.BEFORE)))
    store, other = place.open(proxy, request_timeout_s=1), place.open()
    outcome: list[BaseException | None] = []
    racer = threading.Thread(
        target=lambda: outcome.extend(
            together(lambda: store.create("log/0", b"late", staging="tmp/a"))
        )
    )
    racer.start()
    assert gate.reached.wait(WAIT_S)
    other.create("log/0", b"winner", staging="tmp/b")
    racer.join(WAIT_S)
    assert isinstance(outcome[0], AlreadyExistsError), outcome
    other.remove("log/0")
    gate.release.set()
    assert proxy.settle(WAIT_S)
    assert place.files() == []


@contextlib.contextmanager
def _both_legs(place: Place, **options: Any) -> Iterator[tuple[WebHdfsStorage, FaultProxy]]:
    """The storage through proxies before both servers, and the DataNode's."""
    with (
        FaultProxy(place.raw.data_node()) as data,
        FaultProxy(place.server.endpoint, rewrites={place.raw.data_node(): data.url}) as names,
    ):
        yield place.open(names, **options), data


def test_lost_answers_of_a_datanode(place: Place) -> None:
    """The file was written and its 201 lost: a small one is written again under another name, a
    streamed one is a typed error; nothing is left of either, and reads are asked again.
    """
    with _both_legs(place) as (store, data):
        data.plan.add(HttpFault("PUT", "*", Nth(1), LOSE))
        store.create("log/0", b"entry", staging="tmp/w")
        assert len(data.requests("PUT")) == 2
        data.plan.add(HttpFault("GET", "*", Nth(1), Reset(At.ANSWER)))
        assert store.read("log/0") == b"entry"
        place.write("big", b"x" * (2 << 20))
        into = bytearray(2 << 20)
        data.plan.add(HttpFault("GET", "*", Nth(1), Truncate(1 << 20)))
        with store.open_read("big") as reader:
            reader.read_into(0, memoryview(into))
        assert into == b"x" * (2 << 20)
        data.plan.add(HttpFault("PUT", "*", Nth(1), LOSE))
        with pytest.raises(TransientError, match=data.url):
            write_file(store, "f", b"x" * (3 << 20))
        data.plan.add(HttpFault("PUT", "*", Nth(1), Reset(At.REQUEST, 1 << 20)))
        with pytest.raises(TransientError, match=data.url):
            write_file(store, "f", b"x" * (64 << 20))
    assert place.files() == ["big", "log/0"]


# -- deaths ------------------------------------------------------------------------------------


def test_a_writer_killed_half_way_leaves_no_key(place: Place) -> None:
    """SIGKILL in the middle of a data file: nothing under its key, an older one there is whole; what
    is next to it is swept by its age.
    """
    place.write("d/older", b"whole")
    victim = (
        "import sys, time\n"
        "from ckptfs.storage.webhdfs import open_webhdfs\n"
        "from ckptfs.uri import Uri\n"
        "store = open_webhdfs(Uri.parse(sys.argv[1]), {'user': sys.argv[2]})\n"
        "writers = [store.open_write(key) for key in ('d/f', 'd/older')]\n"
        "for writer in writers:\n"
        "    writer.write(b'x' * (3 << 20))\n"
        "print('half', flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", victim, str(place.root), place.raw.user],
        stdout=subprocess.PIPE,
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"half\n"
        process.send_signal(signal.SIGKILL)
    left = [name for name in place.files() if name != "d/older"]
    assert left
    assert all(name.startswith("d/.partial-") for name in left), left
    assert place.raw.read(f"{place.root.path}/d/older") == b"whole"
    store = place.open()
    assert store.sweep_uploads(older_than_s=3600) == 0
    # The server may make the second file after the list, from the request that it had when the writer was killed.
    assert store.sweep_uploads(older_than_s=-3600) >= len(left)
    assert place.files() == ["d/older"]


def test_dead_servers_are_typed_errors() -> None:
    """The DataNode dies in the middle of a file, then is away, then the NameNode is away: a typed
    error each, within its time, that names the endpoint; nothing appears under the key.
    """
    with contextlib.ExitStack() as stack:
        server = _own(stack)
        place = Place(server)
        store = place.open(retry_s=0.5, request_timeout_s=5, connect_timeout_s=5)
        store.replace("whole", b"x" * 1000)
        name_node, data_node = server.pids[:2]
        writer = store.open_write("d/f")
        writer.write(b"x" * (2 << 20))
        os.kill(data_node, signal.SIGKILL)
        with pytest.raises(TransientError, match=r"http://127\.0\.0\.1:\d+"):
            writer.write(b"x" * (256 << 20))  # more than the sockets hold
        writer.abort()
        assert not place.exists("d/f")
        with pytest.raises(TransientError, match=r"nothing listens at http://127\.0\.0\.1:\d+"):
            store.read("whole")
        with pytest.raises(TransientError, match="127"):
            store.replace("hint", b"x")
        with pytest.raises(TransientError, match="127"):
            write_file(store, "d/f", b"x")
        os.kill(name_node, signal.SIGKILL)
        with pytest.raises(TransientError, match=f"nothing listens at {server.endpoint}"):
            store.stat("whole")
        with pytest.raises(TransientError, match=f"nothing listens at {server.endpoint}"):
            store.create("log/0", b"x", staging="tmp/w")


def _own(stack: contextlib.ExitStack) -> Server:
    """An HDFS of this test's own, to be killed."""
    try:
        return stack.enter_context(lab.hdfs())
    except lab.UnavailableError as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(str(error))
