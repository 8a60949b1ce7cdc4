"""fsspec filesystems ``ckptfs+file://`` ``ckptfs+s3://`` ...: our commit for programs with fsspec.

    dcp.save(state, checkpoint_id="ckptfs+s3://bucket/run/step_100")     nothing to import
    dcp.load(state, checkpoint_id="ckptfs+s3://bucket/run/step_100")     or bare s3://, or ckptfs.load

    *.distcp  .metadata.tmp      of a DCP writer: arrive in an attempt, invisible, from every rank's process
    mv .metadata.tmp .metadata   the commit: all that it refers to is there, or nothing is visible
    rm .metadata                 of a committed step: delayed until that commit, which replaces it
    rm step_100, recursive       deletes the checkpoint: entry first, bytes later
    any other file               plain, whole or not at all when it is closed; a stock checkpoint that
                                 this process has copied in whole is committed (``arrivals.CopiedFiles``)
    .ckptfs/, attempts           never listed

Entry points register the names, so a spawned process knows them too. For programs that insist on a
chain there is ``ckptfs::s3://bucket/run/step_100``, the second choice. ``arrivals`` does the work.
"""

from __future__ import annotations

import contextlib
import re
from typing import Any

from ckptfs._torch import is_called_by_dcp
from ckptfs.commit.catalog.catalog import unprojected
from ckptfs.commit.delete.delete_checkpoint import delete_checkpoint, holds
from ckptfs.commit.paths import CONTROL, MANIFEST, METADATA, PARTIAL_PREFIX, is_save_id
from ckptfs.commit.save.shared_attempt import on_the_way
from ckptfs.errors import CommitConflictError, NotFoundError, UnsupportedError
from ckptfs.integrations.fsspec.arrivals import Arrivals, CopiedFiles, arrives, refuse_alone
from ckptfs.integrations.fsspec.files import DurableWriter, HeldWriter
from ckptfs.integrations.fsspec.plain import PlainFileSystem
from ckptfs.integrations.fsspec.underlying import options_for_storage, typed_errors
from ckptfs.storage.base import DataWriter
from ckptfs.uri import Uri

try:
    from fsspec.implementations.chained import ChainedFileSystem
except ImportError:  # fsspec < 2025.5 knows chains by their names
    from fsspec import AbstractFileSystem as ChainedFileSystem

_MAGIC = re.compile(r"[*?\[]")


class CheckpointFileSystem(PlainFileSystem):
    """One kind of place through ckptfs; a subclass for each protocol is defined below."""

    def _begin_process(self) -> None:
        super()._begin_process()
        self._arrivals_here = Arrivals(self._storage)
        self._copied_here = CopiedFiles(self._storage, self._copy_within)

    @property
    def _arrivals(self) -> Arrivals:
        self._check_fork()
        return self._arrivals_here

    # -- files that arrive, and plain ones ---------------------------------------------------

    def _writing(self, path: str, uri: Uri) -> DataWriter:
        if is_called_by_dcp():
            refuse_alone(uri)
            if uri.name == METADATA:
                return HeldWriter(lambda data: self._put_metadata(path, uri, data))
            if arrives(uri):
                return self._arrivals.open_write(uri.parent, uri.name)
        elif uri.parent.name and (uri.name == METADATA or arrives(uri)):
            self._refuse_committed(uri)
            return _Copying(super()._writing(path, uri), self._copied, uri)
        return super()._writing(path, uri)

    @property
    def _copied(self) -> CopiedFiles:
        self._check_fork()
        return self._copied_here

    def _copy_within(self, source: Uri, target: Uri) -> None:
        self._underlying.cp_file(
            self._strip_protocol(source.full), self._strip_protocol(target.full)
        )

    def _refuse_committed(self, uri: Uri) -> None:
        """Refuse shards and ``.metadata`` of another save next to those of a committed one."""
        if self._is_committed(uri.parent):
            raise CommitConflictError(
                "a committed checkpoint has this name",
                uri=uri.parent,
                hint="remove it first (rm, recursive), or copy to another name",
            )

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        try:
            return super()._open(path, mode, **kwargs)
        except FileNotFoundError:
            if mode != "rb":
                raise
            return super()._open(self._path_in_attempt(path), mode, **kwargs)

    def cat_file(
        self, path: Any, start: int | None = None, end: int | None = None, **kwargs: Any
    ) -> bytes:
        """Return the bytes of a file, or a part of them."""
        try:
            return super().cat_file(path, start, end, **kwargs)
        except FileNotFoundError:
            return super().cat_file(self._path_in_attempt(self._path(path)), start, end, **kwargs)

    def get_file(self, rpath: Any, lpath: Any, **kwargs: Any) -> None:
        """Download one file; of a directory, make it."""
        try:
            super().get_file(rpath, lpath, **kwargs)
        except FileNotFoundError:
            super().get_file(self._path_in_attempt(self._path(rpath)), lpath, **kwargs)

    def _path_in_attempt(self, path: str) -> str:
        """Return the path of a file of a committed checkpoint that was not projected.

        Its committer died before that, so the file is in the attempt, where ckptfs's own readers
        find it too. Raises NotFoundError if there is no such file.
        """
        uri = self._uri(path)
        deep = is_save_id(uri.parent.name)
        step = uri.parent.parent if deep else uri.parent
        if step.name and (deep or uri.name in (METADATA, MANIFEST)) and self._is_run(step.parent):
            options = options_for_storage(self._protocol, self._options)
            inside = f"{uri.parent.name}/{uri.name}" if deep else uri.name
            place = unprojected(step, inside, options)
            if place is not None:
                found: str = self._strip_protocol(place.full)
                return found
        raise NotFoundError("no such file", uri=uri)

    def _is_run(self, uri: Uri) -> bool:
        run: str = self._strip_protocol(uri.full)
        return bool(self._underlying.exists(f"{run.rstrip('/')}/{CONTROL}"))

    def _put_metadata(self, path: str, uri: Uri, data: bytes) -> None:
        if not self._arrivals.put_metadata(uri.parent, data):
            with DurableWriter(*self._place(path)) as plain:
                plain.write(data)

    def makedirs(self, path: Any, exist_ok: bool = False) -> None:  # noqa: FBT001, FBT002
        """Make a directory and its parents. Every rank of a save by torch calls this first."""
        self._arrivals.begin()
        super().makedirs(path, exist_ok)

    def rm_file(self, path: Any) -> None:
        """Remove one file; ``.metadata`` of a checkpoint stays until the next one is moved over it."""
        path = self._path(path)
        uri = self._uri(path)
        if uri.name == METADATA and self.exists(path):
            self._arrivals.replace(uri.parent)
        elif arrives(uri) and not self._underlying.exists(path):
            self._arrivals.remove(uri.parent, uri.name)
        else:
            self._underlying.rm_file(path)

    def rm(self, path: Any, recursive: bool = False, maxdepth: int | None = None) -> None:  # noqa: FBT001, FBT002
        """Remove files; with ``recursive``, directories too.

        A committed checkpoint is deleted as a whole.
        """
        names = path if isinstance(path, list | tuple | set) else [path]
        for one in [found for name in names for found in self._matching(self._path(name))]:
            waits = arrives(self._uri(one))
            if waits or self.islink(one) or self.info(one)["type"] != "directory":
                self.rm_file(one)
                # Object stores: "a" and "a/b" are two objects.
                if waits or not (recursive and self._is_bucket and self.isdir(one)):
                    continue
            elif not recursive:
                raise IsADirectoryError(f"{one} is a directory: pass recursive=True")
            if maxdepth is not None:
                super().rm(one, recursive=True, maxdepth=maxdepth)
            else:
                self._rm_dir(one)

    def _matching(self, path: str) -> list[str]:
        return list(self.glob(path)) if _MAGIC.search(path) and not self.lexists(path) else [path]

    def _rm_dir(self, path: str) -> None:
        uri = self._uri(path)
        todo: list[tuple[Uri, str | None]] = [(uri, None)]
        if is_save_id(uri.name):
            # The program empties a step name by name: without its data the step is gone.
            todo.append((uri.parent, uri.name))
        for step, save_id in todo:
            if self._is_committed(step, save_id):
                with contextlib.closing(self._storage(step.parent)) as storage:
                    delete_checkpoint(storage, step.name)
        self._underlying.invalidate_cache()
        with contextlib.suppress(FileNotFoundError):
            self._underlying.rm(path, recursive=True)

    def _is_committed(self, step: Uri, save_id: str | None = None) -> bool:
        """Whether the log of a run has this name, as that save. Read-only."""
        if not step.name or not self._is_run(step.parent):
            return False
        return holds(step, options_for_storage(self._protocol, self._options), save_id)

    def mv(self, path1: Any, path2: Any, **kwargs: Any) -> None:
        """Rename. A rename to ``.metadata`` commits all files that arrived with it."""
        source, target = self._path(path1), self._path(path2)
        uri = self._uri(source)
        if arrives(uri) and not self._underlying.exists(source):
            if self._uri(target) != uri.parent / METADATA:
                raise UnsupportedError("it waits for a commit and cannot be moved", uri=uri)
            self._arrivals.commit(uri.parent, uri.name)
            self._underlying.invalidate_cache()
        elif self._is_committed(uri):
            raise UnsupportedError(
                "a committed checkpoint keeps its name", uri=uri, hint="save it under the other one"
            )
        else:
            if self._uri(target).name == METADATA:
                self._refuse_committed(self._uri(target))
            self._underlying.mv(
                source, target, **({"recursive": True, **kwargs} if self._is_bucket else {})
            )

    # -- what is there ----------------------------------------------------------------------

    def ls(self, path: Any, detail: bool = False, **kwargs: Any) -> list[Any]:  # noqa: FBT001, FBT002
        """List a directory, without what is ckptfs's own or not committed yet.

        Returns names, or with ``detail`` what ``info`` returns for each.
        """
        path = self._path(path)
        with typed_errors("list", self._uri(path)):
            infos = self._underlying.ls(path, detail=True, **kwargs)
        named = [(info["name"].rstrip("/").rpartition("/")[2], info) for info in infos]
        visible = [
            (name, info)
            for name, info in named
            if name != CONTROL and not name.startswith(PARTIAL_PREFIX)
        ]
        if self._is_bucket:
            is_run = any(name == CONTROL for name, _ in named)
            visible = self._committed(path, visible, is_run=is_run)
            if infos and not visible and not is_run:
                raise NotFoundError("nothing is committed there", uri=self._uri(path))
        return [info if detail else info["name"] for _, info in visible]

    def _committed(
        self, path: str, found: list[tuple[str, Any]], *, is_run: bool
    ) -> list[tuple[str, Any]]:
        """Leave out what is not committed.

        On object stores the data of an attempt have their final keys, in the step, from the start.
        """
        waiting: set[str] = set()
        if any(is_save_id(name) for name, _ in found):
            waiting = set(on_the_way(self._storage(self._uri(path).parent)))
        elif is_run:
            names = on_the_way(self._storage(self._uri(path))).values()
            waiting = {name for name in names if not self.isdir(f"{path}/{name}")}
        return [(name, info) for name, info in found if name not in waiting]

    def info(self, path: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the description of a file or directory that is there: committed, or plain."""
        path = self._path(path)
        with typed_errors("stat", self._uri(path)):
            try:
                found: dict[str, Any] = self._underlying.info(path, **kwargs)
            except FileNotFoundError:
                found = {
                    **self._underlying.info(self._path_in_attempt(path), **kwargs),
                    "name": path,
                }
        if self._is_bucket and found["type"] == "directory" and "/" in path:
            self.ls(path)  # NotFoundError if only an attempt is there
        return found


class _Copying(DataWriter):
    """A plain file that may be one of a stock checkpoint."""

    def __init__(self, plain: DataWriter, copied: CopiedFiles, uri: Uri) -> None:
        self._plain, self._copied, self._uri = plain, copied, uri
        self._metadata = bytearray()

    def write(self, data: bytes | bytearray | memoryview) -> int:
        if self._uri.name == METADATA:
            self._metadata += data
        return self._plain.write(data)

    def close(self) -> None:
        self._plain.close()
        self._copied.wrote(self._uri.parent, self._uri.name, bytes(self._metadata))

    def abort(self) -> None:
        self._plain.abort()
        self._copied.failed(self._uri.parent)


class ChainedCheckpoints(CheckpointFileSystem, ChainedFileSystem):
    """``ckptfs::s3://...``, and the URLs that fsspec makes from it."""

    protocol = "ckptfs"

    def unstrip_protocol(self, name: str) -> str:
        """Return the chained URL."""
        return f"ckptfs::{self._protocol}://{self._path(name)}"


class FileCheckpoints(CheckpointFileSystem):
    """``ckptfs+file:///path``."""

    protocol, target, root_marker = "ckptfs+file", "file", "/"
    local_file = True  # fsspec.open_local


class S3Checkpoints(CheckpointFileSystem):
    """``ckptfs+s3://``."""

    protocol, target = "ckptfs+s3", "s3"


class GSCheckpoints(CheckpointFileSystem):
    """``ckptfs+gs://``."""

    protocol, target = "ckptfs+gs", "gs"


class GCSCheckpoints(CheckpointFileSystem):
    """``ckptfs+gcs://``."""

    protocol, target = "ckptfs+gcs", "gcs"


class AZCheckpoints(CheckpointFileSystem):
    """``ckptfs+az://``."""

    protocol, target = "ckptfs+az", "az"


class ABFSCheckpoints(CheckpointFileSystem):
    """``ckptfs+abfs://``."""

    protocol, target = "ckptfs+abfs", "abfs"


class ABFSSCheckpoints(CheckpointFileSystem):
    """``ckptfs+abfss://``."""

    protocol, target = "ckptfs+abfss", "abfss"


class ADLCheckpoints(CheckpointFileSystem):
    """``ckptfs+adl://``."""

    protocol, target = "ckptfs+adl", "adl"


class HDFSCheckpoints(CheckpointFileSystem):
    """``ckptfs+hdfs://``."""

    protocol, target = "ckptfs+hdfs", "hdfs"


class MemoryCheckpoints(CheckpointFileSystem):
    """``ckptfs+memory://name/path``: ckptfs's memory, which ``ckptfs.load("memory://...")`` reads."""

    protocol, target = "ckptfs+memory", "memory"
