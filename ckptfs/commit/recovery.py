"""Recovery: what the holder of a new fence does before it returns, and nobody else ever.

    1. take the older generations' trash away from whoever stalls over it
    2. report: the folded log and the attempts that lie here      (per domain)
    3. plan: one pure decision over all reached domains           (coordinator)
    4. settle: abort, record, project, wipe                       (per domain)

An attempt that every listed domain sealed is committed. One that a reached domain never sealed, and
whose base is older than the new fence, is aborted there. One with a domain out of reach is in doubt,
kept, and named.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from ckptfs.commit.entries import Body, Decided, Generation, Outcome, Seal, Stamp
from ckptfs.commit.fold import LogState
from ckptfs.commit.layout import ATTEMPTS, CONTROL, LOG, AttemptKeys
from ckptfs.commit.log import Refused, append, catch_up, write_snapshot
from ckptfs.commit.ops import List, Program, Read, Refresh, Sync
from ckptfs.commit.project import project_all
from ckptfs.commit.protocol import (
    Doomed,
    Refusal,
    Standing,
    committed,
    doomed,
    may_abort,
    seal_of,
    standing,
)
from ckptfs.commit.reclaim import (
    delete_save,
    discard_attempt,
    remove_empty_attempt,
    take_trash,
    wipe_leftovers,
)
from ckptfs.errors import AccessError, FencedError, NotFoundError
from ckptfs.storage.base import Capabilities, Shape

__all__ = ["AttemptRecord", "Plan", "Report", "encode_record", "plan_recovery", "report", "settle"]

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class AttemptRecord:
    """attempt.json: the first file of every attempt, so that it can be judged before any entry.

    base is None where the file is missing: the attempt died before its first byte.
    """

    save_id: str
    name: str
    base: Generation | None


@dataclass(frozen=True, slots=True)
class Report:
    """What one domain holds after the new fence."""

    domain: str
    state: LogState
    attempts: tuple[AttemptRecord, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """What every domain does: abort these, record these; in_doubt saves are kept and named."""

    abort: tuple[AttemptRecord, ...]
    decided: tuple[tuple[str, Outcome], ...]
    in_doubt: tuple[Seal, ...]
    views: Mapping[str, LogState]


def encode_record(save_id: str, name: str, base: Generation) -> bytes:
    """The bytes of attempt.json."""
    return json.dumps({"save_id": save_id, "name": name, "base": list(base)}).encode() + b"\n"


def report(
    domain: str, generation: Generation, caps: Capabilities, state: LogState | None = None
) -> Program[Report]:
    """Fold the log after our fence, empty the older trash, list the attempts.

    state: what was folded here before.
    """
    # What this process folds it must not act on before a power cut cannot take it back.
    yield Sync(LOG)
    state = yield from catch_up(state)
    yield from take_trash(generation, caps)
    try:
        yield Refresh(CONTROL)
        entries = yield List(ATTEMPTS)
    except NotFoundError:
        entries = []
    records: tuple[AttemptRecord, ...] = ()
    for entry in entries:
        records += ((yield from _record(entry.name, caps)),)
    return Report(domain, state, records)


def _record(save_id: str, caps: Capabilities) -> Program[AttemptRecord]:
    key = AttemptKeys(caps.shape, "?", save_id).record
    try:
        raw = json.loads((yield Read(key)))
        base = Generation(int(raw["base"][0]), str(raw["base"][1]))
        return AttemptRecord(save_id, str(raw["name"]), base)
    except (NotFoundError, ValueError, KeyError, TypeError, IndexError):
        return AttemptRecord(save_id, "", None)


def plan_recovery(reports: Mapping[str, Report], holder: Generation) -> Plan:
    """What the holder of generation ``holder`` does with everything unsettled. Pure."""
    views = {domain: r.state for domain, r in reports.items()}
    records = _records(reports)
    ids = [*records, *(s for v in views.values() for s in v.saves if s not in records)]
    abort: list[AttemptRecord] = []
    decided: list[tuple[str, Outcome]] = []
    in_doubt: list[Seal] = []
    for save_id in dict.fromkeys(ids):
        seal = seal_of(save_id, views)
        match standing(save_id, views):
            case Standing.UNKNOWN | Standing.PENDING:
                known = records.get(save_id)
                if seal is not None:
                    known = AttemptRecord(save_id, seal.name, seal.base)
                # Began under our own fence or a newer one: not ours to abort. A missing record
                # says nothing about its base.
                if known is not None and known.base is not None and known.base < holder:
                    abort.append(known)
                    decided.append((save_id, Outcome.ABORTED))
            case Standing.COMMITTED:
                if seal is not None and _unrecorded(save_id, seal, views):
                    decided.append((save_id, Outcome.COMMITTED))
            case Standing.ABORTED:
                if seal is not None and _unrecorded(save_id, seal, views):
                    decided.append((save_id, Outcome.ABORTED))
                if save_id in records:
                    abort.append(records[save_id])
            case Standing.IN_DOUBT:
                if seal is not None:
                    in_doubt.append(seal)
            case Standing.DELETED:
                pass
    return Plan(tuple(abort), tuple(decided), tuple(in_doubt), views)


def _records(reports: Mapping[str, Report]) -> dict[str, AttemptRecord]:
    """One record per attempt: of domains where it died before its record and after, the latter."""
    records: dict[str, AttemptRecord] = {}
    for found in (a for r in reports.values() for a in r.attempts):
        if found.base is not None or found.save_id not in records:
            records[found.save_id] = found
    return records


def _unrecorded(save_id: str, seal: Seal, views: Mapping[str, LogState]) -> bool:
    """Whether some reached domain lacks the record of a decision that several domains made."""
    return len(seal.domains) > 1 and any(
        views[d].save(save_id).decided is None for d in seal.domains if d in views
    )


def settle(
    plan: Plan,
    domain: str,
    holder: Generation,
    caps: Capabilities,
    *,
    ids: Iterator[str],
    stamp: Stamp = Stamp(),
) -> Program[LogState]:
    """Carry the plan out in one domain. FencedError when a newer owner came meanwhile."""
    state = plan.views[domain]
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
    views: Mapping[str, LogState] = {**plan.views, domain: state}
    for record in dead:
        # Bytes go only after the abort (or the record of it) was folded back as effective.
        if standing(record.save_id, views) is Standing.ABORTED:
            discard = discard_attempt(record.save_id, record.name, holder, caps)
            yield from _if_permitted(discard, record.save_id, caps)
    views = yield from _complete_deletes(views, domain, holder, caps, ids=ids, stamp=stamp)
    yield from project_all(views, domain, caps)
    for doom in doomed(views):
        if domain in doom.seal.domains:
            delete = delete_save(
                doom.seal,
                views,
                domain,
                holder,
                caps,
                reason=doom.reason,
                ids=ids,
                stamp=stamp,
                still=_still_doomed(doom, views, domain),
            )
            gone = yield from _if_permitted(delete, doom.seal.name, caps)
            if gone is None:
                continue
            _stop_if_fenced(gone, domain)
            views = {**views, domain: gone.state}
    yield from _sweep_empty(domain, views, caps)
    return (yield from write_snapshot(views[domain], write_id=next(ids), stamp=stamp))


def _if_permitted(program: Program[T], what: str, caps: Capabilities) -> Program[T | None]:
    """None where an object store refuses a delete: credentials that may not, or a lock.

    The bytes wait for a later owner; the run can be used without their going.
    """
    try:
        return (yield from program)
    except AccessError as error:
        if caps.shape is not Shape.OBJECT:
            raise
        logger.warning("the bytes of %s stay: %s", what, error)
        return None


def _still_doomed(
    doom: Doomed, views: Mapping[str, LogState], domain: str
) -> Callable[[LogState], bool]:
    return lambda seen: doom in doomed({**views, domain: seen})


def _recorded_in(save_id: str, plan: Plan) -> tuple[str, ...]:
    """The domains that keep a record of the outcome: where one domain decides, its seal is it."""
    seal = seal_of(save_id, plan.views)
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
    domain: str,
    holder: Generation,
    caps: Capabilities,
    *,
    ids: Iterator[str],
    stamp: Stamp,
) -> Program[Mapping[str, LogState]]:
    """Finish deletes whose bytes a crash left, and deletes that another domain began: the entry
    here too, before any byte, or this domain alone would believe in a save that is not there.
    """
    leftovers = []
    for save in list(views[domain].saves.values()):
        if save.seal is None or standing(save.save_id, views) is not Standing.DELETED:
            continue
        if save.gone:
            leftovers.append(save.seal)
            continue
        delete = delete_save(
            save.seal,
            views,
            domain,
            holder,
            caps,
            reason="begun elsewhere",
            ids=ids,
            stamp=stamp,
        )
        gone = yield from _if_permitted(delete, save.seal.name, caps)
        if gone is None:
            continue
        _stop_if_fenced(gone, domain)
        views = {**views, domain: gone.state}
    names = {live.seal.name for live in committed(views)}
    wipe = wipe_leftovers([seal for seal in leftovers if seal.name not in names], caps)
    yield from _if_permitted(wipe, "leftovers", caps)
    return views


def _sweep_empty(domain: str, views: Mapping[str, LogState], caps: Capabilities) -> Program[None]:
    """Remove directories of attempts that died before their first file."""
    if caps.shape is Shape.OBJECT:
        return
    try:
        entries = yield List(ATTEMPTS)
    except NotFoundError:
        return
    known = {live.seal.save_id for live in committed(views)}
    for entry in entries:
        if entry.name not in known and entry.name not in views[domain].saves:
            yield from remove_empty_attempt(entry.name)
