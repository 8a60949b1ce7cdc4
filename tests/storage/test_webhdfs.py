"""HDFS without a server: options, what its refusals mean, gateways that are none.

hdfs:// is in test_fsspec_hdfs.py; what needs a NameNode is in tests/servers/test_hdfs*.py.
"""

from __future__ import annotations

import contextlib
import http.server
import json
import pickle
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from ckptfs.errors import (
    AccessError,
    AlreadyExistsError,
    AnswerLostError,
    CredentialsError,
    NoSpaceError,
    NotFoundError,
    StaleError,
    StorageError,
    TransientError,
    UnsupportedError,
    UriError,
)
from ckptfs.storage.clients.failures import Asked
from ckptfs.storage.hdfs_failures import DATA_NODE, NAME_NODE, refused
from ckptfs.storage.hdfs_options import web_options
from ckptfs.storage.registry import open_storage
from ckptfs.storage.webhdfs import WebHdfsStorage, open_webhdfs
from ckptfs.uri import Uri

RUN = "webhdfs://namenode:9870/runs/a"


def web(uri: str = RUN, **options: Any) -> dict[str, Any]:
    """What fsspec's class would be given."""
    return web_options(Uri.parse(uri), options)[1]


# -- options -------------------------------------------------------------------------------------


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


def test_new_files_can_be_told_their_replication() -> None:
    """replication and block_size_bytes become parameters of every CREATE."""
    found = web_options(Uri.parse(RUN), {"replication": 2, "block_size_bytes": "1048576"})
    assert found[2] == {"replication": "2", "blocksize": "1048576"}


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
    assert again._client._options == store._client._options  # type: ignore[attr-defined]
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
def test_refusals_are_typed_by_their_class(name: str) -> None:
    """Each Java class is its type and one sentence with the endpoint; multi-line text is cut."""
    message, kind, said = REFUSALS[name]
    asked = Asked(NAME_NODE, "rename", Uri.parse(RUN), "http://namenode:9870", changes=True)
    error = refused(asked, 403, remote(name, f"{message}\n\tat org.apache.hadoop.X"))
    assert type(error) is kind
    assert said in str(error)
    assert "http://namenode:9870" in str(error)
    assert "org.apache" not in str(error)


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
    message: str, kind: type[StorageError], said: str
) -> None:
    """What HDFS tells as a bare IOException."""
    asked = Asked(DATA_NODE, "create", Uri.parse(RUN), "http://dn:9864")
    error = refused(asked, 403, remote("IOException", message))
    assert type(error) is kind
    assert said in str(error)


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
def test_pages_of_other_servers(status: int, changes: bool, kind: type[StorageError]) -> None:
    """An answer that is no RemoteException is a gateway's: never "not found", and a change that met
    one may have happened.
    """
    asked = Asked(NAME_NODE, "delete", Uri.parse(RUN), "http://gateway", changes=changes)
    assert type(refused(asked, status, b"<html>no</html>")) is kind


def remote(name: str, message: str) -> bytes:
    """The body of a refusal."""
    told = {"exception": name, "javaClassName": f"org.apache.hadoop.{name}", "message": message}
    return json.dumps({"RemoteException": told}).encode()


# -- a gateway that is no NameNode -----------------------------------------------------------------


class _Gateway(http.server.BaseHTTPRequestHandler):
    """HttpFS in this one respect: it drops renameoptions and answers true or false."""

    def do_PUT(self) -> None:
        if self.headers.get("Transfer-Encoding"):
            while size := int(self.rfile.readline(), 16):
                self.rfile.read(size + 2)
            self.rfile.readline()
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        port = self.headers["Host"].rpartition(":")[2]
        if "op=CREATE" in self.path and "data=true" not in self.path:
            self._say(307, b"", Location=f"http://127.0.0.1:{port}{self.path}&data=true")
        elif "op=CREATE" in self.path:
            self._say(201, b"")
        else:
            self._say(200, b'{"boolean":true}')

    def do_GET(self) -> None:
        if "/page" in self.path:
            self._say(200, b"<html>Log in first</html>")
            return
        self._say(200, b'{"FileStatus":{"length":1,"type":"FILE"}}')

    def do_DELETE(self) -> None:
        self._say(200, b'{"boolean":true}')

    def _say(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Quiet."""


@pytest.fixture
def gateway() -> Iterator[str]:
    """Its URI."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Gateway) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"webhdfs://127.0.0.1:{server.server_port}/run"
        server.shutdown()
        thread.join()


def test_a_gateway_that_drops_the_options_of_a_rename_is_refused(gateway: str) -> None:
    """Where the answer says that renameoptions were not read, nothing counts as created or replaced:
    its "true" may mean "moved into a directory".
    """
    store = open_storage(gateway, {"user": "eve", "retry_s": 0})
    with pytest.raises(UnsupportedError, match="renameoptions"):
        store.create("log/0", b"x", staging="tmp/w")
    with pytest.raises(UnsupportedError, match="renameoptions"):
        store.replace("hint", b"x")


def test_a_page_is_no_answer(gateway: str) -> None:
    """A login page with 200 where JSON belongs is an error that says so, never "absent"."""
    store = open_storage(gateway, {"user": "eve", "retry_s": 0})
    for ask in (store.stat, store.list):
        with pytest.raises(StorageError, match="no WebHDFS") as caught:
            ask("page")
        assert not isinstance(caught.value, NotFoundError)


def test_a_datanode_that_closed_less_than_it_took(gateway: str) -> None:
    """Before Hadoop 3 a DataNode says 201 and then fails to close the file: what the NameNode knows of
    it is shorter, so it is never renamed to its key.
    """
    store = open_storage(gateway, {"user": "eve", "retry_s": 0})
    with pytest.raises(TransientError, match="2 bytes were sent and HDFS has 1"):
        store.replace("hint", b"xx")
    with (
        pytest.raises(TransientError, match="2000000 bytes were sent and HDFS has 1"),
        store.open_write("f") as writer,
    ):
        writer.write(b"x" * 2_000_000)


def test_open_hdfs_needs_no_server() -> None:
    """Opening connects to nothing."""
    with contextlib.closing(open_webhdfs(Uri.parse(RUN), {})) as store:
        assert store.capabilities.exclusive_create
