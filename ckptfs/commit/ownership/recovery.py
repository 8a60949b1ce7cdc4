"""Recovery: what the holder of a new fence does before its claim returns. No other process does it.

    1. remove the older generations' trash, so that stalled deleters cannot use it
    2. report: the folded log and the attempts of this domain     (per domain)
    3. plan: one pure decision over all reached domains           (coordinator)
    4. settle: abort, record, project, wipe                       (per domain)

An attempt that every listed domain sealed is committed. If a reached domain never sealed it, and its base is
older than the new fence, it is aborted there. If one of its domains is out of reach, it is in doubt: it is kept
and reported. A sealed part is a promise: it is released if its home gave up the whole, published if its home
committed the whole, and kept if the home is out of reach.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TypeVar

from ckptfs.commit.decisions import Deletable, Refusal, may_abort, may_publish, pending_deletes
from ckptfs.commit.delete.deletion_steps import (
    delete_save,
    discard_attempt,
    enter_delete,
    remove_empty_attempt,
    wipe_leftovers,
)
from ckptfs.commit.delete.trash import take_trash
from ckptfs.commit.log.append import (
    Appended,
    HolderMeans,
    RefusedAppend,
    append,
    catch_up,
    write_snapshot,
)
from ckptfs.commit.log.entries import Body, Decided, Generation, Outcome, Seal
from ckptfs.commit.log.fold import LogState
from ckptfs.commit.operations import List, Program, Read, Refresh, Sync, is_checkpoint_name
from ckptfs.commit.ownership.recovery_plan import (
    AttemptRecord,
    DomainLog,
    RecoveryPlan,
    decode_record,
    encode_record,
    is_released,
    plan_recovery,
)
from ckptfs.commit.paths import ATTEMPTS, CONTROL, LOG, AttemptKeys, is_save_id
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
    "DomainLog",
    "RecoveryPlan",
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
) -> Program[DomainLog]:
    """Fold the log after our fence, empty the older trash, list the attempts.

    state: An earlier fold of this log.
    """
    state = yield from catch_up(state)
    # The folded entries must be durable before anything is done because of them.
    yield Sync(LOG)
    yield from take_trash(generation, caps, state)
    return DomainLog(domain, state, (yield from attempts_here(caps)))


def attempts_here(caps: Capabilities) -> Program[tuple[AttemptRecord, ...]]:
    """Return the records of the attempts in this domain. Reads only."""
    try:
        yield Refresh(CONTROL)
        entries = yield List(ATTEMPTS)
    except NotFoundError:
        entries = []
    records: tuple[AttemptRecord, ...] = ()
    for entry in entries:
        if not entry.is_link:  # ckptfs makes no links here: the target of one is no attempt
            records += ((yield from read_record(entry.name, caps)),)
    return records


def read_record(save_id: str, caps: Capabilities) -> Program[AttemptRecord]:
    """Return the record of an attempt.

    Its base is None if the attempt died before the record was written.
    """
    key = AttemptKeys(caps.shape, "?", save_id).record
    try:
        stored = decode_record((yield Read(key)))
    except NotFoundError:
        has_none = yield from _has_no_data_directory(save_id, caps)
        return AttemptRecord(save_id, "", None, has_no_data_directory=has_none)
    except ValueError:  # ManifestError and SchemaError among them
        return AttemptRecord(save_id, "", None)
    name, of = stored.name, stored.of
    base = stored.part_base if of else stored.base
    if base is None:
        return AttemptRecord(save_id, "", None)
    if not is_checkpoint_name(name, is_part=bool(of)):
        # Recovery moves everything below the name to the trash, so it must be a checkpoint's name.
        logger.warning("%s names %r, which is not a checkpoint: ignored", key, name[:200])
        return AttemptRecord(save_id, "", None)
    return AttemptRecord(save_id, name, base, of, stored.home)


def _has_no_data_directory(save_id: str, caps: Capabilities) -> Program[bool]:
    """Whether an attempt has files, but not its data directory: see ``AttemptRecord``."""
    if caps.shape is Shape.OBJECT or not is_save_id(save_id):
        return False  # a directory of another name is none of ours
    try:
        names = [entry.name for entry in (yield List(f"{ATTEMPTS}/{save_id}"))]
    except NotFoundError:
        return False
    return bool(names) and save_id not in names


def settle(
    plan: RecoveryPlan, means: HolderMeans, *, left_to_caller: set[str] | None = None
) -> Program[LogState]:
    """Carry the plan out in one domain, and delete what was replaced.

    Args:
        plan: The plan over all domains.
        means: The domain, and the generation of the new fence.
        left_to_caller: Takes the ids of saves with a delete in the log and bytes that the caller removes.
            None removes the bytes here.

    Returns:
        The folded log.

    Raises:
        FencedError: A newer owner took the run in between.
    """
    domain, caps = means.domain, means.caps
    views = yield from settle_plan(plan, means, left_to_caller=left_to_caller)
    for doom in pending_deletes(views):
        if domain in doom.seal.everywhere:
            delete = delete_save(
                doom.seal,
                views,
                means,
                reason=doom.reason,
                still=_is_still_pending(doom, views, domain),
            )
            gone = yield from _if_permitted(delete, doom.seal.name, caps)
            if gone is None:
                continue
            _stop_if_fenced(gone, domain)
            views = {**views, domain: gone.state}
    yield from sweep_empty(domain, views, caps)
    return (yield from write_snapshot(views[domain], write_id=next(means.ids), stamp=means.stamp))


def settle_plan(
    plan: RecoveryPlan, means: HolderMeans, *, left_to_caller: set[str] | None = None
) -> Program[Mapping[str, LogState]]:
    """Carry the plan out in one domain, and do nothing else.

    Errors and ``left_to_caller`` as for ``settle``.
    """
    domain, holder, caps = means.domain, means.holder, means.caps
    state = plan.views[domain]
    doubtful = names_saved_twice(state)  # before the saves that are gone are settled
    dead: list[AttemptRecord] = []
    for record in plan.abort:
        outcome = yield from append(
            lambda current, r=record: may_abort(current, r.save_id, holder),  # type: ignore[misc]
            write_id=next(means.ids),
            stamp=means.stamp,
            state=state,
        )
        state = outcome.state
        _stop_if_fenced(outcome, domain)
        dead.append(record)
    for save_id, what in plan.decided:
        if domain not in _recorded_in(save_id, plan):
            continue
        decided = yield from append(
            lambda current, s=save_id, w=what: _may_record(current, s, w, holder),  # type: ignore[misc]
            write_id=next(means.ids),
            stamp=means.stamp,
            state=state,
        )
        state = decided.state
        _stop_if_fenced(decided, domain)
    for seal in plan.publish:
        published = yield from publish(seal, means, state)
        state = published.state
        _stop_if_fenced(published, domain)
    # Before any of their bytes is removed: after the entry, no process publishes them here.
    known_views = {**plan.views, domain: state}
    noted = yield from note_deletes(known_views, means)
    _stop_if_fenced(noted, domain)
    views: Mapping[str, LogState] = {**known_views, domain: noted.state}
    for record in (*dead, *plan.released):
        # Bytes go only after the abort (or the record of it) was folded back as effective.
        if is_released(record.save_id, record.of, views, domain):
            discard = discard_attempt(record.save_id, record.name, holder, caps)
            yield from _if_permitted(discard, record.save_id, caps)
    views = yield from _complete_deletes(views, means, left_to_caller)
    yield from project_all(views, domain, caps, holder, doubtful)
    return views


def _if_permitted(program: Program[T], what: str, caps: Capabilities) -> Program[T | None]:
    """Run a program that deletes; return None if the delete is not possible now.

    On an object store, credentials or a lock may forbid it. On a filesystem, a directory in the
    trash may not become empty because a process still writes to it. The bytes are left to a later
    owner; the run can be used with them.
    """
    try:
        return (yield from program)
    except (AccessError, AlreadyExistsError) as error:
        if caps.shape is not Shape.OBJECT and isinstance(error, AccessError):
            raise
        logger.warning("the bytes of %s were not removed: %s", what, error)
        return None


def _is_still_pending(
    doom: Deletable, views: Mapping[str, LogState], domain: str
) -> Callable[[LogState], bool]:
    return lambda current: doom in pending_deletes({**views, domain: current})


def _recorded_in(save_id: str, plan: RecoveryPlan) -> tuple[str, ...]:
    """Return the domains that keep a record of the outcome.

    If one domain decides, its seal is the record.
    """
    seal, part = seal_of(save_id, plan.views), part_in(save_id, plan.views)
    if part is not None:
        return part.domains
    return seal.domains if seal is not None and len(seal.domains) > 1 else ()


def _may_record(
    state: LogState, save_id: str, outcome: Outcome, holder: Generation
) -> Body | RefusedAppend[Refusal]:
    if state.generation > holder:
        return RefusedAppend(Refusal.FENCED, state)
    if state.save(save_id).decided is not None:
        return RefusedAppend(Refusal.NOTHING, state)
    return Decided(save_id, outcome)


def _stop_if_fenced(outcome: object, domain: str) -> None:
    if isinstance(outcome, RefusedAppend) and outcome.reason is Refusal.FENCED:
        raise FencedError(
            f"a newer owner took the run while this one recovered it (domain {domain})",
            hint="this process must stop writing to the run",
        )


def _complete_deletes(
    views: Mapping[str, LogState],
    means: HolderMeans,
    left_to_caller: set[str] | None,
) -> Program[Mapping[str, LogState]]:
    """Finish deletes that a crash interrupted, and deletes that another domain began.

    For the latter the entry is appended here too before any byte is removed. Otherwise only this
    domain would treat the save as existing when it does not.
    """
    domain, caps = means.domain, means.caps
    leftovers: dict[str, list[Seal]] = {}
    for save in list(views[domain].saves.living.values()):
        if save.seal is None or standing(save.save_id, views) is not Standing.DELETED:
            continue
        if save.gone:
            leftovers.setdefault(save.seal.name, []).append(save.seal)
            continue
        reason = "another domain began the delete"
        if left_to_caller is None:
            delete = delete_save(save.seal, views, means, reason=reason)
        else:
            left_to_caller.add(save.save_id)
            delete = enter_delete(save.save_id, means, views[domain], reason=reason)
        gone = yield from _if_permitted(delete, save.seal.name, caps)
        if gone is None:
            continue
        _stop_if_fenced(gone, domain)
        views = {**views, domain: gone.state}
    names = {live.seal.name for live in committed(views)}
    saves = views[domain].saves

    def left_of(name: str) -> list[Seal]:
        """Return the saves of a name with removed bytes, if nothing is live under that name."""
        if name in names:
            return []
        known = [saves[save_id].seal for save_id in saves.settled.ids_of(name)]
        return [*leftovers.get(name, ()), *(seal for seal in known if seal is not None)]

    if leftovers or saves.settled.size:
        yield from _if_permitted(wipe_leftovers(left_of, domain, caps), "leftovers", caps)
    return views


def sweep_empty(domain: str, views: Mapping[str, LogState], caps: Capabilities) -> Program[None]:
    """Remove directories of attempts that died before their first file was complete."""
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
    seal: Seal, means: HolderMeans, state: LogState
) -> Program[Appended | RefusedAppend[Refusal]]:
    """Record the home's decision in this domain, if it holds parts of the save."""
    if means.domain in seal.domains or means.domain not in seal.everywhere:
        return RefusedAppend(Refusal.NOTHING, state)
    return (
        yield from append(
            lambda current: may_publish(current, seal, means.holder),
            write_id=next(means.ids),
            stamp=means.stamp,
            state=state,
        )
    )


def note_deletes(views: Views, means: HolderMeans) -> Program[Appended | RefusedAppend[Refusal]]:
    """Append the deletes of saves that were never published in this domain.

    It holds only parts of them.
    """
    state = views[means.domain]
    outcome: Appended | RefusedAppend[Refusal] = RefusedAppend(Refusal.NOTHING, state)
    for save_id in promised_here(state):
        known = outcome.state.save(save_id)
        if known.seal is not None or known.deleted:
            continue
        if standing(save_id, views) is not Standing.DELETED:
            continue
        outcome = yield from enter_delete(
            save_id, means, outcome.state, reason="its home domain deleted it"
        )
        if isinstance(outcome, RefusedAppend) and outcome.reason is Refusal.FENCED:
            return outcome
    return outcome
