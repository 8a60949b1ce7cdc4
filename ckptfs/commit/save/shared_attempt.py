"""Attempts that several processes share: files that arrive one by one, and copies that the next process resumes.

The processes do not begin such a save together. They share only the run's storage and a save_id. Each joins the
attempt by its record, an exclusive create: that is the begin. Its base generation is the one in the seal, so a
fence that comes after the first file fences the save like any other, and the next owner removes what a crash left.

    files that arrive   every process   join      the attempt's record: base and save_id
                                        write     files below the attempt, each whole or not at all
                        one of them     commit    the ordinary attempt, from its middle: manifest,
                                                  seal, projection

    copies              next_id         the id of a copy: by its source and its name, so that it is
                                        found again
                        ResumableAttempt  begin  its record, or the one that is there
                                          write  what the caller likes; a failure or a kill leaves it
                                          commit the manifest by an exclusive create, or the one that
                                                  is there; the seal is the ordinary one

A process cannot know whether another one still works on the same copy. So two may: they write the same bytes under
the same names, the manifest of the first is the manifest of both, and one of them seals. If a fence comes after the
begin of an attempt, the new owner aborts it. An abort or a seal uses an id up; then the next id counts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ckptfs.commit.log.append import catch_up
from ckptfs.commit.log.entries import Generation, Kind
from ckptfs.commit.log.fold import LogState
from ckptfs.commit.manifest import Manifest, decode_manifest, digest_of
from ckptfs.commit.operations import (
    Create,
    List,
    MakeDir,
    Pause,
    Program,
    Read,
    Refresh,
    Remove,
    StatOf,
    Sync,
    Write,
    drive,
    name_is_plain,
    read_limited,
)
from ckptfs.commit.ownership.claim import Takeover, claim
from ckptfs.commit.ownership.recovery_plan import decode_record, encode_record
from ckptfs.commit.ownership.run import Caller, Run
from ckptfs.commit.paths import ATTEMPTS, MANIFEST, PARTIAL_PREFIX, AttemptKeys, staging_key
from ckptfs.commit.save.attempt import Attempt, Gathered
from ckptfs.commit.save.foreign_metadata import names_save
from ckptfs.commit.save.owner_steps import survey
from ckptfs.commit.save.plain_names import other_attempts
from ckptfs.commit.save.planning import SavePlan, origins_of
from ckptfs.commit.save.projection import discard_source
from ckptfs.commit.save.sealing import undo_here
from ckptfs.commit.save.spec import IfExists, SaveSpec, SmallFile, WrittenPart, fresh_ids
from ckptfs.commit.session import Place, RunSession, View, start_session
from ckptfs.commit.state import save_named
from ckptfs.control.control import SoloControl, default_timeout_s
from ckptfs.errors import (
    AlreadyExistsError,
    AnswerLostError,
    CkptfsError,
    FencedError,
    ManifestError,
    NotFoundError,
    StaleError,
    StateError,
    TransientError,
)
from ckptfs.schema import SchemaError
from ckptfs.storage.base import DataWriter, Entry, Shape, Storage

__all__ = [
    "AGAIN",
    "Arrived",
    "Joined",
    "ResumableAttempt",
    "begun_by",
    "give_up",
    "join",
    "join_attempt",
    "next_id",
    "on_the_way",
    "open_attempt",
    "origin_of",
]

logger = logging.getLogger("ckptfs.commit")


def begun_by(keys: AttemptKeys) -> Program[Generation | None]:
    """Return the base generation of an attempt, or None if it has not begun."""
    yield Refresh(keys.record.rsplit("/", 1)[0])
    try:
        raw: bytes = yield Read(keys.record)
    except (NotFoundError, StaleError):
        return None
    try:
        return decode_record(raw).base
    except SchemaError as error:
        raise ManifestError(f"{keys.record} is damaged: {error}", uri=keys.record) from error


def join(keys: AttemptKeys, ids: Iterator[str], *, exclusive: bool) -> Program[Generation]:
    """Join an attempt, and begin it if it has not begun. Returns its base generation.

    Any number of processes may call this at the same time: one of them writes the record.

    exclusive: Whether the storage has an exclusive create.

    Raises:
        FencedError: The id was sealed or aborted before.
    """
    base = yield from begun_by(keys)
    if base is not None:
        return base
    yield from name_is_plain(keys.name, keys.shape)
    state = yield from survey()
    _refuse_spent(state, keys)
    record = encode_record(keys.save_id, keys.name, state.generation)
    home, tries = keys.record.rsplit("/", 1)[0], 0
    while True:
        yield MakeDir(home)
        try:
            if exclusive:
                yield Create(keys.record, record, staging_key(next(ids)))
            else:
                yield Write(keys.record, record)
            yield Sync(home)
        except (AlreadyExistsError, AnswerLostError) as error:
            logger.debug(
                "the record of save %s: %s", keys.save_id, error
            )  # the existing file decides
        except NotFoundError as error:
            # A recovery removed the empty directory because it took the attempt for a dead one.
            logger.debug("the directory of save %s: %s", keys.save_id, error)
        base = yield from begun_by(keys)
        if base is not None:
            return base
        state = yield from catch_up(state)
        _refuse_spent(state, keys)
        yield Pause(tries, f"making {keys.record}")
        tries += 1


def _refuse_spent(state: LogState, keys: AttemptKeys) -> None:
    known = state.save(keys.save_id)
    if known.aborted or known.seal is not None:
        raise FencedError(
            f"save {keys.save_id} of {keys.name} was {'aborted' if known.aborted else 'committed'}",
            hint="the files of a save are removed when it ends; save again",
        )


@dataclass(frozen=True, slots=True)
class Joined:
    """The membership of one process in an attempt.

    base: The base in the attempt's record.
    """

    session: RunSession
    keys: AttemptKeys
    base: Generation

    def key(self, file: str) -> str:
        """The key of one file of the attempt."""
        return f"{self.keys.data}/{file}"

    def open_write(self, file: str) -> DataWriter:
        """Open one file, which will be complete or absent. Its name is durable after ``commit``."""
        return self.session.storage.open_write(self.key(file))

    def remove(self, file: str) -> None:
        """Remove one file. An absent file is success."""
        self.session.storage.remove(self.key(file))

    def files(self) -> list[str]:
        """Return the names of the files that have arrived, without the record."""
        storage = self.session.storage
        storage.refresh(self.keys.data)
        record = self.keys.record.rpartition("/")[2]
        return [
            entry.name
            for entry in storage.list(self.keys.data)
            if not (entry.is_dir or entry.name == record or entry.name.startswith(PARTIAL_PREFIX))
        ]


def on_the_way(storage: Storage) -> dict[str, str]:
    """Return ids and names of attempts with a record. Local, read-only.

    They are in progress, dead, or committed and not projected. On object stores their data has its
    final names already.
    """
    found: dict[str, str] = {}
    with contextlib.suppress(NotFoundError):
        for entry in storage.list(ATTEMPTS):
            record = AttemptKeys(Shape.OBJECT, "", entry.name).record
            with contextlib.suppress(NotFoundError, ValueError):
                found[entry.name] = decode_record(read_limited(storage, record)).name
    return found


def join_attempt(storage: Storage, name: str, save_id: str) -> Joined:
    """Join the attempt ``save_id`` of ``name``; ``storage`` is rooted at the run. Local.

    The run's log and the attempt are made if they are missing.

    Raises:
        FencedError: The id was sealed or aborted before.
    """
    session = start_session(SoloControl(), storage, Place(), write=True)
    keys = AttemptKeys(session.caps.shape, name, save_id)
    program = join(keys, fresh_ids(), exclusive=session.caps.exclusive_create)
    return Joined(session, keys, drive(program, session.storage))


def give_up(joined: Joined) -> None:
    """Abort an attempt that will not be committed, and remove its bytes. Local.

    Calling it twice is harmless. Do not call it while another process may still write to the
    attempt. Errors are the storage's.
    """
    means = joined.session.means()
    undo_here(joined.session, joined.keys, joined.base, means)


class Arrived(Attempt):
    """An attempt with all of its files, in the process that commits it."""

    def __init__(self, session: RunSession, spec: SaveSpec, base: Generation) -> None:
        super().__init__(session, spec)
        self._base = base

    def _decide(self, answers: Sequence[View | None]) -> SavePlan:
        plan = super()._decide(answers)
        # The holder of the run may seal what it began under an earlier generation. Otherwise the
        # record's base counts: else a fence that came after the first file would not fence this
        # save.
        return plan if self.spec.run is not None else replace(plan, base=self._base)

    def _begin(self) -> tuple[str, ...]:
        if self._foreign is not None:
            # Its record was made with the first file, before it was known what it would replace.
            keys = self._named
            record = encode_record(keys.save_id, keys.name, self._base, replaces=self._foreign)
            self.storage.replace(keys.record, record)
        return ()


@contextlib.contextmanager
def open_attempt(joined: Joined, spec: SaveSpec) -> Iterator[Arrived]:
    """Yield the attempt over the files that arrived, begun. An error in the block abandons it.

    If ``spec.if_exists`` is REPLACE and the name is taken, it claims the run during the block, as
    ``save`` does. The recovery that belongs to the claim spares this save.

    Raises:
        CommitConflictError: The name is taken.
        FencedError: The run has a newer owner.
        RunBusyError: A living owner holds the run.
    """
    spec = replace(spec, save_id=joined.keys.save_id)
    with contextlib.ExitStack() as stack:
        with _giving_up(joined):
            run = _claimed(joined, spec, stack)
            if run is None:
                attempt = Arrived(
                    joined.session, replace(spec, if_exists=IfExists.ERROR), joined.base
                )
            else:
                attempt = Arrived(run.session, replace(spec, run=run.generation), joined.base)
            attempt.begin()
        try:
            yield attempt
        except BaseException:
            attempt.abandon()
            raise


@contextlib.contextmanager
def _giving_up(joined: Joined) -> Iterator[None]:
    """Remove an attempt that cannot even begin its commit: each retry would add another copy."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(CkptfsError, OSError):  # then the next owner removes it
            give_up(joined)
        raise


def _claimed(joined: Joined, spec: SaveSpec, stack: contextlib.ExitStack) -> Run | None:
    if spec.if_exists is not IfExists.REPLACE:
        return None
    view = {joined.session.placement.mine.id: drive(catch_up(), joined.session.storage)}
    if save_named(spec.name, view) is None:
        return None
    keep, call = (joined.keys.save_id,), "a write by URL"
    caller = Caller(call, for_call=True, wait_s=default_timeout_s())
    run = claim(joined.session, takeover=Takeover.DEAD, keep=keep, caller=caller)
    return stack.enter_context(run)


AGAIN = "~"  # between a save's id and the suffix that distinguishes two tries to copy it


def origin_of(save_id: str) -> str:
    """Return the id of the save that this one is a copy of, or its own id if it is no copy."""
    return save_id.partition(AGAIN)[0]


def next_id(origin: str, name: str, shape: Shape, state: LogState, *, held: bool) -> Program[str]:
    """Return the id under which ``origin`` is copied to ``name``.

    It is the id of the try before, if that may still be committed. held: The copier holds the run
    and may seal what it began before its fence.
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


class ResumableAttempt(Attempt):
    """One save on one rank, as ``Attempt``; ``spec.save_id`` comes from ``next_id``.

    Only for one domain: with disks of several nodes, no single process can see all existing files.
    """

    _base: Generation | None = None

    def begin(self) -> None:
        """Begin as ``Attempt.begin``, with the files of an earlier process of the same id.

        Collective.
        """
        super().begin()
        if self.spec.run is None:
            base = self.session.control.step("base", lambda: self._base, _first)
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
    ) -> Gathered:
        gathered = super()._gather(parts, finish)
        encoded = self._files[MANIFEST]
        if not isinstance(encoded, bytes):
            raise TypeError("one domain has one manifest")
        exclusive = self._means.caps.exclusive_create
        stored = drive(_once(f"{self._named.data}/{MANIFEST}", encoded, exclusive), self.storage)
        if stored == encoded:
            return gathered
        where = self.storage.uri(self.spec.name)
        manifest = decode_manifest(stored, where)
        if _what(manifest) != _what(decode_manifest(encoded, where)):
            raise StateError(
                "another version of ckptfs or torch began this copy and described it differently",
                uri=where,
                hint="finish it with that version, or remove what is left of it: ckptfs gc "
                "--delete",
            )
        self._files[MANIFEST] = stored
        digest, origins = digest_of(stored), origins_of(manifest)
        return dataclasses.replace(gathered, digest=digest, origins=origins)

    def _prepare(self, files: Mapping[str, SmallFile]) -> None:
        manifest = files.get(MANIFEST)
        if self._owner and self._named.shape is Shape.FILESYSTEM and isinstance(manifest, bytes):
            listed = decode_manifest(manifest, self.storage.uri(self.spec.name)).files
            drive(_tidy(self._named.attempt, {f.path for f in listed}), self.storage)
        super()._prepare(files)

    def abandon(self) -> None:
        """End this process's part of the attempt. Local, best effort.

        The files stay for the next process, unless another copy of the same save was committed:
        then the files that this process made later must never be projected.
        """
        self._let_go()
        if self._keys is None or not self._owner:
            return
        try:
            drive(_clear_after(self._keys), self.storage)
        except (CkptfsError, OSError) as error:
            logger.debug("what is left of %s: %s", self.save_id, error)

    def give_up(self) -> None:
        """Abandon as ``Attempt.abandon``: no process will continue it. Local, best effort."""
        super().abandon()


def _first(bases: Sequence[Generation | None]) -> Generation:
    return next(base for base in bases if base is not None)


def _once(key: str, data: bytes, exclusive: bool) -> Program[bytes]:  # noqa: FBT001 - named by its callers
    """Return the file that one of many processes made: ours, or the one that existed before."""
    try:
        if exclusive:
            yield Create(key, data, staging_key(next(fresh_ids())))
            return data
    except (AlreadyExistsError, AnswerLostError):
        return (yield from _until_present(key, data))
    return data


def _until_present(key: str, data: bytes) -> Program[bytes]:
    """Return the file's bytes once it exists.

    After a lost answer the create may not have been done, so it is repeated.
    """
    attempt = 0
    while True:
        try:
            existing: bytes = yield Read(key)
        except NotFoundError:
            pass
        except (AnswerLostError, StaleError, TransientError) as error:
            logger.debug("reading %s: %s", key, error)
        else:
            return existing
        yield Pause(attempt, f"making {key}")
        attempt += 1
        try:
            yield Create(key, data, staging_key(next(fresh_ids())))
        except (AlreadyExistsError, AnswerLostError, TransientError) as error:
            logger.debug("making %s: %s", key, error)


def _tidy(attempt: str, listed: Collection[str], below: str = "") -> Program[None]:
    """Remove files that killed processes left incomplete: they would be part of the checkpoint.

    Every listed file is complete now. If a living process loses one of its files this way, it finds
    the complete one, or fails alone.
    """
    entries: list[Entry] = yield List(f"{attempt}/{below}".rstrip("/"))
    for entry in entries:
        path = f"{below}{entry.name}"
        if entry.is_dir:
            yield from _tidy(attempt, listed, f"{path}/")
        elif entry.name.startswith(PARTIAL_PREFIX) and path not in listed:
            yield Remove(f"{attempt}/{path}")


def _clear_after(keys: AttemptKeys) -> Program[None]:
    """Remove the rest of an attempt that was committed and completely projected.

    Only on filesystems.
    """
    if keys.shape is not Shape.FILESYSTEM:
        return
    try:
        # The manifest is moved last: as long as it is not there, the attempt may hold committed
        # files.
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
    """Return what two descriptions of one copy must have in common."""
    files = tuple(sorted(manifest.files, key=lambda f: (f.path, f.domain or "")))
    return manifest.save_id, manifest.name, manifest.step, manifest.artifact, files
