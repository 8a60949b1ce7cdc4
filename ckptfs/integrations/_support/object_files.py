"""Files of one process, one object each, with names and removals that a framework decides.

    files = ObjectFiles(mode="async")
    files.save(state, "s3://bucket/run/epoch=1.ckpt")     returns when it is pickled
    files.remove("s3://bucket/run/epoch=0.ckpt")          when the save before this call is committed
    files.close()                                         all done; raises what failed

One thread writes the saves, in the order of the calls. A failure is logged at once, and raised by
the next ``save``, ``wait``, ``load`` or ``close``, so it cannot be missed. The first save into a
directory removes the half-written files that killed processes of this machine left there, and, once
it is written, any half-written files that are older than a day.

What may be removed is decided here, because the framework may be wrong about what it replaces:

    a file that this object wrote                            yes
    a file that the run wrote from which this one resumed,
    in a directory that this object writes into (``adopt``)  yes
    a file that this object has loaded                       not before ``close``
    a symbolic link in a directory that this object writes
    into, to a file in such a directory                      the link, yes
    anything else                                            no
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from ckptfs.dcp.object_file import (
    freeze,
    read_object,
    remove_object,
    remove_partials,
    write_object,
)
from ckptfs.dcp.worker import SaveWorker
from ckptfs.errors import CkptfsError, StateError, UriError
from ckptfs.uri import Uri, options_of

__all__ = ["ObjectFiles", "written_before"]

logger = logging.getLogger("ckptfs.integrations")


@dataclass(frozen=True, slots=True)
class _Written:
    """Where a file is, the URI as the caller gave it, and the options that open its storage."""

    target: Uri
    called: str
    options: Mapping[str, Any]


def _tell_nobody(uri: str) -> None:
    """Do nothing: the default of ``changed``."""


class ObjectFiles:
    """Saves, loads and removes single objects by URI. One thread calls it.

    Args:
        mode: "async" returns from ``save`` when the object is pickled into host memory.
        max_in_flight: How many of these may be under way; one more save waits for the oldest.
        storage_options: For all files.
        changed: Called with the URI as it was given, after a file was written or removed, on the
            thread that did it.
    """

    def __init__(
        self,
        *,
        mode: str = "sync",
        max_in_flight: int = 2,
        storage_options: Mapping[str, Any] | None = None,
        changed: Callable[[str], None] = _tell_nobody,
    ) -> None:
        if mode not in ("sync", "async"):
            raise StateError(f'mode is {mode!r}; it is "sync" or "async"')
        if max_in_flight < 1:
            raise StateError(f"max_in_flight is {max_in_flight}; one save at least")
        self._is_async, self._limit = mode == "async", max_in_flight
        self._options = dict(storage_options or {})
        self._changed = changed
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._worker: SaveWorker | None = None
        self._uploads: deque[Future[None]] = deque()
        self._begun = self._committed = 0  # numbers of saves
        self._to_remove: dict[Uri, tuple[int, _Written]] = {}  # removed when that save is committed
        self._written: dict[Uri, _Written] = {}
        self._adopted: set[Uri] = set()
        self._loaded: set[Uri] = set()
        self._cleared: set[Uri] = set()  # directories where files of dead writers were removed

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the arguments: a launcher that spawns pickles it before anything is saved."""
        return {name: vars(self)[name] for name in ("_is_async", "_limit", "_options", "_changed")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._reset()

    # -- saving -------------------------------------------------------------------------

    def save(
        self, obj: object, uri: Any, *, storage_options: Mapping[str, Any] | None = None
    ) -> None:
        """Save one object under ``uri``, replacing what is there.

        The old file stays until the new one is committed. If an earlier save failed, this raises
        its error and saves nothing: call again.
        """
        file = self._file(uri, storage_options)
        self._settle(self._limit)
        if not self._is_async:
            number = self._begin(file)
            with self._on_its_way(number, file):
                write_object(obj, file.target, file.options)
            return
        frozen = freeze(obj)  # everything as it is now; later changes by the caller do not matter
        number = self._begin(file)

        def job() -> None:
            with self._on_its_way(number, file):
                frozen.write(file.target, file.options)

        if self._worker is None:
            self._worker = SaveWorker("ckptfs-files")
        self._uploads.append(self._worker.submit(f"saving {file.target}", job))

    def _begin(self, file: _Written) -> int:
        with self._lock:
            self._to_remove.pop(file.target, None)  # it is wanted again
            self._begun += 1
            return self._begun

    @contextlib.contextmanager
    def _on_its_way(self, number: int, file: _Written) -> Iterator[None]:
        """Surround the write of one save; what follows its commit cannot fail the save any more."""
        folder = file.target.parent
        if folder not in self._cleared:
            remove_partials(folder, file.options)  # first: a full disk may need the space
        yield
        if folder not in self._cleared:
            remove_partials(folder, file.options, file.target.name)
            self._cleared.add(folder)
        logger.info("%s is saved", file.target)
        with self._lock:
            self._committed = number
            self._written[file.target] = file
            due = [at for at, (after, _) in self._to_remove.items() if after <= number]
            gone = [self._to_remove.pop(at)[1] for at in due]
        self._changed(file.called)
        for other in gone:
            self._remove_if_ours(other)

    def _settle(self, limit: int) -> None:
        """Wait until fewer than ``limit`` are under way; raise what failed so far, once."""
        failures: list[BaseException] = []
        while self._uploads and (len(self._uploads) >= limit or self._uploads[0].done()):
            error = self._uploads.popleft().exception()
            if error is not None:
                failures.append(error)
        if failures:
            for also in failures[1:]:
                failures[0].add_note(f"and another save failed: {type(also).__name__}: {also}")
            raise failures[0]

    def wait(self) -> None:
        """Wait until all saves are committed; raise the error of one that failed."""
        self._settle(1)

    def close(self) -> None:
        """Wait as ``wait`` does; then end the thread, and protect loaded files no longer.

        It may be used again.
        """
        try:
            self._settle(1)
        finally:
            worker, self._worker = self._worker, None
            if worker is not None:
                worker.close()
            self._loaded.clear()
            for target in self._to_remove:
                logger.warning("%s is not removed: no later save was committed", target)

    # -- loading ------------------------------------------------------------------------

    def load(self, uri: Any, *, map_location: Any = "cpu", weights_only: bool | None = None) -> Any:
        """Load one object, as ``read_object``. It is not removed before ``close``."""
        file = self._file(uri, None)
        self.wait()
        obj = read_object(
            file.target, file.options, map_location=map_location, weights_only=weights_only
        )
        self.loaded(file.target)
        return obj

    def loaded(self, target: Uri) -> None:
        """Note that other code loaded this file for this run, so that it stays until ``close``."""
        self._loaded.add(target)
        if target.is_local:
            # `last.ckpt` may be a link to the file that would be removed.
            self._loaded.add(Uri.parse(os.path.realpath(target.local_path)))

    # -- removing -----------------------------------------------------------------------

    def adopt(self, uris: Iterable[object]) -> None:
        """Note that the run from which this process resumed wrote these files."""
        for uri in uris:
            try:
                self._adopted.add(Uri.parse(uri))  # type: ignore[arg-type] # the parser says
            except UriError as error:
                logger.debug("what an earlier process wrote is not to be read: %s", error)

    def remove(self, uri: Any) -> None:
        """Remove a file when the last save that was begun is committed; at once if it is.

        What must not be removed stays, with a line in the log. What cannot be removed stays until
        the next commit.
        """
        file = self._file(uri, None)
        with self._lock:
            if self._begun > self._committed:
                self._to_remove[file.target] = (self._begun, file)
                return
        self._remove_if_ours(file)

    def _remove_if_ours(self, file: _Written) -> None:
        with self._lock:
            why_not = self._why_not(file.target)
            file = self._written.get(file.target, file)
        if why_not is None:
            self._remove(file)
        else:
            logger.warning("%s is not removed: %s", file.target, why_not)

    def _why_not(self, target: Uri) -> str | None:
        if target in self._loaded:
            return "this run was resumed from it"
        if target in self._written:
            return None
        here = {written.parent for written in self._written}
        if target in self._adopted and target.parent in here:
            return None
        # A framework makes links by itself (save_last="link"). Their targets stay.
        if target.parent in here and _leads_into(target, here):
            return None
        return "this run did not write it, as far as it knows"

    def _remove(self, file: _Written) -> None:
        try:
            remove_object(file.target, file.options)
        except CkptfsError as error:
            # No reason to stop training; a later commit tries again.
            logger.warning("%s is removed later: %s", file.target, error)
            with self._lock:
                self._to_remove.setdefault(file.target, (self._committed, file))
            return
        logger.info("%s is removed", file.target)
        with self._lock:
            self._written.pop(file.target, None)
        self._changed(file.called)

    def _file(self, uri: Any, more: Mapping[str, Any] | None) -> _Written:
        options = {**self._options, **options_of(uri), **(more or {})}
        target = Uri.parse(uri)
        return _Written(target, str(uri), options)


def _leads_into(target: Uri, folders: Collection[Uri]) -> bool:
    """Whether there is a symbolic link that leads to a name in one of these directories."""
    if not target.is_local or not os.path.islink(target.local_path):
        return False
    behind = os.path.dirname(os.path.realpath(target.local_path))
    return any(
        behind == os.path.realpath(folder.local_path) for folder in folders if folder.is_local
    )


def written_before(checkpoint: object) -> list[str]:
    """Return the files that the ModelCheckpoint callbacks in a checkpoint of Lightning remember.

    An earlier process of the run wrote them. [] for any other object.
    """
    callbacks = checkpoint.get("callbacks") if isinstance(checkpoint, Mapping) else None
    if not isinstance(callbacks, Mapping):
        return []
    found: list[str] = []
    for state in callbacks.values():
        if isinstance(state, Mapping) and "best_model_path" in state:
            names = ("best_model_path", "last_model_path", "kth_best_model_path")
            found += [*state.get("best_k_models", ()), *(str(state.get(name)) for name in names)]
    return [path for path in found if path not in ("", "None")]
