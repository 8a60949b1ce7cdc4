"""Copies by hand, between any two places: ``ckptfs cp``.

    report = copy_to("/nvme/run/step_100", "s3://bucket/run/step_100")     one checkpoint
    report = copy_to("s3://a/run", "gs://b/run")                           all that is missing there

    look     what the source names, what the target has                    coordinator
    each     oldest first: find, begin or go on, copy, seal                all ranks
    report   what was copied, what was there

Collective: alone, in a process group, or under torchrun, where every node brings the shards that lie
on its disks. What a killed copy brought is there for the next: the id of a copy is made of its source
and its name, see ``commit.resuming``.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

from ckptfs.commit.catalog import read_view
from ckptfs.commit.fold import LogState
from ckptfs.commit.locate import reading_seat
from ckptfs.commit.opening import Place, agree_uri, control_for, open_seat
from ckptfs.commit.ops import drive
from ckptfs.commit.owners import who_am_i
from ckptfs.commit.seat import Seat
from ckptfs.dcp.copying import Manner
from ckptfs.errors import (
    CkptfsError,
    CollectiveError,
    CommitConflictError,
    ControlPlaneLostError,
    DeadlineError,
    RunBusyError,
    StateError,
    UriError,
)
from ckptfs.tools.copy_commit import commit_copy, gone_meanwhile
from ckptfs.tools.copy_parts import copy_parts
from ckptfs.tools.copy_place import is_run, refuse_nested
from ckptfs.tools.copy_plan import (
    Item,
    Lookout,
    Plan,
    Status,
    Subject,
    Wanted,
    plan_one,
    plan_run,
    what_is,
)
from ckptfs.tools.copy_report import Copied, CopyReport
from ckptfs.topology.control import Control
from ckptfs.uri import Uri, options_of

__all__ = ["Copied", "CopyOptions", "CopyReport", "Status", "copy_to", "copy_with"]

_PART_BYTES = 8 << 20  # what a kill loses of an upload is some of these


@dataclass(frozen=True, slots=True)
class CopyOptions:
    """How to copy. step, latest: of a run, these alone. overwrite: replace what has another save.
    jobs: files at once, by each rank. dry_run: say what would be copied. shows: draw progress.
    follow_links: copy what symbolic links in a checkpoint lead to.
    """

    step: int | None = None
    latest: bool = False
    overwrite: bool = False
    jobs: int = 4
    dry_run: bool = False
    shows: bool = False
    follow_links: bool = False


def copy_to(
    source: Any,
    target: Any,
    *,
    step: int | None = None,
    latest: bool = False,
    overwrite: bool = False,
    jobs: int = 4,
    dry_run: bool = False,
    shows: bool = False,
    follow_links: bool = False,
    process_group: Any = None,
    timeout_s: float | None = None,
    source_options: Mapping[str, Any] | None = None,
    target_options: Mapping[str, Any] | None = None,
) -> CopyReport:
    """Collective. Copy a checkpoint, or what a run has and the target lacks; each is committed and
    durable before the next begins.

    source: a checkpoint, a part of one, or a run; the same on all ranks. target: of a checkpoint, its
    new URI, or a run (one that is there, or ends with "/") that it keeps its name in; of a run, a run.
    step, latest: of a run, these alone. overwrite: replace another save that has the name: that claims
    the run for the time of the copy. jobs: files at once, by each rank. shows: draws progress.
    follow_links: copy what symbolic links in a checkpoint lead to; a SymlinkError otherwise.

    NotFoundError: there is no such source. IncompleteCheckpointError: some of it is missing, or on
    nodes that do not take part. IntegrityError, ManifestError: the source is damaged; which file and
    bytes. CommitConflictError: another save has the name there. AlreadyExistsError: the same copy is
    on its way. RunBusyError: a living owner holds the run that something is to be replaced in. Of
    several ranks, what single ones meet is a CollectiveError on all.

    After an error or a crash what was committed stays, nothing else is visible, and what was brought
    of the next one is found by the next call with the same source and target.
    """
    options = CopyOptions(step, latest, overwrite, jobs, dry_run, shows, follow_links)
    here = Place({**options_of(source), **(source_options or {})})
    there = Place({**options_of(target), **(target_options or {})})
    with control_for(process_group, timeout_s) as control:
        return copy_with(control, (source, here), (target, there), options)


def copy_with(
    control: Control, source: tuple[Any, Place], target: tuple[Any, Place], options: CopyOptions
) -> CopyReport:
    """Collective. As ``copy_to``, over a control that is there; it stays the caller's."""
    wanted = Wanted(options.step, options.latest)
    if options.jobs < 1:
        raise StateError(f"jobs is {options.jobs}; it counts files at once, from 1")
    if wanted.latest and wanted.step is not None:
        raise StateError("one step, or the latest", hint="pass step or latest")
    (source_uri, here), (target_uri, there) = source, target
    with _as_itself(control):
        at, to = agree_uri(control, source_uri), agree_uri(control, target_uri)
        there = _resuming(to, there)
        subject = control.step("what is there", lambda: None, lambda _: what_is(at, here))
        if subject is Subject.RUN:
            return _copy_run(control, (at, here), (to, there), wanted, options)
        if wanted.is_told:
            raise UriError(
                "step and latest choose from a run, and this is one checkpoint",
                uri=at,
                hint="pass the URI of the run",
            )
        into = str(target_uri).endswith("/")
        return _copy_one(control, (at, here), (to, there), options, into=into)


def _resuming(to: Uri, there: Place) -> Place:
    """Of S3, the client that finds unfinished uploads again, and parts of which a kill loses little;
    unless the caller, or the URI, says otherwise.
    """
    if to.protocol not in ("s3", "s3a"):
        return there
    options: dict[str, Any] = {"part_size_bytes": _PART_BYTES}
    if find_spec("s3fs") is not None:
        options["client"] = "s3fs"
    return replace(
        there, storage_options={**options, **to.options, **(there.storage_options or {})}
    )


@contextlib.contextmanager
def _as_itself(control: Control) -> Iterator[None]:
    """One process alone raises what it met, not that one rank of one met it."""
    try:
        yield
    except CollectiveError as error:
        if control.size == 1 and isinstance(error.__cause__, CkptfsError):
            raise error.__cause__ from None
        raise


@contextlib.contextmanager
def _in_words_of_a_copy(item: Item) -> Iterator[None]:
    """Hints that name options of ``save`` and ``prepare_run`` name those of a copy."""
    try:
        yield
    except CommitConflictError as error:
        if "if_exists" in (error.hint or ""):
            error.hint = "copy it under another name, or replace that one with --overwrite"
        raise
    except RunBusyError as error:
        error.hint = f"wait for it to end, or copy {item.name} under another name"
        raise


Side = tuple[Uri, Place]


def _copy_one(
    control: Control, source: Side, target: Side, options: CopyOptions, *, into: bool
) -> CopyReport:
    started = time.perf_counter()
    to, there = target

    def into_run(_: Sequence[None]) -> bool:
        chosen = into or is_run(to, there)
        refuse_nested(to if chosen else to.parent, there, source[0])
        return chosen

    into = control.step("into a run?", lambda: None, into_run)
    root = to if into else to.parent
    with reading_seat(source[0], control, source[1]) as (reading, name):
        plan = _planned(
            reading,
            (root, there),
            options,
            lambda here: plan_one(here, name, None if into else to.name),
        )
        copier = _Copier(reading, (root, there), options)
        return copier.run(plan, str(source[0]), str(root / plan.items[0].name), started)


def _copy_run(
    control: Control, source: Side, target: Side, wanted: Wanted, options: CopyOptions
) -> CopyReport:
    started = time.perf_counter()
    control.step("where to", lambda: None, lambda _: refuse_nested(*target, None))
    with open_seat(source[0], control, source[1], write=False) as reading:
        plan = _planned(reading, target, options, lambda here: plan_run(here, wanted))
        copier = _Copier(reading, target, options, skips_gone=wanted.step is None)
        return copier.run(plan, str(source[0]), str(target[0]), started)


View = tuple[str, LogState]


@dataclass(frozen=True, slots=True)
class _Seen:
    """What one rank sees of both logs; None where another rank looks."""

    source: View | None
    target: View | None


def _planned(
    reading: Seat, target: Side, options: CopyOptions, decide: Callable[[Lookout], Plan]
) -> Plan:
    """Collective, read-only. What the coordinator makes of both catalogs."""
    with open_seat(target[0], reading.control, target[1], write=False) as looking:

        def look() -> _Seen:
            return _Seen(
                drive(read_view(), reading.storage) if reading.placement.is_node_lead else None,
                drive(read_view(), looking.storage) if looking.placement.is_node_lead else None,
            )

        def choose(seen: Sequence[_Seen]) -> Plan:
            return decide(
                Lookout(
                    reading.storage,
                    reading.storage.root,
                    dict(s.source for s in seen if s.source is not None),
                    dict(s.target for s in seen if s.target is not None),
                    looking.storage,
                    options.overwrite,
                    who_am_i(reading.control.world).node,
                )
            )

        return reading.control.step("which to copy", look, choose)


@dataclass(frozen=True, slots=True)
class _Copier:
    """Copies from a seat to another place of the same ranks, which is written to if there is a need.

    skips_gone: what the source deletes meanwhile was not asked for by its name, and is left out.
    """

    reading: Seat
    target: Side
    options: CopyOptions
    skips_gone: bool = False

    def run(self, plan: Plan, source: str, target: str, started: float) -> CopyReport:
        """Collective. Copy what is to be copied, one after the other."""
        done, warnings = [], list(plan.warnings)
        control = self.reading.control
        with contextlib.ExitStack() as stack:
            writing: Seat | None = None
            for item in plan.items:
                if not item.status.is_due or self.options.dry_run:
                    done.append(self._told(item))
                    continue
                if writing is None:
                    root, there = self.target
                    writing = stack.enter_context(open_seat(root, control, there, write=True))
                done.append(self._copy_or_skip(writing, item, warnings))
        return CopyReport(
            source,
            target,
            tuple(done),
            time.perf_counter() - started,
            control.rank,
            tuple(dict.fromkeys(warnings)),
            self.options.dry_run,
        )

    def _told(self, item: Item) -> Copied:
        uri = str(self.target[0] / item.name)
        return Copied(
            item.name, item.kind.value, item.step, uri, None, item.status, item.size_bytes
        )

    def _copy_or_skip(self, writing: Seat, item: Item, warnings: list[str]) -> Copied:
        try:
            with _in_words_of_a_copy(item):
                return self._copy(writing, item, warnings)
        except (ControlPlaneLostError, DeadlineError):
            raise
        except CkptfsError as error:
            if not self.skips_gone or not gone_meanwhile(self.reading, item, error):
                raise
        warnings.append(f"{item.name} was deleted from the source before it was copied")
        return self._told(replace(item, status=Status.GONE))

    def _copy(self, writing: Seat, item: Item, warnings: list[str]) -> Copied:
        started, control = time.perf_counter(), self.reading.control
        seal = item.original.seal
        manner = Manner(
            self.options.jobs,
            kept=True,
            shows=self.options.shows,
            follow_links=self.options.follow_links,
        )
        if seal is not None and seal.parts:
            committed = copy_parts(self.reading, seal, writing, item, manner)
        else:
            found = commit_copy(self.reading, writing, item, manner)
            if found is None:
                return self._told(replace(item, status=Status.THERE))
            committed = found
        tally = manner.tally
        all_ = control.step("tally", lambda: (tally.sent_bytes, tally.kept_bytes, tally.digests))
        warnings += committed.warnings
        sent, kept, digests = (sum(numbers) for numbers in zip(*all_, strict=True))
        return replace(
            self._told(replace(item, status=Status.COPIED)),
            save_id=committed.save_id,
            size_bytes=sent + kept if item.size_bytes is None else item.size_bytes,
            copied_bytes=sent,
            resumed_bytes=kept,
            digests=digests,
            seconds=time.perf_counter() - started,
        )
