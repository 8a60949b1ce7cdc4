"""One save on an open seat: what ``save``, ``async_save`` and the manager have in common.

    plan (checks, who writes what)  space  begin  write  seal  project     -> SaveResult

Collective on the seat's control, and on nothing else: it runs as well on a thread of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from ckptfs.commit.attempt import Attempt
from ckptfs.commit.run import Run
from ckptfs.commit.seat import Seat, naming
from ckptfs.commit.spec import Committed, SaveSpec, SmallFile, WrittenPart
from ckptfs.dcp.engine import WriteEngineName, engine_for
from ckptfs.dcp.exchange import PlanMemory
from ckptfs.dcp.pending import Phase, Watch
from ckptfs.dcp.pipeline import PlannedSave, finish_save, item_bytes, plan_save, write
from ckptfs.dcp.planner import SavePlanner
from ckptfs.dcp.resolve import Loan
from ckptfs.dcp.reuse import Memory, Site, Unchanged, need_run
from ckptfs.dcp.reuse_write import Mine, write_changed
from ckptfs.dcp.share import Share
from ckptfs.dcp.slots import writer_slot
from ckptfs.dcp.space import check_space
from ckptfs.errors import CkptfsError
from ckptfs.events import Event, SaveResult, Written
from ckptfs.progress import SILENT, Meter, progress
from ckptfs.topology.control import hearing
from ckptfs.uri import Uri

__all__ = ["Tell", "WriteOptions", "followed", "plans_of", "save_at", "tell_nobody"]

Tell = Callable[[Event], None]


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """How a rank writes its part; equal on all ranks.

    threads: data files written at once by each rank; None: as many as the storage gains by. require_space: NoSpaceError before a byte is
    written where it cannot fit; otherwise a warning. writers_per_node: ranks of one node that write
    at the same time, over all processes of this user that save into the run; None is no limit.
    unchanged: whether what the last committed save of the run holds already is written again. memory:
    what is known of that save from one save of this process to the next. engine: how files are written.
    plans: what is known of its plan.
    """

    threads: int | None = None
    require_space: bool = False
    writers_per_node: int | None = None
    unchanged: Unchanged = Unchanged.WRITE
    memory: Memory = field(default_factory=Memory, compare=False)
    engine: WriteEngineName = WriteEngineName.AUTO
    plans: PlanMemory = field(default_factory=PlanMemory, compare=False)


def tell_nobody(event: Event) -> None:
    """Nobody listens."""


def plans_of(run: Run | None) -> PlanMemory:
    """What is known of the plans of a held run's saves, until it is released; without a run nothing is.

    Saves of one run share it, on whatever thread: it is a hint, and what it says wrongly costs a step.
    """
    if run is None:
        return PlanMemory()
    if run.plans is None:
        run.plans = PlanMemory()
    plans: PlanMemory = run.plans
    return plans


def save_at(
    state_dict: Mapping[str, Any] | Share,
    seat: Seat,
    target: Uri,
    spec: SaveSpec,
    options: WriteOptions = WriteOptions(),
    *,
    started: float | None = None,
    tell: Tell = tell_nobody,
    watch: Watch | None = None,
    attempt: Attempt | None = None,
) -> SaveResult:
    """Collective. Save a state dict as ``target``, directly in the run that the seat is at.

    state_dict: live, it must not change before this returns; or what ``stage`` took of one. started:
    ``time.perf_counter()`` at the user's call. tell: hears of Written. watch: follows the save.
    attempt: of another kind than a save that commits by itself. Without a watch somebody waits for the
    save, and rank 0 draws how far it has come, in a terminal. Errors and what a crash leaves are as
    for ``ckptfs.save``.
    """
    started = time.perf_counter() if started is None else started
    if options.unchanged is Unchanged.REFERENCE:
        need_run(spec, target)
    control = seat.control
    shows = watch is None
    watch = watch or Watch()
    watch.enter(Phase.PLAN)
    domains = {d.id: d.ranks for d in seat.placement.domains}
    with naming(target):
        planned = plan_save(
            state_dict,
            control,
            per_rank=spec.per_rank,
            domains=tuple(domains.values()),
            memory=options.plans,
        )
        watch.planned(planned.size_bytes, len(planned.items))
        room = check_space(seat, planned, options.threads, required=options.require_space)
    attempt = attempt or Attempt(seat, spec)

    def write_mine() -> WrittenPart:
        with writer_slot(str(target.parent), control.world.node, options.writers_per_node):
            watch.enter(Phase.WRITE)
            with room.told(), _meter(target, planned, shows=shows) as meter:
                part = _write(_metered(planned, meter), seat, attempt, options)
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
            root=seat.storage.root,
        )

    def result_of(committed: Committed) -> SaveResult:
        wall_s = time.perf_counter() - started
        return committed.result(str(target), spec.step, control.rank, wall_s, room.warnings)

    try:
        with followed(attempt, watch, result_of):
            attempt.begin()
            committed = attempt.commit(write_mine, finish)
    except BaseException:
        attempt.abandon()
        raise
    return result_of(committed)


@contextmanager
def followed(
    attempt: Attempt, watch: Watch, result_of: Callable[[Committed], SaveResult]
) -> Iterator[None]:
    """While inside, ``watch`` is told what all others have when this rank's part of the save hangs in its
    storage: an error, or that it is committed.
    """

    def hangs(error: CkptfsError) -> None:
        try:
            committed = attempt.given_up(error)
        except CkptfsError as end:
            watch.hangs(end)
        else:
            watch.committed(result_of(committed))

    with hearing(attempt.seat.control, hangs):
        yield


def _meter(target: Uri, planned: PlannedSave, *, shows: bool) -> AbstractContextManager[Meter]:
    if not shows:
        return nullcontext(SILENT)
    return progress(f"saving {target}", planned.size_bytes, rank=planned.rank)


def _metered(planned: PlannedSave, meter: Meter) -> PlannedSave:
    return planned if meter is SILENT else replace(planned, share=_Metered(planned.share, meter))


@dataclass(frozen=True, slots=True)
class _Metered:
    """A share whose items are counted when the writer has them. A ``Share``."""

    share: Share
    meter: Meter

    @property
    def planner(self) -> SavePlanner:
        return self.share.planner

    def plan(self, rank: int, per_rank: Sequence[str]) -> SavePlan:
        return self.share.plan(rank, per_rank)

    def take_on(self, items: Sequence[WriteItem]) -> None:
        self.share.take_on(items)

    def resolve(self, item: WriteItem) -> Loan:
        data = self.share.resolve(item)
        loan = data if isinstance(data, Loan) else Loan(data)

        def done() -> None:
            loan.done()
            self.meter.advance(item_bytes(item))

        return replace(loan, done=done)


def _write(
    planned: PlannedSave, seat: Seat, attempt: Attempt, options: WriteOptions
) -> WrittenPart:
    domain = seat.placement.mine.id
    if options.unchanged is Unchanged.REFERENCE:
        site = Site(seat.storage, seat.caps, attempt.keys, domain)
        mine = Mine(planned.rank, planned.items, planned.resolve)
        previous = attempt.previous
        part = write_changed(
            mine,
            site,
            previous,
            options.memory,
            threads=options.threads,
            engine=engine_for(options.engine),
        )
        return replace(part, counters=replace(part.counters, plan_s=planned.plan_s))
    return write(
        planned,
        seat.storage,
        attempt.prefix,
        attempt.save_id,
        domain=domain,
        threads=options.threads,
        engine=engine_for(options.engine),
    )
