"""The programs of one save in one domain, run by the domain's owner.

    survey    make the log's directories and fold the log
    begin     make the attempt, its record first
    prepare   manifest and metadata next to the data; every name durable
    seal      append the seal: with one domain this is the commit
    finish    record the decision (several domains), project
    clear     delete what was replaced
    tidy      clear, and remove the attempt's record; in the background if deleting takes requests
    undo      abort what was not sealed everywhere, remove the bytes of our own failed attempt

``attempt.py`` runs them over all ranks; the model search in ``tests/model`` runs the same programs.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass

from ckptfs.commit.decisions import Refusal, may_abort, may_seal, to_clear
from ckptfs.commit.delete.deletion_steps import delete_save, discard_own_attempt
from ckptfs.commit.log.append import (
    Appended,
    HolderMeans,
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
    WriteFiles,
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
    """The number of saves with removed bytes, and the log after that."""

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
    """Make the attempt. Its record is durable before any data, because recovery judges by it.

    Args:
        keys: The keys of the attempt.
        base: The generation that it begins under.
        of: For a part, the id of the whole.
        home: For a part, the domain that decides over the whole.
        replaces: As for ``encode_record``.
    """
    yield from name_is_plain(keys.name, keys.shape)
    record = encode_record(keys.save_id, keys.name, base, of=of, home=home, replaces=replaces)
    home, attempt = keys.record.rsplit("/", 1)[0], 0
    while True:
        # ``prepare`` syncs its name. After a power cut before that, either nothing of the attempt is left, or
        # the data directory is missing, by which recovery knows that it died.
        yield MakeDir(home, is_synced=False)
        try:
            yield Write(keys.record, record)
            break
        except (NotFoundError, StaleError):
            # A recovery removed the empty directory because it took the attempt for a dead one.
            yield Pause(attempt, f"making {home}")
            attempt += 1
    yield Sync(home)


def prepare(keys: AttemptKeys, files: Mapping[str, bytes]) -> Program[None]:
    """Write the small files, and return when every name of the attempt is durable.

    The immutable files are stored next to the data. On filesystems there is a second copy, which
    the projection consumes. Data files are durable under their names too.
    """
    yield WriteFiles(keys.data, tuple(files.items()))
    if keys.shape is Shape.FILESYSTEM:
        yield WriteFiles(keys.attempt, tuple(files.items()))


def seal_save(
    seal: Seal, means: Means, state: LogState | None, *, replace: bool
) -> Program[Appended | Refused[Refusal]]:
    """Append the seal in this domain, or return why not."""
    return (
        yield from append_here(
            lambda current: may_seal(current, seal, replace=replace), means, state
        )
    )


def finish(
    seal: Seal,
    means: Means,
    state: LogState,
    *,
    spare: Container[str] = frozenset(),
    replaces: str | None = None,
    in_hand: InHand | None = None,
    at_once: bool = False,
) -> Program[LogState]:
    """Record the decision if several domains made it, project the save, and clear.

    Args:
        seal: The seal of the committed save.
        means: The domain and its capabilities. If they are those of the run's holder, what earlier
            commits replaced is deleted, see ``clear``.
        state: This domain's fold with the seal.
        spare: As for ``clear``.
        replaces: As for ``project``.
        in_hand: As for ``project``.
        at_once: Delete what this save itself replaced too, because its holder commits nothing after
            it.

    Returns:
        The folded log.
    """
    if len(seal.domains) > 1:
        state = yield from _record(seal.save_id, Outcome.COMMITTED, means, state)
    views = {means.domain: state}
    yield from project(seal, views, means.domain, means.caps, replaces=replaces, in_hand=in_hand)
    if isinstance(means, HolderMeans):
        own = frozenset({seal.save_id} if at_once else ())
        outcome = yield from clear(means, state, spare, own)
        state = outcome.state
        if isinstance(outcome, Refused):
            return state
    return (yield from write_snapshot(state, write_id=next(means.ids), stamp=means.stamp))


def tidy(
    keys: AttemptKeys,
    means: HolderMeans,
    state: LogState | None,
    *,
    spare: Container[str],
    at_once: Container[str],
) -> Program[None]:
    """Remove a save's record and the doomed saves, after a save on an object store.

    No process waits for this. ``spare`` and ``at_once``: as for ``clear``.
    """
    yield from drop_record(keys)
    if state is None or to_clear({means.domain: state}, means.domain, spare, at_once):
        yield from clear(means, state, spare, at_once)


def clear(
    means: HolderMeans,
    state: LogState | None,
    spare: Container[str] = frozenset(),
    at_once: Container[str] = frozenset(),
) -> Program[Cleared | Refused[Refusal]]:
    """Delete what later commits of the run replaced or an overwrite hid. Refused once fenced.

    This may run while the next save does: an entry comes before each byte, and no process reads
    bytes of a save with a delete in the log.

    Args:
        means: The domain, its capabilities, and our generation.
        state: An earlier fold of the log, or None.
        spare: Deleted saves with bytes that another task removes. It is checked each time, because
            it may grow during the call.
        at_once: As for ``pending_deletes``.

    Returns:
        How many saves were deleted, or the refusal.
    """
    views = {means.domain: (yield from catch_up(state))}
    done, failures = 0, []
    for one in to_clear(views, means.domain, spare, at_once):
        try:
            gone = yield from delete_save(
                one.seal,
                views,
                means,
                reason=one.reason,
                still=lambda now, s=one.seal: any(  # type: ignore[misc]
                    s.save_id == other.seal.save_id
                    for other in to_clear({means.domain: now}, means.domain, spare, at_once)
                ),
            )
        except StorageError as error:
            # A save that cannot be deleted now (because of a lock, say) must not stop the others.
            failures.append(error)
            continue
        views = {means.domain: gone.state}
        if isinstance(gone, Refused):
            if gone.reason is Refusal.FENCED:
                return gone
            continue
        done += 1
    if failures:
        raise first_of(failures, len(failures) + done)
    return Cleared(done, views[means.domain])


def _record(
    save_id: str, outcome: Outcome, means: Means, state: LogState | None
) -> Program[LogState]:
    def decide(current: LogState) -> Decided | Refused[Refusal]:
        if current.save(save_id).decided is not None:
            return Refused(Refusal.NOTHING, current)
        return Decided(save_id, outcome)

    done = yield from append(decide, write_id=next(means.ids), stamp=means.stamp, state=state)
    return done.state


def undo(keys: AttemptKeys, base: Generation, means: Means) -> Program[bool]:
    """Abort our own attempt in this domain and remove its bytes.

    It returns False and keeps the bytes if the save was sealed here (then the abort of another
    domain settles it), or if a newer owner took the run (then recovery does).
    """
    outcome = yield from append(
        lambda current: may_abort(current, keys.save_id, base),
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
