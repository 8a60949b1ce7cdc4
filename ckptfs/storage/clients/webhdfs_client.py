"""WebHDFS over ``requests``: one try for each operation, with a typed error.

    GETFILESTATUS LISTSTATUS MKDIRS DELETE      the NameNode answers
    RENAME  renameoptions=NONE                  fails if the target exists: of several writers one wins
            renameoptions=OVERWRITE             replaces a file, in one step
    CREATE OPEN                                 the NameNode redirects to a DataNode, which carries the bytes

A RENAME without ``renameoptions`` is never sent: its "true" may mean "moved into a directory". A gateway
that drops the option (HttpFS) is detected by its answer and refused.

fsspec's ``WebHDFS`` makes the session and the parameters, so that storage options have the same meaning as
there. Its own file operations are not used: its rename has no options, and its writer creates a file and
then appends to it.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, Final, Literal
from urllib.parse import quote, urlsplit

import requests
import requests.adapters
from fsspec.implementations.webhdfs import WebHDFS

from ckptfs.errors import (
    AccessError,
    AlreadyExistsError,
    AnswerLostError,
    CredentialsError,
    IntegrityError,
    MissingDriverError,
    NoSpaceError,
    NotFoundError,
    StaleError,
    StorageError,
    TransientError,
    UnsupportedError,
    UriError,
)
from ckptfs.storage.clients.http_errors import (
    Dialect,
    Reason,
    RequestContext,
    clean,
    no_response_error,
)
from ckptfs.storage.options import Times
from ckptfs.storage.threads import Threads
from ckptfs.uri import Uri, mask_credentials

__all__ = ["FileStatus", "RenameOptions", "StreamedPut", "WebHdfsClient"]

_PIECE_BYTES: Final = 1 << 20  # one call of send or recv
_ERROR_BYTES: Final = 64 << 10
_ABORT_S: Final = 5.0
_ERRORS: Final = 400
_BODY: Final = "application/octet-stream"

RenameOptions = Literal["NONE", "OVERWRITE"]


@dataclass(frozen=True, slots=True)
class FileStatus:
    """What the NameNode knows of one path."""

    size_bytes: int
    is_dir: bool
    modified_ms: int
    file_id: int | None  # the inode's number, whatever the file is called; None: not in the answer


class WebHdfsClient:
    """One NameNode and its DataNodes: one try for each operation, with a typed error.

    Thread-safe and picklable. A session is used by one thread at a time, because neither ``requests``
    nor its Kerberos handler promise more, and never by two processes: after a fork both would read
    each other's answers from one connection.

    Errors of every operation:
        NotFoundError: There is no such path, or its parent is missing.
        TransientError: Worth a retry. Nothing happened, or only to a temporary file.
        AnswerLostError: A change was requested, and no answer says whether it happened.
    """

    def __init__(
        self, root: Uri, options: Mapping[str, Any], times: Times, creating: Mapping[str, str]
    ) -> None:
        self._root = root
        self._options = dict(options)
        self._times = times
        self._creating = dict(creating)
        self._idle: tuple[int, deque[Any]] = (0, deque())  # of one process
        self.now_ms = 0  # the NameNode's clock at its last answer; 0: unknown
        scheme = "https" if options.get("use_https") else "http"
        self.endpoint = f"{scheme}://{options['host']}:{options.get('port', 50070)}"

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_idle": (0, deque())}

    # -- operations --

    def status(self, path: str) -> FileStatus:
        """Return size and kind of one path."""
        return _status(self._field("GET", "GETFILESTATUS", path, "FileStatus"))

    def list(self, path: str) -> list[tuple[str, FileStatus]]:
        """Return the entries directly in a directory, in any order."""
        found = self._field("GET", "LISTSTATUS", path, "FileStatuses")["FileStatus"]
        # The listing of a file contains that file, without a name.
        return [(one["pathSuffix"], _status(one)) for one in found if one["pathSuffix"]]

    def make_dirs(self, path: str) -> None:
        """Make a directory and its missing parents; existing is success."""
        self._metadata("PUT", "MKDIRS", path)

    def delete(self, path: str, *, recursive: bool) -> bool:
        """Delete a path. Returns whether anything was there.

        AlreadyExistsError: it is a directory that is not empty.
        """
        flag = "true" if recursive else "false"
        return bool(self._field("DELETE", "DELETE", path, "boolean", recursive=flag))

    def rename(self, source: str, target: str, rename_options: RenameOptions) -> None:
        """Move one file. AlreadyExistsError: ``rename_options`` is "NONE" and the target exists."""
        answer = self._metadata(
            "PUT", "RENAME", source, target, destination=target, renameoptions=rename_options
        )
        if answer.content.strip():
            raise UnsupportedError(
                "this gateway renames without renameoptions, which may overwrite or move into a "
                "directory: nothing can be committed through it",
                uri=self._uri(target),
                hint="HttpFS does this: connect to the NameNode itself, or to a Knox gateway",
            )

    def put(self, path: str, body: bytes | Iterator[memoryview]) -> None:
        """Make one file and its missing parents. Call ``check_size`` before you rely on it."""
        with self._session() as files:
            answer = self._name_node(
                files, "PUT", "CREATE", path, overwrite="false", **self._creating
            )
            with answer as redirect:
                url = self._redirect(redirect, path)
            with self._data_node(
                files, "PUT", url, path, "create", data=body, headers={"Content-Type": _BODY}
            ):
                return

    def check_size(self, path: str, size_bytes: int) -> None:
        """Compare a closed file with what was sent.

        Before Hadoop 3 a DataNode answers 201 before it closes the file, and an error of the close is
        in its log only. A DataNode that ends the request early may also answer 201.
        """
        known = self.status(path).size_bytes
        if known != size_bytes:
            raise TransientError(
                f"create failed: {size_bytes} bytes were sent and HDFS has {known}",
                uri=self._uri(path),
                hint="a DataNode could not close the file (quota or a full disk): see the log of "
                "the DataNode",
            )

    def read(self, path: str, most_bytes: int | None = None) -> bytes:
        """Read all bytes of a small file, or the first ``most_bytes``: no more are received."""
        wanted = {} if most_bytes is None else {"length": most_bytes}
        data = bytearray()
        with self._open(path, path, **wanted) as response:
            for piece in response.iter_content(_PIECE_BYTES):
                data += piece
                if most_bytes is not None and len(data) >= most_bytes:
                    return bytes(data[:most_bytes])
            _check_complete(response, len(data))
        return bytes(data)

    def read_into(
        self, path: str, offset: int, out: memoryview, *, shown: str | None = None
    ) -> None:
        """Fill ``out`` with one range. Errors name the path ``shown``.

        IntegrityError: the file ends before the range does.
        """
        shown = shown or path
        with self._open(path, shown, offset=offset, length=len(out)) as response:
            size = int(response.headers.get("Content-Length") or len(out))
            if size < len(out):
                raise IntegrityError(
                    f"the file ends {len(out) - size} bytes before the end of the range",
                    uri=self._uri(shown),
                )
            got = 0
            for piece in response.iter_content(_PIECE_BYTES):
                view = memoryview(piece)[: len(out) - got]
                out[got : got + len(view)] = view
                got += len(view)
                if len(view) < len(piece):
                    break
            if got < len(out):
                raise requests.ConnectionError("the body ended early")

    def close(self) -> None:
        """Close the idle connections of this process; the next operation opens others."""
        (pid, idle), self._idle = self._idle, (0, deque())
        while pid == os.getpid() and idle:
            idle.pop().session.close()

    # -- one request --

    @contextlib.contextmanager
    def _session(self) -> Iterator[Any]:
        """Yield fsspec's class with its session, for one thread at a time."""
        pid, idle = self._idle
        if pid != os.getpid():
            # Not the parent's. If two threads come here at once, one deque of idle sessions is lost.
            idle = deque()
            self._idle = (os.getpid(), idle)
        try:
            files = idle.pop()
        except IndexError:
            files = _connect(self._root, self._options, self._times)
        try:
            yield files
        finally:
            idle.append(files)

    def _field(self, method: str, op: str, path: str, name: str, **params: object) -> Any:
        """Return one field of a JSON answer."""
        answer = self._metadata(method, op, path, "", **params)
        try:
            return answer.json()[name]
        except (ValueError, KeyError, TypeError):
            failure = _no_webhdfs(self._context(op, path), "this is no WebHDFS")
        raise failure

    def _metadata(
        self, method: str, op: str, path: str, shown: str = "", **params: object
    ) -> requests.Response:
        """Do one operation that the NameNode answers by itself, and read the whole answer."""
        with (
            self._session() as files,
            self._name_node(files, method, op, path, shown, **params) as answer,
        ):
            _drain(answer)
        return answer

    @contextlib.contextmanager
    def _open(self, path: str, shown: str, **params: object) -> Iterator[requests.Response]:
        """Yield the response that contains a file's bytes."""
        with self._session() as files:
            with self._name_node(files, "GET", "OPEN", path, shown, **params) as answer:
                if answer.headers.get("Content-Type") == _BODY and not answer.is_redirect:
                    yield answer  # a gateway that fetches the bytes itself
                    return
                url = self._redirect(answer, shown)
            with self._data_node(files, "GET", url, shown, "open") as answer:
                yield answer

    def _name_node(
        self, files: Any, method: str, op: str, path: str, shown: str = "", **params: object
    ) -> contextlib.AbstractContextManager[requests.Response]:
        url = self._mapped(files.url + quote(path, safe="/="))
        context = self._context(op, shown or path)
        return self._exchange(
            files.session, method, url, context, params={**params, **files.pars, "op": op}
        )

    def _data_node(
        self, files: Any, method: str, url: str, path: str, action: str, **more: Any
    ) -> contextlib.AbstractContextManager[requests.Response]:
        parts = urlsplit(url)
        endpoint = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
        # It counts as no change: a broken PUT leaves a file only under a temporary name that is never read.
        context = RequestContext(_DATA_NODE, action, self._uri(path), endpoint)
        return self._exchange(files.session, method, url, context, **more)

    @contextlib.contextmanager
    def _exchange(
        self, session: requests.Session, method: str, url: str, context: RequestContext, **more: Any
    ) -> Iterator[requests.Response]:
        """Make one request and yield its response, which is no error.

        Redirects are not followed.
        """
        failure: Exception
        try:
            with session.request(
                method,
                url,
                stream=True,
                allow_redirects=False,
                timeout=(self._times.connect_s, self._times.request_s),
                **more,
            ) as response:
                if response.status_code < _ERRORS:
                    if context.dialect is _NAME_NODE:
                        self._note_time(response.headers.get("Date"))
                    yield response
                    return
                body = next(response.iter_content(_ERROR_BYTES), b"")
                failure = _refusal(context, response.status_code, body)
        except StorageError:
            raise
        except OSError as error:  # every error of requests is one
            failure = no_response_error(context, error)
        # Outside of the except block: the text of a library's exception contains the URL, and that
        # a token.
        raise failure

    def _redirect(self, answer: requests.Response, path: str) -> str:
        """Return the DataNode's URL."""
        _drain(answer)
        if not answer.is_redirect:
            raise UnsupportedError("no redirect to a DataNode: not a NameNode", uri=self._uri(path))
        return self._mapped(answer.headers["Location"])

    def _mapped(self, url: str) -> str:
        """Apply the storage option data_proxy, as fsspec does."""
        proxy = self._options.get("data_proxy")
        if callable(proxy):
            return str(proxy(url))
        for original, replacement in (proxy or {}).items():
            url = url.replace(original, replacement, 1)
        return url

    def _note_time(self, date: str | None) -> None:
        if date:
            try:
                self.now_ms = int(parsedate_to_datetime(date).timestamp() * 1000)
            except ValueError:
                self.now_ms = 0

    def _context(self, op: str, path: str) -> RequestContext:
        changes = op in ("RENAME", "MKDIRS", "DELETE")
        return RequestContext(
            _NAME_NODE, op.lower(), self._uri(path), self.endpoint, changes=changes
        )

    def _uri(self, path: str) -> Uri:
        key = path.removeprefix(self._root.path.rstrip("/")).lstrip("/")
        return self._root / key if key and path != key else self._root


class StreamedPut:
    """One PUT with a body that is sent piece by piece.

    ``requests`` pulls a body and our callers push one, so the request runs in a thread of its own,
    which waits for the next piece. ``send`` returns when the connection has taken its piece:
    nothing is copied in order to wait, and the caller may reuse the buffer.
    """

    def __init__(self, put: Callable[[Iterator[memoryview]], None]) -> None:
        self._changed = threading.Condition()
        self._piece: memoryview | None = None
        self._wants_piece = False  # connected, and all pieces so far are taken
        self._ended = False
        self._cancelled = False
        threads = Threads(1, "ckptfs-webhdfs-put")
        try:
            self._request = threads.submit(put, self._body())
        except RuntimeError as error:
            raise StorageError(f"create failed: no thread can be started: {error}") from error
        threads.shutdown(wait=False)
        self._request.add_done_callback(lambda _: self._wake())
        try:
            with self._changed:
                self._wait()
        except BaseException:
            self.abort()
            raise

    def send(self, data: memoryview) -> None:
        """Send bytes. Raises the error of the request if it ended."""
        with self._changed:
            self._piece, self._wants_piece = data, False
            self._changed.notify_all()
            self._wait()

    def finish(self) -> None:
        """End the body normally and wait for the answer."""
        self._end()
        self._request.result()

    def abort(self) -> bool:
        """End the request. Never raises; harmless after it ended.

        The body is ended normally if possible: a DataNode that finds the connection gone may make
        the file after we deleted it, and only its answer shows that it will not.

        Returns:
            Whether it answered, and will not make the file any more.
        """
        with self._changed:
            self._cancelled = not self._wants_piece
        self._end()
        try:
            self._request.result(_ABORT_S)
        except Exception:  # noqa: BLE001 - also TimeoutError: what is left is deleted late
            return False
        return True

    def _end(self) -> None:
        with self._changed:
            self._piece, self._wants_piece, self._ended = None, False, True
            self._changed.notify_all()

    def _wait(self) -> None:
        self._changed.wait_for(lambda: self._wants_piece or self._request.done())
        if self._request.done():
            self._request.result()
            raise TransientError("create failed: the DataNode answered before the file's end")

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _body(self) -> Iterator[memoryview]:
        while (data := self._next_piece()) is not None:
            for start in range(0, len(data), _PIECE_BYTES):
                self._raise_if_cancelled()
                yield data[start : start + _PIECE_BYTES]

    def _next_piece(self) -> memoryview | None:
        with self._changed:
            self._piece = None
            if not self._ended:
                self._wants_piece = True
                self._changed.notify_all()
                self._changed.wait_for(lambda: not self._wants_piece)
            self._raise_if_cancelled()
            return self._piece

    def _raise_if_cancelled(self) -> None:
        if self._cancelled:
            raise _PutCancelledError


class _PutCancelledError(Exception):
    """Ends a request in the middle of its body: the connection is closed."""


class _PatientAdapter(requests.adapters.HTTPAdapter):
    """Sends a body under the timeout of the request.

    urllib3 sends it under the timeout for connecting. A DataNode that writes to disk may pause for
    longer than that, and a stream that was cut cannot be sent again.
    """

    def __init__(self, send_s: float) -> None:
        self._send_s = send_s
        super().__init__()

    def get_connection_with_tls_context(self, *args: Any, **kwargs: Any) -> Any:
        pool: Any = super().get_connection_with_tls_context(*args, **kwargs)
        pool.ConnectionCls = _patient(type(pool).ConnectionCls, self._send_s)
        return pool


def _patient(connection_class: Any, send_s: float) -> Any:
    class Patient(connection_class):  # type: ignore[misc]
        def request(self, *args: Any, **kwargs: Any) -> None:
            if self.sock is None:
                self.connect()
            self.timeout = send_s
            super().request(*args, **kwargs)

    return Patient


def _connect(root: Uri, options: Mapping[str, Any], times: Times) -> Any:
    """Return fsspec's class with a session of its own."""
    more: dict[str, Any] = {"skip_instance_cache": True}
    if options.get("kerberos"):
        # Otherwise requests-kerberos empties the body of an error if the sender did not prove its
        # identity, and "no such file" reads as "no WebHDFS".
        given = options.get("kerb_kwargs") or {}
        more["kerb_kwargs"] = {"sanitize_mutual_error_response": False, **given}
    try:
        files: Any = WebHDFS(**{**options, **more})
    except ImportError as error:
        raise MissingDriverError(
            f"kerberos=True needs a library that cannot be imported: {error}",
            uri=root,
            hint="pip install requests-kerberos",
        ) from error
    except ValueError as error:
        raise UriError(f"storage options: {mask_credentials(str(error))}", uri=root) from error
    for scheme in ("http://", "https://"):
        files.session.mount(scheme, _PatientAdapter(times.request_s))
    files.session.headers["Accept-Encoding"] = "identity"  # lengths are compared
    return files


def _drain(answer: requests.Response) -> None:
    """Read the body, so that the connection can be used again."""
    len(answer.content)


def _check_complete(response: requests.Response, got: int) -> None:
    size = response.headers.get("Content-Length")
    if size is not None and int(size) != got:  # urllib3 before 2 does not check
        raise requests.ConnectionError("the body ended early")


def _status(found: Mapping[str, Any]) -> FileStatus:
    return FileStatus(
        int(found["length"]),
        found["type"] == "DIRECTORY",
        int(found.get("modificationTime") or 0),
        found.get("fileId") or None,
    )


# -- errors ------------------------------------------------------------------------------------

_TLS_HINT: Final = "name the certificate authority's file in session_verify"
_NAME_NODE: Final = Dialect(
    "WebHDFS",
    bucket="NameNode",
    hints={
        Reason.NO_HOST: "check the host of the URI and this machine's DNS",
        Reason.REFUSED: "the port is dfs.namenode.http-address (9870, before Hadoop 3 50070), "
        "not the RPC port; and is the NameNode up?",
        Reason.CERTIFICATE: _TLS_HINT,
        Reason.NOT_TLS: "check use_https and the port: dfs.namenode.https-address is another one",
    },
)
_DATA_NODE: Final = Dialect(
    "WebHDFS",
    bucket="DataNode",
    hints={
        Reason.NO_HOST: "the NameNode redirects clients to the DataNodes' own names: make these names "
        "resolve here, or map them to other addresses with the storage option data_proxy",
        Reason.REFUSED: "is that DataNode up, and is its HTTP port open from here? data_proxy maps "
        "addresses that differ here",
        Reason.UNREACHABLE: "is its HTTP port open from here? data_proxy maps addresses that differ",
        Reason.BROKEN: "its log says why; before Hadoop 3 a quota of space that is used up ends so too",
        Reason.CERTIFICATE: _TLS_HINT,
    },
)

# By the simple name of the Java class: Hadoop moved classes between packages, and never renamed them.
# {said} is the message, which names the path, the quota or the user; those about tokens are not repeated.
_REFUSALS: Final[dict[str, tuple[type[StorageError], str]]] = {
    "FileNotFoundException": (NotFoundError, "no such file"),
    "PathNotFoundException": (NotFoundError, "no such file"),
    "ParentNotDirectoryException": (NotFoundError, "a component of the path is a file"),
    "FileAlreadyExistsException": (AlreadyExistsError, "it exists"),
    "PathIsNotEmptyDirectoryException": (AlreadyExistsError, "the directory is not empty"),
    "AccessControlException": (AccessError, "this user may not do it{said}"),
    "AuthorizationException": (AccessError, "this user may not act for another{said}"),
    "SnapshotException": (AccessError, "a snapshot holds it{said}"),
    "SnapshotAccessControlException": (AccessError, "a snapshot cannot be changed"),
    "InvalidToken": (CredentialsError, "the delegation token is not valid any more"),
    "TokenExpiredException": (CredentialsError, "the credentials have expired"),
    "AuthenticationException": (CredentialsError, "it does not accept these credentials"),
    "SecurityException": (CredentialsError, "it does not accept these credentials"),
    "StandbyException": (TransientError, "this NameNode is in standby: another one is active"),
    "SafeModeException": (TransientError, "HDFS is in safe mode and takes no changes"),
    "RetriableException": (TransientError, "it asks to try again later{said}"),
    "ObserverRetryOnActiveException": (TransientError, "only the active NameNode may"),
    "ServerTooBusyException": (TransientError, "it is too busy"),
    "SocketTimeoutException": (TransientError, "a DataNode was silent for too long"),
    "ConnectException": (TransientError, "it could not reach another node{said}"),
    "NoRouteToHostException": (TransientError, "it could not reach another node{said}"),
    "ClosedChannelException": (TransientError, "a connection between DataNodes broke"),
    "AlreadyBeingCreatedException": (TransientError, "another writer holds the file"),
    "RecoveryInProgressException": (TransientError, "its lease is being recovered"),
    "BlockMissingException": (TransientError, "no living DataNode holds a block of it{said}"),
    "NoDataNode": (TransientError, "no DataNode accepts a block: all are dead, full or excluded"),
    "NSQuotaExceededException": (NoSpaceError, "the quota of names is used up{said}"),
    "DSQuotaExceededException": (NoSpaceError, "the quota of space is used up{said}"),
    "QuotaByStorageTypeExceededException": (NoSpaceError, "a storage type's quota is used up"),
    "DiskOutOfSpaceException": (NoSpaceError, "a DataNode's disk is full"),
    "LeaseExpiredException": (StaleError, "the file was taken from its writer"),
    "UnsupportedOperationException": (UnsupportedError, "it cannot do that{said}"),
}
_HINTS: Final[dict[str | type[StorageError], str]] = {
    AccessError: "check owner, group and mode, and the storage option user (or HADOOP_USER_NAME)",
    "AuthorizationException": "allow it with hadoop.proxyuser.* on the NameNode, or drop proxy_to",
    "SnapshotException": "delete the snapshots of this directory first",
    CredentialsError: "renew them: kinit, or a new delegation token",
    "StandbyException": "name the active NameNode, or a proxy that follows it; hdfs://nameservice finds it",
    "SafeModeException": "wait until enough blocks are reported, or run hdfs dfsadmin -safemode leave",
    "NoDataNode": "look at hdfs dfsadmin -report",
    "BlockMissingException": "bring the DataNodes back: hdfs fsck names the blocks",
    StaleError: "look it up again",
}
# A plain IOException is recognised by its text.
_PHRASES: Final = (
    ("could only be replicated to", "NoDataNode"),
    ("could only be written to", "NoDataNode"),
    ("Failed to find datanode", "NoDataNode"),
    ("Name node is in safe mode", "SafeModeException"),
    ("Could not obtain block", "BlockMissingException"),
    ("is not supported in state standby", "StandbyException"),
    ("InvalidToken", "InvalidToken"),
    ("No space left on device", "DiskOutOfSpaceException"),
)


def _refusal(context: RequestContext, status: int, body: bytes) -> StorageError:
    """Return the error for an error response. It is not raised yet."""
    name, message = _remote_exception(body)
    for phrase, meant in _PHRASES:
        if phrase in message:
            name = meant
    first_line = message.partition("\n")[0]
    message = f" ({clean(first_line)})" if first_line else ""
    if name in _REFUSALS:
        kind, sentence = _REFUSALS[name]
        hint = _HINTS.get(name) or _HINTS.get(kind)
        return _error(context, kind, sentence.format(said=message), hint)
    if name:
        return _error(context, StorageError, f"it answered {name}{message}", None)
    return _page(context, status, body)


def _page(context: RequestContext, status: int, body: bytes) -> StorageError:
    """Return the error for a page of a proxy, a wrong port or a servlet container.

    It is never NotFoundError.
    """
    if status == 401:  # noqa: PLR2004
        hint = "pass kerberos=True after kinit, a delegation token, or user"
        return _error(context, CredentialsError, "it wants to know who this is", hint)
    if status in (429, 503):
        return _error(context, TransientError, f"it is too busy ({status})", None)
    if status >= 500:  # noqa: PLR2004
        kind = AnswerLostError if context.changes else TransientError
        return _error(context, kind, f"it failed with {status}", None)
    if b"Hadoop IPC port" in body:
        return _no_webhdfs(context, "that is the RPC port")
    return _no_webhdfs(context, f"this is no WebHDFS: it answered {status}")


def _no_webhdfs(context: RequestContext, sentence: str) -> StorageError:
    hint = "use the port of dfs.namenode.http-address, and check dfs.webhdfs.enabled"
    return _error(context, StorageError, sentence, hint)


def _error(
    context: RequestContext, kind: type[StorageError], sentence: str, hint: str | None
) -> StorageError:
    verb = "may have happened" if kind is AnswerLostError else "failed"
    where = f"{context.dialect.bucket} {context.endpoint}"
    return kind(f"{context.action} {verb}: {where}: {sentence}", uri=context.uri, hint=hint)


def _remote_exception(body: bytes) -> tuple[str, str]:
    """Return class and message of an error of HDFS; both are empty if it is none."""
    try:
        found = json.loads(body)["RemoteException"]
        return str(found["exception"]), str(found.get("message") or "")
    except (ValueError, KeyError, TypeError):
        return "", ""
