"""Removes what dead jobs left in a run: ``ckptfs gc``. No torch.

    look_for_debris(uri)    read-only: what is there, and what would go
    collect(uri)            removes it, as the next owner of the run would, and then what that leaves
    runs_at(uri)            the run that lies there, or the runs below

``collect`` takes the run for the moment, as a new job does: it appends a fence, and recovery aborts
what is unfinished, completes deletes and empties the trash. Then goes what recovery does not know:
late data, shared data that nobody lists, temporary files, uploads. At last the run is released.

Where no log is, nothing is claimed: beside single files, such as Lightning's, what a killed writer left under
a name of its own goes, once that process of this machine is gone, or by its age.

A fence ends every save that is on its way, also a plain one without a run, and a ``cp`` into it. So
nothing is fenced, and nothing removed,

    - where nothing is to go;
    - while the owner lives (its pid on this node, its lease elsewhere; that the job is the same is no
      reason to take it);
    - while an attempt that the standing owner's generation carries is younger than ``older_than_s``:
      its last file was written a moment ago. What the log calls dead goes at any age;
    - after ``prepare_run(mode="overwrite")``, until something is committed: a fence would bring the
      older checkpoints back;
    - while this machine's clock and that of the store are more than five minutes apart, unless
      ``older_than_s`` is 0: the ages would be wrong. A file of ours in ``.ckptfs/tmp`` tells;
    - where the log has a gap, has lost its domain, or was written by a newer version.

A plain save that begins between that look and the fence gets FencedError: it fails, nothing is lost.
After a crash at any point no committed checkpoint has lost a byte, and the next call goes on.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckptfs.commit.catalog.catalog import Look, looking_at, refuse_gap, refuse_no_run
from ckptfs.commit.decisions import fence_brings_back
from ckptfs.commit.delete.deletion_steps import discard_late
from ckptfs.commit.log.append import catch_up
from ckptfs.commit.operations import drive
from ckptfs.commit.ownership.claim import ORPHAN_S, Takeover, claim
from ckptfs.commit.ownership.run import Caller, Run
from ckptfs.commit.paths import CONTROL, MANIFEST, METADATA, TMP, staging_key
from ckptfs.commit.save.spec import fresh_ids
from ckptfs.commit.session import Place, open_seat
from ckptfs.control.control import SoloControl
from ckptfs.errors import (
    AccessError,
    NotFoundError,
    RunBusyError,
    StateError,
    StorageError,
    SymlinkError,
    UnsupportedError,
)
from ckptfs.storage.base import Shape
from ckptfs.tools.debris import Debris, Fate, Found, Survey
from ckptfs.tools.holding import Hold, Holding, holding_of
from ckptfs.tools.looking import OneOf, Runs, look_at
from ckptfs.tools.surveying import survey_debris
from ckptfs.tools.whole_log import refuse_lost_domain, refuse_newer
from ckptfs.uri import Uri, options_of

__all__ = ["OLDER_THAN_S", "Collected", "collect", "look_for_debris", "runs_at"]

OLDER_THAN_S = 24 * 3600.0
_CLOCKS_APART_S = 300.0


@dataclass(frozen=True, slots=True)
class Collected:
    """What became of one run.

    Attributes:
        uri: The run.
        holding: Who holds it.
        found: All that was there before.
        removed: What is gone of it, empty of a dry run.
        left: What was to go and is still there.
        notes: What could not be read or removed.
    """

    uri: Uri
    holding: Holding
    found: tuple[Found, ...] = ()
    removed: tuple[Found, ...] = ()
    left: tuple[Found, ...] = ()
    notes: tuple[str, ...] = field(default=())

    @property
    def going(self) -> tuple[Found, ...]:
        """What ``collect`` removes."""
        return tuple(one for one in self.found if one.fate is Fate.GOES)


def look_for_debris(
    run_uri: Any,
    older_than_s: float = OLDER_THAN_S,
    storage_options: Mapping[str, Any] | None = None,
) -> Collected:
    """Find what is left in a run. Local, read-only.

    Args:
        run_uri: The run.
        older_than_s: How many seconds ago something that may be in use must have been written last, to be
            removed.
        storage_options: What fsspec's filesystem of that protocol takes; None: nothing beyond what the URI
            has.

    Returns:
        What was found; nothing is removed.

    Raises:
        NotFoundError: Nothing is there.
        StateError: It is a checkpoint.
        ManifestError: Its log is damaged; nothing can be known by that.
    """
    with _looking(run_uri, storage_options) as look:
        survey = survey_debris(look, older_than_s)
        holding = holding_of(look.views)
        return Collected(look.root, holding, survey.found, notes=_notes(look, survey, holding))


def collect(
    run_uri: Any,
    older_than_s: float = OLDER_THAN_S,
    storage_options: Mapping[str, Any] | None = None,
) -> Collected:
    """Remove what is left in a run. Local; writes only where something is to go.

    After a crash some of it is removed, and the same call removes the rest.

    Args:
        run_uri: The run.
        older_than_s: How many seconds ago something that may be in use must have been written last.
        storage_options: What fsspec's filesystem of that protocol takes; None: nothing beyond what the URI
            has.

    Returns:
        What was found, removed and left.

    Raises:
        NotFoundError: Nothing is there.
        StateError: It is a checkpoint, or the clocks are too far apart.
        ManifestError: The log is damaged.
        RunBusyError: A living owner holds the run, or a save may be under way; nothing was changed.
        SymlinkError: A link is in the control directory.
        FencedError: A newer owner took the run in between, and cleans up itself.
    """
    before = look_for_debris(run_uri, older_than_s, storage_options)
    for one in before.found:
        if one.debris is Debris.LINK:
            raise SymlinkError(
                f"{one.name} is a symbolic link, nothing was removed",
                uri=one.uri,
                hint="remove the link; its target does not belong to the run",
            )
    if not before.going:
        return before
    options = {**options_of(run_uri), **(storage_options or {})}
    told: list[str] = []
    with _looking(run_uri, storage_options) as look:
        has_log = bool(look.views)
        if has_log:
            _refuse(look, before)
        if older_than_s > 0:
            _refuse_clock(look)
        if not has_log:
            look.storage.remove_many([key for one in before.going for key in one.keys])
    if has_log:
        told = _claim_and_tidy(before.uri, options, older_than_s)
    after = look_for_debris(run_uri, older_than_s, storage_options)
    still = {(one.debris, one.uri) for one in after.going}
    removed = tuple(one for one in before.going if (one.debris, one.uri) not in still)
    notes = tuple(dict.fromkeys([*before.notes, *told]))
    return Collected(before.uri, before.holding, before.found, removed, after.going, notes)


def runs_at(uri: Any, storage_options: Mapping[str, Any] | None = None) -> tuple[Uri, ...]:
    """List the run at a URI, or those below it. Local, read-only.

    Args:
        uri: A run, or a place above runs.
        storage_options: What fsspec's filesystem of that protocol takes; None: nothing beyond what the URI
            has.

    Raises:
        NotFoundError: Nothing is there.
        StateError: It is a checkpoint.
    """
    found = look_at(uri, storage_options=storage_options)
    if isinstance(found, OneOf):
        raise _is_checkpoint(found.uri)
    return tuple(one.uri for one in found.runs) if isinstance(found, Runs) else (found.uri,)


# -- looking ----------------------------------------------------------------------------


@contextlib.contextmanager
def _looking(run_uri: Any, options: Mapping[str, Any] | None) -> Iterator[Look]:
    """A look at a run whose log can be told from its first entry to its last."""
    with looking_at(run_uri, options) as look:
        if look.views:
            refuse_gap(look)
        else:
            _refuse_no_run(look)
        yield look


def _refuse_no_run(look: Look) -> None:
    try:
        names = {entry.name for entry in look.storage.list("")}
        absent = not names and look.storage.capabilities.shape is Shape.OBJECT
    except NotFoundError:
        names, absent = set(), True
    if names & {MANIFEST, METADATA}:
        raise _is_checkpoint(look.root)
    if absent:
        drive(refuse_no_run(look.root, look.storage.capabilities.shape), look.storage)
        raise NotFoundError(
            "nothing exists there",
            uri=look.root,
            hint="run ckptfs ls on the parent to see what exists",
        )
    refuse_lost_domain(look)


def _is_checkpoint(uri: Uri) -> StateError:
    return StateError("a checkpoint, not a run", uri=uri, hint=f"the run is {uri.parent}")


def _notes(look: Look, survey: Survey, holding: Holding) -> tuple[str, ...]:
    notes = survey.notes
    if not look.views:
        notes += (f"no run log here ({CONTROL}): only temporary files can be known to be dead",)
    if any(state.foreign for state in look.views.values()):
        notes += ("a newer version of ckptfs wrote to this run: it can be looked at, not cleaned",)
    if holding.hold is Hold.HELD:
        notes += (f"the run is {holding.told}; nothing is removed while that one lives",)
    return notes


# -- removing ---------------------------------------------------------------------------


def _refuse(look: Look, before: Collected) -> None:
    """Whatever speaks against a fence now."""
    (state,) = look.views.values()
    refuse_newer(look)
    begun = [one for one in before.found if one.may_live and one.fate is Fate.YOUNG]
    if begun:
        names = ", ".join(dict.fromkeys(one.name for one in begun))
        raise RunBusyError(
            f"a save may be under way: {names}",
            uri=look.root,
            hint="wait for it, or pass --older-than 0s if no job saves or copies there now",
        )
    if fence_brings_back(state):
        raise RunBusyError(
            'prepared with mode="overwrite", and nothing was committed since',
            uri=look.root,
            hint="let the job commit first: a new owner would bring the older checkpoints back",
        )


def _refuse_clock(look: Look) -> None:
    """An hour is young by a clock that is right, and a day by one that runs ahead."""
    key, storage = next(fresh_ids()), look.storage
    if look.views:
        key = staging_key(key)
        storage.make_dir(TMP)
    before_s = time.time()
    try:
        storage.replace(key, b"what time is it")
        written_s = storage.stat(key).modified_s
    finally:
        storage.remove(key)
    if written_s is None:
        return  # the store tells no times: then no age came from its clock
    apart_s = max(before_s - written_s, written_s - time.time())
    if apart_s > _CLOCKS_APART_S:
        raise StateError(
            f"the clock of this machine and that of the store differ by {apart_s:.0f} s, so "
            "ages are unknown",
            uri=look.root,
            hint="set the clock, or pass --older-than 0s if no job saves or copies there now",
        )


def _claim_and_tidy(uri: Uri, options: Mapping[str, Any], older_than_s: float) -> list[str]:
    with (
        SoloControl() as control,
        open_seat(uri, control, Place(options), write=True) as seat,
        claim(seat, takeover=Takeover.DEAD, caller=Caller("gc", for_call=True)) as run,
    ):
        return _tidy(run, older_than_s)


def _tidy(run: Run, older_than_s: float) -> list[str]:
    """Remove what recovery left. What is refused is told, and the rest goes on."""
    seat, told = run.seat, list[str]()
    state = drive(catch_up(seat.fold_from), seat.storage)
    look = Look(run.uri, seat.storage, {seat.placement.mine.id: state})
    found = survey_debris(look, older_than_s).found
    for one in found:
        if one.fate is not Fate.GOES:
            continue
        try:
            _remove(one, run)
        except (AccessError, UnsupportedError) as error:
            told.append(f"{one.name} stays: {error.message}")
    told += _sweep(run, found, older_than_s)
    return told


def _remove(one: Found, run: Run) -> None:
    storage = run.seat.storage
    match one.debris:
        case Debris.LATE:
            for key in one.keys:
                drive(discard_late(key, run.generation, run.seat.caps), storage)
        case Debris.SHARED | Debris.TEMPORARY:
            storage.remove_many(one.keys)


def _sweep(run: Run, found: Sequence[Found], older_than_s: float) -> list[str]:
    keys = {one.keys[0] for one in found if one.debris is Debris.UPLOAD and one.fate is Fate.GOES}
    if not keys:
        return []
    try:
        run.seat.storage.sweep_uploads(min(older_than_s, ORPHAN_S), keys)
    except (AccessError, UnsupportedError) as error:
        return [f"unfinished uploads stay: {error.message}"]
    except StorageError as error:
        return [f"unfinished uploads stay for now: {error.message}"]
    return []
