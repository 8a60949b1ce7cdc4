"""The decision of recovery, before anything is done: one plan over all reached domains. Pure.

reports   the folded log of each domain, and the attempts in it
plan      what to abort, to record, to publish and to release, and what is in doubt
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ckptfs.commit.log.entries import Generation, Outcome, Part, Seal
from ckptfs.commit.log.fold import LogState, SaveState
from ckptfs.commit.state import (
    Standing,
    Views,
    living,
    part_in,
    part_name,
    promise,
    seal_of,
    split_name,
    standing,
)
from ckptfs.schema import Schema

__all__ = [
    "AttemptFile",
    "AttemptRecord",
    "DomainLog",
    "RecoveryPlan",
    "decode_record",
    "encode_record",
    "is_released",
    "lacks_home_abort",
    "lacks_home_seal",
    "plan_recovery",
    "with_equal_seals_once",
]


@dataclass(frozen=True, slots=True)
class AttemptRecord:
    """attempt.json: the first file of every attempt, so that it can be judged before any entry.

    Attributes:
        save_id: The id of the save.
        name: The name of the checkpoint.
        base: The generation that it began under; None if the file is missing, because the attempt
            died before its first byte.
        of: For a part, the id of the whole.
        home: For a part, the domain that decides over it.
        has_no_data_directory: Whether the attempt has files, but not the directory that a living process
            makes before them and moves only after the seal: a power cut has taken it away.
    """

    save_id: str
    name: str
    base: Generation | None
    of: str = ""
    home: str = ""
    has_no_data_directory: bool = False

    def may_be_aborted(self, holder: Generation) -> bool:
        """Whether the attempt is older than the fence of ``holder``, or has no process any more.

        An attempt under the holder's own fence or a newer one is not its to abort. A missing record says
        nothing about the base.
        """
        return self.has_no_data_directory or (self.base is not None and self.base < holder)


@dataclass(frozen=True, slots=True)
class DomainLog:
    """The content of one domain after the new fence."""

    domain: str
    state: LogState
    attempts: tuple[AttemptRecord, ...]


@dataclass(frozen=True, slots=True)
class RecoveryPlan:
    """What every domain does.

    Attributes:
        abort: Attempts to abort.
        decided: Outcomes to record.
        in_doubt: Saves that are kept and reported.
        views: The folded logs.
        publish: Seals of a home to record in the domains of parts that do not have them yet.
        released: Parts that will never belong to a committed save.
    """

    abort: tuple[AttemptRecord, ...]
    decided: tuple[tuple[str, Outcome], ...]
    in_doubt: tuple[Seal, ...]
    views: Mapping[str, LogState]
    publish: tuple[Seal, ...] = ()
    released: tuple[AttemptRecord, ...] = ()


def with_equal_seals_once(views: Mapping[str, LogState]) -> Mapping[str, LogState]:
    """Return the same views with equal seals of several logs as one object, sent only once.

    Every seal lists all domains, so with many domains the size of the views would be quadratic.
    """
    if len(views) == 1:
        return views
    known: dict[str, Seal] = {}

    def once(save: SaveState) -> SaveState:
        if save.seal is None or known.setdefault(save.save_id, save.seal) != save.seal:
            return save
        return replace(save, seal=known[save.save_id])

    return {domain: replace(view, saves=view.saves.mapped(once)) for domain, view in views.items()}


def encode_record(
    save_id: str,
    name: str,
    base: Generation,
    *,
    of: str = "",
    home: str = "",
    replaces: str | None = None,
) -> bytes:
    """Encode attempt.json.

    replaces: The digest of a foreign ``.metadata`` that the save replaces. If the writer dies, the
    process that projects the save for it must know this.
    """
    record: dict[str, Any] = {"save_id": save_id, "name": name}
    if replaces is not None:
        record["replaces"] = replaces
    if of:
        # Under another name: a version that knows no parts judges no attempt without a base, and so
        # leaves a part alone that may be sealed.
        record |= {"part_base": list(base), "of": of, "home": home}
    else:
        record["base"] = list(base)
    return json.dumps(record).encode() + b"\n"


@dataclass(frozen=True, slots=True)
class AttemptFile:
    """attempt.json as it is written: see ``encode_record``."""

    name: str
    base: Generation | None = None
    part_base: Generation | None = None
    of: str = ""
    home: str = ""
    replaces: str | None = None


_FILE = Schema(AttemptFile)


def decode_record(data: bytes) -> AttemptFile:
    """Decode attempt.json. SchemaError if it is damaged or not ours."""
    return _FILE.decode(data)


def plan_recovery(
    reports: Mapping[str, DomainLog], holder: Generation, keep: Collection[str] = ()
) -> RecoveryPlan:
    """Return what the holder of generation ``holder`` does with everything unsettled. Pure.

    keep: Attempts that the holder itself continues.
    """
    views = {domain: r.state for domain, r in reports.items()}
    records = _records(reports)
    ids = [*records, *(save_id for save_id in living(views) if save_id not in records)]
    abort: dict[str, AttemptRecord] = {}
    decided: list[tuple[str, Outcome]] = []
    in_doubt: list[Seal] = []
    publish: list[Seal] = []
    released: list[AttemptRecord] = []
    for save_id in dict.fromkeys(ids):
        seal, part = seal_of(save_id, views), part_in(save_id, views)
        known = records.get(save_id)
        match standing(save_id, views):
            case Standing.UNKNOWN | Standing.PENDING:
                if seal is not None:
                    known = AttemptRecord(save_id, seal.name, seal.base)
                elif part is not None:
                    name = part_name(part.name, part.part)
                    known = AttemptRecord(save_id, name, part.base, part.of, part.home)
                if known is None or not known.may_be_aborted(holder):
                    continue
                if seal is None and save_id in keep:
                    continue
                abort[save_id] = known
                decided.append((save_id, Outcome.ABORTED))
                if known.of and known.home in views:
                    # Only its home releases a sealed part. If the home is reached, it will never commit
                    # the whole, because our fence is in its log.
                    checkpoint = AttemptRecord(known.of, split_name(known.name)[0], known.base)
                    abort.setdefault(known.of, checkpoint)
            case Standing.COMMITTED:
                if seal is not None and _unrecorded(save_id, seal, views):
                    decided.append((save_id, Outcome.COMMITTED))
                if seal is not None and lacks_home_seal(seal, views):
                    publish.append(seal)
            case Standing.ABORTED:
                if seal is not None and _unrecorded(save_id, seal, views):
                    decided.append((save_id, Outcome.ABORTED))
                if known is not None and known.of:
                    released.append(known)
                elif known is not None:
                    abort[save_id] = known
                if part is not None and lacks_home_abort(part, views):
                    name, base = part.name, part.base
                    abort.setdefault(part.of, AttemptRecord(part.of, name, base))
            case Standing.IN_DOUBT:
                doubtful = promise(part) if seal is None and part is not None else seal
                if doubtful is not None:
                    in_doubt.append(doubtful)
            case Standing.DELETED:
                if known is not None and known.of:
                    released.append(known)
    return RecoveryPlan(
        tuple(abort.values()),
        tuple(decided),
        tuple(in_doubt),
        views,
        tuple(publish),
        tuple(released),
    )


def _records(reports: Mapping[str, DomainLog]) -> dict[str, AttemptRecord]:
    """Return one record per attempt.

    If an attempt has a record in one domain and died before it in another, the record counts.
    """
    records: dict[str, AttemptRecord] = {}
    for found in (a for r in reports.values() for a in r.attempts):
        if found.base is not None or found.save_id not in records:
            records[found.save_id] = found
    return records


def _unrecorded(save_id: str, seal: Seal, views: Mapping[str, LogState]) -> bool:
    """Whether several domains decided, and a reached one lacks the record of the decision."""
    return len(seal.domains) > 1 and any(
        views[d].save(save_id).decided is None for d in seal.domains if d in views
    )


def lacks_home_seal(seal: Seal, views: Views) -> bool:
    """Whether a reached domain that holds parts of a committed save lacks its seal. Pure."""
    return any(
        views[d].save(seal.save_id).seal is None
        for d in seal.everywhere
        if d in views and d not in seal.domains
    )


def lacks_home_abort(part: Part, views: Views) -> bool:
    """Whether a reached domain holds a part of a given-up save without the abort. Pure.

    The home of the save gave it up, and the domain has no entry of that.
    """
    if standing(part.of, views) is not Standing.ABORTED:
        return False
    return any(
        view.save(part.save_id).part is not None and not view.save(part.of).aborted
        for view in views.values()
    )


def is_released(save_id: str, of: str, views: Views, domain: str) -> bool:
    """Whether the bytes of this attempt will never be needed. Pure.

    of: For a part, the id of the whole. A published part of a deleted save is deleted with the
    whole.
    """
    now = standing(save_id, views)
    if now is Standing.DELETED and of:
        return views[domain].save(of).seal is None
    return now is Standing.ABORTED
