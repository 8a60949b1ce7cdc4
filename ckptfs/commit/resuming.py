"""An attempt that outlives the process that made it: the next one goes on with what is there.

    next_id        the id of a copy: by its source and its name, so that it is found again
    KeptAttempt    begin    its record by an exclusive create, or the record that is there
                   write    what the caller likes; a failure or a kill leaves it where it is
                   commit   the manifest by an exclusive create, or the one that is there; the seal
                            is the ordinary one

Nobody can tell whether another process still works on the same copy. So two may: they write the same
bytes under the same names, the manifest of the first is the manifest of both, and one of them seals.
An attempt that a fence came after is its owner's to abort. An id is spent by its abort, and by its
seal; then the next one counts.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import logging
from collections.abc import Callable, Collection, Mapping, Sequence

from ckptfs.commit.arriving import begun_by, join
from ckptfs.commit.attempt import Attempt, Gathered
from ckptfs.commit.entries import Generation, Kind
from ckptfs.commit.fold import LogState
from ckptfs.commit.foreign import names_save
from ckptfs.commit.layout import MANIFEST, PARTIAL_PREFIX, AttemptKeys, staging_key
from ckptfs.commit.log import catch_up
from ckptfs.commit.manifest import Manifest, decode_manifest, digest_of
from ckptfs.commit.ops import Create, List, Pause, Program, Read, Remove, StatOf, drive
from ckptfs.commit.plain import other_attempts
from ckptfs.commit.planning import origins_of
from ckptfs.commit.project import discard_source
from ckptfs.commit.spec import SmallFile, WrittenPart, fresh_ids
from ckptfs.errors import (
    AlreadyExistsError,
    AnswerLostError,
    CkptfsError,
    NotFoundError,
    StaleError,
    StateError,
    TransientError,
)
from ckptfs.storage.base import Entry, Shape

__all__ = ["AGAIN", "KeptAttempt", "next_id", "origin_of"]

logger = logging.getLogger(__name__)

AGAIN = "~"  # between a save's id and what tells two tries to copy it apart


def origin_of(save_id: str) -> str:
    """The id of the save that this one is a copy of; its own where it is none."""
    return save_id.partition(AGAIN)[0]


def next_id(origin: str, name: str, shape: Shape, state: LogState, *, held: bool) -> Program[str]:
    """The id under which ``origin`` is copied to ``name``: that of the try before, if it may still be
    committed. held: by the run's holder, who vouches for what began before its fence.
    """
    for number in itertools.count():
        digest = hashlib.sha256(f"{name} {number}".encode()).hexdigest()[:8]
        save_id = f"{origin}{AGAIN}{digest}"
        known = state.save(save_id)
        if known.aborted or known.seal is not None:
            continue
        base = yield from begun_by(AttemptKeys(shape, name, save_id))
        if held or base is None or base >= state.generation:
            return save_id
    raise AssertionError("unreachable")


class KeptAttempt(Attempt):
    """One save, seen from one rank, as ``Attempt``; ``spec.save_id`` is what ``next_id`` told.

    Over one domain: disks of several nodes have no one place that tells what is there.
    """

    _base: Generation | None = None

    def begin(self) -> None:
        """Collective. As ``Attempt.begin``; what an earlier process of the same id brought counts."""
        super().begin()
        if self.spec.run is None:
            base = self.seat.control.step("base", lambda: self._base, _first)
            self._plan = dataclasses.replace(self._planned, base=base)

    def _begin(self) -> tuple[str, ...]:
        if not self._owner:
            return ()
        exclusive = self._means.caps.exclusive_create
        program = join(self._named, fresh_ids(), exclusive=exclusive)
        self._base = drive(program, self.storage)
        if self.spec.artifact is Kind.DIRECTORY and self._named.shape is Shape.OBJECT:
            state = drive(catch_up(), self.storage)
            return drive(other_attempts(self._named, state), self.storage)
        return ()

    def _gather(
        self,
        parts: list[WrittenPart],
        finish: Callable[[list[WrittenPart]], Mapping[str, SmallFile]],
        kept: dict[str, SmallFile],
    ) -> Gathered:
        gathered = super()._gather(parts, finish, kept)
        mine = kept[MANIFEST]
        if not isinstance(mine, bytes):
            raise TypeError("one domain has one manifest")
        exclusive = self._means.caps.exclusive_create
        theirs = drive(_once(f"{self._named.data}/{MANIFEST}", mine, exclusive), self.storage)
        if theirs == mine:
            return gathered
        where = self.storage.uri(self.spec.name)
        manifest = decode_manifest(theirs, where)
        if _what(manifest) != _what(decode_manifest(mine, where)):
            raise StateError(
                "this copy was begun by another version of ckptfs or torch, which described it otherwise",
                uri=where,
                hint="finish it with that one, or remove what is left of it: ckptfs gc --delete",
            )
        kept[MANIFEST] = theirs
        digest, origins = digest_of(theirs), origins_of(manifest)
        return dataclasses.replace(gathered, digest=digest, origins=origins)

    def _prepare(self, files: Mapping[str, SmallFile]) -> None:
        manifest = files.get(MANIFEST)
        if self._owner and self._named.shape is Shape.FILESYSTEM and isinstance(manifest, bytes):
            listed = decode_manifest(manifest, self.storage.uri(self.spec.name)).files
            drive(_tidy(self._named.attempt, {f.path for f in listed}), self.storage)
        super()._prepare(files)

    def abandon(self) -> None:
        """Local, best effort. What is there stays for the next, unless another copy of the same was
        committed: then nobody may project what this one made after that.
        """
        self._let_go()
        if self._keys is None or not self._owner:
            return
        try:
            drive(_clear_after(self._keys), self.storage)
        except (CkptfsError, OSError) as error:
            logger.debug("what is left of %s: %s", self.save_id, error)

    def give_up(self) -> None:
        """Local, best effort. As ``Attempt.abandon``: nobody will go on with it."""
        super().abandon()


def _first(bases: Sequence[Generation | None]) -> Generation:
    return next(base for base in bases if base is not None)


def _once(key: str, data: bytes, exclusive: bool) -> Program[bytes]:  # noqa: FBT001 - named by its callers
    """The file that one of many made: ours, or the one that was there before."""
    try:
        if exclusive:
            yield Create(key, data, staging_key(next(fresh_ids())))
            return data
    except (AlreadyExistsError, AnswerLostError):
        return (yield from _until_there(key, data))
    return data


def _until_there(key: str, data: bytes) -> Program[bytes]:
    """The file, once it is there: the create whose answer was lost may not have been done, and is repeated."""
    attempt = 0
    while True:
        try:
            there: bytes = yield Read(key)
        except NotFoundError:
            pass
        except (AnswerLostError, StaleError, TransientError) as error:
            logger.debug("reading %s: %s", key, error)
        else:
            return there
        yield Pause(attempt, f"making {key}")
        attempt += 1
        try:
            yield Create(key, data, staging_key(next(fresh_ids())))
        except (AlreadyExistsError, AnswerLostError, TransientError) as error:
            logger.debug("making %s: %s", key, error)


def _tidy(attempt: str, listed: Collection[str], below: str = "") -> Program[None]:
    """Remove what killed processes left half-written, or it would be part of the checkpoint. Every file
    is whole by now, so a living one that loses its own this way finds it there, or fails by itself.
    """
    entries: list[Entry] = yield List(f"{attempt}/{below}".rstrip("/"))
    for entry in entries:
        path = f"{below}{entry.name}"
        if entry.is_dir:
            yield from _tidy(attempt, listed, f"{path}/")
        elif entry.name.startswith(PARTIAL_PREFIX) and path not in listed:
            yield Remove(f"{attempt}/{path}")


def _clear_after(keys: AttemptKeys) -> Program[None]:
    """Filesystems: remove what lies in an attempt that was committed and projected to its end."""
    if keys.shape is not Shape.FILESYSTEM:
        return
    try:
        # The manifest is moved last: before it is there, the attempt may hold what was committed.
        shown: bytes = yield Read(f"{keys.name}/{MANIFEST}")
        yield StatOf(f"{keys.projected_data}/{MANIFEST}")
    except NotFoundError:
        return
    if names_save(shown) != keys.save_id:
        return
    known = (yield from catch_up()).save(keys.save_id)
    if known.seal is not None and not known.aborted:
        yield from discard_source(keys)


def _what(manifest: Manifest) -> tuple[object, ...]:
    """What two descriptions of one copy have to agree in."""
    files = tuple(sorted(manifest.files, key=lambda f: (f.path, f.domain or "")))
    return manifest.save_id, manifest.name, manifest.step, manifest.artifact, files
