"""What a run holds, checkpoint by checkpoint: what ``ckptfs ls`` shows. Read-only, no torch.

candidates    from the folded log, the attempts and the directories beside it      cheap
details       sizes, ranks and times of those that are wanted: one small read each, side by side

committed     as the log says; also ``not projected``, where stock torch does not see it yet
in doubt      a domain that decides is out of reach from here
on its way    an attempt without a seal; ``abandoned`` where its writer can not finish it any more
foreign       beside the log of a run: another program, such as stock torch, saved it, and it is whole
damaged       its manifest is missing or another one; a foreign one is not whole. Files of ours are not looked at: that is ``verify``
deleted       by the log, with bytes still there; ``aborted``, ``replaced``, ``overwritten``: history
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from ckptfs.commit.catalog.catalog import Look, Origin, gap_of
from ckptfs.commit.catalog.unlogged import Beside, look_beside, names_beside, oldest_first
from ckptfs.commit.log.entries import Kind, Seal
from ckptfs.commit.operations import drive
from ckptfs.commit.ownership.recovery import AttemptRecord, read_record
from ckptfs.commit.paths import ATTEMPTS, CONTROL, LOG
from ckptfs.commit.state import (
    Live,
    Standing,
    catalog,
    commits,
    hidden,
    living,
    seal_of,
    standing,
    used_overwrites,
)
from ckptfs.errors import AccessError, NotFoundError, UnsupportedError
from ckptfs.storage.base import Entry
from ckptfs.tools.debris import DAY_S, Fate, attempt_fate, is_sending
from ckptfs.tools.details import as_foreign, as_overwritten, from_beside, from_seal
from ckptfs.tools.holding import holding_of
from ckptfs.tools.lines import (
    HISTORY,
    Checkpoint,
    Run,
    Sort,
    State,
    age_s,
    began_at,
    in_order,
    side_by_side,
)
from ckptfs.tools.measured import Tree, attempt_tree

__all__ = ["gap", "list_run"]

_NEWER = "the log has entries of a newer version, which are not understood here: upgrade ckptfs"


def list_run(
    look: Look,
    *,
    everything: bool = False,
    kinds: Collection[Kind] = (),
    names: Collection[str] = (),
    sort: Sort = Sort.COMMIT,
    limit: int | None = None,
) -> Run:
    """The checkpoints of a run, in commit order those that the log knows. Local, read-only.

    Args:
        look: What this process sees of the run.
        everything: History too, and whether stock readers see each.
        kinds: Only these; empty: all.
        names: Only these; empty: all.
        sort: The order.
        limit: So many, the last of the order; None: all.

    Raises:
        NotFoundError: Nothing is there.
        ManifestError: The log is damaged.
    """
    found = _candidates(look, names)
    shown = [one for one in found if everything or one.line.state not in HISTORY]
    withheld = len(found) - len(shown)
    if limit is not None and sort is Sort.COMMIT and not kinds:
        shown = shown[max(0, len(shown) - limit) :]  # what is not shown is not read
    loose: list[Checkpoint] = []
    if limit is None or len(shown) < limit or sort is not Sort.COMMIT or kinds:
        loose = _beside(look, names)
    lives = catalog(look.views)
    newest = lives[-1].seal if lives else None

    def detailed(one: _Candidate) -> Checkpoint:
        line = one.detailed(look, everything=everything)
        return (
            line if one.seal is None or one.seal != newest else as_overwritten(line, newest, look)
        )

    lines = [*loose, *side_by_side(detailed, shown)]
    lines = in_order([line for line in lines if not kinds or line.kind in kinds], sort)
    if limit is not None:
        lines = lines[max(0, len(lines) - limit) :]
    return Run(look.root, holding_of(look.views), tuple(lines), withheld, _notes(look))


# -- candidates -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Candidate:
    """What is known of a save without a read of its own. seal: None of an attempt."""

    line: Checkpoint
    seal: Seal | None = None

    def detailed(self, look: Look, *, everything: bool) -> Checkpoint:
        """With what its manifest tells."""
        if self.seal is None:
            return self.line
        return from_seal(self.line, self.seal, look, everything=everything)


def _candidates(look: Look, names: Collection[str]) -> list[_Candidate]:
    attempts = _attempts(look)
    found = [*_logged(look, attempts), *_unsealed(look, attempts)]
    return [one for one in found if not names or one.line.name in names]


def _beside(look: Look, names: Collection[str]) -> list[Checkpoint]:
    """What lies beside the log, in an order of its own: before all that the log has one for."""
    entries = [Entry(name, is_dir=True) for name in names] or look.storage.list("")

    def looked_at(name: str) -> Beside | None:
        return drive(look_beside(name, look.views, look.root), look.storage)

    found = side_by_side(looked_at, names_beside(entries, look.views))
    lines = [
        from_beside(Checkpoint(look.root / one.name, one.name, State.COMMITTED, None), one)
        for one in oldest_first(one for one in found if one is not None)
    ]
    # Where no log is, a checkpoint of another program is what there is.
    return side_by_side(lambda line: as_foreign(line, look), lines) if look.views else lines


def _logged(look: Look, attempts: Sequence[AttemptRecord]) -> list[_Candidate]:
    """What the log knows: history and committed saves in commit order, then what is in doubt."""
    lives = commits(look.views)
    live = {one.seal.save_id for one in catalog(look.views)}
    order = {one.seal.save_id: at for at, one in enumerate(lives)}
    names = {one.save_id: one.name for one in attempts}
    found: list[tuple[int, _Candidate]] = []
    for save_id in dict.fromkeys([*living(look.views), *names]):
        seal = seal_of(save_id, look.views)
        if standing(save_id, look.views) is Standing.ABORTED:
            name = names.get(save_id, "") if seal is None else seal.name
            if name:  # else nothing is left of it; the log tells
                line = Checkpoint(look.root / name, name, State.ABORTED, Origin.LOG)
                line = replace(line, save_id=save_id, created_at=began_at(save_id))
                found.append((-1, _Candidate(line)))
        elif seal is not None:
            state, note = _state_of(seal, look, lives, live)
            if state is not None:
                line = _line(look, seal, state, note)
                found.append((order.get(save_id, len(order)), _Candidate(line, seal)))
    return [one for _, one in sorted(found, key=lambda pair: pair[0])]


def _state_of(
    seal: Seal, look: Look, lives: Sequence[Live], live: Collection[str]
) -> tuple[State | None, str]:
    """Of a sealed save, and why; None: nothing of it is left."""
    views = look.views
    match standing(seal.save_id, views):
        case Standing.COMMITTED if seal.save_id in live:
            return State.COMMITTED, ""
        case Standing.COMMITTED:
            is_hidden = hidden(seal, views, used_overwrites(views, lives))
            return (State.OVERWRITTEN if is_hidden else State.REPLACED), ""
        case Standing.DELETED:
            saves = [view.save(seal.save_id) for view in views.values()]
            if all(save.gone for save in saves if save.seal is not None):
                return None, ""
            return State.DELETED, "its bytes are still there"
        case Standing.IN_DOUBT:
            lost = sorted(set(seal.domains) - set(views))
            return State.IN_DOUBT, f"out of reach: domain {', '.join(lost)}"
        case _:
            return State.IN_DOUBT, "not sealed in all of its domains"


def _line(look: Look, seal: Seal, state: State, note: str) -> Checkpoint:
    return Checkpoint(
        look.root / seal.name,
        seal.name,
        state,
        Origin.LOG,
        seal.step,
        seal.artifact,
        seal.save_id,
        began_at(seal.save_id),
        parts=tuple(ref.name for ref in seal.parts),
        pinned=any(view.save(seal.save_id).pinned for view in look.views.values()),
        failure=seal.failure,
        generation=seal.base.number,
        domains=seal.everywhere,
        note=note,
    )


def _attempts(look: Look) -> list[AttemptRecord]:
    try:
        entries = look.storage.list(ATTEMPTS)
    except NotFoundError:
        return []
    ids = [e.name for e in entries if e.is_dir and not e.is_link]
    caps = look.storage.capabilities
    return side_by_side(lambda one: drive(read_record(one, caps), look.storage), ids)


def _unsealed(look: Look, attempts: Iterable[AttemptRecord]) -> list[_Candidate]:
    """Attempts that no log has settled."""
    found = []
    for record in attempts:
        saves = [view.save(record.save_id) for view in look.views.values()]
        if any(s.seal is not None or s.aborted or s.decided is not None for s in saves):
            continue
        created_at = began_at(record.save_id)
        state, note = State.SAVING, ""
        if any(save.part is not None for save in saves):
            note = "a part, whole; the others are not yet"
        elif look.views:
            state, note = _attempt_state(look, record, created_at)
        name = record.name or record.save_id
        base = None if record.base is None else record.base.number
        line = Checkpoint(look.root / name, name, state, None, save_id=record.save_id)
        found.append(_Candidate(replace(line, created_at=created_at, generation=base, note=note)))
    return found


def _attempt_state(look: Look, record: AttemptRecord, created_at: str | None) -> tuple[State, str]:
    """As ``gc`` sees it. What began less than a day ago was written to less than a day ago: nothing of it
    is measured, which on an object store is a request for each file.
    """
    (state,) = look.views.values()
    age, tree, sending = age_s(created_at), Tree(), False
    if (age is None or age >= DAY_S) and not (record.base and record.base < state.generation):
        tree = attempt_tree(look.storage, record)
        if tree.newest_s is not None:
            age = max(0.0, time.time() - tree.newest_s)
        with contextlib.suppress(AccessError, UnsupportedError):
            sending = is_sending(record.save_id, look.storage.unfinished_uploads())
    fate = attempt_fate(
        record,
        state,
        has_files=bool(tree.files),
        age_s=age,
        is_sending=sending,
        older_than_s=DAY_S,
    )
    match fate.fate:
        case Fate.GOES:
            why = "nothing was written to it for a day" if fate.may_live else fate.why
            return State.ABANDONED, why
        case Fate.STAYS:
            return State.ABANDONED, fate.why
        case Fate.YOUNG:
            return State.SAVING, "nothing was written yet" if record.base is None else ""


def _notes(look: Look) -> tuple[str, ...]:
    if look.views:
        told = [gap(look)]
        told += [_NEWER for view in look.views.values() if view.foreign]
        return tuple(note for note in told if note)
    try:
        entries = look.storage.list(LOG)
    except NotFoundError:
        return ()
    if not entries:
        return ()
    return (f"{CONTROL}/domain is missing: the log is not read, each checkpoint speaks for itself",)


def gap(look: Look) -> str:
    """Return what is wrong where entries of the log in ``look`` are missing and later ones are there; "" where
    none is.
    """
    found = gap_of(look)
    if found is None:
        return ""
    return f"entry {found.missing} of the log is missing, and what comes after it is not read: ckptfs log"
