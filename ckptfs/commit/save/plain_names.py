"""Plain names on object stores: written before the commit, so guarded one by one.

A directory checkpoint has the names that its reader expects, not names that contain its id. On a filesystem they
are in the attempt until the commit. Here they are final, and a late writer would change what another save
committed. Two things keep writers apart:

    begin     the attempt's record is written, then the records are listed: if two begin at the same
              time, at least one sees the other, and stops
    each put  read the etag, fold the log (not fenced, the name not sealed), put if the object still
              has that etag: a writer that stalls in between finds the etag changed

Not every store can complete a multipart upload on the condition of an etag. For such a file the log is folded
right before the completion, and a writer that stalls between the two may still complete it. That window is
documented.
"""

from __future__ import annotations

from dataclasses import dataclass

from ckptfs.commit.log.append import catch_up
from ckptfs.commit.log.entries import Generation
from ckptfs.commit.log.fold import LogState
from ckptfs.commit.operations import List, Pause, Program, Read, Replace, StatOf
from ckptfs.commit.ownership.recovery_plan import decode_record
from ckptfs.commit.paths import ATTEMPTS, AttemptKeys
from ckptfs.errors import (
    AlreadyExistsError,
    AnswerLostError,
    CommitConflictError,
    FencedError,
    NotFoundError,
)
from ckptfs.storage.base import Capabilities, Entry

__all__ = ["NameClaim", "other_attempts", "put_plain", "still_free"]


def other_attempts(keys: AttemptKeys, state: LogState) -> Program[tuple[str, ...]]:
    """Return other attempts of this name that are neither sealed nor aborted: running, or dead."""
    found: tuple[str, ...] = ()
    try:
        entries: list[Entry] = yield List(ATTEMPTS)
    except NotFoundError:
        return ()
    for entry in entries:
        known = state.save(entry.name)
        if entry.name == keys.save_id or known.seal is not None or known.aborted:
            continue
        try:
            raw: bytes = yield Read(AttemptKeys(keys.shape, "", entry.name).record)
            name = decode_record(raw).name
        except (NotFoundError, ValueError):
            continue
        if name == keys.name:
            found += (entry.name,)
    return found


@dataclass(frozen=True, slots=True)
class NameClaim:
    """The attempt that writes plain names, its generation, and the capabilities of the storage."""

    keys: AttemptKeys
    base: Generation
    caps: Capabilities


def still_free(claim: NameClaim, state: LogState | None) -> Program[LogState]:
    """Return the newest fold if this attempt may still write its plain names.

    Raises:
        FencedError: The run has a newer owner, or it aborted the attempt.
        CommitConflictError: Another save sealed the name.
    """
    keys, base = claim.keys, claim.base
    current = yield from catch_up(state)
    if current.generation > base or current.save(keys.save_id).aborted:
        raise FencedError(
            f"the run was taken over by generation {current.generation.number}",
            hint="this process must stop; no file of the new owner was changed",
        )
    for save in current.saves.living.values():
        if (
            save.seal is not None
            and save.seal.name == keys.name
            and not (save.aborted or save.gone)
        ):
            raise CommitConflictError(
                f"{keys.name} was sealed by another save, {save.save_id}",
                hint="files with plain names never overwrite: choose another name",
            )
    return current


def put_plain(claim: NameClaim, state: LogState | None, key: str, data: bytes) -> Program[LogState]:
    """Put one small file, unless it belongs to another save now.

    Returns the fold that allowed it.
    """
    attempt = 0
    while True:
        try:
            etag = (yield StatOf(key)).etag
        except NotFoundError:
            etag = ""
        state = yield from still_free(claim, state if claim.caps.exclusive_create else None)
        try:
            yield Replace(key, data, etag if claim.caps.conditional_replace else None)
            return state
        except (AlreadyExistsError, AnswerLostError) as error:
            # Another rank of this save may have put the same file: look again.
            yield Pause(attempt, f"putting {key}: {error}")
            attempt += 1
