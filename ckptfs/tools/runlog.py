"""The log of a run for people: who saved, fenced and deleted what, when, and from where.

    read_log(uri)   -> Line per entry: number, when, who, what, and the reason if it is void
    RunWatcher(uri) -> RunEvent for each commit, failure, fence, release and delete, as it happens

``read_log`` reads each entry separately, so a damaged, missing or newer entry is a line like the others.
Earlier entries can make an entry void: a seal after an abort of the same save, an abort after its seal,
a fence with a generation that is not above the current one. Entries after a damaged or missing one are
read only here; other readers stop there. Read-only, no torch.

A watcher polls for the entry after the last one that it read, at least every ``WATCH_PACE.longest_s``
seconds:

    idle poll       one read; every few seconds also one of the owner's lease and one of the domain's id
    advisory log    one listing, because an entry may appear below one that was read already

An event reports what an entry changed. A void entry changes nothing, so it causes no event. The death of
an owner is not in the log before the next owner comes; the watcher learns it from the owner's process or
lease.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from enum import StrEnum
from threading import Lock
from types import TracebackType
from typing import Any, Self

from ckptfs.commit.catalog.catalog import opened_log, read_domain
from ckptfs.commit.log.advisory_log import LogKind, kind_of_log
from ckptfs.commit.log.append import LogBudget, catch_up
from ckptfs.commit.log.entries import (
    GENESIS,
    Abort,
    Body,
    Decided,
    Delete,
    Entry,
    Fence,
    FenceMode,
    Foreign,
    Generation,
    Gone,
    Kind,
    Part,
    Pin,
    Release,
    Seal,
    Snapshot,
    Stamp,
    decode_entry,
)
from ckptfs.commit.log.fold import LogState, fold_entry
from ckptfs.commit.operations import drive, read_limited
from ckptfs.commit.ownership.lease import LeaseTimes, alive_here, describe, who_am_i
from ckptfs.commit.ownership.recovery import read_record
from ckptfs.commit.paths import AHEAD_BYTES, CONTROL, ENTRY_BYTES, LEASE, LOG, log_key
from ckptfs.commit.state import Standing, standing
from ckptfs.control.world import World
from ckptfs.errors import (
    AccessError,
    AnswerLostError,
    CkptfsError,
    CommitInDoubtError,
    ManifestError,
    NotFoundError,
    StaleError,
    StorageError,
    TransientError,
)
from ckptfs.manager.waiting import Pace
from ckptfs.storage.base import Storage
from ckptfs.storage.registry import open_storage
from ckptfs.tools.lines import side_by_side
from ckptfs.uri import Uri, options_of

__all__ = [
    "Condition",
    "EventKind",
    "Line",
    "RunEvent",
    "RunWatcher",
    "lines_of",
    "read_log",
    "told",
]

logger = logging.getLogger("ckptfs.tools")

WATCH_PACE = Pace(first_s=0.5, longest_s=2.0)


class Condition(StrEnum):
    """Whether an entry counts.

    Attributes:
        VALID: It counts.
        VOID: Earlier entries rule it out.
        UNREAD: It is after an entry that cannot be read, so no reader folds it.
        DAMAGED: It cannot be decoded.
        MISSING: It does not exist, but later ones do.
    """

    VALID = "valid"
    VOID = "void"
    UNREAD = "unread"
    DAMAGED = "damaged"
    MISSING = "missing"


_MOST_MISSING = 1000  # missing entries that are listed one by one


@dataclass(frozen=True, slots=True)
class Line:
    """One entry of the log.

    Attributes:
        number: Its number.
        entry: Its kind; "damaged" or "missing" if there is no readable entry.
        condition: Whether it counts.
        stamp: Who wrote it, and when.
        what: What it says, in words.
        why: Why it does not count; "" if it does.
        save_id: The save that it is about; None if it is about no save.
        name: The name of that save; None if it is about no save, or the name is not known.
        generation: The number of the owner that it names; None if it names none.
    """

    number: int
    entry: str
    condition: Condition
    stamp: Stamp
    what: str
    why: str = ""
    save_id: str | None = None
    name: str | None = None
    generation: int | None = None


def read_log(run_uri: Any, storage_options: Mapping[str, Any] | None = None) -> list[Line]:
    """Every entry of the run's log, oldest first. Local, read-only.

    Args:
        run_uri: The run.
        storage_options: Options for fsspec's filesystem of that protocol; None: only those that the
            URI carries.

    Raises:
        NotFoundError: There is no log.
    """
    with opened_log(run_uri, storage_options) as storage:
        lines = lines_of(storage)
    if not lines:
        raise NotFoundError(
            "no run has a log there",
            uri=Uri.parse(run_uri),
            hint="what was copied without its log, or saved by stock torch, has none; see ckptfs ls",
        )
    return lines


def lines_of(storage: Storage) -> list[Line]:
    """Return the entries of the log in ``storage``, as ``read_log``; empty if there are none."""
    storage.refresh(LOG)
    return _lines(_read(storage, _end(storage)))


def _end(storage: Storage) -> int:
    """Return how many entries to ask for, by a listing.

    The listing is only a hint: ``_read`` asks for later entries too. A file with a number far above all
    others is taken for a stray file, so that it does not cause millions of reads.
    """
    try:
        names = [entry.name for entry in storage.list(LOG) if not entry.is_dir]
    except NotFoundError:
        return 0
    numbered = [name for name in names if name[:1].isdigit()]
    if any("." in name for name in numbered):
        return len(numbered)  # an advisory log: its entries are numbered by their order
    last = max((int(name) for name in numbered if name.isdigit()), default=-1)
    return min(last + 1, len(numbered) + _MOST_MISSING)


def _read(storage: Storage, end: int) -> list[Entry | Line]:
    """Read and decode the entries: small ones several at once, each large one by itself.

    Raises:
        ManifestError: There are more than ``LogBudget`` permits.
    """
    budget, lock = LogBudget(), Lock()

    def read(number: int, limit_bytes: int) -> Entry | Line | None:
        try:
            data = storage.read_small(log_key(number), limit_bytes)
        except NotFoundError:
            return _decoded(number, None)
        except StorageError as error:
            if error.errno != errno.EFBIG:
                raise
            return None
        entry = _decoded(number, data)
        if isinstance(entry, Entry):
            with lock:
                budget.add(len(data), entry.body)
        return entry

    def read_large(number: int) -> Entry | Line:
        found = read(number, ENTRY_BYTES)
        what = f"more than {ENTRY_BYTES} bytes"
        return found or Line(
            number, "damaged", Condition.DAMAGED, Stamp(), what, "no entry is so large"
        )

    found = side_by_side(lambda number: read(number, AHEAD_BYTES), range(end))
    entries = [read_large(n) if entry is None else entry for n, entry in enumerate(found)]
    while entries and _is_present(more := read_large(len(entries))):
        entries.append(more)
    return entries


def _is_present(entry: Entry | Line) -> bool:
    return isinstance(entry, Entry) or entry.condition is not Condition.MISSING


# -- in words: pure ---------------------------------------------------------------------------


def told(raw: Sequence[bytes | None]) -> list[Line]:
    """Return the lines of a log's entries ``raw``, from number 0 on; None is a missing entry."""
    return _lines([_decoded(number, data) for number, data in enumerate(raw)])


def _lines(entries: Sequence[Entry | Line]) -> list[Line]:
    names = _names(entries)
    state: LogState = LogState()
    broken: int | None = None
    lines = []
    for number, entry in enumerate(entries):
        if not isinstance(entry, Entry):
            broken = number if broken is None else broken
            lines.append(entry)
            continue
        why = _why_void(entry.body, state)
        condition = Condition.VOID if why else Condition.VALID
        if broken is not None:
            condition, why = Condition.UNREAD, f"entry {broken} cannot be read"
        lines.append(_line(number, entry, condition, why, names))
        state = fold_entry(state, entry.body)
    return lines


def _decoded(number: int, data: bytes | None) -> Entry | Line:
    if data is None:
        what = "nothing: it was removed"
        return Line(number, "missing", Condition.MISSING, Stamp(), what, "no entry is ever removed")
    try:
        entry = decode_entry(data, log_key(number))
        if isinstance(entry.body, Snapshot):
            # Only the size of a snapshot is shown, and only that is kept: whole snapshots fill memory.
            saves = entry.body.state.get("saves", ())
            count = len(saves) if isinstance(saves, Sized) else 0
            return replace(entry, body=Snapshot({"saves": range(count)}))
        return entry
    except ManifestError as error:
        shown = f"{len(data)} bytes that are no entry"
        return Line(number, "damaged", Condition.DAMAGED, Stamp(), shown, error.message)


def _names(entries: Sequence[Entry | Line]) -> dict[str, str]:
    """Return the names of saves by id, so that entries before the seal can be named too."""
    names: dict[str, str] = {}
    for body in (entry.body for entry in entries if isinstance(entry, Entry)):
        if isinstance(body, Seal):
            names[body.save_id] = body.name
            names |= {ref.save_id: f"{body.name}/{ref.name}" for ref in body.parts}
        elif isinstance(body, Part):
            names[body.save_id] = f"{body.name}/{body.part}"
            names.setdefault(body.of, body.name)
    return names


def _line(
    number: int, entry: Entry, condition: Condition, why: str, names: Mapping[str, str]
) -> Line:
    body = entry.body
    save_id = getattr(body, "save_id", None)
    kind = body.kind if isinstance(body, Foreign) else type(body).__name__.lower()
    by: Generation | None = next(
        (g for g in (getattr(body, n, None) for n in ("generation", "base", "by")) if g), None
    )
    return Line(
        number,
        kind,
        condition,
        entry.stamp,
        _what(body, names),
        why,
        save_id,
        None if save_id is None else names.get(save_id),
        None if by is None else by.number,
    )


def _what(body: Body, names: Mapping[str, str]) -> str:
    match body:
        case Seal():
            return _sealed(body)
        case Part():
            return f"sealed part {body.part} of {body.name} ({body.save_id})"
        case Abort(save_id=save_id):
            return f"aborted {_named(save_id, names)}"
        case Decided(save_id=save_id, outcome=outcome):
            return f"decided: {_named(save_id, names)} is {outcome.value}"
        case Fence():
            return _fenced(body)
        case Release(generation=generation):
            return f"left: generation {generation.number} released the run"
        case Delete(save_id=save_id, reason=reason):
            return f"deleted {_named(save_id, names)}" + (f": {reason}" if reason else "")
        case Gone(save_id=save_id):
            return f"removed the bytes of {_named(save_id, names)}"
        case Pin(save_id=save_id, pinned=pinned):
            return f"{'pinned' if pinned else 'unpinned'} {_named(save_id, names)}"
        case Snapshot(state=state):
            return f"snapshot of {len(state.get('saves', ()))} saves"
        case Foreign(kind=kind):
            return f"{kind}: an entry of a newer version"


def _sealed(seal: Seal) -> str:
    what = "" if seal.artifact is Kind.CHECKPOINT else f", {seal.artifact.value}"
    parts = f", of parts {', '.join(ref.name for ref in seal.parts)}" if seal.parts else ""
    unfenced = "" if seal.fenced else ", unfenced"
    failing = ", by a failing run" if seal.failure else ""
    several = f", one of {len(seal.domains)} domains" if len(seal.domains) > 1 else ""
    return f"sealed {seal.name} ({seal.save_id}){what}{parts}{several}{unfenced}{failing}"


def _fenced(fence: Fence) -> str:
    who = f"job {fence.job} on {fence.host}" if fence.job else f"{fence.host} pid {fence.pid}"
    overwrites = fence.mode is FenceMode.OVERWRITE
    tail = ", overwriting: older checkpoints leave the catalog" if overwrites else ""
    return f"fence {fence.generation.number} by {who}{tail}"


def _named(save_id: str, names: Mapping[str, str]) -> str:
    name = names.get(save_id)
    return f"{name} ({save_id})" if name else f"save {save_id}"


def _why_void(body: Body, state: LogState) -> str:
    """Return why the entry changes nothing; "" if it changes something."""
    match body:
        case Fence(generation=generation) if generation <= state.generation:
            return f"generation {state.generation.number} has the run already"
        case Release(generation=generation) if generation != state.generation:
            return f"generation {state.generation.number} has the run"
        case Seal() | Part() | Abort() | Decided() | Delete() | Gone() | Pin():
            return _why_save_void(body, state)
        case _:
            return ""


def _why_save_void(
    body: Seal | Part | Abort | Decided | Delete | Gone | Pin, state: LogState
) -> str:
    save = state.save(body.save_id)
    is_sealed = save.seal is not None or save.part is not None
    match body:
        case Seal() | Part() if save.aborted:
            return "it was aborted before"
        case Seal() if save.seal is not None:
            return f"it was sealed by entry {save.sealed_at}"
        case Part() if save.part is not None:
            return f"it was sealed by entry {save.sealed_at}"
        case Abort() if is_sealed:
            return f"it was sealed by entry {save.sealed_at}"
        case Abort() if save.aborted:
            return "it was aborted before"
        case Decided(outcome=outcome) if save.decided is not None:
            return "" if outcome is save.decided else f"it was {save.decided.value} before"
        case Delete() if save.deleted:
            return "it was deleted before"
        case _:
            return ""


# -- as it happens ----------------------------------------------------------------------------


class EventKind(StrEnum):
    """What happened to a run.

    Attributes:
        COMMIT: A checkpoint was committed.
        FAILURE: A save was aborted, or the owner died.
        FENCE: A new owner took the run.
        RELEASE: The owner left.
        DELETE: A checkpoint was deleted; its bytes are removed after that.
    """

    COMMIT = "commit"
    FAILURE = "failure"
    FENCE = "fence"
    RELEASE = "release"
    DELETE = "delete"


@dataclass(frozen=True, slots=True)
class RunEvent:
    """One thing that happened to a run.

    Attributes:
        number: The number of the log's entry; None if no entry says it, as when an owner died.
        event: What happened.
        stamp: Who wrote the entry, and when.
        what: What happened, in words.
        save_id: The id of the save; None for events of owners.
        uri: The checkpoint; None for events of owners, and for a save that was aborted before its name
            was known.
        name: Its name; None if ``uri`` is None.
        step: Its completed optimizer steps; None if they are not known.
        kind: Checkpoint, weights or directory; None if the save is not sealed.
        generation: The number of the owner; None if it is not known.
    """

    number: int | None
    event: EventKind
    stamp: Stamp
    what: str
    save_id: str | None = None
    uri: Uri | None = None
    name: str | None = None
    step: int | None = None
    kind: Kind | None = None
    generation: int | None = None


@dataclass(frozen=True, slots=True)
class _Change:
    """A new entry, and the state of the log before and after it."""

    number: int
    entry: Entry
    before: LogState
    after: LogState


class RunWatcher:
    """An iterator over what happens to a run from now on. Any thread may ``stop`` it.

    Local and read-only: read permission is enough, and nothing is appended. One thread iterates. The run
    need not exist yet. On node-local disks the watcher reads this node's log, and reports a save over
    several domains once this log records that it was committed. Iterating raises ManifestError at a
    damaged entry of the log, because no reader reads what comes after it, and StorageError if the storage
    fails for longer than a moment.

    Args:
        run_uri: The run.
        from_entry: Begin with this entry of the log. None: begin after those that exist at
            the first poll.
        until_end: End once an owner left or died. If the run is free, wait for an owner first.
        storage_options: Options for fsspec's filesystem of that protocol; None: only those that the
            URI carries.
        pace: The pauses between polls.
        storage: The storage of the run, for tests; ``close`` closes it. None: the watcher opens it.
        wait: Waits that many seconds and returns whether to stop; for tests. None: waits, but not longer
            than until ``stop``.
        clock: Returns seconds that only increase; for tests.

    Attributes:
        root: The run's URI.
    """

    def __init__(
        self,
        run_uri: Any,
        *,
        from_entry: int | None = None,
        until_end: bool = False,
        storage_options: Mapping[str, Any] | None = None,
        pace: Pace = WATCH_PACE,
        storage: Storage | None = None,
        wait: Callable[[float], bool] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.root = Uri.parse(run_uri)
        options = {**options_of(run_uri), **(storage_options or {})}
        self._storage = storage or open_storage(self.root, options)
        self._pace, self._until_end = pace, until_end
        self._stopped = threading.Event()
        self._wait = wait or self._stopped.wait
        self._tail = _Tail(self._storage, from_entry)
        self._owner = _OwnerCheck(self._storage, clock)
        self._dead: Generation | None = None

    def __iter__(self) -> Iterator[RunEvent]:
        idle, trouble = 0, False
        while not self._stopped.is_set():
            events: list[RunEvent] = []
            try:
                events.extend(self._poll(idle))  # events read before an error are kept
                trouble = False
            except (AnswerLostError, CommitInDoubtError, StaleError, TransientError) as error:
                if not trouble:
                    logger.warning("still watching %s after an error: %s", self.root, error)
                trouble = True
            except ManifestError as error:
                error.uri = str(self._storage.uri(error.uri or ""))  # an entry is read by its key
                raise
            for event in events:
                yield event
                if self._until_end and _ends(event):
                    return
            idle = 0 if events else idle + 1
            if self._wait(self._pace.pause_s(idle)):
                return

    def _poll(self, idle: int) -> Iterator[RunEvent]:
        yield from self._new_events(idle)
        state = self._tail.state
        if not self._owner.has_died(state):
            self._dead = None
            return
        if self._dead == state.generation:
            return
        # An owner appends a release before its process ends: it may have arrived since the poll.
        yield from self._new_events(idle)
        if self._tail.state.generation == state.generation and not self._tail.state.released:
            self._dead, fence = state.generation, state.fence
            what = f"the owner died: {describe(fence)}"
            stamp = Stamp(host=fence.host, pid=fence.pid)
            yield RunEvent(None, EventKind.FAILURE, stamp, what, generation=fence.generation.number)

    def _new_events(self, idle: int) -> Iterator[RunEvent]:
        for change in self._tail.poll(idle):
            event = _event_of(change, self._tail.domain, self.root)
            if event is not None:
                yield event if event.name or not event.save_id else self._named(event)

    def _named(self, event: RunEvent) -> RunEvent:
        """Return the event with the name from the save's own record, if the record still exists."""
        try:
            record = read_record(event.save_id or "", self._storage.capabilities)
            name = drive(record, self._storage).name
        except CkptfsError:
            return event
        return replace(event, name=name, uri=self.root / name) if name else event

    def stop(self) -> None:
        """End the iteration. May be called from any thread and from a signal handler."""
        self._stopped.set()

    def close(self) -> None:
        """Stop, and release the storage. May be called twice."""
        self.stop()
        self._storage.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()


def _ends(event: RunEvent) -> bool:
    return event.event is EventKind.RELEASE or (
        event.event is EventKind.FAILURE and event.number is None
    )


def _event_of(change: _Change, domain: str, root: Uri) -> RunEvent | None:
    """Return the event for what an entry of a domain's log changed; None if there is none. Pure."""
    number, stamp, body = change.number, change.entry.stamp, change.entry.body
    after, generation = change.after, change.after.generation.number
    match body:
        case Fence() if after.generation != change.before.generation:
            what = _what(body, {})
            return RunEvent(number, EventKind.FENCE, stamp, what, generation=generation)
        case Release() if after.released and not change.before.released:
            what = _what(body, {})
            return RunEvent(number, EventKind.RELEASE, stamp, what, generation=generation)
        case Seal() | Decided() | Abort() | Delete():
            return _save_event(change, body, domain, root)
        case _:
            return None


_OUTCOMES = {
    Standing.COMMITTED: EventKind.COMMIT,
    Standing.ABORTED: EventKind.FAILURE,
    Standing.DELETED: EventKind.DELETE,
}


def _save_event(
    change: _Change, body: Seal | Decided | Abort | Delete, domain: str, root: Uri
) -> RunEvent | None:
    # By one log alone, a save over several domains is in doubt until that log records the outcome.
    before, now = (
        standing(body.save_id, {domain: state}) for state in (change.before, change.after)
    )
    if before is now or now not in _OUTCOMES:
        return None
    save = change.after.save(body.save_id)
    known = save.seal or save.part
    name = None if known is None else known.name
    if save.seal is not None and now is Standing.COMMITTED:
        parts = f", of parts {', '.join(ref.name for ref in save.seal.parts)}"
        what = f"committed {name} ({body.save_id}){parts if save.seal.parts else ''}"
        what += ", by a failing run" if save.seal.failure else ""
    else:
        what = _what(body, {} if name is None else {body.save_id: name})
    return RunEvent(
        change.number,
        _OUTCOMES[now],
        change.entry.stamp,
        what,
        body.save_id,
        None if name is None else root / name,
        name,
        None if known is None else known.step,
        None if save.seal is None else save.seal.artifact,
        change.after.generation.number,
    )


class _Tail:
    """The new entries of a log since the poll before."""

    _ROUND_EVERY = 8  # idle polls between checks that this is still the same run

    def __init__(self, storage: Storage, from_entry: int | None) -> None:
        self.state = LogState()
        self._storage = storage
        self._first = from_entry
        self._domain: str | None = None
        self._is_begun = False
        self._kind = LogKind.NONE
        self._entries: dict[str, Entry] = {}  # of an advisory log, by the names of their files

    @property
    def domain(self) -> str:
        """The id of the domain of this log; "" before there is one."""
        return self._domain or ""

    def poll(self, idle: int) -> list[_Change]:
        """Return the changes by new entries. After a temporary error, a new poll loses nothing."""
        if self._domain is None or (idle and idle % self._ROUND_EVERY == 0):
            domain = drive(read_domain(), self._storage)
            if domain != self._domain:
                # The run may have been removed and begun again: all its entries are new then.
                first = self._first if self._domain is None else 0
                self._domain, self._kind, self.state = domain, LogKind.NONE, LogState()
                self._first, self._entries = first, {}
        if self._kind is LogKind.NONE:
            self._kind = LogKind.NONE if self._domain is None else kind_of_log(self._storage)
        is_begun, self._is_begun = self._is_begun, True
        if self._kind is LogKind.NONE:
            if self._first is None:
                self._first = 0  # the run does not exist yet: all entries will be new
            return []
        if self._kind is LogKind.ADVISORY:
            changes = self._read_names()
        elif self._first is None and not is_begun:
            changes, self.state = [], drive(catch_up(None), self._storage)
        else:
            changes = self._read_numbers()
        if self._first is None:
            changes, self._first = [], 0
        return [change for change in changes if change.number >= self._first]

    def _read_numbers(self) -> list[_Change]:
        found: list[_Change] = []
        state = self.state
        self._storage.refresh(LOG)
        while True:
            key = log_key(state.next)
            try:
                entry = decode_entry(self._storage.read_small(key, ENTRY_BYTES), key)
            except NotFoundError:
                break
            after = fold_entry(state, _shortened(entry).body)
            found.append(_Change(state.next, entry, state, after))
            state = after
        self.state = state
        return found

    def _read_names(self) -> list[_Change]:
        self._storage.refresh(LOG)
        listed = [e.name for e in self._storage.list(LOG) if not e.is_dir and e.name[:1].isdigit()]
        names = sorted(name for name in listed if "." in name)
        fresh = [name for name in names if name not in self._entries]

        def read(name: str) -> Entry:
            key = f"{LOG}/{name}"
            return _shortened(decode_entry(self._storage.read_small(key, ENTRY_BYTES), key))

        if not fresh:
            return []
        read_now = dict(zip(fresh, side_by_side(read, fresh), strict=True))
        self._entries |= read_now
        state, found = LogState(), []
        for number, name in enumerate(names):
            entry = self._entries[name]
            after = fold_entry(state, entry.body)
            if name in read_now:
                found.append(_Change(number, entry, state, after))
            state = after
        self.state = state
        return found


def _shortened(entry: Entry) -> Entry:
    """Return an entry; a snapshot without its content, because that would fill the memory."""
    return replace(entry, body=Snapshot()) if isinstance(entry.body, Snapshot) else entry


class _OwnerCheck:
    """Checks whether the owner of a run died: by its process on this machine, else by its lease."""

    def __init__(
        self,
        storage: Storage,
        clock: Callable[[], float],
        times: LeaseTimes = LeaseTimes(),
    ) -> None:
        self._storage, self._clock, self._times = storage, clock, times
        self._node = who_am_i(World.solo()).node
        self._generation: Generation | None = None
        self._lease = b""
        self._moved_s = self._read_s = 0.0
        self._is_dead = False

    def has_died(self, state: LogState) -> bool:
        """Whether the owner died, as far as can be known. state: the log as it was read last."""
        if state.generation == GENESIS or state.released:
            return False
        now_s = self._clock()
        if state.generation != self._generation:
            self._generation, self._is_dead, self._lease = state.generation, False, b""
            self._moved_s, self._read_s = now_s, now_s - self._times.rewrite_s
        if state.fence.node == self._node:
            self._is_dead = not alive_here(state.fence)
        elif now_s - self._read_s >= self._times.rewrite_s:
            self._read_s = now_s
            self._look(now_s)
        return self._is_dead

    def _look(self, now_s: float) -> None:
        self._storage.refresh(CONTROL)
        try:
            lease = read_limited(self._storage, LEASE)
        except (AccessError, NotFoundError):
            return  # it cannot be known
        if lease != self._lease:
            self._lease, self._moved_s, self._is_dead = lease, now_s, False
        elif now_s - self._moved_s >= self._times.still_s:
            self._is_dead = True
