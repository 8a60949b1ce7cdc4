"""The programs of one save in one domain, run by the domain's owner.

    survey    make the log's directories and fold the log
    begin     make the attempt, its record first
    prepare   manifest and metadata beside the data; every name durable
    seal      append the seal: with one domain this is the commit
    finish    record the decision (several domains), project, reclaim what was replaced
    undo      abort what was not sealed everywhere, remove the bytes of an own failed attempt

``attempt.py`` runs them over all ranks; the model search in ``tests/model`` runs the same ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ckptfs.commit.entries import Decided, Generation, Outcome, Seal, Stamp
from ckptfs.commit.fold import LogState
from ckptfs.commit.layout import ATTEMPTS, AttemptKeys
from ckptfs.commit.log import Appended, Refused, append, catch_up, make_log, write_snapshot
from ckptfs.commit.ops import MakeDir, Pause, Program, Sync, Write
from ckptfs.commit.project import project
from ckptfs.commit.protocol import Refusal, doomed, may_abort, may_seal
from ckptfs.commit.reclaim import delete_save, discard_own_attempt
from ckptfs.commit.recovery import encode_record
from ckptfs.errors import NotFoundError
from ckptfs.storage.base import Capabilities, Shape

__all__ = ["Means", "begin", "finish", "prepare", "seal_save", "survey", "undo"]


@dataclass(frozen=True, slots=True)
class Means:
    """What every program of an owner needs: where it is, what the place can do, fresh ids."""

    domain: str
    caps: Capabilities
    ids: Iterator[str]
    stamp: Stamp = Stamp()


def survey() -> Program[LogState]:
    """Make the log's directories and fold the log."""
    yield from make_log()
    yield MakeDir(ATTEMPTS)
    return (yield from catch_up())


def begin(keys: AttemptKeys, base: Generation) -> Program[None]:
    """Make the attempt. Its record is durable before any data: recovery judges by it."""
    record = encode_record(keys.save_id, keys.name, base)
    home, attempt = keys.record.rsplit("/", 1)[0], 0
    while True:
        yield MakeDir(home)
        try:
            yield Write(keys.record, record)
            break
        except NotFoundError:
            # A recovery took the empty directory for one that died before its first file.
            yield Pause(attempt, f"making {home}")
            attempt += 1
    yield Sync(home)


def prepare(keys: AttemptKeys, files: Mapping[str, bytes]) -> Program[None]:
    """Write the small files: immutable ones beside the data, on filesystems a second copy that the
    projection consumes. Returns with every name of the attempt durable, data files included.
    """
    for name, data in files.items():
        yield Write(f"{keys.data}/{name}", data)
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
        yield from append(
            lambda seen: may_seal(seen, seal, replace=replace),
            write_id=next(means.ids),
            stamp=means.stamp,
            state=state,
        )
    )


def finish(
    seal: Seal, means: Means, state: LogState, *, holder: Generation | None
) -> Program[LogState]:
    """After the commit: record it where several domains decided, project, and, when we hold the
    run, delete what earlier commits replaced. ``state``: this domain's fold with the seal.
    """
    if len(seal.domains) > 1:
        state = yield from _record(seal.save_id, Outcome.COMMITTED, means, state)
    seen = {means.domain: state}
    yield from project(seal, seen, means.domain, means.caps)
    if holder is not None:
        for doom in doomed(seen):
            if means.domain not in doom.seal.domains:
                continue
            gone = yield from delete_save(
                doom.seal,
                seen,
                means.domain,
                holder,
                means.caps,
                reason=doom.reason,
                ids=means.ids,
                stamp=means.stamp,
                still=lambda now, d=doom: d in doomed({means.domain: now}),  # type: ignore[misc]
            )
            state = gone.state
            seen = {means.domain: state}
            if isinstance(gone, Refused) and gone.reason is Refusal.FENCED:
                return state
    return (yield from write_snapshot(state, write_id=next(means.ids), stamp=means.stamp))


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
