"""Any protocol that fsspec knows, used as an object store: keys, no directories, no rename.

    tree kinds (sftp smb webdav hf file ...)   data and small: .partial-*, then mv over the key
                                               create: UnsupportedError, no client of theirs excludes
    bucket kinds (oss, and fsspec+s3 ...)      data: one stream, committed on close, discarded on abort
                                               small: one PUT; create: a conditional PUT, probed

S3, GCS, Azure and WebHDFS have clients of their own (``object_store``, ``webhdfs``). This one works for all
protocols. It writes through one stream and reads one range at a time, because that is what fsspec offers:
parts are not sent in parallel, and retries are the library's own. Listing caches are off, instances are not
shared, and a client that was made in another process is never used, because fsspec's event loop does not
survive a fork.

fsspec's ``rm``, ``mv`` and ``copy`` treat every name as a glob pattern, so that removing the tree ``step_[1]``
would remove ``step_1``. They never get a name that could be a pattern.

A large file is written by one stream and read by ranges:

    bucket kinds   the stream is an upload: committed on close, discarded on abort
    tree kinds     the stream is .partial-* in the same directory, moved over the key on close
"""

from __future__ import annotations

import errno
import functools
import inspect
import logging
import os
import secrets
import shutil
import tempfile
import threading
from collections.abc import Collection, Mapping, Sequence
from glob import has_magic
from typing import Any, Final

import fsspec

from ckptfs.errors import (
    AccessError,
    AlreadyExistsError,
    AnswerLostError,
    CkptfsError,
    IntegrityError,
    NotFoundError,
    StorageError,
    UnsupportedError,
    UriError,
)
from ckptfs.storage.base import (
    Capabilities,
    DataReader,
    DataWriter,
    Entry,
    Shape,
    Space,
    Stat,
    Storage,
    UnfinishedUpload,
    usable,
)
from ckptfs.storage.clients.base import ALWAYS, IF_ABSENT, BucketLibrary, IfMatch, PendingUpload
from ckptfs.storage.conditional_writes import NO_CONDITIONS, EtagSpelling, HonouredConditions
from ckptfs.storage.fsspec_client import FsspecClient
from ckptfs.storage.options import OURS
from ckptfs.storage.os_errors import too_large
from ckptfs.uri import Uri, mask_credentials

__all__ = ["FsspecReader", "FsspecStorage", "FsspecWriter", "open_fsspec"]

_log = logging.getLogger("ckptfs.storage")

_SWEEPS = 3
_ARCHIVES = ("zip", "tar", "libarchive")
# Protocols that fsspec only reads, or (zip) only writes from the beginning.
_READ_ONLY = frozenset((*_ARCHIVES, "http", "https", "github", "git"))
_PROBES = 4  # keys to try, if each first answer seems to be lost


def open_fsspec(uri: Uri, storage_options: Mapping[str, Any]) -> FsspecStorage:
    """Open ``sftp://...``, or ``fsspec+s3://...`` to insist on fsspec. This is the registry's factory.

    Args:
        uri: The root.
        storage_options: The options of fsspec's filesystem.

    Raises:
        UriError: An option belongs to the clients of ckptfs itself, and would do nothing here.
    """
    for name in OURS:
        if name in storage_options:
            raise UriError(
                f"storage option {name!r} means nothing to {uri.protocol}://",
                uri=uri,
                hint="this protocol uses one fsspec stream; s3, gs, az and webhdfs have this "
                "option",
            )
    protocol = uri.protocol.removeprefix("fsspec+")
    if protocol == "hdfs":
        storage_options = _hdfs_options(uri, storage_options)
    if protocol in _ARCHIVES and not storage_options.get("fo"):
        raise UriError(
            f"{protocol}:// does not name the archive",
            uri=uri,
            hint=f'storage_options={{"fo": "/data/run.{protocol}"}}; the URI names what is in it',
        )
    return FsspecStorage(uri, storage_options)


def _hdfs_options(uri: Uri, storage_options: Mapping[str, Any]) -> dict[str, Any]:
    """The options for libhdfs, checked.

    A URI's query gives numbers as text, which pyarrow refuses. fsspec's class drops names that it does not know,
    and their values would do nothing.
    """
    cls: Any = fsspec.get_filesystem_class("hdfs")
    known = inspect.signature(cls.__init__).parameters.keys() - {"self", "kwargs"}
    for name in sorted(storage_options.keys() - known):
        raise UriError(
            f"{uri.protocol}:// has no storage option {name!r}",
            uri=uri,
            hint=f"it has {', '.join(sorted(known))}; Hadoop's own settings go into extra_conf",
        )
    options = dict(storage_options)
    for name in ("port", "replication"):
        if name in options:
            try:
                options[name] = int(str(options[name]))
            except ValueError as error:
                raise UriError(
                    f"storage option {name}={options[name]!r}: it takes a number", uri=uri
                ) from error
    return options


# What this process knows of each bucket. Storages are opened and closed with saves; this stays.
_SEEN: dict[tuple[int, str, str, str], HonouredConditions] = {}


class FsspecStorage(Storage):
    """Bytes below one URI, through fsspec.

    With ``library`` it takes the place of ``ObjectStorage`` if obstore cannot do what the options ask for. It
    then replaces by an etag too, and every object gets the settings that the library holds.

    Args:
        root: What keys are relative to.
        storage_options: Those of fsspec; they are pickled.
        library: Makes the requests that fsspec has no method for.
        data_path: Why this library carries the data, for ``ckptfs doctor``.
    """

    def __init__(
        self,
        root: Uri,
        storage_options: Mapping[str, Any] | None = None,
        library: BucketLibrary | None = None,
        data_path: str = "",
    ) -> None:
        self.root = root
        self.data_path = data_path
        self._library = library
        self._client = FsspecClient(root, storage_options or {}, library)
        self._probed: dict[tuple[int, str, str, str], HonouredConditions] = (
            {} if library is None else _SEEN
        )
        if self._client.protocol == "memory" and int(os.environ.get("WORLD_SIZE") or 1) > 1:
            raise UriError("fsspec's memory belongs to one process", uri=root)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_probed": {} if self._library is None else None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self._library is not None:
            self._probed = _SEEN

    @property
    def capabilities(self) -> Capabilities:
        """What the client claims. After this process created something: what the probe found."""
        by_etag = EtagSpelling.AS_GIVEN if self._library is not None else None
        claimed = HonouredConditions(self._client.claims_create(), by_etag)
        found = self._probed.get(self._bucket_id(), claimed)
        return Capabilities(
            shape=Shape.OBJECT,
            exclusive_create=found.if_absent,
            atomic_replace=self._client.is_bucket
            or self._client.protocol in ("file", "local", "memory"),
            conditional_replace=found.if_match is not None,
            durable=self._client.is_bucket,
        )

    def probe(self, key: str) -> Capabilities:
        """As ``Storage.probe``."""
        self._refuse_read_only(key)
        self._probed_conditions(key)
        return self.capabilities

    # -- small, whole ------------------------------------------------------------------

    def read(self, key: str) -> bytes:
        with self._client.translating("read", key):
            return bytes(self._client.fs.cat_file(self._client.path_of(key)))

    def read_small(self, key: str, limit_bytes: int) -> bytes:
        # One more request: no client of fsspec has a read that stops at a limit.
        found = self._info(key)
        if found.get("type", "file") not in ("file", "link"):
            raise StorageError(
                f"read refused: it is {found['type']}, not a regular file",
                errno=errno.EINVAL,
                uri=self.uri(key),
                hint="remove it; ckptfs reads regular files only",
            )
        size = int(found.get("size") or 0)
        if size > limit_bytes:
            raise too_large(self.uri(key), size, limit_bytes)
        return super().read_small(key, limit_bytes)

    def create(self, key: str, data: bytes, *, staging: str) -> None:
        """See ``Storage.create``.

        The first create of a process writes and removes a key of its own, to find out whether
        conditions work.

        Raises:
            UnsupportedError: The client or the server has no condition.
        """
        del staging
        self._refuse_read_only(key)
        if not self._probed_conditions(key.rpartition("/")[0]).if_absent:
            raise UnsupportedError(
                "no exclusive create here: the server or its client ignores the condition",
                uri=self.uri(key),
                hint="fences cannot hold on this store; see capabilities",
            )
        self._create(key, data)

    def replace(self, key: str, data: bytes, *, if_match: str | None = None) -> None:
        self._refuse_read_only(key)
        if if_match is not None:
            if self._probed_conditions(key.rpartition("/")[0]).if_match is None:
                raise UnsupportedError(
                    "no conditional replace here: the store or its client ignores the condition",
                    uri=self.uri(key),
                )
            self._replace_if(key, data, if_match)
            return
        with self._client.translating("replace", key, changes=True):
            if self._library is not None:
                self._library.put(self._client.fs, self._client.path_of(key), data, ALWAYS)
                return
            if self._client.is_bucket:
                self._client.fs.pipe_file(self._client.path_of(key), data)
                return
        with self.open_write(key) as writer:
            writer.write(data)

    def stat(self, key: str) -> Stat:
        found = self._info(key)
        if self._library is not None:
            etag = self._library.etag(found)
        else:
            etag = found.get("ETag") or found.get("etag") or found.get("generation")
        size_bytes = int(found.get("size") or 0)
        return Stat(size_bytes, is_dir=False, etag=None if etag is None else str(etag))

    def list(self, key: str) -> list[Entry]:
        path = self._client.path_of(key).rstrip("/")
        try:
            with self._client.translating("list", key):
                self._client.fs.invalidate_cache()
                fs, library = self._client.fs, self._library
                found = library.list_names(fs, path) if library else fs.ls(path, detail=True)
        except NotFoundError as error:
            if error.of_bucket:
                raise
            return []
        names = {
            item["name"].rstrip("/").rpartition("/")[2]: item.get("type") == "directory"
            for item in found
            # A listing of a file is that file; a bucket may hold a marker for the prefix itself.
            if item["name"].strip("/") != path.strip("/")
        }
        entries = (Entry(name, is_dir) for name, is_dir in names.items())
        return usable(entries, self.uri(key))

    # -- large, streamed ---------------------------------------------------------------

    def open_write(self, key: str, *, size_hint_bytes: int | None = None) -> DataWriter:
        del size_hint_bytes
        self._refuse_read_only(key)
        return FsspecWriter(self._client, key)

    def open_read(self, key: str) -> DataReader:
        size = self._info(key).get("size")
        if size is None:
            raise UnsupportedError(
                "the server does not say how long the file is", uri=self.uri(key)
            )
        return FsspecReader(self._client, key, int(size))

    # -- names -------------------------------------------------------------------------

    def make_dir(self, key: str) -> None:
        self.uri(key)

    def rename(self, source: str, target: str) -> None:
        del target
        raise UnsupportedError("an object store has no rename", uri=self.uri(source))

    def remove(self, key: str) -> None:
        self._refuse_read_only(key)
        with self._client.translating("remove", key, changes=True):
            self._client.remove(self._client.path_of(key))

    def remove_dir(self, key: str) -> None:
        self.uri(key)

    def remove_many(self, keys: Sequence[str]) -> None:
        if self._client.is_bucket and len(keys) > 1:
            try:
                with self._client.translating("remove", "", changes=True):
                    self._remove_files([self._client.path_of(key) for key in keys])
                    return
            except StorageError:
                # One of them failed, and it is not known which: remove them one by one.
                _log.debug("a batch of deletes failed below %s", self.root, exc_info=True)
        super().remove_many(keys)

    def remove_tree(self, key: str) -> None:
        if not key:
            raise UnsupportedError("the root is never removed", uri=self.root)
        self._refuse_read_only(key)
        with self._client.translating("remove_tree", key, changes=True):
            for _ in range(_SWEEPS):
                files, folders = self._client.below(key)
                if not files and not folders:
                    return
                self._remove_files(files)
                self._client.forget_folders()
                self._remove_folders(folders)

    # -- certainty ---------------------------------------------------------------------

    def sync(self, key: str) -> None:
        self.uri(key)

    def refresh(self, key: str) -> None:
        with self._client.translating("refresh", key):
            self._client.fs.invalidate_cache(self._client.path_of(key))

    def unfinished_uploads(self) -> tuple[UnfinishedUpload, ...]:
        return tuple(UnfinishedUpload(key, upload.age_s) for key, upload in self._pending())

    def sweep_uploads(self, older_than_s: float, keys: Collection[str] | None = None) -> int:
        swept = 0
        for key, upload in self._pending():
            if upload.age_s < older_than_s or (keys is not None and key not in keys):
                continue
            assert self._library is not None  # noqa: S101 - nothing is pending without one
            try:
                with self._client.translating("abort upload", key, changes=True):
                    self._library.abort_upload(self._client.fs, self._client.bucket, upload)
            except NotFoundError:
                continue  # completed, or aborted by another sweep
            swept += 1
        return swept

    def _pending(self) -> Sequence[tuple[str, PendingUpload]]:
        """Return the incomplete uploads below the root, with their keys."""
        if self._library is None:
            return []
        base = self.root.path.strip("/")
        prefix = f"{base}/" if base else ""
        with self._client.translating("list uploads", ""):
            found = [*self._library.list_uploads(self._client.fs, self._client.bucket, prefix)]
        return [(upload.key.removeprefix(prefix), upload) for upload in found]

    def space(self) -> Space | None:
        return None

    def close(self) -> None:
        self._client.close()

    # -- inside ------------------------------------------------------------------------

    def _refuse_read_only(self, key: str) -> None:
        if self._client.protocol in _READ_ONLY:
            raise AccessError(
                f"{self._client.protocol}:// is read-only",
                uri=self.uri(key),
                hint="save to another place, and copy or pack what was committed there",
            )

    def _info(self, key: str) -> dict[str, Any]:
        with self._client.translating("stat", key):
            found = self._client.info(self._client.path_of(key))
        if found.get("type") == "directory":
            raise NotFoundError("stat failed: a prefix, not an object", uri=self.uri(key))
        return found

    def _remove_files(self, paths: Sequence[str]) -> None:
        fs = self._client.fs
        if self._client.is_bucket and len(paths) > 1 and not any(map(has_magic, paths)):
            try:
                # Few requests for many names.
                if self._library is not None:
                    self._library.remove(fs, paths)
                else:
                    fs.rm(list(paths))
                return
            except FileNotFoundError:
                # Another process removed all of them or, with some libraries, one of them.
                _log.debug("removed by another: some below %s", self.root)
            except CkptfsError:
                raise  # of one key
            except Exception as error:
                refusal = self._client.typed_error(error, "remove", "", changes=True)
                if not isinstance(refusal, UnsupportedError):
                    raise
                # OpenStack Swift requires a Content-MD5 of a batch, which botocore does not send.
                _warn_of_single_deletes(
                    f"{self.root.protocol}://{self.root.authority}", refusal.message
                )
        for path in paths:
            self._client.remove(path)

    def _remove_folders(self, paths: Sequence[str]) -> None:
        for path in paths:
            try:
                self._client.fs.rmdir(path)
            except FileNotFoundError:
                continue
            except Exception:  # noqa: BLE001 - of each client a type of its own
                # A file was written into it, or it was removed: the next listing shows which.
                _log.debug("not removed yet: %s", mask_credentials(path), exc_info=True)

    def _probed_conditions(self, folder: str) -> HonouredConditions:
        """Return what the probe found. It runs now if nothing has been written yet."""
        known = self._probed.get(self._bucket_id())
        if known is None:
            claimed = self._client.claims_create()
            known = self._probe(folder) if claimed else NO_CONDITIONS
            self._probed[self._bucket_id()] = known
        return known

    def _bucket_id(self) -> tuple[int, str, str, str]:
        """Return this process, and the bucket as its library reaches it.

        A storage without a library shares nothing.
        """
        library = self._library
        if library is None:
            return 0, "", "", ""
        return os.getpid(), library.name, library.endpoint, self._client.bucket

    def _probe(self, folder: str) -> HonouredConditions:
        """Create a key of our own twice: a store with an exclusive create refuses the second one.

        The library repeats a request after its answer was lost, and the repeated request finds our
        own object. The first answer then means nothing, and another key is tried.
        """
        lost: StorageError | None = None
        for _ in range(_PROBES):
            name = f".partial-probe-{secrets.token_hex(8)}"
            key = f"{folder}/{name}" if folder else name
            try:
                self._create(key, b"first")
            except (AlreadyExistsError, AnswerLostError) as error:
                lost = error
                self._remove_probe(key)
                continue
            except UnsupportedError:
                # OpenStack Swift answers 501 to a condition: nothing was made, creates are not exclusive.
                return NO_CONDITIONS
            try:
                excludes = self._excludes(key)
                by_etag = excludes and self._replaces_by_etag(key)
                return HonouredConditions(excludes, EtagSpelling.AS_GIVEN if by_etag else None)
            except AnswerLostError as error:
                lost = error
            finally:
                self._remove_probe(key)
        # Not False: if two writers disagree about a store, neither sees the other's log.
        raise StorageError(
            f"exclusive create cannot be probed: the answers to {_PROBES} requests were lost",
            uri=self.uri(folder),
            hint="a proxy or the connection repeats requests after it loses their answers: check "
            "both",
        ) from lost

    def _excludes(self, key: str) -> bool:
        try:
            self._create(key, b"second")
        except AlreadyExistsError:
            return self.read(key) == b"first"
        return False

    def _replaces_by_etag(self, key: str) -> bool:
        """Replace the probe by its etag, which must work, and again by it, which must fail."""
        etag = self.stat(key).etag if self._library is not None else None
        if etag is None:
            return False
        try:
            self._replace_if(key, b"third", etag)
        except AlreadyExistsError:
            if self.read(key) != b"third":  # else the library repeated it, and found its own
                return False
        except UnsupportedError:
            return False
        try:
            self._replace_if(key, b"fourth", etag)
        except AlreadyExistsError:
            return self.read(key) == b"third"
        return False

    def _remove_probe(self, key: str) -> None:
        try:
            self.remove(key)
        except StorageError as error:
            # No permission to delete, or a lock: the result is valid, and a few bytes stay.
            _log.warning("left behind: the probe %s (%s)", self.uri(key), error.message)

    def _create(self, key: str, data: bytes) -> None:
        try:
            with self._client.translating("create", key, changes=True):
                self._create_object(self._client.path_of(key), data)
        except AlreadyExistsError:
            raise
        except StorageError as error:
            # Some servers' refusal arrives as EINVAL (radosgw through s3fs). If an object is
            # there, ours or another's, it was a refusal.
            if error.errno == errno.EINVAL and self._exists(key):
                raise AlreadyExistsError("create failed: it exists", uri=self.uri(key)) from error
            raise

    def _create_object(self, path: str, data: bytes) -> None:
        if self._library is not None:
            self._library.put(self._client.fs, path, data, IF_ABSENT)
        else:
            self._client.fs.pipe_file(path, data, mode="create")

    def _replace_if(self, key: str, data: bytes, etag: str) -> None:
        """Replace the object if it has that etag; for "", create it if it is absent.

        Raises:
            AlreadyExistsError: The condition does not hold.
        """
        assert self._library is not None  # noqa: S101 - the probe says no without one
        condition = IfMatch(etag) if etag else IF_ABSENT
        try:
            with self._client.translating("replace", key, changes=True):
                self._library.put(self._client.fs, self._client.path_of(key), data, condition)
        except NotFoundError as error:
            # Some stores answer 404, not 412, if the object with that etag is gone.
            raise AlreadyExistsError(
                "replace failed: the object has changed", uri=self.uri(key)
            ) from error

    def _exists(self, key: str) -> bool:
        try:
            self.stat(key)
        except StorageError:
            return False
        return True


# -- large files ------------------------------------------------------------------------------

_BLOCK_BYTES: Final = 16 << 20  # parts of a bucket's stream: S3 takes 10,000 of them, 160 GB a file
_READ_BYTES: Final = 64 << 20
_WEB: Final = ("http", "https")
_GONE: Final = (404, 410)


@functools.lru_cache(maxsize=256)
def _warn_of_single_deletes(bucket: str, why: str) -> None:
    """Warn once per bucket: a process has a storage for each run, copy and reader."""
    _log.warning("%s does not delete batches: keys are deleted one by one (%s)", bucket, why)


class FsspecWriter(DataWriter):
    """Writes one file through one fsspec stream. It is invisible under its key until it is closed."""

    def __init__(self, client: FsspecClient, key: str) -> None:
        self._client = client
        self._key = key
        self._target = client.path_of(key)
        folder, _, _ = self._target.rpartition("/")
        self._path = (
            self._target if client.is_bucket else f"{folder}/.partial-{secrets.token_hex(8)}"
        )
        self._done = False
        self._broken = False
        self._file: Any = None
        try:
            with client.translating("write", key):
                self._file = self._begin()
        except BaseException:
            self.abort()
            raise

    def write(self, data: bytes | bytearray | memoryview) -> int:
        if self._file is None or self._broken:
            raise StorageError("the file cannot be written any more", uri=self._uri)
        view = memoryview(data).cast("B")
        self._broken = True
        with self._client.translating("write", self._key):
            sent = 0
            while sent < len(view):
                # bytes: not every client's stream takes a memoryview, and it may keep the buffer.
                block = bytes(view[sent : sent + _BLOCK_BYTES])
                written = self._file.write(block)
                # paramiko's write writes everything, and returns nothing.
                sent += len(block) if written is None else written
        self._broken = False
        return len(view)

    def close(self) -> None:
        if self._done:
            return
        if self._file is None or self._broken:
            raise StorageError("the file cannot be closed: a write failed", uri=self._uri)
        self._broken = True
        with self._client.translating("write", self._key, changes=True):
            self._file.close()
            if self._client.is_bucket:
                self._file.commit()
            else:
                self._move()
        self._file, self._done = None, True

    def abort(self) -> None:
        if self._done:
            return
        stream, self._file, self._done = self._file, None, True
        self._broken = True
        try:
            if self._client.is_bucket:
                if stream is not None:
                    # Not close(): that would complete the upload and leave a truncated object.
                    stream.discard()
                    stream.closed = True
            else:
                with self._client.exclusive():
                    if stream is not None:
                        stream.close()
                    self._client.fs.rm_file(self._path)
        except FileNotFoundError:
            return
        except Exception as error:  # noqa: BLE001 - the error that brought us here is the one to tell
            # If the file was never opened, it is not known whether anything of it exists.
            level = logging.DEBUG if stream is None else logging.WARNING
            _log.log(level, "left behind: %s (%s)", self._uri, mask_credentials(str(error)))

    @property
    def _uri(self) -> Uri:
        return self._client.uri(self._key)

    def _begin(self) -> Any:
        fs, library = self._client.fs, self._client.library
        if library is not None:
            return library.open_write(fs, self._path, _BLOCK_BYTES)
        if self._client.is_bucket:
            return fs.open(self._path, "wb", autocommit=False, block_size=_BLOCK_BYTES)
        # An object store has no parent directories, so our callers make none.
        self._client.make_parents(self._path.rpartition("/")[0])
        return fs.open(self._path, "wb")

    def _move(self) -> None:
        try:
            self._client.move(self._path, self._target)
        except FileExistsError:
            # Some SFTP and SMB servers do not rename over a file. The last writer wins, so the old
            # file is removed first.
            self._client.fs.rm_file(self._target)
            self._client.move(self._path, self._target)


class FsspecReader(DataReader):
    """Ranged reads of one file, one request after another, each at most 64 MiB.

    A web server that ignores ranges is found out by its first answer, before its body is read; then the
    file is fetched whole, once, into a temporary file (the first 64 MiB of it in memory).
    """

    def __init__(self, client: FsspecClient, key: str, size_bytes: int) -> None:
        self._client = client
        self._key = key
        self._closed = False
        self._file: Any = None
        self._copy: tempfile.SpooledTemporaryFile[bytes] | None = None
        self._lock = threading.Lock()
        self.size_bytes = size_bytes

    def read_into(self, offset: int, buffer: memoryview) -> None:
        uri = self._client.uri(self._key)
        if self._closed:
            raise StorageError("the reader is closed", uri=uri)
        view = buffer.cast("B")
        for start in range(0, len(view), _READ_BYTES):
            part = view[start : start + _READ_BYTES]
            begin = offset + start
            data = b""
            if begin < self.size_bytes:
                with self._client.translating("read", self._key):
                    data = self._read(begin, min(begin + len(part), self.size_bytes))
            if len(data) != len(part):
                raise IntegrityError(
                    f"the file ends at byte {begin + len(data)}, but {offset + len(view)} "
                    "were requested",
                    uri=uri,
                )
            part[:] = data

    def close(self) -> None:
        self._closed = True
        with self._lock:
            copy, self._copy = self._copy, None
            if copy is not None:
                copy.close()

    def _read(self, begin: int, end: int) -> bytes:
        client = self._client
        if client.protocol not in _WEB:
            return client.read_range(client.path_of(self._key), begin, end)
        if self._copy is None:
            try:
                return self._read_range(begin, end)
            except ValueError:
                # fsspec's error for a body that is no range; nothing of the body was read.
                _log.info(
                    "%s: the server ignores ranges, so each read fetches the complete file",
                    self._uri,
                )
        with self._lock:
            if self._copy is None:
                self._copy = self._fetch()
            self._copy.seek(begin)
            return self._copy.read(end - begin)

    def _read_range(self, begin: int, end: int) -> bytes:
        if self._file is None:
            self._file = self._client.fs.open(self._client.path_of(self._key), size=self.size_bytes)
        try:
            # The method that fsspec's buffered files use. Unlike cat_file it checks the answer
            # first.
            return bytes(self._file._fetch_range(begin, end))  # noqa: SLF001
        except Exception as error:
            if getattr(error, "status", None) in _GONE:
                raise FileNotFoundError(f"{type(error).__name__}: {self._key}") from error
            raise

    def _fetch(self) -> tempfile.SpooledTemporaryFile[bytes]:
        copy = tempfile.SpooledTemporaryFile(max_size=_READ_BYTES)  # noqa: SIM115 - until close
        try:
            with self._client.fs.open(self._client.path_of(self._key), block_size=0) as stream:
                shutil.copyfileobj(stream, copy, _BLOCK_BYTES)
        except BaseException:
            copy.close()
            raise
        return copy

    @property
    def _uri(self) -> Uri:
        return self._client.uri(self._key)
