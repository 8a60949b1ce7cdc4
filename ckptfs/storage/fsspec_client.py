"""One fsspec client: opened lazily, once per process, its errors typed and its secrets masked.

    Client.fs       the filesystem, listing caches off; a new one after a fork
    Client.at(key)  the path of a key in the filesystem's own spelling
    Client.below    what lies below a key;  Client.move  one file over another: no glob patterns
    Client.said     a context: whatever the library raises becomes a typed error with the URI

Client libraries raise what they like, OSErrors with and without an errno, and types of their own:
all are caught here, at the edge, and only here.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final

import fsspec
from fsspec.asyn import AsyncFileSystem

from ckptfs.errors import (
    AccessError,
    AnswerLostError,
    CkptfsError,
    CredentialsError,
    MissingDriverError,
    NotFoundError,
    StorageError,
    TransientError,
    UnsupportedError,
)
from ckptfs.storage.clients.base import BucketLibrary
from ckptfs.storage.clients.forks import ProcessLock
from ckptfs.storage.clients.reasons import CODES, STATUSES, Reason
from ckptfs.storage.os_errors import typed
from ckptfs.uri import Uri, mask_credentials

__all__ = ["Client"]

# One connection that answers one question after another: two threads would read each other's answers.
_ONE_AT_A_TIME = frozenset(("sftp", "ssh", "ftp"))
_WEBDAV = frozenset(("webdav", "dav"))
_BUCKETS = frozenset(("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oss"))
_AZURE = frozenset(("az", "abfs", "abfss"))
# libhdfs: a Java virtual machine in this process.
_JAVA = frozenset(("hdfs", "arrow_hdfs"))
_JAVA_LIBRARIES = ("libjvm", "libhdfs", "JNI")
# Of libraries that give a refusal no errno: adlfs, gcsfs.
_REFUSALS: Final[dict[Reason | None, tuple[type[StorageError], str]]] = {
    Reason.FORBIDDEN: (
        AccessError,
        "these credentials may not do that here: allow it, or use others",
    ),
    Reason.WRONG_CREDENTIALS: (CredentialsError, "check the credentials, or when they end"),
    Reason.NO_CREDENTIALS: (CredentialsError, "give credentials in storage_options"),
    Reason.EXPIRED: (CredentialsError, "renew the credentials"),
}
_JAVA_ERRORS = (None, errno.EIO, 255)  # a Java exception that has no errno of its own
_SERVER_ERRORS = 500
_GCSFS_LISTING = re.compile(
    r"b/[^/]+/o"
)  # the path of a request for a bucket, not for an object in it
# What an answer says of a change by itself: it was not done, or nobody knows.
_NOT_DONE = frozenset(
    (Reason.THROTTLED, Reason.CONFLICT, Reason.SLOW_BODY, Reason.DAMAGED, Reason.CLOCK)
)
_NETWORK = ("Timeout", "Connection", "Disconnected", "ServerError", "ServiceUnavailable")


class Client:
    """The library behind one root. Picklable (with its options, secrets included); thread-safe.

    is_bucket: an object store, where a stream can be thrown away and a PUT is one step. library: how
    requests are made that fsspec has no word for; it then holds the options.
    """

    def __init__(
        self, root: Uri, options: Mapping[str, Any], library: BucketLibrary | None = None
    ) -> None:
        self.root = root
        self.library = library
        self.protocol = root.protocol.removeprefix("fsspec+")
        self.is_bucket = self.protocol in _BUCKETS
        self.bucket = root.userinfo or root.authority if library is not None else ""
        self._options = dict(options)
        self._set_locks()

    def _set_locks(self) -> None:
        self._lock, self._turn = ProcessLock(), ProcessLock()
        self._made: set[str] = set()  # directories that were there, or made
        self._open: tuple[int, Any, str] | None = None
        self._has_container = False

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_lock": None, "_turn": None, "_open": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._set_locks()

    def uri(self, key: str) -> Uri:
        """The full URI of a key."""
        return self.root / key

    @property
    def fs(self) -> Any:
        """The filesystem of this process. fsspec's event loop does not survive a fork."""
        return self._opened()[1]

    def at(self, key: str) -> str:
        """The path of a key, as the filesystem writes it."""
        tail = self.uri(key).path.removeprefix(self.root.path).lstrip("/")
        base = self._opened()[2].rstrip("/")
        return f"{base}/{tail}" if tail else base or "/"

    def info(self, path: str) -> dict[str, Any]:
        """What stands at a path. FileNotFoundError: nothing does."""
        try:
            found: dict[str, Any] = self.fs.info(path)
        except FileNotFoundError:
            if self.protocol not in _JAVA:
                raise
            # pyarrow answers "not found" to every error of libhdfs (hdfs.cc). Opening the file tells
            # which one it was: a file that cannot be looked at is not absent.
            self.fs.open(path, "rb").close()
            found = self.fs.info(path)
        return found

    def read_range(self, path: str, begin: int, end: int) -> bytes:
        """The bytes from ``begin`` up to ``end`` of one file."""
        # fsspec opens hdfs:// as a stream for a range that begins at 0, and then cannot seek in it.
        more = {"seekable": True} if self.protocol in _JAVA else {}
        return bytes(self.fs.cat_file(path, start=begin, end=end, **more))

    def below(self, key: str) -> tuple[list[str], list[str]]:
        """Paths of all files below a key, or of the file that it is; and of its directories, the
        deepest first (none in a bucket). By ``find``, which takes a name for a name.
        """
        fs, path = self.fs, self.at(key)
        fs.invalidate_cache()
        if not self.is_bucket and fs.isfile(path):
            return [path], []  # ftp's find takes it for a directory
        found = fs.find(path, withdirs=not self.is_bucket, detail=True)
        if not isinstance(found, dict):
            # adlfs, of a name that is a file, or is not there.
            found = {str(name): {} for name in found}
        # What only begins alike is another's: some clients list by a prefix of letters.
        mine = {
            name: info
            for name, info in found.items()
            if f"{name.strip('/')}/".startswith(f"{path.strip('/')}/")
        }
        folders = [name for name, info in mine.items() if info.get("type") == "directory"]
        files = [name for name in mine if name not in set(folders)]
        return files, sorted(folders, key=len, reverse=True)

    def move(self, source: str, target: str) -> None:
        """One file over another, in one step where the client has one: else copied and removed."""
        fs = self.fs
        if self.protocol in _WEBDAV:
            # webdav4's mv copies, and not over a file that is there; the protocol's own MOVE does both.
            fs.client.move(source, target, overwrite=True)
            return
        if type(fs).mv is not fsspec.AbstractFileSystem.mv:
            fs.mv(source, target)
            return
        fs.cp_file(source, target)
        fs.rm_file(source)

    def remove(self, path: str) -> None:
        """One file, if it is there. A server of directories has an error of its own where it is not."""
        try:
            self.fs.rm_file(path)
        except FileNotFoundError:
            return
        except Exception:
            if self.is_bucket or self.fs.exists(path):
                raise

    def make_parents(self, folder: str) -> None:
        """Make a directory and those above it. Each is asked for once: clients fail late where one is
        missing, with the upload or at close, each with an error of its own.
        """
        if folder in self._made or not folder.strip("/"):
            return
        try:
            self.fs.makedirs(folder, exist_ok=True)
        except Exception:
            # Another process made it at the same moment, and the server calls that an error.
            self.fs.invalidate_cache()
            if not self.fs.isdir(folder):
                raise
        self._made.add(folder)

    def forget_folders(self) -> None:
        """Some are about to go."""
        self._made.clear()

    def turn(self) -> AbstractContextManager[None]:
        """For what is done outside of ``said``: a client that one thread at a time may use is held."""
        return self._turn if self.protocol in _ONE_AT_A_TIME else contextlib.nullcontext()

    def close(self) -> None:
        """Let the client go; the next use opens another."""
        with self._lock:
            opened, self._open = self._open, None
        if opened is None or opened[0] != os.getpid():
            return  # the connection is another process's
        inner: Any = getattr(opened[1], "client", None)
        if self.protocol in ("sftp", "ssh"):
            inner.close()
        elif self.protocol in _WEBDAV:
            inner.http.close()

    def claims_create(self) -> bool:
        """A client with a ``pipe_file`` of its own may pass the condition on to the server; fsspec's
        default asks ``exists`` first, which excludes nobody.
        """
        if not self.is_bucket or self.library is not None:
            return self.is_bucket
        cls: Any = fsspec.get_filesystem_class(self.protocol)
        if issubclass(cls, AsyncFileSystem):
            # The seam that fsspec gives its asynchronous implementations has this name.
            return cls._pipe_file is not AsyncFileSystem._pipe_file  # noqa: SLF001
        return bool(cls.pipe_file is not fsspec.AbstractFileSystem.pipe_file)

    @contextmanager
    def said(self, action: str, key: str, *, changes: bool = False) -> Iterator[None]:
        """Inside, every Exception becomes a typed one. ``changes``: a network failure, or the error of
        a bucket's server, leaves open whether it happened (AnswerLostError); a bucket that refuses for
        now has not done it (TransientError).
        """
        try:
            with self.turn():
                yield
        except CkptfsError:
            raise
        except Exception as error:  # noqa: BLE001 - see above: the edge where all become typed
            self._made.clear()  # somebody may have removed a directory
            reason = _reason(error) if self.is_bucket else None
            if self.protocol in _JAVA and isinstance(error, OSError):
                # Hadoop's client tried again, and failed over, before it gave up.
                reason = Reason.SERVER if error.errno in _JAVA_ERRORS else None
            if self.is_bucket and (_lacks_bucket(error, reason) or self._lacks_container(error)):
                raise self._no_bucket(action, key) from _cause(error)
            raise _typed(error, self.uri(key), action, reason, changes=changes) from _cause(error)

    def _lacks_container(self, error: Exception) -> bool:
        """adlfs drops what the answer to a HEAD says of the container: it is asked for, until it was there."""
        if (
            self._has_container
            or self.protocol not in _AZURE
            or not isinstance(error, FileNotFoundError)
        ):
            return False
        try:
            self._has_container = bool(self.fs.exists(self.at("").partition("/")[0]))
        except Exception:  # noqa: BLE001 - who may not look at the container may know its blobs
            self._has_container = True
        return not self._has_container

    def _no_bucket(self, action: str, key: str) -> NotFoundError:
        bucket = self.at("").partition("/")[0]
        made = NotFoundError(
            f"{action} failed: there is no bucket {bucket!r}",
            uri=self.uri(key),
            hint="check its name and the endpoint; ckptfs never creates one",
        )
        made.of_bucket = True
        return made

    def _connect(self) -> tuple[Any, str]:
        if self.library is None:
            return _connect(self.root, self.protocol, self._options)
        path = "/".join(filter(None, (self.bucket, self.root.path.strip("/"))))
        return self.library.filesystem(), path

    def _opened(self) -> tuple[int, Any, str]:
        with self._lock:
            if self._open is None or self._open[0] != os.getpid():
                if self._open is not None and self.protocol in _JAVA:
                    raise UnsupportedError(
                        "this process was forked from one that uses libhdfs, and a Java virtual "
                        "machine does not survive a fork",
                        uri=self.root,
                        hint="start processes with 'spawn', or use webhdfs://",
                    )
                try:
                    self._open = (os.getpid(), *self._connect())
                except ImportError as error:
                    raise MissingDriverError(
                        f"the library of {self.protocol}:// does not import: {error}", uri=self.root
                    ) from error
                except FileNotFoundError as error:
                    # Of an archive: the URI names what is in it.
                    archive = mask_credentials(str(self._options.get("fo", self.root)))
                    raise NotFoundError(f"there is no {archive}", uri=self.root) from _cause(error)
                except Exception as error:
                    libraries = _JAVA_LIBRARIES if self.protocol in _JAVA else ()
                    if any(library in str(error) for library in libraries):
                        raise MissingDriverError(
                            f"hdfs:// needs libhdfs and Java: {str(error).partition(chr(10))[0]}",
                            uri=self.root,
                            hint="set JAVA_HOME, HADOOP_HOME (or ARROW_LIBHDFS_DIR) and "
                            "CLASSPATH=$(hadoop classpath --glob), or use webhdfs://",
                        ) from error
                    raise _typed(error, self.root, "open", None, changes=False) from _cause(error)
            return self._open


def _connect(root: Uri, protocol: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    """The filesystem, and the path of the root in its own spelling."""
    cls: Any = fsspec.get_filesystem_class(protocol)
    place = Uri(protocol, root.authority, root.path, "", root.userinfo)
    found = dict(options)
    if protocol in ("s3", "s3a") and root.userinfo:
        key, _, secret = root.userinfo.partition(":")
        found = {"key": key, "secret": secret, **found}
        place = Uri(protocol, root.authority, root.path)
    found = {**cls._get_kwargs_from_urls(place.full), **found}
    if protocol in _BUCKETS:
        found = {"use_listings_cache": False, **found}
    # fsspec takes this word itself; any other goes to the client, and paramiko and webdav4 refuse what they do
    # not know.
    files = cls(**{"skip_instance_cache": True, **found})
    if "use_listings_cache" not in found:
        files.dircache.use_listings_cache = False
    return files, str(cls._strip_protocol(place.full))


def _reason(error: BaseException) -> Reason | None:
    """What a bucket's server answered, by the library's error or the one below it; None: no answer of
    a server, or one that says no more than the error's type.
    """
    told: BaseException | None = error
    while told is not None:
        code, status = _answer(told)
        reason = CODES.get(code) or STATUSES.get(status)
        if reason is not None:
            return reason
        if status >= _SERVER_ERRORS:
            return Reason.SERVER
        told = told.__cause__
    if isinstance(error, OSError):
        if error.errno is None and str(error).startswith("Forbidden: "):
            return Reason.FORBIDDEN  # gcsfs, which keeps no status of a 403
        # s3fs, where the library's error is lost: InternalError, SlowDown.
        return {errno.EREMOTEIO: Reason.SERVER, errno.EBUSY: Reason.THROTTLED}.get(error.errno or 0)
    return None


def _lacks_bucket(error: Exception, reason: Reason | None) -> bool:
    """Whether the server answered that the bucket itself is not there. It looks like an empty run otherwise,
    and training would begin at step 0.
    """
    if not isinstance(error, FileNotFoundError):
        return False
    if reason is Reason.NO_BUCKET or _GCSFS_LISTING.fullmatch(str(error)):
        return True
    below = error.__context__  # adlfs does not say "from"
    return below is not None and CODES.get(_answer(below)[0]) is Reason.NO_BUCKET


def _answer(error: BaseException) -> tuple[str, int]:
    """Code and status of a server's answer, as botocore, gcsfs, azure-core and aiohttp keep them."""
    response = getattr(error, "response", None)
    if isinstance(response, Mapping):
        code = str(response.get("Error", {}).get("Code", ""))
        return code, int(response.get("ResponseMetadata", {}).get("HTTPStatusCode") or 0)
    for name in ("status_code", "status", "code"):
        status = getattr(error, name, None)
        if isinstance(status, int):
            return str(getattr(error, "error_code", "") or ""), status
    return "", 0


def _typed(
    error: Exception, uri: Uri, action: str, reason: Reason | None, *, changes: bool
) -> StorageError:
    if changes and reason in _NOT_DONE:
        return TransientError(
            f"{action} was not done: {mask_credentials(str(error)) or type(error).__name__}",
            uri=uri,
        )
    name = type(error).__name__
    if reason in _REFUSALS and not (isinstance(error, OSError) and error.errno):
        refusal, hint = _REFUSALS[reason]
        return refusal(
            f"{action} was refused: {mask_credentials(str(error)) or name}", uri=uri, hint=hint
        )
    network = any(word in name for word in _NETWORK)
    found = (
        typed(error, uri, action)
        if isinstance(error, OSError)
        else (TransientError if network else StorageError)(
            f"{action} failed: {name}: {mask_credentials(str(error))}", uri=uri
        )
    )
    network = network or reason is Reason.SERVER
    if changes and (isinstance(found, TransientError) or network):
        return AnswerLostError(
            f"{action} may have happened: {name}: {mask_credentials(str(error))}", uri=uri
        )
    return found


def _cause(error: Exception) -> Exception | None:
    """The original for the traceback, unless its text would carry credentials into a log."""
    return error if mask_credentials(str(error)) == str(error) else None
