"""The programs of one save in one domain, run by the domain's owner.

    survey    make the log's directories and fold the log
    begin     make the attempt, its record first
    prepare   manifest and metadata beside the data; every name durable
    seal      append the seal: with one domain this is the commit
    finish    record the decision (several domains), project
    clear     delete what was replaced
    tidy      clear, and the attempt's record, in the background where deleting takes requests
    undo      abort what was not sealed everywhere, remove the bytes of an own failed attempt

``attempt.py`` runs them over all ranks; the model search in ``tests/model`` runs the same ones.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass

from ckptfs.commit.decisions import Refusal, may_abort, may_seal, to_clear
from ckptfs.commit.delete.deletion_steps import delete_save, discard_own_attempt
from ckptfs.commit.log.append import (
    Appended,
    Means,
    Refused,
    append,
    append_here,
    catch_up,
    make_log,
    write_snapshot,
)
from ckptfs.commit.log.entries import Decided, Generation, Outcome, Seal
from ckptfs.commit.log.fold import LogState
from ckptfs.commit.operations import (
    MakeDir,
    Pause,
    Program,
    Sync,
    Write,
    all_at_once,
    name_is_plain,
)
from ckptfs.commit.ownership.recovery import encode_record
from ckptfs.commit.paths import ATTEMPTS, AttemptKeys
from ckptfs.commit.save.projection import InHand, drop_record, project
from ckptfs.errors import NotFoundError, StaleError, StorageError
from ckptfs.storage.base import Shape, first_of

__all__ = [
    "Cleared",
    "begin",
    "clear",
    "finish",
    "prepare",
    "record_abort",
    "seal_save",
    "survey",
    "tidy",
    "undo",
]


@dataclass(frozen=True, slots=True)
class Cleared:
    """How many saves' bytes went, and the log after it."""

    saves: int
    state: LogState


def survey() -> Program[LogState]:
    """Make the log's directories and fold the log."""
    yield from make_log()
    yield MakeDir(ATTEMPTS)
    return (yield from catch_up())


def begin(
    keys: AttemptKeys,
    base: Generation,
    *,
    of: str = "",
    home: str = "",
    replaces: str | None = None,
) -> Program[None]:
    """Make the attempt. Its record is durable before any data: recovery judges by it.

    of, home: of a part, the id of the whole and the domain that decides over that. replaces: as for
    ``encode_record``.
    """
    yield from name_is_plain(keys.name, keys.shape)
    record = encode_record(keys.save_id, keys.name, base, of=of, home=home, replaces=replaces)
    home, attempt = keys.record.rsplit("/", 1)[0], 0
    while True:
        yield MakeDir(home)
        try:
            yield Write(keys.record, record)
            break
        except (NotFoundError, StaleError):
            # A recovery took the empty directory for one that died before its first file.
            yield Pause(attempt, f"making {home}")
            attempt += 1
    yield Sync(home)


def prepare(keys: AttemptKeys, files: Mapping[str, bytes]) -> Program[None]:
    """Write the small files: immutable ones beside the data, on filesystems a second copy that the
    projection consumes. Returns with every name of the attempt durable, data files included.
    """
    yield from all_at_once([Write(f"{keys.data}/{name}", data) for name, data in files.items()])
    yield Sync(keys.data)
    if keys.shape is Shape.FILESYSTEM:
        for name, data in files.items():
            yield Write(f"{keys.attempt}/{name}", data)
        yield Sync(keys.attempt)


def seal_save(
    seal: Seal, means: Means, state: LogState | None, *, replace: bool
) -> Program[Appended | Refused[Refusal]]:
    """Append the seal in this domain, or say why not."""
    return (
        yield from append_here(lambda seen: may_seal(seen, seal, replace=replace), means, state)
    )


def finish(
    seal: Seal,
    means: Means,
    state: LogState,
    *,
    holder: Generation | None,
    spare: Container[str] = frozenset(),
    replaces: str | None = None,
    in_hand: InHand | None = None,
    at_once: bool = False,
) -> Program[LogState]:
    """After the commit: record it where several domains decided, project, and, when we hold the
    run, delete what earlier commits replaced (None: not here, see ``clear``). ``state``: this
    domain's fold with the seal. replaces, in_hand: as for ``project``. at_once: what this save itself replaced goes
    too, because nobody who holds the run commits after it.
    """
    if len(seal.domains) > 1:
        state = yield from _record(seal.save_id, Outcome.COMMITTED, means, state)
    views = {means.domain: state}
    yield from project(seal, views, means.domain, means.caps, replaces=replaces, in_hand=in_hand)
    if holder is not None:
        own = frozenset({seal.save_id} if at_once else ())
        outcome = yield from clear(means, state, holder, spare, own)
        state = outcome.state
        if isinstance(outcome, Refused):
            return state
    return (yield from write_snapshot(state, write_id=next(means.ids), stamp=means.stamp))


def tidy(
    keys: AttemptKeys,
    means: Means,
    state: LogState | None,
    holder: Generation,
    *,
    spare: Container[str],
    at_once: Container[str],
) -> Program[None]:
    """What nobody waits for after a save on an object store: its record goes, and what is doomed by now,
    as for ``clear``.
    """
    yield from drop_record(keys)
    if state is None or to_clear({means.domain: state}, means.domain, spare, at_once):
        yield from clear(means, state, holder, spare, at_once)


def clear(
    means: Means,
    state: LogState | None,
    holder: Generation,
    spare: Container[str] = frozenset(),
    at_once: Container[str] = frozenset(),
) -> Program[Cleared | Refused[Refusal]]:
    """Delete what later commits of the run replaced or an overwrite hid; Refused once fenced.

    It may run while the next save does: an entry comes before each byte, and nobody looks at bytes
    whose delete is in the log. spare: deleted saves whose bytes somebody else removes, asked again
    and again while it grows. at_once: as for ``doomed``.
    """
    seen = {means.domain: (yield from catch_up(state))}
    done, failures = 0, []
    for one in to_clear(seen, means.domain, spare, at_once):
        try:
            gone = yield from delete_save(
                one.seal,
                seen,
                means,
                holder,
                reason=one.reason,
                still=lambda now, s=one.seal: any(  # type: ignore[misc]
                    s.save_id == other.seal.save_id
                    for other in to_clear({means.domain: now}, means.domain, spare, at_once)
                ),
            )
        except StorageError as error:
            # One that cannot be deleted now (held by a lock, say) must not keep the others.
            failures.append(error)
            continue
        seen = {means.domain: gone.state}
        if isinstance(gone, Refused):
            if gone.reason is Refusal.FENCED:
                return gone
            continue
        done += 1
    if failures:
        raise first_of(failures, len(failures) + done)
    return Cleared(done, seen[means.domain])


def _record(
    save_id: str, outcome: Outcome, means: Means, state: LogState | None
) -> Program[LogState]:
    def decide(seen: LogState) -> Decided | Refused[Refusal]:
        if seen.save(save_id).decided is not None:
            return Refused(Refusal.NOTHING, seen)
        return Decided(save_id, outcome)

    done = yield from append(decide, write_id=next(means.ids), stamp=means.stamp, state=state)
    return done.state


def undo(keys: AttemptKeys, base: Generation, means: Means) -> Program[bool]:
    """Abort our own attempt in this domain and remove its bytes.

    False, and the bytes stay, where it was sealed here (the abort of another domain settles it) or
    where a newer owner took the run (recovery is its business).
    """
    outcome = yield from append(
        lambda seen: may_abort(seen, keys.save_id, base),
        write_id=next(means.ids),
        stamp=means.stamp,
    )
    if not outcome.state.save(keys.save_id).aborted:
        return False
    yield from discard_own_attempt(keys.save_id, keys.name, means.caps)
    return True


def record_abort(save_id: str, means: Means) -> Program[LogState]:
    """Record that another domain aborted a save that is sealed here."""
    return (yield from _record(save_id, Outcome.ABORTED, means, None))
