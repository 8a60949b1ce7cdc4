"""HDFS over HTTP: the NameNode decides, a DataNode carries the bytes.

    GETFILESTATUS LISTSTATUS MKDIRS DELETE      the NameNode answers
    RENAME  renameoptions=NONE                  one wins; never *into* a directory of that name
            renameoptions=OVERWRITE             over a file, in one step
    CREATE OPEN                                 307 to a DataNode, which is spoken to directly

fsspec's ``WebHDFS`` is made with the user's options (host, user, kerberos, token, certificates ...)
and lends its session, its URL and its parameters; the operations are spelled here, because its
rename without options moves a directory into another one and its writer creates, then appends.
A rename without ``renameoptions`` is not used: it answers true or false, and true may mean "moved
into". A gateway that drops the option (HttpFS) is found by that answer, and refused.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import Any, Final
from urllib.parse import quote

from fsspec.implementations.webhdfs import WebHDFS

from ckptfs.errors import (
    MissingDriverError,
    NotFoundError,
    StaleError,
    TransientError,
    UnsupportedError,
    UriError,
)
from ckptfs.storage.base import Entry
from ckptfs.storage.clients.failures import Asked, unanswered
from ckptfs.storage.hdfs_client import HdfsClient, Over, Powers, Sink, Source, Status
from ckptfs.storage.hdfs_datanode import PutStream, Route, fetch, fetch_into, put
from ckptfs.storage.hdfs_failures import NAME_NODE, no_web_hdfs, refused
from ckptfs.storage.options import Times
from ckptfs.uri import Uri, mask_credentials

__all__ = ["WebClient"]

_INODES: Final = "/.reserved/.inodes"
_REDIRECTS: Final = (302, 303, 307, 308)
_BAD: Final = 400
_CHANGES: Final = frozenset(("RENAME", "MKDIRS", "DELETE"))
_OPTIONS: Final = {Over.REFUSE: "NONE", Over.REPLACE: "OVERWRITE"}


class WebClient(HdfsClient):
    """One NameNode over HTTP. ``options`` are those of fsspec's class; ``creating`` are added to
    every CREATE (replication, blocksize).
    """

    powers = Powers(refuses=True, replaces=True)

    def __init__(
        self, root: Uri, options: Mapping[str, Any], times: Times, creating: Mapping[str, str]
    ) -> None:
        self._root = root
        self._options = dict(options)
        self._times = times
        self._creating = dict(creating)
        self._local = threading.local()
        self._now_ms = 0
        scheme = "https" if options.get("use_https") else "http"
        self.endpoint = f"{scheme}://{options['host']}:{options.get('port', 50070)}"

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_local"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._local = threading.local()

    # -- operations ----------------------------------------------------------------------

    def read(self, path: str, most_bytes: int | None = None) -> bytes:
        part: dict[str, Any] = {} if most_bytes is None else {"length": most_bytes}
        answer = self._ask("GET", "OPEN", path, **part)
        route = self._route(answer, path, "open")
        return bytes(answer.content) if route is None else fetch(route)

    def status(self, path: str) -> Status:
        return _status(self._told("GET", "GETFILESTATUS", path, "FileStatus"))

    def list(self, path: str) -> list[tuple[Entry, Status]]:
        told = self._told("GET", "LISTSTATUS", path, "FileStatuses")["FileStatus"]
        return [
            (Entry(one["pathSuffix"], one["type"] == "DIRECTORY"), _status(one))
            for one in told
            if one["pathSuffix"]  # the listing of a file is that file, without a name
        ]

    def put(self, path: str, data: bytes) -> None:
        put(self._create(path), data)
        self._closed(path, len(data))

    def begin(self, path: str) -> Sink:
        return _Checked(self, path, PutStream(self._create(path)))

    def open(self, path: str, status: Status) -> Source:
        return _Ranges(self, path, status)

    def rename(self, source: str, target: str, over: Over) -> None:
        options = {"destination": target, "renameoptions": _OPTIONS[over]}
        answer = self._ask("PUT", "RENAME", source, target, **options)
        if answer.content.strip():
            raise UnsupportedError(
                "this gateway renames without renameoptions, which may overwrite or move into a "
                "directory: nothing can be committed through it",
                uri=self._uri(target),
                hint="HttpFS does so: speak to the NameNode itself, or to a Knox in front of it",
            )

    def make_dirs(self, path: str) -> None:
        self._ask("PUT", "MKDIRS", path)

    def delete(self, path: str, *, recursive: bool) -> bool:
        flag = "true" if recursive else "false"
        return bool(self._told("DELETE", "DELETE", path, "boolean", recursive=flag))

    def now_ms(self) -> int:
        return self._now_ms

    def close(self) -> None:
        fs = getattr(self._local, "fs", None)
        if fs is not None:
            fs.session.close()
        self._local = threading.local()

    # -- for the streams -----------------------------------------------------------------

    def read_range(self, path: str, shown: str, offset: int, out: memoryview) -> None:
        """One OPEN into ``out``; ``shown`` is the path that errors name."""
        answer = self._ask("GET", "OPEN", path, shown, offset=offset, length=len(out))
        route = self._route(answer, shown, "open")
        if route is None:
            raise UnsupportedError(
                "no redirect to a DataNode: not a NameNode", uri=self._uri(shown)
            )
        fetch_into(route, out)

    def _closed(self, path: str, size_bytes: int) -> None:
        """Does the NameNode know the file by its whole length? Before Hadoop 3 a DataNode answers
        201 before it closes the file, and an error of the close is logged there only.
        """
        known = self.status(path).size_bytes
        if known != size_bytes:
            raise TransientError(
                f"create failed: {size_bytes} bytes were sent and HDFS has {known}",
                uri=self._uri(path),
                hint="a DataNode could not close the file (a quota of space, a full disk): its log "
                "says why",
            )

    def _create(self, path: str) -> Route:
        answer = self._ask("PUT", "CREATE", path, overwrite="false", **self._creating)
        route = self._route(answer, path, "create")
        if route is None:
            raise UnsupportedError("no redirect to a DataNode: not a NameNode", uri=self._uri(path))
        return route

    # -- one request to the NameNode -----------------------------------------------------

    def _told(self, method: str, op: str, path: str, name: str, **params: object) -> Any:
        """One field of a JSON answer."""
        answer = self._ask(method, op, path, "", **params)
        try:
            return answer.json()[name]
        except (ValueError, KeyError, TypeError):
            failure = no_web_hdfs(self._asked(op, path))
        raise failure

    def _ask(self, method: str, op: str, path: str, shown: str = "", **params: object) -> Any:
        """The answer, which is no error. Redirects are not followed."""
        asked = self._asked(op, shown or path)
        fs = self._fs()
        failure: Exception
        try:
            answer = fs.session.request(
                method,
                self._mapped(fs.url + quote(path, safe="/=")),
                params={**params, **fs.pars, "op": op},
                allow_redirects=False,
                timeout=(self._times.connect_s, self._times.request_s),
            )
        except OSError as error:  # every error of requests is one
            failure = unanswered(asked, error)
        else:
            self._note_time(answer.headers.get("Date"))
            if answer.status_code < _BAD:
                return answer
            failure = refused(asked, answer.status_code, answer.content)
        # Out here: the text of a library's exception holds the URL, and that a token.
        raise failure

    def _asked(self, op: str, path: str) -> Asked:
        uri = self._uri(path)
        return Asked(NAME_NODE, op.lower(), uri, self.endpoint, changes=op in _CHANGES)

    def _route(self, answer: Any, path: str, action: str) -> Route | None:
        """To the DataNode that the NameNode named; None: it answered by itself."""
        if answer.status_code not in _REDIRECTS:
            return None
        where = self._mapped(answer.headers["Location"])
        return Route(self._fs().session, where, self._uri(path), action, self._times)

    def _mapped(self, url: str) -> str:
        """The storage option data_proxy, as fsspec applies it."""
        proxy = self._options.get("data_proxy")
        if callable(proxy):
            return str(proxy(url))
        for theirs, ours in (proxy or {}).items():
            url = url.replace(theirs, ours, 1)
        return url

    def _note_time(self, date: str | None) -> None:
        if date:
            try:
                self._now_ms = int(parsedate_to_datetime(date).timestamp() * 1000)
            except ValueError:
                self._now_ms = 0  # nobody's age is known then

    def _uri(self, path: str) -> Uri:
        key = path.removeprefix(self._root.path.rstrip("/")).lstrip("/")
        return self._root / key if key and path != key else self._root

    def _fs(self) -> Any:
        """fsspec's class, one per thread: neither requests nor its Kerberos handler promise to be
        shared. Not one that another process made.
        """
        pid = os.getpid()
        if getattr(self._local, "pid", None) != pid:
            self._local.fs = _made(self._root, self._options)
            self._local.pid = pid
        return self._local.fs


class _Checked(Sink):
    """A stream whose end is asked for at the NameNode."""

    def __init__(self, client: WebClient, path: str, stream: PutStream) -> None:
        self._client = client
        self._path = path
        self._stream = stream
        self._sent = 0

    def send(self, data: memoryview) -> None:
        self._stream.send(data)
        self._sent += len(data)

    def finish(self) -> None:
        self._stream.finish()
        self._client._closed(self._path, self._sent)  # noqa: SLF001 - one module, two classes

    def drop(self) -> bool:
        return self._stream.drop()


class _Ranges(Source):
    """Ranges of one inode: a file renamed over the name meanwhile is not read in its place."""

    def __init__(self, client: WebClient, path: str, status: Status) -> None:
        self._client = client
        self._path = path
        self._id = status.file_id
        self._by_id = status.file_id is not None

    def read_into(self, offset: int, out: memoryview) -> None:
        if not self._by_id:
            self._client.read_range(self._path, self._path, offset, out)
            return
        try:
            self._client.read_range(f"{_INODES}/{self._id}", self._path, offset, out)
        except (NotFoundError, UnsupportedError):
            if self._client.status(self._path).file_id != self._id:
                raise StaleError(
                    "the file was replaced or removed meanwhile",
                    uri=self._client._uri(self._path),  # noqa: SLF001 - one module, two classes
                    hint="open it again",
                ) from None
            self._by_id = False  # a federation's router knows no inodes
            self._client.read_range(self._path, self._path, offset, out)

    def close(self) -> None:
        return


def _made(root: Uri, options: Mapping[str, Any]) -> Any:
    kerberos = {}
    if options.get("kerberos"):
        # Or requests-kerberos empties the body of an error whose sender did not prove itself, and
        # "no such file" reads as "no WebHDFS".
        told = options.get("kerb_kwargs") or {}
        kerberos = {"kerb_kwargs": {"sanitize_mutual_error_response": False, **told}}
    try:
        return WebHDFS(**{**options, **kerberos, "skip_instance_cache": True})
    except ImportError as error:
        raise MissingDriverError(
            f"kerberos=True needs a library that does not import: {error}",
            uri=root,
            hint="pip install requests-kerberos",
        ) from error
    except ValueError as error:
        raise UriError(f"storage options: {mask_credentials(str(error))}", uri=root) from error


def _status(told: Mapping[str, Any]) -> Status:
    return Status(
        int(told["length"]),
        told["type"] == "DIRECTORY",
        int(told.get("modificationTime") or 0),
        told.get("fileId") or None,
    )
