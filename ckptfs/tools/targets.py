"""What a URI given to ``verify`` names: a run, a checkpoint of one, a part, or a copy without a log.

    with aimed_at(uri, options) as aim:
        aim.targets     every checkpoint to look at, with what the log says of it
        aim.findings    what is wrong with the log itself

Read-only, no torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ckptfs.commit.catalog.catalog import list_live, live_of, part_of
from ckptfs.commit.catalog.unlogged import look_beside, names_beside
from ckptfs.commit.log.advisory_log import with_log
from ckptfs.commit.log.entries import PartRef, Seal
from ckptfs.commit.log.fold import LogState
from ckptfs.commit.manifest import decode_manifest
from ckptfs.commit.operations import drive, read_limited
from ckptfs.commit.paths import LOG, MANIFEST, METADATA
from ckptfs.commit.state import Standing, part_name, piece, standing
from ckptfs.errors import (
    AccessError,
    ManifestError,
    NotFoundError,
    StorageError,
    UriError,
)
from ckptfs.manager.survey import look
from ckptfs.storage.base import Storage
from ckptfs.storage.registry import open_storage
from ckptfs.tools.findings import Damage, Finding
from ckptfs.tools.looked import Target
from ckptfs.tools.runlog import Condition, lines_of
from ckptfs.uri import Uri, options_of

__all__ = ["Aim", "Doubt", "aimed_at", "is_live"]


@dataclass(frozen=True, slots=True)
class Doubt:
    """A save of which it is not known from here whether it was committed.

    Attributes:
        uri: Where it would be.
        name: Its name in the run.
        save_id: The id of the save.
        why: The reason.
    """

    uri: Uri
    name: str
    save_id: str
    why: str


@dataclass(frozen=True, slots=True)
class Aim:
    """What is to be verified at one URI.

    Attributes:
        storage: Of the run, open until the block is left.
        views: Its log, by domain.
        domain: The id of the domain that is seen from here, "" for none.
        targets: The checkpoints and parts.
        doubts: Saves that may be committed.
        findings: Damage of the run.
        notes: What else was noticed.
    """

    storage: Storage
    views: Mapping[str, LogState]
    domain: str
    targets: tuple[Target, ...] = ()
    doubts: tuple[Doubt, ...] = ()
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def is_nothing(self) -> bool:
        """Whether there is nothing to look at."""
        return not (self.targets or self.doubts or self.findings)


@contextlib.contextmanager
def aimed_at(uri: Any, storage_options: Mapping[str, Any] | None = None) -> Iterator[Aim]:
    """Yield what there is to verify. Local, read-only.

    Args:
        uri: A run, a checkpoint, or a part of one.
        storage_options: What fsspec's filesystem of that protocol takes; None: nothing beyond what the URI
            has.

    Raises:
        NotFoundError: There is nothing.
        IncompleteCheckpointError: Whether the checkpoint was committed is in doubt.
        StorageError: The storage failed.
    """
    target = Uri.parse(uri)
    options = {**options_of(uri), **(storage_options or {})}
    with contextlib.ExitStack() as opened:

        def at(root: Uri) -> Storage:
            plain = open_storage(root, options)
            opened.callback(plain.close)
            return with_log(plain, plain.capabilities, write=False)

        here = at(target)
        run = _whole_log(_sight(here))
        if run.domain or run.findings:
            yield _found(_of_run(here, run), target)
            return
        refused: AccessError | None = None
        try:
            one = _one(at, target)
        except AccessError as error:
            refused = error  # above a run nothing need be permitted
            one = run
        if one.is_nothing:
            one = _of_run(here, run)
        if one.is_nothing and refused is not None:
            raise refused
        yield _found(one, target)


def is_live(aim: Aim, seal: Seal) -> bool:
    """Whether the log of ``aim``, read again, still has the save ``seal``: what is deleted under us is not
    damaged.
    """
    views = _sight(aim.storage).views
    known = {live.save_id for live in list_live(views)}
    return seal.save_id in known or any(
        ref.save_id == seal.save_id for live in list_live(views) for ref in live.parts
    )


def _found(aim: Aim, target: Uri) -> Aim:
    if aim.is_nothing:
        raise NotFoundError(
            "there is nothing to verify: no committed checkpoint",
            uri=target,
            hint="give a run, a checkpoint, or a part of one; ckptfs ls lists them",
        )
    return aim


def _sight(storage: Storage) -> Aim:
    """The log, and what is wrong with it; no targets yet."""
    try:
        sight = drive(look(), storage)
    except ManifestError as error:
        return Aim(storage, {}, "", findings=(_of_log(storage, error.message),))
    state, domain = sight.state, sight.domain or ""
    views = {} if state is None or not domain else {domain: state}
    findings = () if sight.unread is None else (_of_log(storage, sight.unread),)
    notes: tuple[str, ...] = ()
    if state is not None and state.foreign:
        notes = ("the log has entries that this version does not know; they were passed over",)
    return Aim(storage, views, domain, findings=findings, notes=notes)


def _whole_log(run: Aim) -> Aim:
    """With what is wrong below a snapshot too: those who read on from there do not meet it, and whoever
    has none does.
    """
    if run.findings or not run.domain:
        return run
    bad = {Condition.DAMAGED: "is none", Condition.MISSING: "is missing"}
    findings = tuple(
        _of_log(run.storage, f"entry {line.number} {bad[line.condition]}: {line.why}")
        for line in lines_of(run.storage)
        if line.condition in bad
    )
    return replace(run, findings=findings)


def _of_log(storage: Storage, why: str) -> Finding:
    return Finding(
        Damage.LOG,
        storage.uri(LOG),
        why,
        "copy the entry back from another place; else copy what is whole to a new run",
        path=LOG,
    )


def _of_run(storage: Storage, run: Aim) -> Aim:
    targets: list[Target] = []
    for seal in list_live(run.views):
        targets += _with_parts(storage.uri(seal.name), seal)
    try:
        entries = storage.list("")
    except (NotFoundError, NotADirectoryError):
        entries = []
    for name in names_beside(entries, run.views):
        if drive(look_beside(name, run.views, storage.root), storage) is not None:
            targets += _copied(storage, name, storage.uri(name))
    return Aim(
        storage,
        run.views,
        run.domain,
        tuple(targets),
        tuple(_doubts(storage, run.views)),
        run.findings,
        run.notes,
    )


def _one(at: Callable[[Uri], Storage], target: Uri) -> Aim:
    """One checkpoint or part: of a log that knows it, else as it lies there."""
    parent = at(target.parent)
    run, name = _whole_log(_sight(parent)), target.name
    seal = live_of(name, run.views, target) if name else None
    if seal is None and not run.domain:
        # What lies above a copied checkpoint need not be permitted to be read, nor be a run.
        with contextlib.suppress(StorageError, ManifestError, UriError):
            part = _of_part(at(target.parent.parent), target)
            if not part.is_nothing:
                return part
    targets = _with_parts(target, seal) if seal is not None else _copied(parent, name, target)
    if not targets:
        return Aim(parent, run.views, run.domain)
    return Aim(parent, run.views, run.domain, tuple(targets), (), run.findings, run.notes)


def _of_part(storage: Storage, target: Uri) -> Aim:
    run, step = _whole_log(_sight(storage)), target.parent.name
    whole = live_of(step, run.views, target) if step else None
    if whole is None:
        return Aim(storage, run.views, run.domain)
    seal, _ = part_of(whole, target.name, target)
    only = Target(target, part_name(step, target.name), seal)
    return Aim(storage, run.views, run.domain, (only,), (), run.findings, run.notes)


def _with_parts(uri: Uri, seal: Seal) -> list[Target]:
    whole = Target(uri, seal.name, seal)
    return [whole, *(_part(uri, seal, ref) for ref in seal.parts)]


def _part(uri: Uri, whole: Seal, ref: PartRef) -> Target:
    return Target(uri / ref.name, part_name(whole.name, ref.name), piece(whole, ref))


def _copied(storage: Storage, name: str, uri: Uri) -> list[Target]:
    """A directory that no log knows: one target, or a whole and its parts; none if it is neither."""
    storage.refresh(name)
    try:
        manifest = decode_manifest(read_limited(storage, f"{name}/{MANIFEST}"), uri)
    except (NotFoundError, NotADirectoryError):
        return [Target(uri, name)] if _is_there(storage, f"{name}/{METADATA}") else []
    except ManifestError:
        return [Target(uri, name)]  # whoever looks at it says what is wrong
    parts = [
        Target(uri / ref.name, part_name(name, ref.name), None, ref.digest)
        for ref in manifest.parts
    ]
    return [Target(uri, name), *parts]


def _is_there(storage: Storage, key: str) -> bool:
    try:
        storage.stat(key)
    except (NotFoundError, NotADirectoryError):
        return False
    return True


def _doubts(storage: Storage, views: Mapping[str, LogState]) -> Iterator[Doubt]:
    living = {s: v for view in views.values() for s, v in view.saves.living.items()}
    for save_id, save in living.items():
        if save.seal is None or standing(save_id, views) is not Standing.IN_DOUBT:
            continue
        lost = sorted(set(save.seal.domains) - set(views))
        why = f"in doubt: whether it was committed is known in domain {', '.join(lost)} too"
        yield Doubt(storage.uri(save.seal.name), save.seal.name, save_id, why)
