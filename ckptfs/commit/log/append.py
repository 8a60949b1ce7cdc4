"""Reading the run log of one domain to its end, and appending to it.

Appending is one exclusive create of the next number. A process that finds the number taken reads that entry,
folds it and decides again, because what was right at n may be wrong at n+1:

    catch up -> decide -> Create(n)
                  ^          |-- done                   -> appended
                  |          |-- exists, our write-id   -> appended (our answer was lost before)
                  |          |-- exists, another's      -> fold it, decide again
                  |          `-- no answer              -> the same create again, until it is known
                  `--------------'

On an object store, reading the end of the log is a request. So a process that folded the log before decides by that
fold and creates at once: if creates are exclusive, a create of n that succeeds shows that nothing came after the
fold. A refusal counts only after the end of the log was read.

Entries are never removed, renamed or rewritten. A reader sees a prefix of the log; only an append proves where
the log ends.
"""

from __future__ import annotations

import errno
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from ckptfs.commit.log.entries import (
    Body,
    Entry,
    Generation,
    Snapshot,
    Stamp,
    decode_entry,
    encode_entry,
)
from ckptfs.commit.log.fold import (
    LogState,
    fold_entries,
    fold_entry,
    snapshot_of,
    state_from_snapshot,
)
from ckptfs.commit.operations import (
    Create,
    List,
    MakeDir,
    Pause,
    Program,
    Read,
    ReadAhead,
    Refresh,
    Replace,
)
from ckptfs.commit.paths import (
    CONTROL,
    ENTRY_BYTES,
    HINT,
    LOG,
    LOG_BYTES,
    LOG_ENTRIES,
    LOG_SNAPSHOT_BYTES,
    PLAIN_ENTRY_BYTES,
    TMP,
    log_key,
    staging_key,
)
from ckptfs.errors import (
    AlreadyExistsError,
    AnswerLostError,
    CommitInDoubtError,
    ManifestError,
    NotFoundError,
    StaleError,
    StorageError,
    TransientError,
)
from ckptfs.schema import Number, Schema, SchemaError
from ckptfs.storage.base import Capabilities, Shape
from ckptfs.storage.base import Entry as Listed

__all__ = [
    "SNAPSHOT_EVERY",
    "Appended",
    "CheckedLog",
    "FoundHint",
    "Gap",
    "HolderMeans",
    "LogBudget",
    "Means",
    "RefusedAppend",
    "append",
    "append_here",
    "catch_up",
    "catch_up_again",
    "check_complete",
    "gap_in",
    "make_log",
    "read_hint",
    "write_snapshot",
]


@dataclass(frozen=True, slots=True)
class Means:
    """What every program of an owner needs.

    Attributes:
        domain: The id of its domain.
        caps: The capabilities of the storage there.
        ids: Fresh ids.
        stamp: The process and the time, written into entries.
    """

    domain: str
    caps: Capabilities
    ids: Iterator[str]
    stamp: Stamp = Stamp()

    def held_by(self, holder: Generation) -> HolderMeans:
        """Return these means with the generation ``holder``, under which entries are decided."""
        return HolderMeans(self.domain, self.caps, self.ids, self.stamp, holder=holder)

    def tried(self, state: LogState | None) -> LogState | None:
        """Return the fold by which an append decides before it reads the log; None to read first.

        It is None on a filesystem: reading the log there costs little, and a damaged entry is not
        taken for a lost answer. Without exclusive creates entries may have appeared below the end
        of the fold.
        """
        is_object = self.caps.shape is Shape.OBJECT
        return state if is_object and self.caps.exclusive_create else None


@dataclass(frozen=True, slots=True)
class HolderMeans(Means):
    """The means of a program that deletes or recovers: a newer fence refuses its entries.

    Attributes:
        holder: The generation that holds the run, or the current one if no process does.
    """

    holder: Generation = field(kw_only=True)


logger = logging.getLogger("ckptfs.commit")

# After so many entries the next save, delete or claim writes a snapshot. A new process reads about
# 100 entries at most; a few may come before the next snapshot. A fold of 10,000 entries without one
# took seconds on NFS and S3.
SNAPSHOT_EVERY = 90
FOLD_AT_ONCE = 1000  # entries; each fold copies the known saves once
_DIGITS = 20
READ_AHEAD = 16  # entries that are read at the same time if the log turns out to be longer
COLD_AHEAD = 8  # the same at the start of a fold: one round trip for a short log

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Appended:
    """Our entry has ``number``; ``state`` is the fold up to and including it."""

    number: int
    state: LogState


@dataclass(frozen=True, slots=True)
class RefusedAppend(Generic[R]):
    """The decision not to append, after folding ``state``."""

    reason: R
    state: LogState


@dataclass(frozen=True, slots=True)
class Gap:
    """An entry that is missing, and the number of one after it."""

    missing: int
    there: int


@dataclass(frozen=True, slots=True)
class CheckedLog:
    """A log that was folded and then listed. gap: None if there are no entries after the fold."""

    state: LogState
    gap: Gap | None


@dataclass(slots=True)
class LogBudget:
    """How much of one log a reader has read, so that no log can fill the memory of a reader."""

    entries: int = 0
    entry_bytes: int = 0  # of entries that are no snapshots
    snapshot_bytes: int = 0

    def add(self, size_bytes: int, body: Body) -> None:
        """Count an entry.

        Raises:
            ManifestError: The log has more than a reader accepts.
        """
        self.entries += 1
        if isinstance(body, Snapshot):
            self.snapshot_bytes += size_bytes
        else:
            self.entry_bytes += size_bytes
        for what, count, most in (
            ("entries", self.entries, LOG_ENTRIES),
            ("bytes of entries", self.entry_bytes, LOG_BYTES),
            ("bytes of snapshots", self.snapshot_bytes, LOG_SNAPSHOT_BYTES),
        ):
            if count > most:
                raise ManifestError(
                    f"the run log is too long to read: it has more than {most} {what}",
                    uri=LOG,
                    hint="ckptfs never writes such a log: check which program added to it",
                )


def gap_in(names: Iterable[str], end: int) -> Gap | None:
    """Return the first missing entry of a log, or None; the fold ended before ``end``. Pure.

    names: The names of the files in the log's directory. Without exclusive creates they are
    <number>.<write id>, and the writer of number n saw n entries before it.
    """
    parts = [name.partition(".") for name in names]
    plain = [int(number) for number, dot, _ in parts if not dot and _is_number(number)]
    behind = [number for number in plain if number >= end]
    if behind:
        return Gap(end, max(behind))
    numbers = sorted(int(number) for number, dot, _ in parts if dot and _is_number(number))
    return next((Gap(at, n) for at, n in enumerate(numbers) if n > at), None)


def _is_number(name: str) -> bool:
    """Whether an entry can have this name.

    No log has more than 10^19 entries, and a file with a longer name is no reason to believe that
    entries are missing.
    """
    return name.isascii() and name.isdecimal() and len(name) < _DIGITS


def check_complete(state: LogState) -> Program[CheckedLog]:
    """Check by a listing that there are no entries after the end of ``state``.

    ``state`` is the fold of all that was read. Reads only. Call this before acting on a log: no
    reader continues after a gap, and an append would permanently take the number of the missing
    entry.
    """
    yield Refresh(LOG)
    try:
        found: list[Listed] = yield List(LOG)
    except NotFoundError:
        return CheckedLog(state, None)
    names = [one.name for one in found if not one.is_dir]
    gap = gap_in(names, state.next)
    if gap is not None:
        # A process may have appended between the two reads: an entry is missing only if a second
        # read misses it too.
        state = yield from catch_up(state)
        gap = gap_in(names, state.next)
    return CheckedLog(state, gap)


def make_log() -> Program[None]:
    """Make the log's directories without a check: on NFS their absence may be cached."""
    for key in (CONTROL, LOG, TMP):
        yield MakeDir(key)


@dataclass(frozen=True, slots=True)
class FoundHint:
    """A hint that was read before, or None if there is none.

    An old hint leads to an older snapshot.
    """

    data: bytes | None


def catch_up(state: LogState | None = None, *, hint: FoundHint | None = None) -> Program[LogState]:
    """Fold all entries that can be seen after ``state``. Reads only.

    A missing log is an empty one.

    Args:
        state: The fold to continue, or None to start from a snapshot, or from entry 0 if there is
            none.
        hint: The hint, if the caller has read it already; used if ``state`` is None.

    Raises:
        ManifestError: An entry is damaged, or there are more than ``LogBudget`` permits.
    """
    ahead, bodies, budget = 1, list[Body](), LogBudget()
    if state is None:
        state, ahead = (yield from _from_snapshot(hint)), COLD_AHEAD
    while True:
        # Each time: the first missing one may be the end, and a client may have cached its absence.
        yield Refresh(LOG)
        number = state.next + len(bodies)
        entries = yield from _read_entries(tuple(range(number, number + ahead)), budget)
        if any(entry.partial for entry in entries):
            # A snapshot by this version would lose what it does not understand.
            state = replace(state, foreign=True)
        # Of a snapshot that the fold continues past, only its place counts: all of them would fill
        # the memory.
        bodies += [Snapshot() if isinstance(e.body, Snapshot) else e.body for e in entries]
        if bodies and (len(entries) < ahead or len(bodies) >= FOLD_AT_ONCE):
            state, bodies = fold_entries(state, bodies), []
        if len(entries) < ahead:
            return state
        ahead = min(2 * ahead, READ_AHEAD)


def catch_up_again(known: LogState | None) -> Program[LogState]:
    """Continue the fold ``known`` of a process that holds the run, like ``catch_up``.

    If there is nothing new, this takes two reads, done at once. The fence is read again: on an
    object store, an entry could be created in a log that was removed, and that entry would never be
    found.
    """
    if known is None:
        return (yield from catch_up())
    yield Refresh(LOG)
    budget = LogBudget()
    fence, *fresh = (yield from _read_entries((known.fence_at, known.next), budget)) or (None,)
    if fence is None or fence.body != known.fence:
        return (yield from catch_up())
    if not fresh:
        return known
    known = fold_entry(known, fresh[0].body)
    # A snapshot by this version would lose what it does not understand.
    known = replace(known, foreign=known.foreign or fresh[0].partial)
    return (yield from catch_up(known))


@dataclass(frozen=True, slots=True)
class _Hint:
    """The number of the newest snapshot that the writer of the hint knew."""

    snapshot: Number


_HINT = Schema(_Hint)


def read_hint(data: bytes) -> int:
    """Return the number of the snapshot that a hint names. SchemaError if it is no hint."""
    return _HINT.decode(data).snapshot


def _from_snapshot(hint: FoundHint | None) -> Program[LogState]:
    """Start at the snapshot that the hint names. The hint is only a pointer; the entry decides.

    A hint or a snapshot that cannot be read is ignored: the entries from 0 have the same content,
    and a newer version may have written words there that this one does not know.
    """
    try:
        if hint is None:
            yield Refresh(CONTROL)
            hint = FoundHint((yield Read(HINT)))
        if hint.data is None:
            return LogState()
        number = read_hint(hint.data)
        if number < 0:
            return LogState()
        entry = yield from _read_entry(number)
        if entry is None or not isinstance(entry.body, Snapshot):
            return LogState()
        state = state_from_snapshot(number, entry.body)
    except (StorageError, ManifestError, SchemaError) as error:
        if not isinstance(error, NotFoundError):
            logger.warning("the run log is read from its first entry: %s", error)
        return LogState()
    return replace(state, foreign=True) if entry.partial else state


def _read_entries(numbers: Sequence[int], budget: LogBudget) -> Program[list[Entry]]:
    """Return the entries with these rising numbers, up to the first that is not seen yet."""
    keys = tuple(map(log_key, numbers))
    attempt = 0
    while True:
        try:
            found: tuple[bytes, ...] = yield ReadAhead(keys)
            entries = [decode_entry(data, key) for data, key in zip(found, keys, strict=False)]
            for data, entry in zip(found, entries, strict=True):
                budget.add(len(data), entry.body)
            return entries
        except StorageError as error:
            if error.errno == errno.EFBIG:
                return (yield from _read_one_by_one(numbers, budget))
            if not isinstance(error, StaleError | TransientError | AnswerLostError):
                raise
            yield Pause(attempt, f"reading {keys[0]}: {error}")
            attempt += 1


def _read_one_by_one(numbers: Sequence[int], budget: LogBudget) -> Program[list[Entry]]:
    """Do the same as ``_read_entries`` if one of the entries is large, as a snapshot may be.

    Only the bytes of one entry are in memory then. Of a snapshot that the fold continues past, only
    its place counts.
    """
    entries: list[Entry] = []
    for number in numbers:
        entry = yield from _read_entry(number, budget)
        if entry is None:
            break
        is_snapshot = isinstance(entry.body, Snapshot)
        entries.append(replace(entry, body=Snapshot()) if is_snapshot else entry)
    return entries


def _read_entry(number: int, budget: LogBudget | None = None) -> Program[Entry | None]:
    """Return entry ``number``, or None if it is not seen yet."""
    key = log_key(number)
    attempt = 0
    while True:
        try:
            data: bytes = yield Read(key)
            entry = decode_entry(data, key)
            if budget is not None:
                budget.add(len(data), entry.body)
            return entry
        except NotFoundError:
            return None
        except (StaleError, TransientError, AnswerLostError) as error:
            yield Pause(attempt, f"reading {key}: {error}")
            attempt += 1


def append(
    decide: Callable[[LogState], Body | RefusedAppend[R]],
    *,
    write_id: str,
    stamp: Stamp = Stamp(),
    state: LogState | None = None,
    tried: LogState | None = None,
) -> Program[Appended | RefusedAppend[R]]:
    """Append the entry that ``decide`` returns for the whole log, or return its refusal.

    The entry is durable when Appended is returned.

    Args:
        decide: Returns the entry for a folded log, or why there is none. It is called again if
            another process took the number.
        write_id: The id of this call, different from that of all others.
        stamp: The process and the time, for people.
        state: A fold to continue from.
        tried: A fold that is tried before the log is read, instead of ``state``; only if creates
            are exclusive.

    Returns:
        The entry's number with the fold, or the refusal of ``decide``.

    Raises:
        CommitInDoubtError: At the driver's deadline. The entry may be in the log or may still
            appear; nothing was deleted.
    """
    if tried is not None:
        body = decide(tried)
        if not isinstance(body, RefusedAppend):
            entry = Entry(write_id, body, stamp)
            if (yield from _create(tried.next, entry)):
                return Appended(tried.next, fold_entry(tried, body))
        state = tried
    while True:
        state = yield from catch_up(state)
        body = decide(state)
        if isinstance(body, RefusedAppend):
            return body
        number = state.next
        entry = Entry(write_id, body, stamp)
        if (yield from _create(number, entry)):
            return Appended(number, fold_entry(state, body))


def append_here(
    decide: Callable[[LogState], Body | RefusedAppend[R]], means: Means, state: LogState | None
) -> Program[Appended | RefusedAppend[R]]:
    """Append the entry that ``decide`` returns for the log of this domain.

    It decides by ``state`` before the log is read, if that is safe.
    """
    return (
        yield from append(
            decide,
            write_id=next(means.ids),
            stamp=means.stamp,
            state=state,
            tried=means.tried(state),
        )
    )


def _create(number: int, entry: Entry) -> Program[bool]:
    """Whether entry ``number`` is ours now. Repeats the same create until that is known."""
    key, attempt, lost = log_key(number), 0, False
    data = encode_entry(entry)
    most = ENTRY_BYTES if isinstance(entry.body, Snapshot) else PLAIN_ENTRY_BYTES
    if len(data) > most:
        # No reader accepts a larger one: no process could use the run any more.
        raise StorageError(
            f"an entry of {len(data)} bytes is not appended: readers accept at most {most}",
            errno=errno.EFBIG,
            uri=key,
        )
    request = Create(key, data, staging_key(entry.write_id))
    while True:
        try:
            yield request
            return True
        except AlreadyExistsError:
            # Read it even after the first try: a server restart or a client's own retry turns our
            # success into "exists", and taking that for a conflict would lose an acknowledged save.
            try:
                return (yield from _settle(number)).write_id == entry.write_id
            except ManifestError as error:
                raise CommitInDoubtError(
                    f"log entry {key} exists but cannot be read: {error.message}",
                    uri=error.uri,
                    hint="nothing was deleted; it was damaged, or placed by hand",
                ) from error
        except (AnswerLostError, TransientError, StaleError) as error:
            lost = lost or isinstance(error, AnswerLostError)
            yield Pause(attempt, f"creating {key}: {error}")
            attempt += 1
        except StorageError as error:
            if lost:
                raise CommitInDoubtError(
                    f"log entry {key}: an answer was lost, then {error.message}",
                    uri=error.uri,
                    hint="nothing was deleted; the next save or prepare_run settles it",
                ) from error
            raise


def _settle(number: int) -> Program[Entry]:
    """Return entry ``number``, which is known to exist."""
    attempt = 0
    while True:
        entry = yield from _read_entry(number)
        if entry is not None:
            return entry
        yield Refresh(LOG)
        yield Pause(attempt, f"reading {log_key(number)}, which exists")
        attempt += 1


def write_snapshot(state: LogState, *, write_id: str, stamp: Stamp = Stamp()) -> Program[LogState]:
    """Append a snapshot if one is due, and point the hint at it. Never needed for correctness."""
    if state.foreign or state.next - state.snapshot_at < SNAPSHOT_EVERY:
        return state

    def decide(current: LogState) -> Body | RefusedAppend[None]:
        # Recomputed after every "exists": a snapshot equals the fold of all entries below it.
        return RefusedAppend(None, current) if current.foreign else snapshot_of(current)

    try:
        outcome = yield from append(decide, write_id=write_id, stamp=stamp, state=state)
        if isinstance(outcome, Appended):
            hint = json.dumps({"snapshot": outcome.number, "next": outcome.number + 1}).encode()
            yield Replace(HINT, hint)
    except StorageError as error:
        # Without it only a fold from the start is slower: no save and no recovery fails because of
        # it.
        logger.warning("the snapshot of the run log could not be written: %s", error)
        return state
    return outcome.state
