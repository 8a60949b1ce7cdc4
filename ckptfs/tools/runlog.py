"""The log of a run as a person reads it: who saved, fenced and deleted what, when, from where.

    read_log(uri)   -> Line per entry: number, when, who, what, and why it is void where it is

Every entry is read by itself, so that one that is damaged, missing or of a newer version is a line
like the others. An entry is void by those below it: a seal after an abort of the same save, an abort
after its seal, a fence below the one that stands. What follows a damaged or missing entry is read
here, and by nobody else. Read-only, no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from ckptfs.commit.advisory import with_log
from ckptfs.commit.entries import (
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
from ckptfs.commit.fold import LogState, fold_entry
from ckptfs.commit.layout import LOG, log_key
from ckptfs.commit.ops import read_limited
from ckptfs.errors import ManifestError, NotFoundError
from ckptfs.storage.base import Storage
from ckptfs.storage.registry import open_storage
from ckptfs.tools.lines import side_by_side
from ckptfs.uri import Uri, options_of

__all__ = ["Condition", "Line", "lines_of", "read_log", "told"]


class Condition(StrEnum):
    """Whether an entry counts."""

    VALID = "valid"
    VOID = "void"  # those below it say otherwise
    UNREAD = "unread"  # it lies behind an entry that cannot be read: nobody folds it
    DAMAGED = "damaged"
    MISSING = "missing"


_MOST_MISSING = 1000  # entries, that are told one by one


@dataclass(frozen=True, slots=True)
class Line:
    """One entry. entry: of an entry, "damaged" and "missing" of what is none. what: in words. why: it
    does not count, "" where it does. save_id, name: of the save that it is about, None of others.
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
    """Every entry of the run's log, oldest first. NotFoundError: there is none."""
    root = Uri.parse(run_uri)
    plain = open_storage(root, {**options_of(run_uri), **(storage_options or {})})
    try:
        lines = lines_of(with_log(plain, plain.capabilities, write=False))
    finally:
        plain.close()
    if not lines:
        raise NotFoundError(
            "no run has a log there",
            uri=root,
            hint="what was copied without its log, or saved by stock torch, has none; see ckptfs ls",
        )
    return lines


def lines_of(storage: Storage) -> list[Line]:
    """As ``read_log``, of a storage ``with_log``; none where there is no entry."""
    storage.refresh(LOG)
    return told(_read(storage, _end(storage)))


def _end(storage: Storage) -> int:
    """How many numbers there are to ask for; a listing is a hint, and later ones are asked for too. A number
    that lies far behind all others is no entry's: a hundred million are not asked for because of it.
    """
    try:
        names = [entry.name for entry in storage.list(LOG) if not entry.is_dir]
    except NotFoundError:
        return 0
    numbered = [name for name in names if name[:1].isdigit()]
    if any("." in name for name in numbered):
        return len(numbered)  # an advisory log: entries are counted through
    last = max((int(name) for name in numbered if name.isdigit()), default=-1)
    return min(last + 1, len(numbered) + _MOST_MISSING)


def _read(storage: Storage, end: int) -> list[bytes | None]:
    """The entries' bytes; None where one is missing."""

    def read(number: int) -> bytes | None:
        try:
            return read_limited(storage, log_key(number))
        except NotFoundError:
            return None

    raw = side_by_side(read, range(end))
    while raw and (more := read(len(raw))) is not None:
        raw.append(more)
    return raw


# -- in words: pure ---------------------------------------------------------------------------


def told(raw: Sequence[bytes | None]) -> list[Line]:
    """The lines of a log's entries, from number 0 on; None: it is missing."""
    entries = [_decoded(number, data) for number, data in enumerate(raw)]
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
        what = "nothing: somebody removed it"
        return Line(number, "missing", Condition.MISSING, Stamp(), what, "no entry is ever removed")
    try:
        return decode_entry(data, log_key(number))
    except ManifestError as error:
        shown = f"{len(data)} bytes that are no entry"
        return Line(number, "damaged", Condition.DAMAGED, Stamp(), shown, error.message)


def _names(entries: Sequence[Entry | Line]) -> dict[str, str]:
    """The names of saves, also for entries before their seal."""
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
    """Why the entry changes nothing, "" where it does."""
    match body:
        case Fence(generation=generation) if generation <= state.generation:
            return f"generation {state.generation.number} stands already"
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
