"""One fsspec filesystem: opened lazily and once per process, its errors typed and its secrets masked.

    FsspecClient.fs             the filesystem, without listing caches; a new one after a fork
    FsspecClient.path_of(key)   the path of a key, as the filesystem writes it
    FsspecClient.below          everything below a key, without glob patterns
    FsspecClient.move           moves one file over another, without glob patterns
    FsspecClient.translating    a context: whatever the library raises becomes a typed error with the URI

Client libraries raise OSErrors with and without an errno, and types of their own. All of them are caught
here, at the edge, and only here. For an object store the error is that of ``http_errors``, which clients on
obstore raise too.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, Final

import fsspec
from fsspec.asyn import AsyncFileSystem

from ckptfs.errors import (
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
from ckptfs.storage.clients.choose import dialect_of
from ckptfs.storage.clients.http_errors import (
    Reason,
    RequestContext,
    clean,
    library_error,
    origin_of,
    reason_error,
    response_of,
)
from ckptfs.storage.os_errors import typed
from ckptfs.storage.threads import ProcessLock
from ckptfs.uri import Uri, mask_credentials

__all__ = ["FsspecClient"]

# One connection that answers one request after another: two threads would read each other's
# answers.
_ONE_AT_A_TIME = frozenset(("sftp", "ssh", "ftp"))
_WEBDAV = frozenset(("webdav", "dav"))
_BUCKETS = frozenset(("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oss"))
_AZURE = frozenset(("az", "abfs", "abfss"))
_WEB = frozenset(("http", "https"))
# libhdfs: a Java virtual machine in this process.
_JAVA = frozenset(("hdfs", "arrow_hdfs"))
_JAVA_LIBRARIES = ("libjvm", "libhdfs", "JNI")
_JAVA_ERRORS = (None, errno.EIO, 255)  # a Java exception that has no errno of its own
_GCSFS_LISTING = re.compile(
    r"b/[^/]+/o"
)  # the path of a request for a bucket, not for an object in it
# The actions of ``FsspecStorage``, as the table of permissions and the clients on obstore name
# them.
_ACTIONS: Final = {
    "read": "get",
    "stat": "head",
    "create": "put",
    "replace": "put",
    "write": "upload",
    "remove": "delete",
    "remove_tree": "delete",
}
_NETWORK = ("Timeout", "Connection", "Disconnected", "ServerError", "ServiceUnavailable")


class FsspecClient:
    """The library behind one root. Thread-safe, and picklable with its options, secrets included.

    ``is_bucket`` is true for an object store, where a stream can be discarded and a PUT is one step.

    Args:
        root: What keys are relative to.
        options: Those of the filesystem.
        library: Makes the requests that fsspec has no method for. It then holds the options.
    """

    def __init__(
        self, root: Uri, options: Mapping[str, Any], library: BucketLibrary | None = None
    ) -> None:
        self.root = root
        self.library = library
        self.protocol = root.protocol.removeprefix("fsspec+")
        self.is_bucket = self.protocol in _BUCKETS
        self.bucket = library.bucket(root) if library is not None else ""
        self._options = dict(options)
        self._set_locks()

    def _set_locks(self) -> None:
        self._lock, self._exclusive = ProcessLock(), ProcessLock()
        self._made_dirs: set[str] = set()  # directories that existed, or were made
        self._opened_fs: tuple[int, Any, str] | None = None
        self._has_container = False

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_lock": None, "_exclusive": None, "_opened_fs": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._set_locks()

    def uri(self, key: str) -> Uri:
        """Return the full URI of a key."""
        return self.root / key

    @property
    def fs(self) -> Any:
        """The filesystem of this process. fsspec's event loop does not survive a fork."""
        return self._opened()[1]

    def path_of(self, key: str) -> str:
        """Return the path of a key, as the filesystem writes it."""
        tail = self.uri(key).path.removeprefix(self.root.path).lstrip("/")
        base = self._opened()[2].rstrip("/")
        return f"{base}/{tail}" if tail else base or "/"

    def info(self, path: str) -> dict[str, Any]:
        """Return what fsspec knows of a path. FileNotFoundError: nothing exists there."""
        try:
            found: dict[str, Any] = self.fs.info(path)
        except FileNotFoundError:
            if self.protocol not in _JAVA:
                raise
            # pyarrow answers "not found" to every error of libhdfs (hdfs.cc). Opening the file shows
            # which one it was: a file that cannot be examined is not absent.
            self.fs.open(path, "rb").close()
            found = self.fs.info(path)
        except Exception as error:
            answer = response_of(error) if self.is_bucket else None
            if answer is not None and not answer.code:
                # A HEAD has no body, so an expired token looks the same as a wrong request. The answer
                # to a GET says which one it is.
                with contextlib.suppress(FileNotFoundError):
                    self.read_range(path, 0, 1)
            raise
        return found

    def read_range(self, path: str, begin: int, end: int) -> bytes:
        """Return the bytes of one file from ``begin`` up to ``end``."""
        # fsspec opens hdfs:// as a stream for a range that begins at 0, and then cannot seek in it.
        more = {"seekable": True} if self.protocol in _JAVA else {}
        return bytes(self.fs.cat_file(path, start=begin, end=end, **more))

    def below(self, key: str) -> tuple[list[str], list[str]]:
        """Find everything below a key. ``find`` takes names literally, not as patterns.

        Returns:
            The paths of all files below the key, or the key's own if it is a file. Then the paths
            of its directories, the deepest first; none in a bucket.
        """
        fs, path = self.fs, self.path_of(key)
        fs.invalidate_cache()
        if not self.is_bucket and fs.isfile(path):
            return [path], []  # ftp's find takes it for a directory
        found = fs.find(path, withdirs=not self.is_bucket, detail=True)
        if not isinstance(found, dict):
            # adlfs gives this answer for a name that is a file, or that does not exist.
            found = {str(name): {} for name in found}
        # Some clients list by a prefix of letters: names that only begin alike are not below it.
        inside = {
            name: info
            for name, info in found.items()
            if f"{name.strip('/')}/".startswith(f"{path.strip('/')}/")
        }
        folders = [name for name, info in inside.items() if info.get("type") == "directory"]
        files = [name for name in inside if name not in set(folders)]
        return files, sorted(folders, key=len, reverse=True)

    def move(self, source: str, target: str) -> None:
        """Move one file over another, in one step if the client has one; else it is copied and removed."""
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
        """Remove one file if it exists. Servers of directories have errors of their own for a missing one."""
        try:
            self.fs.rm_file(path)
        except FileNotFoundError:
            return
        except Exception:
            if self.is_bucket or self.fs.exists(path):
                raise

    def make_parents(self, folder: str) -> None:
        """Make a directory and its ancestors, once per directory.

        Without them clients fail late, with the upload or at close, each with an error of its own.
        """
        if folder in self._made_dirs or not folder.strip("/"):
            return
        try:
            self.fs.makedirs(folder, exist_ok=True)
        except Exception:
            # Another process made it at the same moment, and the server calls that an error.
            self.fs.invalidate_cache()
            if not self.fs.isdir(folder):
                raise
        self._made_dirs.add(folder)

    def forget_folders(self) -> None:
        """Forget which directories exist, because some are about to be removed."""
        self._made_dirs.clear()

    def exclusive(self) -> AbstractContextManager[None]:
        """Return a context for calls outside of ``translating``.

        It locks a client that only one thread may use at a time.
        """
        return self._exclusive if self.protocol in _ONE_AT_A_TIME else contextlib.nullcontext()

    def close(self) -> None:
        """Close the client. The next use opens another."""
        with self._lock:
            opened, self._opened_fs = self._opened_fs, None
        if opened is None or opened[0] != os.getpid():
            return  # the connection belongs to another process
        inner: Any = getattr(opened[1], "client", None)
        if self.protocol in ("sftp", "ssh"):
            inner.close()
        elif self.protocol in _WEBDAV:
            inner.http.close()

    def claims_create(self) -> bool:
        """Return whether the client may send a condition with a create.

        A client with a ``pipe_file`` of its own may do so. fsspec's default only calls ``exists``
        first, which is not exclusive.
        """
        if not self.is_bucket or self.library is not None:
            return self.is_bucket
        cls: Any = fsspec.get_filesystem_class(self.protocol)
        if issubclass(cls, AsyncFileSystem):
            # fsspec's asynchronous implementations override the method of this name.
            return cls._pipe_file is not AsyncFileSystem._pipe_file  # noqa: SLF001
        return bool(cls.pipe_file is not fsspec.AbstractFileSystem.pipe_file)

    @contextmanager
    def translating(self, action: str, key: str, *, changes: bool = False) -> Iterator[None]:
        """Raise every Exception of the library in the block as a typed error.

        Args:
            action: What the block does: "read", "stat", "create", ...
            key: The key that it is about.
            changes: Whether it changes something. A lost connection, or the error of a bucket's
                server, then leaves open whether it happened (AnswerLostError). A bucket that
                refuses temporarily has not done it (TransientError).
        """
        failure: CkptfsError
        try:
            with self.exclusive():
                yield
            return
        except CkptfsError:
            raise
        except Exception as error:  # noqa: BLE001 - the edge, where every error becomes a typed one
            self._made_dirs.clear()  # another program may have removed a directory
            failure, cause = self.typed_error(error, action, key, changes=changes), _cause(error)
        if isinstance(failure, CredentialsError) and self.library is not None:
            # The next request must use the credentials of that time.
            self.close()
        raise failure from cause

    def typed_error(self, error: Exception, action: str, key: str, *, changes: bool) -> CkptfsError:
        """Return the typed error for an exception of the library. It is not raised."""
        if self.is_bucket or self.protocol in _WEB:
            name = _ACTIONS.get(action, action)
            context = replace(
                self._context(name, key), changes=changes, conditional=action == "create"
            )
            if _is_gcsfs_listing(error) or self._lacks_container(error):
                return reason_error(context, Reason.NO_BUCKET)
            if (found := library_error(context, error)) is not None:
                return found
        return _error_by_type(
            error, self.uri(key), action, changes=changes, is_java=self.protocol in _JAVA
        )

    def _context(self, action: str, key: str) -> RequestContext:
        if self.library is not None:
            dialect, endpoint = self.library.dialect, self.library.endpoint
        else:
            dialect = dialect_of(self.protocol)
            endpoint = _endpoint_of(self._opened_fs) or dialect.name
        bucket = self.bucket or self.root.userinfo or self.root.authority
        return RequestContext(dialect, action, self.uri(key), endpoint, bucket=bucket)

    def _lacks_container(self, error: Exception) -> bool:
        """Whether the container is missing.

        adlfs drops that part of the answer to a HEAD, so the container is requested until it
        exists.
        """
        if (
            self._has_container
            or self.protocol not in _AZURE
            or not isinstance(error, FileNotFoundError)
        ):
            return False
        try:
            self._has_container = bool(self.fs.exists(self.path_of("").partition("/")[0]))
        except Exception:  # noqa: BLE001 - who may not look at the container may know its blobs
            self._has_container = True
        return not self._has_container

    def _connect(self) -> tuple[Any, str]:
        if self.library is None:
            return _connect(self.root, self.protocol, self._options)
        path = "/".join(filter(None, (self.bucket, self.root.path.strip("/"))))
        return self.library.filesystem(), path

    def _opened(self) -> tuple[int, Any, str]:
        with self._lock:
            if self._opened_fs is None or self._opened_fs[0] != os.getpid():
                if self._opened_fs is not None and self.protocol in _JAVA:
                    raise UnsupportedError(
                        "this process was forked from one that uses libhdfs, and a Java virtual "
                        "machine does not survive a fork",
                        uri=self.root,
                        hint="start processes with 'spawn', or use webhdfs://",
                    )
                try:
                    self._opened_fs = (os.getpid(), *self._connect())
                except ImportError as error:
                    raise MissingDriverError(
                        f"the library of {self.protocol}:// cannot be imported: {error}",
                        uri=self.root,
                    ) from error
                except FileNotFoundError as error:
                    # An archive: the URI names the file in it.
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
                    raise _error_by_type(error, self.root, "open", changes=False) from _cause(error)
            return self._opened_fs


def _connect(root: Uri, protocol: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    """Return the filesystem, and the path of the root as it writes it."""
    cls: Any = fsspec.get_filesystem_class(protocol)
    location = Uri(protocol, root.authority, root.path, "", root.userinfo)
    found = dict(options)
    if protocol in ("s3", "s3a") and root.userinfo:
        key, _, secret = root.userinfo.partition(":")
        found = {"key": key, "secret": secret, **found}
        location = Uri(protocol, root.authority, root.path)
    found = {**cls._get_kwargs_from_urls(location.full), **found}
    if protocol in _BUCKETS:
        found = {"use_listings_cache": False, **found}
    # fsspec takes this word itself. Any other word goes to the client, and paramiko and webdav4
    # refuse unknown words.
    files = cls(**{"skip_instance_cache": True, **found})
    if "use_listings_cache" not in found:
        files.dircache.use_listings_cache = False
    return files, str(cls._strip_protocol(location.full))


def _endpoint_of(opened: tuple[int, Any, str] | None) -> str:
    """Return scheme://host[:port] of the server if s3fs, gcsfs or adlfs has it; else ""."""
    names = ("endpoint_url", "_endpoint", "account_url")
    found = (getattr(opened[1], name, None) for name in names) if opened is not None else ()
    return next((origin_of(text) for text in found if isinstance(text, str) and "://" in text), "")


def _is_gcsfs_listing(error: Exception) -> bool:
    """Whether gcsfs did not find the bucket itself. Its message is then the path of a request for a bucket.

    Otherwise a missing bucket would look like an empty run, and training would begin at step 0.
    """
    return isinstance(error, FileNotFoundError) and _GCSFS_LISTING.fullmatch(str(error)) is not None


def _error_by_type(
    error: Exception, uri: Uri, action: str, *, changes: bool, is_java: bool = False
) -> StorageError:
    """Return the error for an exception without an answer of a server, by its type and errno."""
    name = type(error).__name__
    network = any(word in name for word in _NETWORK)
    found = (
        typed(error, uri, action)
        if isinstance(error, OSError)
        else (TransientError if network else StorageError)(
            f"{action} failed: {name}: {clean(str(error))}", uri=uri
        )
    )
    # Hadoop's client tried again, and failed over, before it gave up.
    gave_up = is_java and isinstance(error, OSError) and error.errno in _JAVA_ERRORS
    if changes and (isinstance(found, TransientError) or network or gave_up):
        return AnswerLostError(f"{action} may have happened: {name}: {clean(str(error))}", uri=uri)
    return found


def _cause(error: Exception) -> Exception | None:
    """Return the original for the traceback, unless its text would carry credentials into a log."""
    return error if mask_credentials(str(error)) == str(error) else None
