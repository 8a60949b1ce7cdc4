"""Everything that deletes. Entry first, bytes later; always by rename, never by name.

A recursive delete of ``attempts/<id>`` through a stale NFS client emptied the committed step, 20
times of 20; renaming it first gave "not found". So a save goes in four moves:

    1. an entry says so (delete, abort), appended under the holder's fence
    2. rename, piece by piece, to fresh unique names in ``trash/<generation>/``; "not found" means
       that this piece is done
    3. unlink below those names only
    4. an entry says that the bytes are gone: from here a plain save may take the name

``erase`` has moves 2 and 3, ``trash`` where they go; what is not ours, or stands in the place of what
was, stays: its save stays "deleted", and whoever put it there removes it. Between 1 and 4 nobody else
projects to the name, so what was read in a check still holds at the rename.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping

from ckptfs.commit.decisions import Refusal, may_delete, may_forget
from ckptfs.commit.entries import Delete, Generation, Seal, Stamp
from ckptfs.commit.erase import LEFT, erase, wipe_objects
from ckptfs.commit.fold import LogState
from ckptfs.commit.layout import (
    ATTEMPTS,
    PARTIAL_PREFIX,
    AttemptKeys,
    shared_key,
)
from ckptfs.commit.log import Appended, Refused, append
from ckptfs.commit.ops import (
    List,
    Program,
    Remove,
    RemoveDir,
    RemoveTree,
)
from ckptfs.commit.pieces import pieces
from ckptfs.commit.project import discard_source
from ckptfs.commit.trash import move_to_trash, trash_of
from ckptfs.errors import (
    AlreadyExistsError,
    NotFoundError,
    SymlinkError,
    UnsupportedError,
)
from ckptfs.storage.base import Capabilities, Entry, Shape

__all__ = [
    "delete_save",
    "discard_attempt",
    "discard_own_attempt",
    "enter_delete",
    "finish_delete",
    "remove_empty_attempt",
    "wipe_leftovers",
]

logger = logging.getLogger(__name__)


def delete_save(
    seal: Seal,
    views: Mapping[str, LogState],
    domain: str,
    holder: Generation,
    caps: Capabilities,
    *,
    reason: str,
    ids: Iterator[str],
    stamp: Stamp = Stamp(),
    still: Callable[[LogState], bool] = lambda _: True,
) -> Program[Appended | Refused[Refusal]]:
    """Delete one committed save in this domain: the entry, its bytes, the entry that they are gone.

    views: what is known of all domains. still: as for ``enter_delete``.
    """
    outcome = yield from enter_delete(
        seal, views[domain], holder, reason=reason, ids=ids, stamp=stamp, still=still
    )
    if isinstance(outcome, Refused) and (
        outcome.reason is Refusal.FENCED or not outcome.state.save(seal.save_id).deleted
    ):
        return outcome
    now = {**views, domain: outcome.state}
    return (yield from finish_delete(seal, now, domain, holder, caps, ids=ids, stamp=stamp))


def enter_delete(
    seal: Seal,
    state: LogState | None,
    holder: Generation,
    *,
    reason: str,
    ids: Iterator[str],
    stamp: Stamp = Stamp(),
    still: Callable[[LogState], bool] = lambda _: True,
) -> Program[Appended | Refused[Refusal]]:
    """The entry alone: from here the save is deleted, and its bytes may go at any time.

    still: asked of this domain's log at every try of the append; what was to be deleted may be
    pinned, or the newest again, by then.
    """

    def decide(seen: LogState) -> Delete | Refused[Refusal]:
        if not still(seen):
            return Refused(Refusal.NOTHING, seen)
        return may_delete(seen, seal.save_id, holder, reason)

    return (yield from append(decide, write_id=next(ids), stamp=stamp, state=state))


def finish_delete(
    seal: Seal,
    views: Mapping[str, LogState],
    domain: str,
    holder: Generation,
    caps: Capabilities,
    *,
    ids: Iterator[str],
    stamp: Stamp = Stamp(),
    trash: str | None = None,
) -> Program[Appended | Refused[Refusal]]:
    """Remove the bytes of a save whose delete lies in this domain's log, and say so there.

    trash: of a remover that holds nothing; else the holder's.
    """
    erased = yield from erase(seal, views, domain, trash or trash_of(holder), caps)
    if not erased:
        return Refused(Refusal.NOTHING, views[domain])
    return (
        yield from append(
            lambda seen: may_forget(seen, seal.save_id, holder),
            write_id=next(ids),
            stamp=stamp,
            state=views[domain],
        )
    )


def discard_attempt(
    save_id: str, name: str, holder: Generation, caps: Capabilities
) -> Program[None]:
    """Remove the bytes of an attempt whose abort was folded back as effective.

    It was never committed, hence never projected. name is "" where its record was lost.
    """
    keys = AttemptKeys(caps.shape, name, save_id)
    trash = trash_of(holder)
    if caps.shape is Shape.OBJECT:
        yield from _wipe_attempt(keys)
        return
    yield from move_to_trash(keys.attempt, f"{trash}/{save_id}.attempt")
    if name:
        try:
            yield from move_to_trash(keys.projected_data, f"{trash}/{save_id}.data")
        except (UnsupportedError, SymlinkError) as error:
            # Another disk or a link stands there; what was never committed was never moved to it.
            logger.warning(LEFT, name, error)


def discard_own_attempt(save_id: str, name: str, caps: Capabilities) -> Program[None]:
    """Remove an attempt that this process began, knows unsealed, and has appended an abort for."""
    keys = AttemptKeys(caps.shape, name, save_id)
    if caps.shape is Shape.OBJECT:
        yield from _wipe_attempt(keys)
        return
    yield from discard_source(keys)


def _wipe_attempt(keys: AttemptKeys) -> Program[None]:
    """Object stores: everything of a save that was never committed, so nobody shares it."""
    yield RemoveTree(shared_key(keys.save_id))
    yield from wipe_objects(keys, projected=False)


def wipe_leftovers(
    left_of: Callable[[str], list[Seal]], domain: str, caps: Capabilities
) -> Program[None]:
    """Object stores: take away what a delayed PUT wrote after its save was deleted and gone.

    left_of: the saves of a name whose bytes went. Asked for what lies in the run, not for all that
    ever did.
    """
    if caps.shape is not Shape.OBJECT:
        return
    entries: list[Entry] = yield List("")
    for name in dict.fromkeys(entry.name for entry in entries):
        for seal in left_of(name):
            for piece in pieces(seal, domain):
                keys = AttemptKeys(caps.shape, piece.name, piece.save_id)
                yield from wipe_objects(keys, projected=True)


def remove_empty_attempt(save_id: str) -> Program[None]:
    """Remove the directories of an attempt that died before its record was whole.

    One that has a file may be another's and alive, who is writing data. A living one without: it sees
    that its directory is gone, and makes it again (``saving.begin``).
    """
    data = f"{ATTEMPTS}/{save_id}/{save_id}"
    try:
        entries: list[Entry] = yield List(data)
    except NotFoundError:
        entries = []  # it died between the two directories
    if not all(entry.name.startswith(PARTIAL_PREFIX) for entry in entries):
        return
    for entry in entries:
        # Half of a record. The name is unique to its writer: nobody else's file can be meant.
        yield Remove(f"{data}/{entry.name}")
    for key in (data, f"{ATTEMPTS}/{save_id}"):
        try:
            yield RemoveDir(key)
        except AlreadyExistsError:
            return
