"""The coordinator's plan of a save before a byte is written, and its description afterwards.

    plan_save(spec, views, session)     whether it may begin; id, base, place in the order (survey)
    manifest_of(plan, spec, ...)     the list of what all ranks wrote                   (gather)
    seal_of_plan(plan, spec, ...)    the entry that every owner appends                 (seal)

Pure but for the clock and the random id.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ckptfs._version import __version__
from ckptfs.commit.log.entries import Generation, Kind, Seal
from ckptfs.commit.log.fold import LogState
from ckptfs.commit.manifest import (
    DomainRecord,
    FileRecord,
    Manifest,
    digest_of,
    needed_reader,
)
from ckptfs.commit.save.spec import IfExists, SaveSpec, SmallFile, fresh_save_id, now_text
from ckptfs.commit.session import RunSession
from ckptfs.commit.state import Standing, catalog, next_seq, occupant, save_named, standing
from ckptfs.errors import CommitConflictError, FencedError
from ckptfs.uri import Uri

__all__ = ["SavePlan", "manifest_of", "origins_of", "plan_save", "seal_of_plan"]

Views = Mapping[str, LogState]


@dataclass(frozen=True, slots=True)
class SavePlan:
    """The plan of a save, the same on every rank.

    Attributes:
        save_id: The id of the save.
        base: The generation that it carries.
        seq: Its place in the order.
        domains: The ids of its domains.
        previous: For a save that holds the run, the last committed save of its kind.
        replaces: Whether the name is taken.
        metrics: The coordinator's metrics.
    """

    save_id: str
    base: Generation
    seq: int
    domains: tuple[str, ...]
    previous: Seal | None = None
    replaces: bool = False
    metrics: tuple[tuple[str, float], ...] = ()


def plan_save(spec: SaveSpec, views: Views, session: RunSession) -> SavePlan:
    """Return the plan of a save that may begin, by the folds of every domain's owner.

    Raises:
        FencedError: The run has a newer owner, or its log is not the one that was claimed.
        CommitConflictError: The name is taken, or a failing run would replace a healthy save.
    """
    where = session.storage.uri(spec.name)
    base = _base(spec, views, where, session.storage.root)
    if spec.artifact is Kind.DIRECTORY:
        _refuse_occupied(spec.name, views, where)
    existing = save_named(spec.name, views)
    if existing is not None and spec.if_exists is IfExists.ERROR:
        raise _conflict(existing, views, where)
    if existing is not None and spec.failure and not existing.failure and spec.save_id is None:
        # A save of a failing run is never the latest: if it replaced a healthy one, the run would
        # lose a step.
        raise CommitConflictError(
            f"{existing.name} is a healthy checkpoint (save {existing.save_id}), and a save of a "
            "failing run does not replace it",
            uri=where,
            hint="the step is saved already; save a later step, or skip this save",
        )
    seq = next_seq(base, views, fenced=spec.run is not None)
    if spec.run is not None:
        # a ticket that is not committed yet began before this
        seq = max(seq, session.known.seq + 1)
    save_id = fresh_save_id() if spec.save_id is None else spec.save_id
    domains = tuple(d.id for d in session.placement.domains)
    replaces = existing is not None
    return SavePlan(save_id, base, seq, domains, _previous(spec, views), replaces)


def _previous(spec: SaveSpec, views: Views) -> Seal | None:
    """Return the last committed save of the same kind, if this save holds the run.

    A save that does not hold the run has none: it cannot stop the owner from deleting the files
    that it would build on.
    """
    if spec.run is None:
        return None
    same = [live.seal for live in catalog(views) if live.seal.artifact is spec.artifact]
    return same[-1] if same else None


def _base(spec: SaveSpec, views: Views, where: Uri, root: Uri) -> Generation:
    newest = max(v.generation for v in views.values())
    if spec.run is not None and newest > spec.run:
        raise _fenced(newest, views, where)
    if spec.run is not None and any(v.generation < spec.run for v in views.values()):
        # Every domain took this fence. If a log does not have it, that log was removed: a save
        # would start half a new run.
        raise FencedError(
            "the claimed run is gone: its log was removed or replaced",
            uri=root,
            hint="stop, check what is left of the run, and claim it again with prepare_run()",
        )
    # Unfenced: the lowest generation of all domains, so that any newer fence stops this save.
    base = spec.run or min(v.generation for v in views.values())
    if spec.run is None and newest > base:
        raise FencedError(
            "the domains of this run were claimed at different times, or some are new",
            uri=where,
            hint="claim all of them: run = ckptfs.prepare_run(...), then save(..., run=run)",
        )
    return base


def _refuse_occupied(name: str, views: Views, where: Uri) -> None:
    existing = occupant(name, views)
    if existing is not None:
        raise CommitConflictError(
            f"{name} still has save {existing.save_id}",
            uri=where,
            hint="files with plain names never overwrite: choose another name; what an overwrite "
            "hid is deleted after the first commit of another one",
        )


def _conflict(holder: Seal, views: Views, where: Uri) -> CommitConflictError:
    if standing(holder.save_id, views) is Standing.COMMITTED:
        what = f"{holder.name} is committed already (save {holder.save_id})"
        hint = 'choose another name, or if_exists="replace"'
    else:
        what = f"{holder.name} is in doubt: save {holder.save_id} is sealed in some domains only"
        hint = (
            "another process commits it now, or died before that: call prepare_run() to settle it"
        )
    return CommitConflictError(what, uri=where, hint=hint)


def _fenced(newest: Generation, views: Views, where: Uri) -> FencedError:
    fence = next(v.fence for v in views.values() if v.generation == newest)
    return FencedError(
        f"the run was taken over by generation {newest.number} ({fence.host} pid {fence.pid})",
        uri=where,
        hint="this process must stop; nothing of this save was committed",
    )


def manifest_of(
    plan: SavePlan,
    spec: SaveSpec,
    session: RunSession,
    files: Sequence[FileRecord],
    extra: Mapping[str, SmallFile],
) -> Manifest:
    """Return the manifest over every rank's files and the small files next to it."""
    small = [
        FileRecord(f"{plan.save_id}/{name}", len(data), domain, digest=digest_of(data))
        for name, file in extra.items()
        for domain, data in ([(None, file)] if isinstance(file, bytes) else file.items())
    ]
    every = (*files, *small)
    return Manifest(
        save_id=plan.save_id,
        name=spec.name.rpartition("/")[2],  # of a part, its own
        step=spec.step,
        # Two ranks may have uploaded one and the same file; it is one file.
        files=tuple({(f.path, f.domain): f for f in every}.values()),
        domains=tuple(
            DomainRecord(d.id, d.ranks, _hosts(session, d.ranks)) for d in session.placement.domains
        ),
        base=plan.base,
        artifact=spec.artifact,
        world_size=spec.world_size or session.control.size,
        created_at=now_text(),
        writer=f"ckptfs {__version__}",
        references=spec.references,
        per_rank=spec.per_rank,
        min_reader_version=needed_reader(every),
    )


def origins_of(manifest: Manifest) -> tuple[str, ...]:
    """Return the other saves that wrote bytes of this save's files."""
    origins = {f.origin for f in manifest.files if f.origin is not None}
    return tuple(sorted(origins - {manifest.save_id}))


def _hosts(session: RunSession, ranks: Sequence[int]) -> tuple[str, ...]:
    """Return the hosts of a domain, for people who look for a lost shard."""
    worlds = session.control.worlds
    return tuple(dict.fromkeys(worlds[rank].hostname for rank in ranks))


def seal_of_plan(
    plan: SavePlan, spec: SaveSpec, digest: str, origins: tuple[str, ...] = ()
) -> Seal:
    """Return the seal over a manifest with that digest and those origins.

    It is the same in every domain.
    """
    return Seal(
        save_id=plan.save_id,
        base=plan.base,
        seq=plan.seq,
        fenced=spec.run is not None,
        name=spec.name,
        step=spec.step,
        artifact=spec.artifact,
        domains=plan.domains,
        digest=digest,
        references=spec.references,
        failure=spec.failure,
        metrics=plan.metrics,
        origins=origins,
    )
