"""HDFS without a server: options, what its refusals mean, gateways that are none.

hdfs:// is in test_fsspec_hdfs.py; what needs a NameNode is in tests/servers/test_hdfs*.py.
"""

from __future__ import annotations

import contextlib
import errno
import http.server
import json
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from email.message import Message
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from ckptfs.errors import (
    AccessError,
    AlreadyExistsError,
    AnswerLostError,
    CredentialsError,
    IntegrityError,
    NoSpaceError,
    NotFoundError,
    StaleError,
    StorageError,
    TransientError,
    UnsupportedError,
    UriError,
)
from ckptfs.storage.registry import open_storage
from ckptfs.storage.webhdfs import WebHdfsStorage, open_webhdfs
from ckptfs.uri import Uri
from tests.lab.process import REPOSITORY
from tests.measures import own_threads

RUN = "webhdfs://namenode:9870/runs/a"
WAIT_S = 30.0


# -- a server --------------------------------------------------------------------------------------


@dataclass
class Asked:
    """One request, as the server got it."""

    method: str
    path: str
    query: dict[str, str]
    port: int
    headers: Message
    body: bytearray = field(default_factory=bytearray)
    ended: bool = True  # a chunked body came to its end

    @property
    def op(self) -> str:
        """OPEN, CREATE, ...; those that a DataNode gets have a small letter."""
        op = self.query.get("op", "")
        return op.lower() if "data" in self.query else op


Answer = tuple[int, bytes, dict[str, str]]


@dataclass
class WebHdfs:
    """NameNode and DataNode in this process: every file has one byte, unless an answer is scripted."""

    server: http.server.ThreadingHTTPServer
    asked: list[Asked] = field(default_factory=list)
    answers: dict[str, Callable[[Asked], Answer]] = field(default_factory=dict)
    before_body: Callable[[Asked], Answer | None] = lambda _: None

    @property
    def uri(self) -> str:
        """Of a run there."""
        return f"webhdfs://127.0.0.1:{self.server.server_port}/run"

    def open(self, **options: Any) -> WebHdfsStorage:
        """Its storage, which gives up at once."""
        return open_webhdfs(Uri.parse(self.uri), {"user": "eve", "retry_s": 0, **options})

    def ops(self) -> list[str]:
        """What was asked so far."""
        return [one.op for one in self.asked]

    def of(self, op: str) -> list[Asked]:
        """The requests of one operation."""
        return [one for one in self.asked if one.op == op]

    def answer(self, asked: Asked) -> Answer:
        """As scripted, or as a NameNode and a DataNode would."""
        if asked.op in self.answers:
            return self.answers[asked.op](asked)
        data = f"http://127.0.0.1:{self.server.server_port}/webhdfs/v1{asked.path}?op={{}}&data=1"
        match asked.op:
            case "CREATE" | "OPEN":
                return 307, b"", {"Location": data.format(asked.op)}
            case "create":
                return 201, b"", {}
            case "open":
                return 200, b"x", {"Content-Type": "application/octet-stream"}
            case "GETFILESTATUS":
                return 200, b'{"FileStatus":{"length":1,"type":"FILE"}}', {}
            case "RENAME":
                return 200, b"", {}
        return 200, b'{"boolean":true}', {}


class _Handler(http.server.BaseHTTPRequestHandler):
    """One connection, kept alive."""

    protocol_version = "HTTP/1.1"
    hdfs: WebHdfs

    def do_PUT(self) -> None:
        parts = urlsplit(self.path)
        query = {name: value for name, [value] in parse_qs(parts.query).items()}
        path = parts.path.removeprefix("/webhdfs/v1")
        asked = Asked(self.command, path, query, self.client_address[1], self.headers)
        self.hdfs.asked.append(asked)
        early = self.hdfs.before_body(asked)
        if early is None:
            self._read_body(asked)
        self._say(*(early or self.hdfs.answer(asked)))
        self.close_connection |= early is not None

    do_GET = do_DELETE = do_PUT  # noqa: N815 - the names of the standard library

    def _read_body(self, asked: Asked) -> None:
        if not self.headers.get("Transfer-Encoding"):
            asked.body += self.rfile.read(int(self.headers.get("Content-Length") or 0))
            return
        asked.ended = False
        while line := self.rfile.readline():
            asked.body += self.rfile.read(int(line, 16))
            self.rfile.readline()
            if int(line, 16) == 0:
                asked.ended = True
                return

    def _say(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            if value:
                self.send_header(name, value)
        self.end_headers()
        with contextlib.suppress(OSError):  # the client has enough
            self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Quiet."""


@pytest.fixture
def hdfs() -> Iterator[WebHdfs]:
    """A server with nothing scripted."""
    handler = type("Handler", (_Handler,), {})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        server.block_on_close = False  # a client keeps its connection
        handler.hdfs = found = WebHdfs(server)  # type: ignore[attr-defined]
        thread = threading.Thread(target=lambda: server.serve_forever(poll_interval=0.01))
        thread.start()
        yield found
        server.shutdown()
        thread.join()


def remote(name: str, message: str) -> bytes:
    """The body of a refusal."""
    told = {"exception": name, "javaClassName": f"org.apache.hadoop.{name}", "message": message}
    return json.dumps({"RemoteException": told}).encode()


def status_of(size_bytes: int) -> Callable[[Asked], Answer]:
    """GETFILESTATUS of a file of that size."""
    body = json.dumps({"FileStatus": {"length": size_bytes, "type": "FILE"}}).encode()
    return lambda _: (200, body, {})


# -- options ---------------------------------------------------------------------------------------


def web(uri: str = RUN, **options: Any) -> dict[str, Any]:
    """What fsspec's class would be given."""
    return dict(open_webhdfs(Uri.parse(uri), options)._client._options)


def test_the_uri_and_the_options_say_who_and_where(monkeypatch: pytest.MonkeyPatch) -> None:
    """Host, port and user come from the URI, the options win, HADOOP_USER_NAME is asked last."""
    monkeypatch.delenv("HADOOP_USER_NAME", raising=False)
    assert web() == {"host": "namenode", "port": 9870}
    assert web("webhdfs://eve:pw@h:1/r") == {
        "host": "h",
        "port": 1,
        "user": "eve",
        "password": "pw",
    }
    assert web("webhdfs://eve@h:1/r", user="bob", port="2")["user"] == "bob"
    assert web("webhdfs://eve@h:1/r", port="2")["port"] == 2
    assert web(use_https="true", session_verify="/ca.pem")["session_verify"] == "/ca.pem"
    assert web(use_https="false", session_verify="false") | {"host": ""} == {
        "host": "", "port": 9870, "use_https": False, "session_verify": False,
    }  # fmt: skip
    monkeypatch.setenv("HADOOP_USER_NAME", "ann")
    assert web()["user"] == "ann"
    assert web(user="bob")["user"] == "bob"
    assert "user" not in web(token="t")  # noqa: S106 - a test's token
    assert "user" not in web(kerberos=True)


def test_new_files_can_be_told_their_replication(hdfs: WebHdfs) -> None:
    """replication and block_size_bytes become parameters of every CREATE."""
    hdfs.open(replication=2, block_size_bytes="1048576").replace("f", b"x")
    [create] = hdfs.of("CREATE")
    assert create.query.items() >= {"replication": "2", "blocksize": "1048576"}.items()


def test_every_request_says_who_asks(hdfs: WebHdfs) -> None:
    """A user, one who acts for another, a password and a token, as fsspec sends them."""
    open_storage(hdfs.uri, {"user": "eve", "proxy_to": "bob"}).stat("f")
    assert hdfs.asked[-1].query.items() >= {"user.name": "eve", "doas": "bob"}.items()
    open_storage(hdfs.uri, {"token": "t0"}).stat("f")
    assert hdfs.asked[-1].query["delegation"] == "t0"
    open_storage(hdfs.uri, {"user": "eve", "password": "pw"}).replace("f", b"x")
    assert all(one.headers["Authorization"].startswith("Basic ") for one in hdfs.asked[-4:])


@pytest.mark.parametrize(
    ("uri", "options", "said"),
    [
        (RUN, {"tokn": "x"}, "'tokn'"),
        (RUN, {"client": "obstore"}, "'client'"),
        (RUN, {"port": "http"}, "port"),
        (RUN, {"replication": "many"}, "replication"),
        (RUN, {"retry_s": "soon"}, "retry_s"),
    ],
)
def test_nonsense_is_refused_by_name(uri: str, options: dict[str, Any], said: str) -> None:
    """An unknown option or a value that means nothing is a UriError before anything is connected."""
    with pytest.raises(UriError, match=said):
        open_storage(uri, options)


def test_contradictions_are_refused_at_first_use() -> None:
    """What fsspec's class refuses, such as a token and a user, is a UriError without the token."""
    store = open_storage(RUN, {"token": "geheim", "user": "eve"})
    with pytest.raises(UriError) as caught:
        store.read("f")
    assert "geheim" not in str(caught.value)


def test_a_pickle_keeps_the_options() -> None:
    """Options survive a pickle; nothing was connected to make it."""
    store = open_storage(RUN, {"user": "eve", "data_proxy": {"a": "b"}, "retry_s": 3})
    again = pickle.loads(pickle.dumps(store))
    assert isinstance(again, WebHdfsStorage)
    assert isinstance(store, WebHdfsStorage)
    assert again._client._options == store._client._options
    assert again.capabilities == store.capabilities


# -- refusals ------------------------------------------------------------------------------------

REFUSALS: Mapping[str, tuple[str, type[StorageError], str]] = {
    "FileNotFoundException": ("File does not exist: /f", NotFoundError, "no such file"),
    "FileAlreadyExistsException": ("rename destination /f", AlreadyExistsError, "exists"),
    "PathIsNotEmptyDirectoryException": ("`/d is non empty'", AlreadyExistsError, "not empty"),
    "AccessControlException": ("Permission denied: user=eve", AccessError, "user=eve"),
    "AuthorizationException": ("User: eve may not impersonate bob", AccessError, "impersonate"),
    "InvalidToken": ("token (HDFS_DELEGATION_TOKEN token 7) expired", CredentialsError, "kinit"),
    "SecurityException": ("Failed to obtain user group information", CredentialsError, "kinit"),
    "StandbyException": ("Operation category READ", TransientError, "standby"),
    "RetriableException": ("NameNode still not started", TransientError, "still not started"),
    "SafeModeException": (
        "Cannot create file/f. Name node is in safe mode.",
        TransientError,
        "safe",
    ),
    "NSQuotaExceededException": ("The NameSpace quota of /q: 10", NoSpaceError, "quota of names"),
    "DSQuotaExceededException": ("The DiskSpace quota of /q: 10", NoSpaceError, "quota of space"),
    "LeaseExpiredException": ("No lease on /f", StaleError, "taken from its writer"),
    "SocketTimeoutException": ("60000 millis timeout", TransientError, "silent"),
    "SnapshotException": ("/d is snapshottable", AccessError, "snapshot"),
    "UnsupportedOperationException": ("Symlinks not supported", UnsupportedError, "Symlinks"),
    "BlockMissingException": ("Could not obtain block: BP-1", TransientError, "no living DataNode"),
    "SomethingNewException": ("strange", StorageError, "SomethingNewException"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals_are_typed_by_their_class(hdfs: WebHdfs, name: str) -> None:
    """Each Java class is its type and one sentence with the endpoint; multi-line text is cut."""
    message, kind, said = REFUSALS[name]
    body = remote(name, f"{message}\n\tat org.apache.hadoop.X")
    hdfs.answers["GETFILESTATUS"] = lambda _: (403, body, {})
    with pytest.raises(StorageError) as caught:
        hdfs.open().stat("f")
    assert type(caught.value) is kind
    assert said in str(caught.value)
    assert f"http://127.0.0.1:{hdfs.server.server_port}" in str(caught.value)
    assert "org.apache" not in str(caught.value)


@pytest.mark.parametrize(
    ("message", "kind", "said"),
    [
        ("File /f could only be replicated to 0 nodes instead of", TransientError, "no DataNode"),
        (
            "Failed to find datanode, suggest to check cluster health.",
            TransientError,
            "no DataNode",
        ),
        ("No space left on device", NoSpaceError, "full"),
        ("Source /a and destination /b must both be directories", StorageError, "directories"),
    ],
)
def test_plain_exceptions_are_typed_by_their_words(
    hdfs: WebHdfs, message: str, kind: type[StorageError], said: str
) -> None:
    """What a DataNode reports as a bare IOException."""
    hdfs.answers["create"] = lambda _: (403, remote("IOException", message), {})
    with pytest.raises(StorageError, match=said) as caught:
        hdfs.open().replace("f", b"x")
    assert type(caught.value) is kind
    assert "DataNode" in str(caught.value)


@pytest.mark.parametrize(
    ("status", "changes", "kind"),
    [
        (401, True, CredentialsError),
        (503, True, TransientError),
        (502, False, TransientError),
        (502, True, AnswerLostError),
        (500, True, AnswerLostError),
        (404, False, StorageError),
    ],
)
def test_pages_of_other_servers(
    hdfs: WebHdfs, status: int, changes: bool, kind: type[StorageError]
) -> None:
    """An answer that is no RemoteException is a gateway's: never "not found", and a change that met
    one may have happened.
    """
    page: Answer = (status, b"<html>no</html>", {})
    hdfs.answers |= {"DELETE": lambda _: page, "GETFILESTATUS": lambda _: page}
    store = hdfs.open()
    with pytest.raises(StorageError) as caught:
        (store.remove_tree if changes else store.stat)("f")
    assert type(caught.value) is kind


# -- a gateway that is no NameNode -----------------------------------------------------------------


def test_a_gateway_that_drops_the_options_of_a_rename_is_refused(hdfs: WebHdfs) -> None:
    """Where the answer says that renameoptions were not read, nothing counts as created or replaced:
    its "true" may mean "moved into a directory".
    """
    hdfs.answers["RENAME"] = lambda _: (200, b'{"boolean":true}', {})
    store = hdfs.open()
    with pytest.raises(UnsupportedError, match="renameoptions"):
        store.create("log/0", b"x", staging="tmp/w")
    with pytest.raises(UnsupportedError, match="renameoptions"):
        store.replace("hint", b"x")
    assert [one.query["renameoptions"] for one in hdfs.of("RENAME")] == ["NONE", "OVERWRITE"]


def test_a_page_is_no_answer(hdfs: WebHdfs) -> None:
    """A login page with 200 where JSON or a file belongs is an error, never "absent" and never bytes."""
    page: Answer = (200, b"<html>Log in first</html>", {"Content-Type": "text/html"})
    for op in ("GETFILESTATUS", "LISTSTATUS", "OPEN"):
        hdfs.answers[op] = lambda _: page
    store = hdfs.open()
    asks: list[Callable[[str], object]] = [store.stat, store.list, store.read]
    for ask in asks:
        with pytest.raises(StorageError, match=r"no WebHDFS|not a NameNode") as caught:
            ask("page")
        assert not isinstance(caught.value, NotFoundError)


def test_a_gateway_that_fetches_the_bytes_itself(hdfs: WebHdfs) -> None:
    """HttpFS does not redirect to a DataNode: what it reads is read."""
    body = {"Content-Type": "application/octet-stream"}
    hdfs.answers["OPEN"] = lambda _: (200, b"bytes", body)
    assert hdfs.open().read("f") == b"bytes"


# -- bytes to and from a DataNode ------------------------------------------------------------------


def test_a_datanode_that_closed_less_than_it_took(hdfs: WebHdfs) -> None:
    """Before Hadoop 3 a DataNode says 201 and then fails to close the file: what the NameNode knows of
    it is shorter, so it is never renamed to its key.
    """
    store = hdfs.open()
    with pytest.raises(TransientError, match="2 bytes were sent and HDFS has 1"):
        store.replace("hint", b"xx")
    with (
        pytest.raises(TransientError, match="2000000 bytes were sent and HDFS has 1"),
        store.open_write("f") as writer,
    ):
        writer.write(b"x" * 2_000_000)
    assert not hdfs.of("RENAME")


def assert_no_thread_stays() -> None:
    """The one that sent a body ends by itself, a moment after it gave its answer."""
    for thread in own_threads("ckptfs-webhdfs"):
        thread.join(WAIT_S)
        assert not thread.is_alive()


def test_what_was_written_may_be_overwritten(hdfs: WebHdfs) -> None:
    """write() returns when the bytes are on their way: its buffer is the caller's again."""
    hdfs.answers["GETFILESTATUS"] = status_of(9 << 20)
    buffer = bytearray(3 << 20)
    with hdfs.open().open_write("f") as writer:
        for value in range(3):
            buffer[:] = bytes([value]) * len(buffer)
            writer.write(buffer)
    [put] = hdfs.of("create")
    assert put.body == b"".join(bytes([value]) * (3 << 20) for value in range(3))
    assert [one.query["destination"] for one in hdfs.of("RENAME")] == ["/run/f"]
    assert_no_thread_stays()


def test_an_aborted_file_is_ended_in_order_and_deleted(hdfs: WebHdfs) -> None:
    """A DataNode that finds its client gone may make the file after we deleted it: the body is ended,
    its answer is awaited, and then the temporary name is deleted, once.
    """
    writer = hdfs.open().open_write("f")
    writer.write(b"x" * (2 << 20))
    writer.abort()
    [put] = hdfs.of("create")
    assert put.ended
    [delete] = hdfs.of("DELETE")
    assert delete.path == put.path
    assert hdfs.ops()[-2:] == ["create", "DELETE"]
    assert not hdfs.of("RENAME")
    assert_no_thread_stays()


def test_a_datanode_that_refuses_in_the_middle_is_heard(hdfs: WebHdfs) -> None:
    """It answers before the body's end and closes: its words are the error, not the broken pipe."""

    def full(asked: Asked) -> Answer | None:
        return (403, remote("DSQuotaExceededException", "x"), {}) if asked.op == "create" else None

    hdfs.before_body = full
    writer = hdfs.open().open_write("f")
    with pytest.raises((NoSpaceError, TransientError)) as caught, writer:
        writer.write(bytes(64 << 20))
    # A reset that overtakes the answer is all that a client can see of it.
    assert isinstance(caught.value, NoSpaceError) or "broke" in str(caught.value)
    assert not hdfs.of("RENAME")


def test_a_datanode_may_pause_for_longer_than_it_takes_to_connect(hdfs: WebHdfs) -> None:
    """A body is sent under request_timeout_s: a pause of the DataNode ends no file."""
    size = 64 << 20  # more than the sockets hold
    hdfs.answers["GETFILESTATUS"] = status_of(size)

    def pause(asked: Asked) -> None:
        if asked.op == "create":
            threading.Event().wait(1.5)

    hdfs.before_body = pause
    with hdfs.open(connect_timeout_s=0.5, request_timeout_s=WAIT_S).open_write("f") as writer:
        writer.write(bytes(size))
    assert len(hdfs.of("create")[0].body) == size


def test_a_small_file_that_never_ends_is_refused(hdfs: WebHdfs) -> None:
    """read_small asks for one byte more than may be, and takes no more from a server that sends on."""
    body = {"Content-Type": "application/octet-stream", "Content-Length": str(1 << 40)}
    hdfs.answers["open"] = lambda _: (200, bytes(32 << 20), body)
    with pytest.raises(StorageError, match="1001 bytes") as caught:
        hdfs.open().read_small("f", 1000)
    assert caught.value.errno == errno.EFBIG
    assert [one.query["length"] for one in hdfs.of("OPEN")] == ["1001"]


def test_a_range_that_is_cut_short(hdfs: WebHdfs) -> None:
    """A file that ends before is an IntegrityError; a connection that ends before is asked again."""
    hdfs.answers["GETFILESTATUS"] = status_of(10)
    with hdfs.open().open_read("f") as reader:
        with pytest.raises(IntegrityError, match="ends 9 bytes before"):
            reader.read_into(0, memoryview(bytearray(10)))
        ended = {"Connection": "close"}
        turns: Iterator[Answer] = iter(
            [
                (200, b"x" * 9, {"Content-Length": "10", **ended}),
                (200, b"x" * 9, {"Content-Length": "", **ended}),
            ]
        )
        hdfs.answers["open"] = lambda _: next(turns, (200, b"y" * 10, {}))
        for _ in range(2):
            with pytest.raises(TransientError, match="broke"):
                reader.read_into(0, memoryview(bytearray(10)))
        into = bytearray(10)
        reader.read_into(0, memoryview(into))
    assert into == b"y" * 10


# -- processes and threads -------------------------------------------------------------------------


def test_a_connection_is_kept_and_never_shared_with_a_fork(hdfs: WebHdfs) -> None:
    """One thread's requests go through one connection; a forked child opens its own, or two processes
    would read each other's answers.
    """
    store = hdfs.open()
    store.stat("f")
    store.stat("f")
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            store.stat("f")
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0
    store.stat("f")
    first, second, child, again = (one.port for one in hdfs.asked)
    assert first == second == again
    assert child != first


def test_keys_are_removed_after_the_main_thread_has_returned(hdfs: WebHdfs) -> None:
    """async_save at the end of a script: the standard thread pool takes no work any more then."""
    script = (
        "import sys, threading\n"
        "from ckptfs.storage.registry import open_storage\n"
        "store = open_storage(sys.argv[1], {'user': 'eve', 'retry_s': 0})\n"
        "def late():\n"
        "    threading.main_thread().join()\n"
        "    store.remove_many([f'd/{n}' for n in range(5)])\n"
        "    store.open_write('f').close()\n"
        "    print('done', flush=True)\n"
        "threading.Thread(target=late).start()\n"
    )
    hdfs.answers["GETFILESTATUS"] = status_of(0)
    done = subprocess.run(
        [sys.executable, "-c", script, hdfs.uri],
        capture_output=True,
        timeout=WAIT_S,
        check=False,
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    assert done.stdout == b"done\n", done.stderr
    assert {one.path for one in hdfs.of("DELETE")} >= {f"/run/d/{n}" for n in range(5)}


def test_open_webhdfs_needs_no_server() -> None:
    """Opening connects to nothing."""
    with contextlib.closing(open_webhdfs(Uri.parse(RUN), {})) as store:
        assert store.capabilities.exclusive_create
