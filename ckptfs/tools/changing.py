"""Delete, pin and unpin one checkpoint by its URI, from one process without an open run. No torch.

    remove(uri)         does the checks that need no claim, then commit/delete/delete_checkpoint.py
    set_pin(uri, ...)   appends one entry; the run need not be free

A pin is one more entry in the order of the log, and it does not depend on who owns the run. An owner
that deletes a checkpoint reads all entries before its own delete, so it sees each pin that came first.
Any process may therefore pin while a job trains. A pin that comes after the delete is refused.

Nothing is appended to a log that has a gap: the entry would take the number of the missing one.
Nothing is deleted if a newer version wrote to the log. If some domains of a checkpoint cannot be
reached from here, it is deleted only with ``partial=True``: the logs of those domains may hold a pin
that is unknown here.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ckptfs.commit.catalog.catalog import (
    Look,
    Origin,
    find,
    looking_at,
    refuse_newer,
    refuse_partial_log,
)
from ckptfs.commit.decisions import BY_HAND, Cause, reason_to_keep, unreached
from ckptfs.commit.delete.delete_checkpoint import delete_checkpoint
from ckptfs.commit.delete.deletion_steps import pin
from ckptfs.commit.log.append import RefusedAppend
from ckptfs.commit.log.entries import Stamp
from ckptfs.commit.log.fold import SaveState
from ckptfs.commit.operations import drive
from ckptfs.commit.ownership.claim import Takeover
from ckptfs.commit.paths import LOG
from ckptfs.commit.save.spec import now_text
from ckptfs.commit.session import TOUCH_AFTER_S, Place, start_session
from ckptfs.commit.state import catalog
from ckptfs.control.control import SoloControl
from ckptfs.errors import CkptfsError, NotFoundError, StateError, StorageError, UriError
from ckptfs.storage.base import Shape, Storage
from ckptfs.storage.registry import open_storage
from ckptfs.text import counted
from ckptfs.tools.lines import Checkpoint, State
from ckptfs.tools.listing import OneOf, Wanted, list_run, look_at
from ckptfs.uri import Uri, options_of

__all__ = ["Pinned", "Removed", "committed_in", "doomed_at", "remove", "set_pin"]


@dataclass(frozen=True, slots=True)
class Removed:
    """What was deleted.

    Attributes:
        uri: The checkpoint.
        elsewhere: Domains that hold bytes of it and were not reached. Those bytes stay until a job on
            all nodes takes the run, or the checkpoint is deleted from there too.
    """

    uri: Uri
    elsewhere: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Pinned:
    """The outcome of a pin or an unpin.

    Attributes:
        uri: The checkpoint.
        save_id: The id of the save.
        pinned: Whether it is pinned now.
        changed: False if it was so already.
        elsewhere: Domains that hold the save and were not reached. An unpin has no effect in these,
            because it is not in their logs.
    """

    uri: Uri
    save_id: str
    pinned: bool
    changed: bool
    elsewhere: tuple[str, ...] = ()


def committed_in(run_uri: Any, storage_options: Mapping[str, Any] | None = None) -> tuple[str, ...]:
    """List the URIs of the committed checkpoints of a run, oldest commit first. Local, read-only.

    Args:
        run_uri: The run.
        storage_options: Options for fsspec's filesystem of that protocol; None: only those that the
            URI carries.

    Raises:
        NotFoundError: There is no run, or its log has no committed checkpoint.
        ManifestError: The log is damaged or newer.
    """
    root = Uri.parse(run_uri)
    with looking_at(run_uri, storage_options) as look:
        names = [one.seal.name for one in catalog(look.views)]
    if not names:
        raise NotFoundError(
            "no run with checkpoints is there", uri=root, hint="run ckptfs ls to see what exists"
        )
    return tuple((root / name).full for name in names)


def doomed_at(
    uri: Any, storage_options: Mapping[str, Any] | None = None, *, partial: bool = False
) -> tuple[Checkpoint, ...]:
    """Find what ``remove`` would delete: saves of that name that have bytes. Local, read-only.

    Args:
        uri: The checkpoint.
        storage_options: Options for fsspec's filesystem of that protocol; None: only those that the
            URI carries.
        partial: Accept that other nodes hold some of it.

    Returns:
        The saves, as lines of a listing.

    Raises:
        NotFoundError: The log of its run has no such checkpoint; the message says what to do.
        StateError: It is pinned, it is a part, or not all of its domains are reached (unless ``partial``).
        ManifestError: The log is damaged or newer.
    """
    target = Uri.parse(uri)
    with looking_at(target.parent, storage_options) as look:
        ids = {
            save.save_id
            for save in _saves_to_delete(look, target, storage_options, partial=partial)
        }
    place = look_at(target, Wanted(everything=True), storage_options)
    lines = place.lines if isinstance(place, OneOf) else ()
    return tuple(line for line in lines if line.save_id in ids)


def _saves_to_delete(
    look: Look, target: Uri, options: Mapping[str, Any] | None, *, partial: bool
) -> list[SaveState]:
    drive(refuse_partial_log(look), look.storage)
    refuse_newer(look)
    saves = [save for save in _saves_of(look, target.name) if not save.gone]
    if not saves:
        raise _not_ours(look, target, options, "rm")
    found = (reason_to_keep(save.save_id, look.views, BY_HAND) for save in saves)
    obstacles = [obstacle for obstacle in found if obstacle is not None]
    if any(obstacle.cause is Cause.PINNED for obstacle in obstacles):
        raise StateError(f"{target.name} is pinned", uri=target, hint="ckptfs unpin it first")
    lost = sorted({domain for obstacle in obstacles for domain in obstacle.names})
    if lost and not partial:
        raise StateError(
            f"not all of {target.name} is reached from here: {_hosts_of(look, saves, lost)}",
            uri=target,
            hint="its pins on the other nodes are unknown here. The retention of a job on all "
            "nodes deletes all of it; --partial deletes what is here",
        )
    return saves


def _saves_of(look: Look, name: str) -> list[SaveState]:
    """Return the sealed saves of a name in all views."""
    return [save for view in look.views.values() for save in view.saves.of_name(name)]


def _elsewhere(look: Look, saves: Sequence[SaveState]) -> tuple[str, ...]:
    return unreached((save.seal for save in saves if save.seal is not None), look.views)


def _hosts_of(look: Look, saves: Sequence[SaveState], domains: Sequence[str]) -> str:
    """Return the domains as text, each with its hosts if a seal or a manifest here names them.

    Read-only.
    """
    hosts: dict[str, tuple[str, ...]] = {}
    for seal in [save.seal for save in saves if save.seal is not None]:
        for ref in seal.parts:
            hosts |= {d: (host,) for d, host in zip(ref.domains, ref.hosts, strict=False)}
        with contextlib.suppress(CkptfsError):
            found = drive(find(seal, look.storage.capabilities.shape, look.root), look.storage)
            if found.manifest is not None:
                hosts |= {record.id: record.hosts for record in found.manifest.domains}
    texts = [
        f"domain {one} (host {', '.join(hosts[one])})" if hosts.get(one) else f"domain {one}"
        for one in domains
    ]
    return ", ".join(texts)


def remove(
    uri: Any, storage_options: Mapping[str, Any] | None = None, *, partial: bool = False
) -> Removed:
    """Delete the checkpoint. Local.

    Its bytes are gone when this returns; files that others put into its directory stay. After a crash the
    checkpoint is either deleted or not. The next call, or the next owner of the run, removes the rest of
    its bytes.

    Args:
        uri: The checkpoint.
        storage_options: Options for fsspec's filesystem of that protocol; None: only those that the
            URI carries.
        partial: Accept that other nodes hold some of it.

    Returns:
        What was deleted.

    Raises:
        NotFoundError: The log of its run has no such checkpoint; the message says what to do.
        StateError: It is pinned, it is a part, others use its files, or not all of its domains are reached
            (unless ``partial``).
        ManifestError: The log is damaged or newer.
        RunBusyError: A living owner holds the run.
        StorageError: It is deleted, but some of its bytes stay.
    """
    target = Uri.parse(uri)
    with looking_at(target.parent, storage_options) as look:
        elsewhere = _elsewhere(
            look, _saves_to_delete(look, target, storage_options, partial=partial)
        )
    with contextlib.closing(_open(target, uri, storage_options)) as storage:
        if not delete_checkpoint(storage, target.name, Takeover.DEAD):
            raise _gone(target)
        _touch_log(storage)
    return Removed(target, elsewhere)


def set_pin(uri: Any, *, pinned: bool, storage_options: Mapping[str, Any] | None = None) -> Pinned:
    """Pin or unpin the live checkpoint of that name; durable on return. Local.

    Args:
        uri: The checkpoint.
        pinned: True pins it, False removes the pin.
        storage_options: Options for fsspec's filesystem of that protocol; None: only those that the
            URI carries.

    Returns:
        The outcome.

    Raises:
        NotFoundError: The log of its run has no live checkpoint of that name.
        StateError: It is a part.
        ManifestError: The log is damaged.
        CommitInDoubtError: No answer came, so the pin may be in the log. The same call again settles it.
    """
    target = Uri.parse(uri)
    with looking_at(target.parent, storage_options) as look:
        # An append would take the number of an entry that is missing.
        drive(refuse_partial_log(look), look.storage)
        live = [one.seal for one in catalog(look.views) if one.seal.name == target.name]
        if not live:
            # Before anything is written, a probe included.
            raise _not_ours(look, target, storage_options, "pin" if pinned else "unpin")
        seal, elsewhere = live[-1], unreached(live[-1:], look.views)
    with contextlib.closing(_open(target, uri, storage_options)) as storage:
        session = start_session(SoloControl(), storage, Place(), write=True)
        stamp = Stamp(now_text(), session.control.world.hostname, os.getpid())
        means = replace(session.means(), stamp=stamp)
        done = drive(pin(seal.save_id, means, None, None, pinned=pinned), session.storage)
        _touch_log(storage)
    if isinstance(done, RefusedAppend) and done.state.save(seal.save_id).deleted:
        raise _gone(target)
    changed = not isinstance(done, RefusedAppend)
    return Pinned(target, seal.save_id, pinned, changed=changed, elsewhere=elsewhere)


def _open(target: Uri, uri: Any, storage_options: Mapping[str, Any] | None) -> Storage:
    return open_storage(target.parent, {**options_of(uri), **(storage_options or {})})


def _touch_log(storage: Storage) -> None:
    """Touch the log now: this process may end before the timer of ``RunSession.touch_log_later``."""
    if storage.capabilities.shape is Shape.FILESYSTEM:
        time.sleep(TOUCH_AFTER_S)
        with contextlib.suppress(StorageError):
            storage.touch(LOG)


def _not_ours(
    look: Look, target: Uri, options: Mapping[str, Any] | None, command: str
) -> CkptfsError:
    """Return the error that says why ``command`` does nothing to this name.

    Only if neither the log nor an enclosing checkpoint knows the name does the error allow the user to
    remove it by hand.
    """
    inside = _inside(target, options) or _run_instead(target, options, command)
    if inside is not None:
        return inside
    lines = list_run(look, everything=True, names=[target.name]).checkpoints
    if any(line.state in _BEGUN for line in lines):
        return NotFoundError(
            f"{target.name} is not committed: {lines[0].state}",
            uri=target,
            hint=f"if its writer died, run ckptfs gc {_shown(target.parent)} to see what is left "
            "of it",
        )
    if _saves_of(look, target.name) or any(line.origin is Origin.LOG for line in lines):
        return _gone(target)
    return NotFoundError(
        f"no checkpoint of that name in the log of {target.parent}",
        uri=target,
        hint="see ckptfs ls of the run; what was copied there without a log, or saved by stock "
        f"torch, is yours to remove by hand: {_shown(target)}",
    )


_BEGUN = frozenset({State.SAVING, State.ABANDONED})


def _inside(target: Uri, options: Mapping[str, Any] | None) -> StateError | None:
    """Return the error for a target inside a checkpoint, such as a part; None for others."""
    for enclosing in (target.parent, target.parent.parent):
        if enclosing.parent == enclosing or not enclosing.name:
            return None
        try:
            with looking_at(enclosing.parent, options) as look:
                saves = [save for save in _saves_of(look, enclosing.name) if not save.gone]
        except (StorageError, UriError):
            return None  # the directory above a run may be forbidden
        if saves:
            parts = {ref.name for save in saves if save.seal is not None for ref in save.seal.parts}
            what = "a part of" if target.name in parts else "something in"
            return StateError(
                f"{target.name} is {what} {enclosing.name}, which is kept or goes as a whole",
                uri=target,
                hint=f"its URI is {_shown(enclosing)}",
            )
    return None


def _run_instead(target: Uri, options: Mapping[str, Any] | None, command: str) -> StateError | None:
    """Return the error for a target that is a run: checkpoints are changed one by one, by the log.

    None if no run is there.
    """
    with looking_at(target, options) as look:
        if not look.views:
            return None
        names = [one.seal.name for one in catalog(look.views)]
    shown = _shown(target)
    count = counted(len(names), "checkpoint") if names else "no checkpoints"
    if not names:
        hint = f"run ckptfs gc {shown} to see what dead jobs left in it"
    elif command == "rm":
        hint = f"ckptfs rm {shown}/{names[0]} removes the oldest, ckptfs rm --all {shown} all"
    else:
        hint = f"ckptfs {command} {shown}/{names[-1]} takes one of them"
    return StateError(f"a run with {count}, not a checkpoint", uri=target, hint=hint)


def _gone(target: Uri) -> NotFoundError:
    return NotFoundError(
        f"{target.name} is deleted, or was never committed, by the log of {target.parent}",
        uri=target,
        hint=f"run ckptfs gc {_shown(target.parent)} to see whether anything of it is left",
    )


def _shown(uri: Uri) -> str:
    return uri.local_path if uri.is_local else str(uri)
