"""One save on an open session: what ``save``, ``async_save`` and the manager have in common.

    plan (checks, who writes what, space)  begin  write  seal  project     -> SaveResult

    plan_at      all that can refuse a save before it writes: the plan, planned bytes and inodes against what is free
                 in each domain, and in a held run the survey of the logs
    save_at      a checkpoint of its own
    save_part    save_part(state, ticket.part("actor"), ...) -> SealedPart, the same on every rank: what is
                 written is sealed for its ticket, and becomes part of a checkpoint when the process that
                 began the ticket commits it

``writers_per_node`` limits how many ranks of a run write on a node at once, even if they are processes that
do not know each other:

    with writer_slot(run_uri, node, limit):      waits for one of ``limit`` slots
        write                                    a slot is a lock (flock) on a file in a directory of
                                                 this user's, which the kernel frees when its holder dies

Containers with a ``/tmp`` of their own do not see each other's slots.

Saves are collective on the session's control and on nothing else, so they can run on a thread of their own.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import logging
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from ckptfs.commit.ownership.run import Run
from ckptfs.commit.parts.parts import agreed_plan, part_attempt, reference_to
from ckptfs.commit.parts.tickets import SealedPart, TicketPart
from ckptfs.commit.save.attempt import SaveAttempt
from ckptfs.commit.save.spec import Committed, SaveSpec, SmallFile, WrittenPart
from ckptfs.commit.session import Place, RunSession, naming, open_session
from ckptfs.commit.state import part_name
from ckptfs.control.control import Control, hearing, step_of_stages
from ckptfs.control.messages import Stage, apart
from ckptfs.dcp.incremental.reuse import Memory, RankItems, Site, Unchanged, need_run, write_changed
from ckptfs.dcp.pending import Phase, Watch
from ckptfs.dcp.planning.save_planner import Share
from ckptfs.dcp.write.pipeline import (
    PLANNING,
    PlanMemory,
    PlannedSave,
    SavePlanning,
    finish_save,
    write,
)
from ckptfs.dcp.write.rank_files import WriteEngineName, engine_for
from ckptfs.errors import CkptfsError, NoSpaceError, StateError
from ckptfs.events import Event, SaveResult, Written
from ckptfs.progress import SILENT, Meter, progress
from ckptfs.storage.base import Space, Storage
from ckptfs.storage.inflight import log_fields
from ckptfs.text import size_text
from ckptfs.uri import Uri

__all__ = [
    "PlannedSpace",
    "Tell",
    "WriteOptions",
    "followed",
    "plan_at",
    "plans_of",
    "save_at",
    "save_part",
    "slot_directory",
    "tell_nobody",
    "writer_slot",
]

logger = logging.getLogger("ckptfs.dcp")

Tell = Callable[[Event], None]


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """How a rank writes its part; equal on all ranks.

    Attributes:
        threads: Data files that each rank writes at once. None: as many as make the storage faster.
        require_space: Whether too little space is a NoSpaceError before a byte is written; otherwise it is a
            warning.
        writers_per_node: How many ranks of one node write at the same time, over all processes of this user
            that save into the run. None: no limit.
        unchanged: Whether to write again what the last committed save of the run already holds.
        memory: What this process knows of that save.
        engine: How files are written.
        plans: What this process knows of that save's plan.
    """

    threads: int | None = None
    require_space: bool = False
    writers_per_node: int | None = None
    unchanged: Unchanged = Unchanged.WRITE
    memory: Memory = field(default_factory=Memory, compare=False)
    engine: WriteEngineName = WriteEngineName.AUTO
    plans: PlanMemory = field(default_factory=PlanMemory, compare=False)


def tell_nobody(event: Event) -> None:
    """Ignore the event."""


def plans_of(run: Run | None) -> PlanMemory:
    """Return what is known of the plans of a held run's saves; nothing without a run.

    All saves of one run share it until the run is released, on any thread. It is a hint: wrong contents cost
    one step.
    """
    if run is None:
        return PlanMemory()
    if run.plans is None:
        run.plans = PlanMemory()
    plans: PlanMemory = run.plans
    return plans


def save_at(
    state_dict: Mapping[str, Any] | Share,
    session: RunSession,
    target: Uri,
    spec: SaveSpec,
    options: WriteOptions = WriteOptions(),
    *,
    agreeing: Sequence[Stage] = (),
    started: float | None = None,
    tell: Tell = tell_nobody,
    watch: Watch | None = None,
    attempt: SaveAttempt | None = None,
) -> SaveResult:
    """Save a state dict as ``target``, directly in the run that the session is at. Collective.

    Errors, and what a crash leaves, are as for ``ckptfs.save``.

    Args:
        state_dict: A live state dict, which must not change before this returns; or what ``stage`` took of one.
        session: The session at the run.
        target: The checkpoint's URI.
        spec: Name, step and rules of the save.
        options: How to write.
        agreeing: What the ranks have not agreed on yet about the target; its errors come before the plan's.
        started: ``time.perf_counter()`` at the user's call. None: now.
        tell: Receives Written.
        watch: Follows the save. None: the caller waits for the save, and rank 0 shows its progress in a
            terminal.
        attempt: An attempt of another kind than a save that commits by itself. None: such a save.

    Returns:
        What was saved.
    """
    started = time.perf_counter() if started is None else started
    if options.unchanged is Unchanged.REFERENCE:
        need_run(spec, target)
    control = session.control
    shows = watch is None
    watch = watch or Watch()
    watch.enter(Phase.PLAN)
    attempt = attempt or SaveAttempt(session, spec)
    domains = {d.id: d.ranks for d in session.placement.domains}
    fields = {"run": str(session.storage.root), "step": spec.step, "rank": control.rank}

    def write_own() -> WrittenPart:
        with writer_slot(str(target.parent), control.world.node, options.writers_per_node):
            watch.enter(Phase.WRITE)
            with space.told(), _meter(target, planned, shows=shows) as meter:
                part = _write(planned, session, attempt, options, meter)
        tell(Written(str(target), spec.step, part.counters))
        watch.durable(part.counters)
        watch.enter(Phase.COMMIT)
        return part

    def finish(parts: list[WrittenPart]) -> Mapping[str, SmallFile]:
        return finish_save(
            planned,
            parts,
            save_id=attempt.save_id,
            checkpoint_id=str(target),
            domains=domains,
            root=session.storage.root,
        )

    def result_of(committed: Committed) -> SaveResult:
        wall_s = time.perf_counter() - started
        return committed.result(str(target), spec.step, control.rank, wall_s, space.warnings)

    try:
        with followed(attempt, watch, result_of):
            with naming(target), log_fields(**fields):
                planned, space = plan_at(state_dict, session, attempt, options, agreeing)
            watch.planned(planned.size_bytes, len(planned.items))
            attempt.begin()
            committed = attempt.commit(write_own, finish)
    except BaseException:
        attempt.abandon()
        raise
    return result_of(committed)


@contextmanager
def followed(
    attempt: SaveAttempt, watch: Watch, result_of: Callable[[Committed], SaveResult]
) -> Iterator[None]:
    """Report to ``watch`` if this rank's part of the save hangs in its storage.

    ``watch`` then receives what all other ranks have: an error, or that the save is committed.
    """

    def hangs(error: CkptfsError) -> None:
        try:
            committed = attempt.given_up(error)
        except CkptfsError as end:
            watch.hangs(end)
        else:
            watch.committed(result_of(committed))

    with hearing(attempt.session.control, hangs):
        yield


def _meter(target: Uri, planned: PlannedSave, *, shows: bool) -> AbstractContextManager[Meter]:
    if not shows:
        return nullcontext(SILENT)
    return progress(f"saving {target}", planned.size_bytes, rank=planned.rank)


def _write(
    planned: PlannedSave,
    session: RunSession,
    attempt: SaveAttempt,
    options: WriteOptions,
    meter: Meter,
) -> WrittenPart:
    domain = session.placement.mine.id
    if options.unchanged is Unchanged.REFERENCE:
        site = Site(session.storage, session.caps, attempt.keys, domain)
        items_here = RankItems(planned.rank, planned.items, planned.counted(meter))
        part = write_changed(
            items_here,
            site,
            attempt.previous,
            options.memory,
            threads=options.threads,
            engine=engine_for(options.engine),
        )
        return replace(part, counters=replace(part.counters, plan_s=planned.plan_s))
    return write(
        planned,
        session.storage,
        attempt.prefix,
        attempt.save_id,
        domain=domain,
        threads=options.threads,
        engine=engine_for(options.engine),
        meter=meter,
        sync_names=not session.placement.is_owner,
    )


_SMALL_FILES = 8  # record, manifests, metadata, log entry and their directories


@dataclass(frozen=True, slots=True)
class _Need:
    domain: str
    size_bytes: int
    files: int
    space: Space | None


@dataclass(frozen=True, slots=True)
class PlannedSpace:
    """What a save writes in the domain of this rank, and what was free there before it began.

    Attributes:
        warnings: A sentence for each domain that has too little space.
        planned_bytes: What the ranks of this domain write.
        free_bytes: What was free there; None if that is not known.
    """

    warnings: tuple[str, ...]
    planned_bytes: int
    free_bytes: int | None

    @contextlib.contextmanager
    def told(self) -> Iterator[None]:
        """Add how much space is missing to the message of a NoSpaceError raised in the block."""
        try:
            yield
        except NoSpaceError as error:
            error.message = f"{error.message}: {self._missing()}"
            raise

    def _missing(self) -> str:
        text = f"{size_text(self.planned_bytes)} to write"
        if self.free_bytes is None:
            return text
        text += f", {size_text(self.free_bytes)} were free"
        missing = self.planned_bytes - self.free_bytes
        return f"{size_text(missing)} missing ({text})" if missing > 0 else text


def plan_at(
    state_dict: Mapping[str, Any] | Share,
    session: RunSession,
    attempt: SaveAttempt,
    options: WriteOptions,
    agreeing: Sequence[Stage] = (),
) -> tuple[PlannedSave, PlannedSpace]:
    """Agree on all that can refuse a save before it writes anything. Collective, one step.

    The plan, the space in each domain and, in a held run, the survey of the logs. The first of them that fails
    is the error. What is free is advice, not a reservation: other processes write to the disk too, and quotas may
    not be visible.

    Args:
        state_dict: As for ``save_at``.
        session: The session at the run.
        attempt: The save.
        options: How to write.
        agreeing: As for ``save_at``.

    Returns:
        The plan, and what is planned and what is free.

    Raises:
        CollectiveError: Some ranks failed; the same on every rank.
        StateError: The ranks disagree; the same on every rank.
        NoSpaceError: ``options.require_space``, and a domain has too little space; on all ranks.
        FencedError: The run has a newer owner.
    """
    planning = SavePlanning(
        state_dict,
        session.control,
        per_rank=attempt.spec.per_rank,
        domains=tuple(domain.ranks for domain in session.placement.domains),
        memory=options.plans,
    )
    survey = attempt.survey_ahead(is_due=lambda: planning.described is not None)
    stages = [*agreeing, planning.stage, _space_stage(session, planning, options)]
    if survey is not None:
        stages.append(survey)
    while True:
        answers = step_of_stages(session.control, PLANNING, stages)
        plan, space, *surveyed = answers[len(agreeing) :]
        planned = planning.planned(plan)
        if planned is not None:
            break
    attempt.surveyed(surveyed[0] if surveyed else None)
    warnings, (planned_bytes, free_bytes) = space
    if session.placement.is_owner:
        for text in warnings:
            logger.warning("%s: %s", session.storage.root, text)
    return planned, PlannedSpace(warnings, planned_bytes, free_bytes)


def _space_stage(session: RunSession, planning: SavePlanning, options: WriteOptions) -> Stage:
    """Return the stage that compares what is to be written with what is free in each domain."""
    placement = session.placement
    domain_of = {rank: domain.id for domain in placement.domains for rank in domain.ranks}

    def local() -> Space | None:
        return session.storage.space() if placement.is_owner else None

    def decide(spaces: Sequence[Space | None]) -> tuple[tuple[str, ...], tuple[int, int | None]]:
        if planning.described is None:
            return apart(())  # the step is made again, with whole plans
        counts, sizes = planning.described.world.written
        files = _files_of_ranks(session.storage, counts, sizes, options.threads)
        needs = [
            _Need(domain_of[rank], size, count, space)
            for rank, (size, count, space) in enumerate(zip(sizes, files, spaces, strict=True))
        ]
        short = tuple(text for text in _shortages(needs) if text)
        if short and options.require_space:
            raise NoSpaceError(
                "; ".join(short),
                uri=session.storage.root,
                hint="nothing was written; free space, or pass require_space=False to try anyway",
            )
        bytes_by_domain = _bytes_by_domain(needs)
        return apart(short, [bytes_by_domain[need.domain] for need in needs])

    return Stage("space", local, decide)


def _files_of_ranks(
    storage: Storage, counts: Sequence[int], sizes: Sequence[int], threads: int | None
) -> list[int]:
    """Return how many files each rank will make, data and digests, as far as the coordinator can tell."""

    @functools.cache
    def at_once(size: int) -> int:
        return storage.files_at_once("", size) if threads is None else threads

    most = at_once(max(sizes, default=0))  # where one file is as fast, no rank writes more
    return [
        2 * min(most if most == 1 else at_once(size), count)
        for count, size in zip(counts, sizes, strict=True)
    ]


def _bytes_by_domain(needs: Sequence[_Need]) -> dict[str, tuple[int, int | None]]:
    """Return for each domain the bytes that its ranks plan and the bytes that are free."""
    found: dict[str, tuple[int, int | None]] = {}
    for need in needs:
        planned, free = found.get(need.domain, (0, None))
        here = None if need.space is None else need.space.free_bytes
        found[need.domain] = (planned + need.size_bytes, free if here is None else here)
    return found


def _shortages(needs: Sequence[_Need]) -> list[str]:
    """Return what each domain lacks, as sentences."""
    lacking = []
    for domain in dict.fromkeys(need.domain for need in needs):
        here = [need for need in needs if need.domain == domain]
        space = next((need.space for need in here if need.space is not None), None)
        if space is None:
            continue
        size = sum(need.size_bytes for need in here)
        files = sum(need.files for need in here) + _SMALL_FILES
        if space.free_bytes is not None and size > space.free_bytes:
            lacking.append(f"domain {domain}: {size} bytes planned, {space.free_bytes} free")
        if space.free_inodes is not None and files > space.free_inodes:
            lacking.append(
                f"domain {domain}: {files} files planned, {space.free_inodes} inodes free"
            )
    return lacking


def save_part(
    state_dict: Mapping[str, Any],
    ticket: TicketPart,
    control: Control,
    place: Place,
    *,
    per_rank: tuple[str, ...] = (),
    options: WriteOptions = WriteOptions(),
) -> SealedPart:
    """Write and seal one part; durable on return. Collective over the group's own control.

    Other errors than these, and what is left after them, are as for ``ckptfs.save``; the part may be saved
    again with the same ticket.

    Args:
        state_dict: The state of the group.
        ticket: The part.
        control: How the group's ranks talk.
        place: How this group reaches the run.
        per_rank: As for ``ckptfs.save``.
        options: How to write.

    Returns:
        The sealed part.

    Raises:
        CommitConflictError: The ticket was committed or given up.
        FencedError: The run has a newer owner.
    """
    started = time.perf_counter()
    plan = control.step("ticket", lambda: ticket.plan, agreed_plan)
    with open_session(ticket.run, control, place, write=True) as session:
        spec = SaveSpec(
            part_name(plan.name, plan.part),
            plan.step,
            run=plan.word.generation,
            per_rank=per_rank,
        )
        attempt = part_attempt(session, plan, spec)
        result = save_at(
            state_dict, session, ticket.uri, spec, options, started=started, attempt=attempt
        )
        return SealedPart(plan.part, plan.of, reference_to(attempt, plan), result)


_LOOK_S = (0.005, 0.1)  # the first and the longest pause between two looks for a free slot


@contextlib.contextmanager
def writer_slot(
    run: str, node: str, limit: int | None, look: Callable[[float], None] = time.sleep
) -> Iterator[None]:
    """Hold one of ``limit`` slots (None: no limit). Waits as long as it takes; ``look`` sleeps."""
    if limit is None:
        yield
        return
    if limit < 1:
        raise StateError(f"writers_per_node is {limit}; at least one rank has to write")
    held = _acquire(run, node, limit, look)
    try:
        yield
    finally:
        os.close(held)


def _acquire(run: str, node: str, limit: int, look: Callable[[float], None]) -> int:
    name = hashlib.sha256(f"{node}\0{run}".encode()).hexdigest()[:32]
    paths = [f"{slot_directory()}/{name}-{number}" for number in range(limit)]
    first = os.getpid() % limit  # so that not all try the same one first
    pause_s, longest_s = _LOOK_S
    while True:
        for path in paths[first:] + paths[:first]:
            held = _try(path)
            if held is not None:
                return held
        look(pause_s)
        pause_s = min(2 * pause_s, longest_s)


def _try(path: str) -> int | None:
    # The file is never unlinked: other processes would not see a lock on an unlinked file.
    held = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(held)
        return None
    except BaseException:
        os.close(held)
        raise
    return held


def slot_directory() -> str:
    """Return this user's own directory for locks. StateError if another user made it."""
    base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    path = f"{base}/ckptfs-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise StateError(
            f"{path} belongs to another user",
            hint="set XDG_RUNTIME_DIR to a directory of your own, or leave writers_per_node out",
        )
    return path
