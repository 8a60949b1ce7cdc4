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
                        ResumableStrategy begin  its record, or the one that is there
                                          write  what the caller likes; a failure or a kill leaves it
                                          commit the manifest by an exclusive create, or the one that
                                                  is there; the seal is the ordinary one

A process cannot know whether another one still works on the same copy. So two may: they write the same bytes under
the same names, the manifest of the first is the manifest of both, and one of them seals. If a fence comes after the
begin of an attempt, the new owner aborts it. An abort or a seal uses an id up; then the next id counts.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ckptfs.commit.log.append import catch_up
from ckptfs.commit.log.entries import Generation
from ckptfs.commit.log.fold import LogState
from ckptfs.commit.manifest import Manifest, decode_manifest, encode_manifest
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
from ckptfs.commit.save.attempt import SaveAttempt
from ckptfs.commit.save.foreign_metadata import names_save
from ckptfs.commit.save.owner_steps import BegunHere, Here, Strategy, others_of_name, survey
from ckptfs.commit.save.planning import SavePlan
from ckptfs.commit.save.projection import discard_source
from ckptfs.commit.save.sealing import undo_here
from ckptfs.commit.save.spec import IfExists, SaveSpec, SmallFile, fresh_ids
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
    "ArrivedStrategy",
    "Joined",
    "ResumableStrategy",
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


@dataclass(frozen=True, slots=True)
class ArrivedStrategy(Strategy):
    """A save with all of its files, in the process that commits it.

    Attributes:
        base: The generation in its record.
    """

    base: Generation

    def plan(self, spec: SaveSpec, views: Sequence[View | None], session: RunSession) -> SavePlan:
        """As ``Strategy.plan``, with the base of the record."""
        plan = Strategy.plan(self, spec, views, session)
        # The holder of the run may seal what it began under an earlier generation. Otherwise the
        # record's base counts: else a fence that came after the first file would not fence this
        # save.
        return plan if spec.run is not None else replace(plan, base=self.base)

    def begin(self, here: Here) -> BegunHere:
        """Only complete the record: it was made with the first file, before it was known what is replaced."""
        if here.foreign is not None:
            keys = here.keys
            record = encode_record(keys.save_id, keys.name, self.base, replaces=here.foreign)
            here.session.storage.replace(keys.record, record)
        return BegunHere()


@contextlib.contextmanager
def open_attempt(joined: Joined, spec: SaveSpec) -> Iterator[SaveAttempt]:
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
                session, spec = joined.session, replace(spec, if_exists=IfExists.ERROR)
            else:
                session, spec = run.session, replace(spec, run=run.generation)
            attempt = SaveAttempt(session, spec, strategy=ArrivedStrategy(joined.base))
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


class ResumableStrategy(Strategy):
    """A save with files that the next process continues with; ``spec.save_id`` comes from ``next_id``.

    Only for one domain: with disks of several nodes, no single process can see all existing files.
    """

    keeps_files = True

    def begin(self, here: Here) -> BegunHere:
        """Begin with the files of an earlier process of the same id, if there are any."""
        storage, exclusive = here.session.storage, here.session.caps.exclusive_create
        base = drive(join(here.keys, fresh_ids(), exclusive=exclusive), storage)
        others = others_of_name(here, lambda: drive(catch_up(), storage))
        return BegunHere(others, base=base)

    def described(self, manifest: Manifest, here: Here) -> bytes:
        """Return the manifest of the first process that made one: it is the manifest of all."""
        storage, encoded = here.session.storage, encode_manifest(manifest)
        exclusive = here.session.caps.exclusive_create
        stored = drive(_once(f"{here.keys.data}/{MANIFEST}", encoded, exclusive), storage)
        if stored == encoded:
            return encoded
        where = storage.uri(here.spec.name)
        if _what(decode_manifest(stored, where)) != _what(decode_manifest(encoded, where)):
            raise StateError(
                "another version of ckptfs or torch began this copy and described it differently",
                uri=where,
                hint="finish it with that version, or remove what is left of it: ckptfs gc "
                "--delete",
            )
        return stored

    def before_prepare(self, files: Mapping[str, SmallFile], here: Here) -> None:
        """Remove what killed processes left incomplete, on a filesystem."""
        manifest, storage = files.get(MANIFEST), here.session.storage
        if here.keys.shape is Shape.FILESYSTEM and isinstance(manifest, bytes):
            listed = decode_manifest(manifest, storage.uri(here.spec.name)).files
            drive(_tidy(here.keys.attempt, {f.path for f in listed}), storage)

    def leave(self, here: Here) -> None:
        """Leave the files to the next process, unless another copy of the same save was committed.

        The files that this process made later must never be projected then.
        """
        drive(_clear_after(here.keys), here.session.storage)


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
