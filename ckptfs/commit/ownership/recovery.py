"""Recovery: what the holder of a new fence does before it returns, and nobody else ever.

    1. take the older generations' trash away from whoever stalls over it
    2. report: the folded log and the attempts that lie here      (per domain)
    3. plan: one pure decision over all reached domains           (coordinator)
    4. settle: abort, record, project, wipe                       (per domain)

An attempt that every listed domain sealed is committed. One that a reached domain never sealed, and
whose base is older than the new fence, is aborted there. One with a domain out of reach is in doubt,
kept, and named. A part that is sealed is a promise: it is released where its home gave up the whole,
published where its home committed it, and kept where the home is out of reach.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

from ckptfs.commit.decisions import Deletable, Refusal, doomed, may_abort, may_publish
from ckptfs.commit.delete.deletion_steps import (
    delete_save,
    discard_attempt,
    enter_delete,
    remove_empty_attempt,
    wipe_leftovers,
)
from ckptfs.commit.delete.trash import take_trash
from ckptfs.commit.log.append import Appended, Means, Refused, append, catch_up, write_snapshot
from ckptfs.commit.log.entries import Body, Decided, Generation, Outcome, Seal, Stamp
from ckptfs.commit.log.fold import LogState
from ckptfs.commit.operations import List, Program, Read, Refresh, Sync, is_checkpoint_name
from ckptfs.commit.ownership.recovery_plan import (
    AttemptRecord,
    Plan,
    Report,
    decode_record,
    encode_record,
    is_released,
    plan_recovery,
)
from ckptfs.commit.paths import ATTEMPTS, CONTROL, LOG, AttemptKeys
from ckptfs.commit.save.projection import names_saved_twice, project_all
from ckptfs.commit.state import (
    Standing,
    Views,
    committed,
    part_in,
    promised_here,
    seal_of,
    standing,
)
from ckptfs.errors import AccessError, AlreadyExistsError, FencedError, NotFoundError
from ckptfs.storage.base import Capabilities, Shape

__all__ = [
    "AttemptRecord",
    "Plan",
    "Report",
    "attempts_here",
    "encode_record",
    "note_deletes",
    "plan_recovery",
    "publish",
    "read_record",
    "report",
    "settle",
    "settle_plan",
    "sweep_empty",
]

logger = logging.getLogger("ckptfs.commit")

T = TypeVar("T")


def report(
    domain: str, generation: Generation, caps: Capabilities, state: LogState | None = None
) -> Program[Report]:
    """Fold the log after our fence, empty the older trash, list the attempts.

    state: what was folded here before.
    """
    state = yield from catch_up(state)
    # What was folded is not acted on before a power cut cannot take it back.
    yield Sync(LOG)
    yield from take_trash(generation, caps, state)
    return Report(domain, state, (yield from attempts_here(caps)))


def attempts_here(caps: Capabilities) -> Program[tuple[AttemptRecord, ...]]:
    """What the attempts that lie here say of themselves. Reads only."""
    try:
        yield Refresh(CONTROL)
        entries = yield List(ATTEMPTS)
    except NotFoundError:
        entries = []
    records: tuple[AttemptRecord, ...] = ()
    for entry in entries:
        if not entry.is_link:  # it is none of ours: nothing of what it leads to is an attempt
            records += ((yield from read_record(entry.name, caps)),)
    return records


def read_record(save_id: str, caps: Capabilities) -> Program[AttemptRecord]:
    """What an attempt says of itself; without a base where it died before it said so."""
    key = AttemptKeys(caps.shape, "?", save_id).record
    try:
        told = decode_record((yield Read(key)))
    except (NotFoundError, ValueError):  # ManifestError and SchemaError among them
        return AttemptRecord(save_id, "", None)
    name, of = told.name, told.of
    base = told.part_base if of else told.base
    if base is None:
        return AttemptRecord(save_id, "", None)
    if not is_checkpoint_name(name, is_part=bool(of)):
        # Recovery moves what lies below the name to the trash: it has to be a checkpoint's.
        logger.warning("%s names %r, which is not a checkpoint: ignored", key, name[:200])
        return AttemptRecord(save_id, "", None)
    return AttemptRecord(save_id, name, base, of, told.home)


def settle(
    plan: Plan,
    domain: str,
    holder: Generation,
    caps: Capabilities,
    *,
    ids: Iterator[str],
    stamp: Stamp = Stamp(),
    spared: set[str] | None = None,
) -> Program[LogState]:
    """Carry the plan out in one domain, and delete what was replaced. FencedError when a newer owner
    came meanwhile.

    spared: takes the save_ids whose deletes are entered and whose bytes are left to the caller;
    None removes them here.
    """
    views = yield from settle_plan(plan, domain, holder, caps, ids=ids, stamp=stamp, spared=spared)
    means = Means(domain, caps, ids, stamp)
    for doom in doomed(views):
        if domain in doom.seal.everywhere:
            delete = delete_save(
                doom.seal,
                views,
                means,
                holder,
                reason=doom.reason,
                still=_still_doomed(doom, views, domain),
            )
            gone = yield from _if_permitted(delete, doom.seal.name, caps)
            if gone is None:
                continue
            _stop_if_fenced(gone, domain)
            views = {**views, domain: gone.state}
    yield from sweep_empty(domain, views, caps)
    return (yield from write_snapshot(views[domain], write_id=next(ids), stamp=stamp))


def settle_plan(
    plan: Plan,
    domain: str,
    holder: Generation,
    caps: Capabilities,
    *,
    ids: Iterator[str],
    stamp: Stamp = Stamp(),
    spared: set[str] | None = None,
) -> Program[Mapping[str, LogState]]:
    """Carry the plan out in one domain, and nothing else. Errors and ``spared`` as for ``settle``."""
    state, means = plan.views[domain], Means(domain, caps, ids, stamp)
    doubtful = names_saved_twice(state)  # before what is gone is forgotten
    dead: list[AttemptRecord] = []
    for record in plan.abort:
        outcome = yield from append(
            lambda seen, r=record: may_abort(seen, r.save_id, holder),  # type: ignore[misc]
            write_id=next(ids),
            stamp=stamp,
            state=state,
        )
        state = outcome.state
        _stop_if_fenced(outcome, domain)
        dead.append(record)
    for save_id, what in plan.decided:
        if domain not in _recorded_in(save_id, plan):
            continue
        decided = yield from append(
            lambda seen, s=save_id, w=what: _may_record(seen, s, w, holder),  # type: ignore[misc]
            write_id=next(ids),
            stamp=stamp,
            state=state,
        )
        state = decided.state
        _stop_if_fenced(decided, domain)
    for seal in plan.publish:
        told = yield from publish(seal, domain, state, holder, ids=ids, stamp=stamp)
        state = told.state
        _stop_if_fenced(told, domain)
    # Before any byte of them: from the entry on nobody publishes them here.
    seen = {**plan.views, domain: state}
    noted = yield from note_deletes(seen, means, holder)
    _stop_if_fenced(noted, domain)
    views: Mapping[str, LogState] = {**seen, domain: noted.state}
    for record in (*dead, *plan.released):
        # Bytes go only after the abort (or the record of it) was folded back as effective.
        if is_released(record.save_id, record.of, views, domain):
            discard = discard_attempt(record.save_id, record.name, holder, caps)
            yield from _if_permitted(discard, record.save_id, caps)
    views = yield from _complete_deletes(views, means, holder, spared)
    yield from project_all(views, domain, caps, holder, doubtful)
    return views


def _if_permitted(program: Program[T], what: str, caps: Capabilities) -> Program[T | None]:
    """None where an object store refuses a delete (credentials that may not, or a lock), and where
    a directory in the trash will not be empty because somebody still writes to it.

    The bytes wait for a later owner; the run can be used without their going.
    """
    try:
        return (yield from program)
    except (AccessError, AlreadyExistsError) as error:
        if caps.shape is not Shape.OBJECT and isinstance(error, AccessError):
            raise
        logger.warning("the bytes of %s were not removed: %s", what, error)
        return None


def _still_doomed(
    doom: Deletable, views: Mapping[str, LogState], domain: str
) -> Callable[[LogState], bool]:
    return lambda seen: doom in doomed({**views, domain: seen})


def _recorded_in(save_id: str, plan: Plan) -> tuple[str, ...]:
    """The domains that keep a record of the outcome: where one domain decides, its seal is it."""
    seal, part = seal_of(save_id, plan.views), part_in(save_id, plan.views)
    if part is not None:
        return part.domains
    return seal.domains if seal is not None and len(seal.domains) > 1 else ()


def _may_record(
    state: LogState, save_id: str, outcome: Outcome, holder: Generation
) -> Body | Refused[Refusal]:
    if state.generation > holder:
        return Refused(Refusal.FENCED, state)
    if state.save(save_id).decided is not None:
        return Refused(Refusal.NOTHING, state)
    return Decided(save_id, outcome)


def _stop_if_fenced(outcome: object, domain: str) -> None:
    if isinstance(outcome, Refused) and outcome.reason is Refusal.FENCED:
        raise FencedError(
            f"a newer owner took the run while this one recovered it (domain {domain})",
            hint="this process must stop writing to the run",
        )


def _complete_deletes(
    views: Mapping[str, LogState],
    means: Means,
    holder: Generation,
    spared: set[str] | None,
) -> Program[Mapping[str, LogState]]:
    """Finish deletes whose bytes a crash left, and deletes that another domain began: the entry
    here too, before any byte, or this domain alone would believe in a save that is not there.
    """
    domain, caps = means.domain, means.caps
    leftovers: dict[str, list[Seal]] = {}
    for save in list(views[domain].saves.living.values()):
        if save.seal is None or standing(save.save_id, views) is not Standing.DELETED:
            continue
        if save.gone:
            leftovers.setdefault(save.seal.name, []).append(save.seal)
            continue
        reason = "begun elsewhere"
        if spared is None:
            delete = delete_save(save.seal, views, means, holder, reason=reason)
        else:
            spared.add(save.save_id)
            delete = enter_delete(save.save_id, means, holder, views[domain], reason=reason)
        gone = yield from _if_permitted(delete, save.seal.name, caps)
        if gone is None:
            continue
        _stop_if_fenced(gone, domain)
        views = {**views, domain: gone.state}
    names = {live.seal.name for live in committed(views)}
    saves = views[domain].saves

    def left_of(name: str) -> list[Seal]:
        """Saves of a name whose bytes went, where nothing lives under that name."""
        if name in names:
            return []
        known = [saves[save_id].seal for save_id in saves.settled.ids_of(name)]
        return [*leftovers.get(name, ()), *(seal for seal in known if seal is not None)]

    if leftovers or saves.settled.size:
        yield from _if_permitted(wipe_leftovers(left_of, domain, caps), "leftovers", caps)
    return views


def sweep_empty(domain: str, views: Mapping[str, LogState], caps: Capabilities) -> Program[None]:
    """Remove directories of attempts that died before their first file was whole."""
    if caps.shape is Shape.OBJECT:
        return
    try:
        entries = yield List(ATTEMPTS)
    except NotFoundError:
        return
    known = {live.seal.save_id for live in committed(views)}
    for entry in entries:
        if entry.is_link:
            continue
        if entry.name not in known and entry.name not in views[domain].saves:
            yield from remove_empty_attempt(entry.name)


def publish(
    seal: Seal,
    domain: str,
    state: LogState,
    by: Generation,
    *,
    ids: Iterator[str],
    stamp: Stamp = Stamp(),
) -> Program[Appended | Refused[Refusal]]:
    """Record the home's decision in this domain, if parts of the save lie here."""
    if domain in seal.domains or domain not in seal.everywhere:
        return Refused(Refusal.NOTHING, state)
    return (
        yield from append(
            lambda seen: may_publish(seen, seal, by),
            write_id=next(ids),
            stamp=stamp,
            state=state,
        )
    )


def note_deletes(
    views: Views, means: Means, by: Generation
) -> Program[Appended | Refused[Refusal]]:
    """Enter here the deletes of saves that were never published here: only parts of them are."""
    state = views[means.domain]
    outcome: Appended | Refused[Refusal] = Refused(Refusal.NOTHING, state)
    for whole in promised_here(state):
        known = outcome.state.save(whole)
        if known.seal is not None or known.deleted:
            continue
        if standing(whole, views) is not Standing.DELETED:
            continue
        outcome = yield from enter_delete(whole, means, by, outcome.state, reason="deleted at home")
        if isinstance(outcome, Refused) and outcome.reason is Refusal.FENCED:
            return outcome
    return outcome
