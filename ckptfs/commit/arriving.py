"""Files that arrive one by one from several processes, and become one commit.

Nobody begins such a save together: each process writes the files it has, and one of them says when
all are there. What they share is the run's storage and a save_id (``integrations.fsspec.arrivals``).

    every process   join      the attempt's record, by an exclusive create: base and save_id
                    write     files below the attempt, each whole or not at all
    one of them     commit    the ordinary attempt, from its middle: manifest, seal, projection

The record is the begin: its base generation is the one that the seal carries, so a fence that comes
after the first file fences the save like any other, and what a crash leaves is the next owner's.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ckptfs.commit.attempt import Attempt
from ckptfs.commit.claim import Takeover, claim
from ckptfs.commit.entries import Generation, Stamp
from ckptfs.commit.fold import LogState
from ckptfs.commit.layout import ATTEMPTS, PARTIAL_PREFIX, AttemptKeys, staging_key
from ckptfs.commit.links import name_is_plain
from ckptfs.commit.log import catch_up
from ckptfs.commit.opening import Place, sit_down
from ckptfs.commit.ops import (
    Create,
    MakeDir,
    Pause,
    Program,
    Read,
    Refresh,
    Sync,
    Write,
    drive,
    read_limited,
)
from ckptfs.commit.planning import SavePlan
from ckptfs.commit.protocol import name_taken
from ckptfs.commit.recovery_plan import decode_record, encode_record
from ckptfs.commit.run import Caller, Run
from ckptfs.commit.saving import Means, survey
from ckptfs.commit.sealing import undo_here
from ckptfs.commit.seat import Seat, View
from ckptfs.commit.spec import IfExists, SaveSpec, fresh_ids, now_text
from ckptfs.errors import (
    AlreadyExistsError,
    AnswerLostError,
    CkptfsError,
    FencedError,
    ManifestError,
    NotFoundError,
    StaleError,
)
from ckptfs.schema import SchemaError
from ckptfs.storage.base import DataWriter, Shape, Storage
from ckptfs.topology.control import SoloControl, default_timeout_s

__all__ = [
    "Arrived",
    "Joined",
    "begun_by",
    "give_up",
    "join",
    "join_attempt",
    "on_the_way",
    "open_attempt",
]

logger = logging.getLogger(__name__)


def begun_by(keys: AttemptKeys) -> Program[Generation | None]:
    """The base generation of an attempt that somebody began, None where nobody did."""
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
    """Take part in an attempt, beginning it where nobody did; its base generation.

    Safe from any number of processes at once: one of them writes the record. FencedError: the id was
    sealed or aborted before. exclusive: whether the place lets one creator of many win.
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
            )  # what stands there tells
        except NotFoundError as error:
            # A recovery took the empty directory for one that died before its first file.
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
            hint="the files of one save do not outlive its end; save again",
        )


@dataclass(frozen=True, slots=True)
class Joined:
    """A process's part in an attempt: where its files go. base: as the attempt's record has it."""

    seat: Seat
    keys: AttemptKeys
    base: Generation

    def key(self, file: str) -> str:
        """The key of one file of the attempt."""
        return f"{self.keys.data}/{file}"

    def open_write(self, file: str) -> DataWriter:
        """One file, whole or not at all. Its name is durable after ``commit``."""
        return self.seat.storage.open_write(self.key(file))

    def remove(self, file: str) -> None:
        """Take one file away again; absent is success."""
        self.seat.storage.remove(self.key(file))

    def files(self) -> list[str]:
        """What has arrived, by name; without the record."""
        storage = self.seat.storage
        storage.refresh(self.keys.data)
        record = self.keys.record.rpartition("/")[2]
        return [
            entry.name
            for entry in storage.list(self.keys.data)
            if not (entry.is_dir or entry.name == record or entry.name.startswith(PARTIAL_PREFIX))
        ]


def on_the_way(storage: Storage) -> dict[str, str]:
    """Local, read-only. Ids and names of attempts whose record lies there: at work, dead, or committed
    and not projected. On object stores their data lie below their final names already.
    """
    found: dict[str, str] = {}
    with contextlib.suppress(NotFoundError):
        for entry in storage.list(ATTEMPTS):
            record = AttemptKeys(Shape.OBJECT, "", entry.name).record
            with contextlib.suppress(NotFoundError, ValueError):
                found[entry.name] = decode_record(read_limited(storage, record)).name
    return found


def join_attempt(storage: Storage, name: str, save_id: str) -> Joined:
    """Local. Take part in the attempt ``save_id`` of ``name``; ``storage`` is rooted at the run.

    Makes the run's log and this attempt where they are missing. FencedError: the id is spent.
    """
    seat = sit_down(SoloControl(), storage, Place(), write=True)
    keys = AttemptKeys(seat.caps.shape, name, save_id)
    program = join(keys, fresh_ids(), exclusive=seat.caps.exclusive_create)
    return Joined(seat, keys, drive(program, seat.storage))


def give_up(joined: Joined) -> None:
    """Local. Abort an attempt that nobody will commit, and remove its bytes; harmless twice.

    Not while another process may still write to it. Errors are the storage's.
    """
    world = joined.seat.control.world
    stamp = Stamp(now_text(), world.hostname, os.getpid(), joined.seat.control.rank)
    means = Means(joined.seat.placement.mine.id, joined.seat.caps, fresh_ids(), stamp)
    undo_here(joined.seat, joined.keys, joined.base, means)


class Arrived(Attempt):
    """An attempt whose files are there already, seen from the process that commits it."""

    def __init__(self, seat: Seat, spec: SaveSpec, base: Generation) -> None:
        super().__init__(seat, spec)
        self._base = base

    def _decide(self, answers: Sequence[View | None]) -> SavePlan:
        plan = super()._decide(answers)
        # A holder vouches for what it took over from itself; otherwise the record's base counts, or
        # a fence that came after the first file would not fence this save.
        return plan if self.spec.run is not None else replace(plan, base=self._base)

    def _begin(self) -> tuple[str, ...]:
        if self._foreign is not None:
            # Its record was made with the first file, before anybody knew what it would replace.
            keys = self._named
            record = encode_record(keys.save_id, keys.name, self._base, replaces=self._foreign)
            self.storage.replace(keys.record, record)
        return ()


@contextlib.contextmanager
def open_attempt(joined: Joined, spec: SaveSpec) -> Iterator[Arrived]:
    """The attempt over what arrived, begun; abandoned when the block is left by an error.

    ``spec.if_exists`` REPLACE claims the run for the time of the block where the name is taken, as
    ``save`` does; the recovery that comes with it spares this very save.

    CommitConflictError: the name is taken. FencedError, RunBusyError: somebody else's run.
    """
    spec = replace(spec, save_id=joined.keys.save_id)
    with contextlib.ExitStack() as stack:
        with _giving_up(joined):
            run = _claimed(joined, spec, stack)
            if run is None:
                attempt = Arrived(joined.seat, replace(spec, if_exists=IfExists.ERROR), joined.base)
            else:
                attempt = Arrived(run.seat, replace(spec, run=run.generation), joined.base)
            attempt.begin()
        try:
            yield attempt
        except BaseException:
            attempt.abandon()
            raise


@contextlib.contextmanager
def _giving_up(joined: Joined) -> Iterator[None]:
    """What cannot even begin to be committed goes: each further try would bring another copy."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(CkptfsError, OSError):  # then the next owner removes it
            give_up(joined)
        raise


def _claimed(joined: Joined, spec: SaveSpec, stack: contextlib.ExitStack) -> Run | None:
    if spec.if_exists is not IfExists.REPLACE:
        return None
    view = {joined.seat.placement.mine.id: drive(catch_up(), joined.seat.storage)}
    if name_taken(spec.name, view) is None:
        return None
    keep, call = (joined.keys.save_id,), "a write by URL"
    caller = Caller(call, for_call=True, wait_s=default_timeout_s())
    run = claim(joined.seat, takeover=Takeover.DEAD, keep=keep, caller=caller)
    return stack.enter_context(run)
