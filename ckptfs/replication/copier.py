"""Copies on demand, between any two places: ``ckptfs cp`` and ``ckptfs.gather``.

    report = copy_to("/nvme/run/step_100", "s3://bucket/run/step_100")     one checkpoint
    report = copy_to("s3://a/run", "gs://b/run")                           all that is missing there

    look     what the source names, what the target has                    coordinator
    each     oldest first: find, begin or continue, copy, seal             all ranks
    report   what was copied, what was there

Collective: with one process, in a process group, or under torchrun, where every node copies the
shards on its own disks. What a killed copy wrote is used by the next one: the id of a copy is made
from its source and its name, see ``commit.save.shared_attempt``.

A checkpoint of parts is gathered into one run, with the parts that it had. The run is claimed,
because only the owner of a run commits what several groups wrote. Each part is a save of its own,
sealed for the ticket, and one seal over all of them commits. The processes that copy must see all
of its parts. An interrupted copy of this kind starts over; the claim of a process that died is
taken over.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ckptfs.commit.catalog.catalog import live_of, part_of, unlogged
from ckptfs.commit.catalog.locate import node_view, owner_view, reading_session
from ckptfs.commit.log.append import catch_up
from ckptfs.commit.operations import drive
from ckptfs.commit.ownership.claim import claim
from ckptfs.commit.ownership.lease import who_am_i
from ckptfs.commit.ownership.run import Caller
from ckptfs.commit.save.attempt import SaveAttempt
from ckptfs.commit.save.shared_attempt import AGAIN, ResumableStrategy, next_id, origin_of
from ckptfs.commit.save.spec import Committed
from ckptfs.commit.session import (
    Place,
    RunSession,
    View,
    agree_uri,
    collect_views,
    control_for,
    open_session,
)
from ckptfs.commit.state import (
    Standing,
    catalog,
    save_named,
    split_name,
    standing,
)
from ckptfs.control.control import Control
from ckptfs.errors import (
    CkptfsError,
    CollectiveError,
    CommitConflictError,
    ControlPlaneLostError,
    DeadlineError,
    IncompleteCheckpointError,
    NotFoundError,
    RunBusyError,
    StaleError,
    StateError,
    UriError,
)
from ckptfs.events import SaveResult
from ckptfs.replication.backlog import One, fresh_id
from ckptfs.replication.checkpoint_copy import (
    Manner,
    copy_checkpoint,
    copy_files,
    copy_parts,
    find_held,
    spec_of,
)
from ckptfs.replication.plan import (
    Copied,
    CopyReport,
    Item,
    Lookout,
    Plan,
    Status,
    Subject,
    Wanted,
    is_run,
    plan_one,
    plan_run,
    refuse_nested,
    what_is,
)
from ckptfs.uri import Uri, options_of

__all__ = [
    "Copied",
    "CopyOptions",
    "CopyReport",
    "Status",
    "commit_copy",
    "copy_to",
    "copy_with",
    "gather",
    "gone_meanwhile",
]


def commit_copy(
    reading: RunSession, writing: RunSession, item: Item, manner: Manner
) -> Committed | None:
    """Copy one checkpoint. Collective. None: another process committed the same copy first."""
    held = find_held(reading, item.original)
    save_id = _id_of(writing, item)
    with contextlib.ExitStack() as stack:
        session, generation = writing, None
        if item.status is Status.TO_REPLACE:
            run = stack.enter_context(
                claim(writing, keep=(save_id,), caller=Caller("cp", for_call=True))
            )
            session, generation = run.session, run.generation
        spec = spec_of(held, item.original.seal, item.name, generation, save_id)
        # Disks of several nodes have no single place that says what an earlier try copied.
        single = len(session.placement.domains) == 1
        strategy = ResumableStrategy() if single else None
        attempt = SaveAttempt(session, spec, strategy=strategy)
        try:
            return copy_files(reading, held, attempt, replace(manner, kept=single))
        except (ControlPlaneLostError, DeadlineError):
            raise
        except CkptfsError as error:
            if _came_first(writing, item):
                return None
            lost = isinstance(error, CommitConflictError) or gone_meanwhile(reading, item, error)
            if lost and strategy is not None:
                attempt.give_up()
            raise


def _id_of(writing: RunSession, item: Item) -> str:
    """Return the id of the copy: that of an interrupted try, if there is one. Collective."""
    if len(writing.placement.domains) > 1:
        fresh = f"{item.origin}{AGAIN}{secrets.token_hex(4)}"
        return writing.control.step("copy id", lambda: None, lambda _: fresh)
    held = item.status is Status.TO_REPLACE

    def decide(_: Sequence[None]) -> str:
        state = drive(catch_up(), writing.storage)
        program = next_id(item.origin, item.name, writing.caps.shape, state, held=held)
        return drive(program, writing.storage)

    return writing.control.step("copy id", lambda: None, decide)


def _came_first(writing: RunSession, item: Item) -> bool:
    """Whether another process has committed the same copy since. Collective."""

    def decide(found: Sequence[View | None]) -> bool:
        existing = save_named(item.name, collect_views(found))
        return existing is not None and origin_of(existing.save_id) == item.origin

    return writing.control.step("who came first", lambda: owner_view(writing), decide)


def _commit_parts(
    reading: RunSession, writing: RunSession, item: Item, manner: Manner
) -> Committed:
    """Copy one checkpoint of parts. Collective.

    The run is claimed, because only its owner commits what several groups wrote.
    """
    seal = item.original.seal
    if seal is None:
        raise AssertionError("a checkpoint without a log has no parts")
    fresh = f"{item.origin}{AGAIN}{secrets.token_hex(4)}"
    save_id = writing.control.step("copy id", lambda: None, lambda _: fresh)
    with claim(writing, caller=Caller("cp", for_call=True)) as run:
        replaces = item.status is Status.TO_REPLACE
        return copy_parts(
            reading,
            seal,
            run,
            name=item.name,
            save_id=save_id,
            manner=manner,
            replaces=replaces,
        )


_MISSING = (NotFoundError, IncompleteCheckpointError, StaleError)


def gone_meanwhile(reading: RunSession, item: Item, error: CkptfsError) -> bool:
    """Whether the source lost this save while it was copied.

    Collective, after the same error on all ranks. True if the error says that files are missing,
    and the save was deleted or replaced since, or, if no log lists it, cannot be found.
    """
    failed = isinstance(error, CollectiveError) and any(
        CollectiveError("", failures={rank: failure}).all_are(kind)
        for rank, failure in error.failures.items()
        for kind in _MISSING
    )
    if not failed and not isinstance(error, _MISSING):
        return False

    def decide(found: Sequence[View | None]) -> bool:
        views = collect_views(found)
        seal = item.original.seal
        if seal is None:
            try:
                drive(unlogged(item.original.name, views, reading.storage.root), reading.storage)
            except NotFoundError:
                return True
            return False
        live = {one.seal.save_id for one in catalog(views)}
        ended = (Standing.COMMITTED, Standing.DELETED)
        return seal.save_id not in live and standing(seal.save_id, views) in ended

    return reading.control.step("what is left of the source", lambda: node_view(reading), decide)


@dataclass(frozen=True, slots=True)
class CopyOptions:
    """How to copy.

    Attributes:
        step: Of a run, this step only; None: all.
        latest: Of a run, the latest only.
        overwrite: Replace another save that has the name.
        jobs: Files at once, by each rank.
        dry_run: Report what would be copied, and copy nothing.
        shows: Draw progress.
        follow_links: Copy what symbolic links in a checkpoint lead to.
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
    """Copy a checkpoint, or what a run has and the target lacks. Collective.

    Each checkpoint is committed and durable before the next begins. After an error or a crash what
    was committed stays, and nothing else is visible; the next call with the same source and target
    continues with what was copied of an unfinished checkpoint.

    Args:
        source: A checkpoint, a part of one, or a run; the same on all ranks.
        target: For a checkpoint, its new URI, or a run (one that exists, or ends with "/") where it
            keeps its name; for a run, a run.
        step: Of a run, this step only; None: all.
        latest: Of a run, the latest only.
        overwrite: Replace another save that has the name: that claims the run for the time of the
            copy.
        jobs: Files at once, by each rank.
        dry_run: Report what would be copied, and copy nothing.
        shows: Draw progress.
        follow_links: Copy what symbolic links in a checkpoint lead to.
        process_group: The ranks that take part; None: the default group, or torchrun's ranks if
            there is none.
        timeout_s: How many seconds a rank may be silent before the others stop waiting for it;
            None: 600, or CKPTFS_TIMEOUT_S.
        source_options: Options for fsspec's filesystem of the source; None: those of ``source``, if
            it has any.
        target_options: The same for the target; None: those of ``target``, if it has any.

    Returns:
        What happened to each checkpoint.

    Raises:
        NotFoundError: There is no such source.
        IncompleteCheckpointError: Some of it is missing, or on nodes that do not take part.
        IntegrityError: The source is damaged; the message says which file and bytes.
        ManifestError: The source's description is damaged.
        CommitConflictError: Another save has the name there.
        AlreadyExistsError: The same copy is under way.
        RunBusyError: A living owner holds the run in which something is to be replaced.
        SymlinkError: A link leads out of the checkpoint, and ``follow_links`` is False.
        StateError: ``step`` and ``latest`` together, or ``jobs`` below 1.
        UriError: ``step`` or ``latest`` of one checkpoint, or the target is inside the source or in
            a run's own directories.
        CollectiveError: With several ranks, an error of single ones; every rank raises this same
            error.
    """
    options = CopyOptions(step, latest, overwrite, jobs, dry_run, shows, follow_links)
    source_place = Place({**options_of(source), **(source_options or {})})
    target_place = Place({**options_of(target), **(target_options or {})})
    with control_for(process_group, timeout_s) as control:
        return copy_with(control, (source, source_place), (target, target_place), options)


def copy_with(
    control: Control, source: tuple[Any, Place], target: tuple[Any, Place], options: CopyOptions
) -> CopyReport:
    """As ``copy_to``, over an existing control, which stays the caller's. Collective.

    Args:
        control: The ranks that take part.
        source: Its URI, and how to reach it.
        target: The same for the target.
        options: What to copy and how.

    Returns:
        What happened to each checkpoint.

    Raises:
        StateError: ``step`` and ``latest`` together, or ``jobs`` below 1.
        UriError: ``step`` or ``latest`` of one checkpoint.
        CkptfsError: As for ``copy_to``.
    """
    wanted = Wanted(options.step, options.latest)
    if options.jobs < 1:
        raise StateError(f"jobs is {options.jobs}; it counts files at once, from 1")
    if wanted.latest and wanted.step is not None:
        raise StateError("step and latest exclude each other", hint="pass step or latest")
    (source_uri, source_place), (target_uri, target_place) = source, target
    with _as_itself(control):
        at, to = agree_uri(control, source_uri), agree_uri(control, target_uri)
        subject = control.step("what is there", lambda: None, lambda _: what_is(at, source_place))
        if subject is Subject.RUN:
            return _copy_run(control, (at, source_place), (to, target_place), wanted, options)
        if wanted.is_given:
            raise UriError(
                "step and latest choose from a run, but this is one checkpoint",
                uri=at,
                hint="pass the URI of the run",
            )
        into = str(target_uri).endswith("/")
        return _copy_one(control, (at, source_place), (to, target_place), options, into=into)


@contextlib.contextmanager
def _as_itself(control: Control) -> Iterator[None]:
    """Raise the error itself, not a CollectiveError, if there is only one process."""
    try:
        yield
    except CollectiveError as error:
        if control.size == 1 and isinstance(error.__cause__, CkptfsError):
            raise error.__cause__ from None
        raise


@contextlib.contextmanager
def _in_words_of_a_copy(item: Item) -> Iterator[None]:
    """Let hints that name options of ``save`` and ``prepare_run`` name those of a copy."""
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
    to, target_place = target

    def into_run(_: Sequence[None]) -> bool:
        chosen = into or is_run(to, target_place)
        refuse_nested(to if chosen else to.parent, target_place, source[0])
        return chosen

    into = control.step("into a run?", lambda: None, into_run)
    root = to if into else to.parent
    with reading_session(source[0], control, source[1]) as (reading, _, name):
        plan = _planned(
            reading,
            (root, target_place),
            options,
            lambda here: plan_one(here, name, None if into else to.name),
        )
        copier = _Copier(reading, (root, target_place), options)
        return copier.run(plan, str(source[0]), str(root / plan.items[0].name), started)


def _copy_run(
    control: Control, source: Side, target: Side, wanted: Wanted, options: CopyOptions
) -> CopyReport:
    started = time.perf_counter()
    control.step("where to", lambda: None, lambda _: refuse_nested(*target, None))
    with open_session(source[0], control, source[1], write=False) as reading:
        plan = _planned(reading, target, options, lambda here: plan_run(here, wanted))
        copier = _Copier(reading, target, options, skips_gone=wanted.step is None)
        return copier.run(plan, str(source[0]), str(target[0]), started)


@dataclass(frozen=True, slots=True)
class _BothLogs:
    """What one rank sees of both logs; None if another rank reads them."""

    source: View | None
    target: View | None


def _planned(
    reading: RunSession, target: Side, options: CopyOptions, decide: Callable[[Lookout], Plan]
) -> Plan:
    """Return the coordinator's plan from both catalogs. Collective, read-only."""
    with open_session(target[0], reading.control, target[1], write=False) as looking:

        def look() -> _BothLogs:
            return _BothLogs(node_view(reading), node_view(looking))

        def choose(reports: Sequence[_BothLogs]) -> Plan:
            return decide(
                Lookout(
                    reading.storage,
                    reading.storage.root,
                    collect_views(s.source for s in reports),
                    collect_views(s.target for s in reports),
                    looking.storage,
                    options.overwrite,
                    who_am_i(reading.control.world).node,
                )
            )

        return reading.control.step("which to copy", look, choose)


@dataclass(frozen=True, slots=True)
class _Copier:
    """Copies from a session to another place of the same ranks, which is opened only if needed.

    ``skips_gone``: leave out what the source deletes during the copy, if it was not requested by
    name.
    """

    reading: RunSession
    target: Side
    options: CopyOptions
    skips_gone: bool = False

    def run(self, plan: Plan, source: str, target: str, started: float) -> CopyReport:
        """Copy what is to be copied, one checkpoint after the other. Collective."""
        done, warnings = [], list(plan.warnings)
        control = self.reading.control
        with contextlib.ExitStack() as stack:
            writing: RunSession | None = None
            for item in plan.items:
                if not item.status.is_due or self.options.dry_run:
                    done.append(self._outcome(item))
                    continue
                if writing is None:
                    root, place = self.target
                    writing = stack.enter_context(open_session(root, control, place, write=True))
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

    def _outcome(self, item: Item) -> Copied:
        uri = str(self.target[0] / item.name)
        return Copied(
            item.name, item.kind.value, item.step, uri, None, item.status, item.size_bytes
        )

    def _copy_or_skip(self, writing: RunSession, item: Item, warnings: list[str]) -> Copied:
        try:
            with _in_words_of_a_copy(item):
                return self._copy(writing, item, warnings)
        except (ControlPlaneLostError, DeadlineError):
            raise
        except CkptfsError as error:
            if not self.skips_gone or not gone_meanwhile(self.reading, item, error):
                raise
        warnings.append(f"{item.name} was deleted from the source before it was copied")
        return self._outcome(replace(item, status=Status.GONE))

    def _copy(self, writing: RunSession, item: Item, warnings: list[str]) -> Copied:
        started, control = time.perf_counter(), self.reading.control
        seal = item.original.seal
        manner = Manner(
            self.options.jobs,
            kept=True,
            shows=self.options.shows,
            follow_links=self.options.follow_links,
        )
        if seal is not None and seal.parts:
            committed = _commit_parts(self.reading, writing, item, manner)
        else:
            found = commit_copy(self.reading, writing, item, manner)
            if found is None:
                return self._outcome(replace(item, status=Status.THERE))
            committed = found
        tally = manner.tally
        all_ = control.step(
            "tally", lambda: (tally.sent_bytes, tally.existing_bytes, tally.digests)
        )
        warnings += committed.warnings
        sent, resumed, digests = (sum(numbers) for numbers in zip(*all_, strict=True))
        return replace(
            self._outcome(replace(item, status=Status.COPIED)),
            save_id=committed.save_id,
            size_bytes=sent + resumed if item.size_bytes is None else item.size_bytes,
            copied_bytes=sent,
            resumed_bytes=resumed,
            digests=digests,
            seconds=time.perf_counter() - started,
        )


def gather(
    source: Any,
    target: Any,
    *,
    process_group: Any = None,
    timeout_s: float | None = None,
    storage_options: Mapping[str, Any] | None = None,
    target_options: Mapping[str, Any] | None = None,
) -> SaveResult:
    """Copy a committed checkpoint to another URI.

    Collective; committed and durable when it returns. On node-local disks a rank of every node that
    holds a part of the files takes part, and each file is read by one of them. Every block is
    compared with its digest. The source is only read, and no process may delete it before the call
    returns. After an error or a crash the target is as it was.

    Args:
        source: Run and name (and part), the same on all ranks.
        target: Run and name.
        process_group: The ranks that take part; None: the default group, or torchrun's ranks if
            there is none.
        timeout_s: How many seconds a rank may be silent before the others stop waiting for it;
            None: 600, or CKPTFS_TIMEOUT_S.
        storage_options: Options for fsspec's filesystem of the source; None: those of ``source``,
            if it has any.
        target_options: The same for the target; None: those of ``target``, if it has any.

    Returns:
        What was copied, on this rank and on all.

    Raises:
        NotFoundError: The source's log has no such checkpoint.
        IncompleteCheckpointError: Some of it is on nodes that do not take part; the message says
            which.
        CommitConflictError: The target is committed already.
        CollectiveError: An error of single ranks; every rank raises this same error.
        IntegrityError: The source is damaged; as a CollectiveError.
    """
    with control_for(process_group, timeout_s) as control:
        at, to = agree_uri(control, source), agree_uri(control, target)
        source_place = Place({**options_of(source), **(storage_options or {})})
        target_place = Place({**options_of(target), **(target_options or {})})
        with (
            reading_session(at, control, source_place) as (reading, _, name),
            open_session(to.parent, control, target_place, write=True) as writing,
        ):
            one = control.step(
                "which to copy",
                lambda: _look(reading, writing),
                lambda all_: _choose(all_, name, at),
            )
            if not one.seal.parts:
                return copy_checkpoint(
                    reading, one.seal, writing, name=to.name, save_id=one.save_id, shows=True
                )
            began = time.perf_counter()
            with claim(writing, caller=Caller("gather", for_call=True)) as run:
                committed = copy_parts(
                    reading,
                    one.seal,
                    run,
                    name=to.name,
                    save_id=one.save_id,
                    manner=Manner(shows=True),
                )
            return committed.result(
                str(to), one.seal.step, control.rank, time.perf_counter() - began
            )


def _look(reading: RunSession, writing: RunSession) -> _BothLogs:
    return _BothLogs(node_view(reading), owner_view(writing))


def _choose(reports: Sequence[_BothLogs], name: str, at: Uri) -> One:
    views = collect_views(s.source for s in reports)
    step, part = split_name(name)
    checkpoint = live_of(step, views, at)
    if checkpoint is None:
        raise NotFoundError(
            "no log lists a committed checkpoint there",
            uri=at,
            hint="call list_checkpoints() on its parent to see what exists; ckptfs cp copies a "
            "checkpoint without a log too",
        )
    seal = checkpoint if part is None else part_of(checkpoint, part, at)[0]
    return One(seal, fresh_id(seal.save_id, collect_views(s.target for s in reports)))
