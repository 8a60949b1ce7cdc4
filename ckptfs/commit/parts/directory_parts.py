"""Directories as parts of a checkpoint: files that a framework writes, by several groups of processes.

    ticket = begin_parts(run, "step_100", 100, ["actor", "critic"], artifact=Kind.DIRECTORY)

    writing_part(session, part, done)   a path to write into; sealed when all ranks of the group have left
    publish_part(session, part, path)   seals files that this rank has already written below ``path``
    sealed_parts(ticket)             the parts that are sealed now, according to the log of the run
    wait_sealed(ticket, 600)         the same, once all of them are sealed

This works like ``ckptfs.save(state, ticket.part(...))``, with plain files instead of a state dict: nothing is
visible before the ticket's commit. All parts of such a ticket are directories.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

from ckptfs.commit.catalog.catalog import looking_at
from ckptfs.commit.directory_checkpoints.write import (
    Sender,
    collected_files,
    leaving_together,
    list_files,
)
from ckptfs.commit.log.entries import Kind, PartRef
from ckptfs.commit.parts.parts import agreed_plan, part_attempt, reference_to
from ckptfs.commit.parts.tickets import SealedPart, Ticket, TicketPart
from ckptfs.commit.save.attempt import SaveAttempt
from ckptfs.commit.save.spec import SaveSpec, WrittenPart
from ckptfs.commit.session import RunSession
from ckptfs.commit.state import part_name, promised_here
from ckptfs.errors import IncompleteCheckpointError, StateError
from ckptfs.events import Counters, SaveResult
from ckptfs.storage.base import Shape

__all__ = ["publish_part", "sealed_parts", "wait_sealed", "writing_part"]

_FIRST_LOOK_S, _LAST_LOOK_S = 0.05, 5.0


@contextlib.contextmanager
def writing_part(session: RunSession, part: TicketPart, done: list[SealedPart]) -> Iterator[str]:
    """Yield a path to write into. Collective to enter and to leave, over the ranks of the session.

    On a mounted filesystem it is the attempt's own directory; elsewhere it is a directory of this
    rank alone, which is uploaded on leaving. An exception inside, on any rank, seals nothing and is
    raised on all ranks; the part may be saved again with the same ticket.

    done: Receives the sealed part.
    """
    started = time.perf_counter()
    attempt = _attempt(session, part)
    try:
        attempt.begin()
        with contextlib.ExitStack() as stack:
            with leaving_together(session.control):
                collector = stack.enter_context(collected_files(attempt))
                yield collector.path
            collector.share_out()
            committed = attempt.commit(collector.write, collector.finish)
    except BaseException:
        attempt.abandon()
        raise
    wall_s = time.perf_counter() - started
    result = committed.result(str(part.uri), part.plan.step, session.control.rank, wall_s)
    done.append(SealedPart(part.plan.part, part.plan.of, reference_to(attempt, part.plan), result))


def publish_part(session: RunSession, part: TicketPart, path: str) -> SealedPart:
    """Seal the files below ``path``, a directory of this rank alone, as its share. Collective.

    The directory must not change until this returns. Errors other than the one below are those of
    ``writing_part``.

    Raises:
        StateError: Two ranks have different files of one name.
    """
    started = time.perf_counter()
    attempt = _attempt(session, part)
    is_local = session.caps.shape is Shape.FILESYSTEM
    domain = session.placement.mine.id if is_local else None

    def write() -> WrittenPart:
        return Sender(attempt, path, domain).send([file.path for file in list_files(path)])

    try:
        attempt.begin()
        committed = attempt.commit(write, _alike)
    except BaseException:
        attempt.abandon()
        raise
    wall_s = time.perf_counter() - started
    result = committed.result(str(part.uri), part.plan.step, session.control.rank, wall_s)
    return SealedPart(part.plan.part, part.plan.of, reference_to(attempt, part.plan), result)


def sealed_parts(
    ticket: Ticket, storage_options: Mapping[str, Any] | None = None
) -> list[SealedPart]:
    """Return the sealed parts of a ticket that this process sees in the home. Local, read-only.

    For drivers with groups that cannot send back the values that they were returned. Parts on disks
    that the home does not reach are not seen. If a part was saved again, the last one counts.
    """
    options = {**ticket.storage_options, **(storage_options or {})}
    found: dict[str, SealedPart] = {}
    with looking_at(ticket.uri.parent, options) as look:
        for state in look.views.values():
            for one in promised_here(state).get(ticket.save_id, []):
                ref = PartRef(one.part, one.save_id, one.digest, one.domains)
                uri = str(ticket.uri / one.part)
                result = SaveResult(uri, one.step, one.save_id, Counters(), Counters(), (), 0.0)
                found[one.part] = SealedPart(one.part, one.of, ref, result)
    return list(found.values())


def wait_sealed(
    ticket: Ticket, timeout_s: float, stopped: threading.Event | None = None
) -> list[SealedPart]:
    """Return what ``sealed_parts`` returns once all parts are sealed. Local, read-only.

    The pauses between two looks become longer.

    Raises:
        IncompleteCheckpointError: Some parts are not sealed within timeout_s, or ``stopped`` was
            set. The message names the missing parts.
    """
    stopped = stopped or threading.Event()
    until, pause_s = time.monotonic() + timeout_s, _FIRST_LOOK_S
    while True:
        sealed = sealed_parts(ticket)
        missing = sorted(set(ticket.parts) - {part.part for part in sealed})
        if not missing:
            return sealed
        left_s = until - time.monotonic()
        if left_s <= 0 or stopped.wait(min(pause_s, left_s)):
            raise IncompleteCheckpointError(
                f"part {', '.join(missing)} of {ticket.uri.name} is not sealed",
                uri=ticket.uri,
                hint="its group failed, or it writes to a disk that this process cannot reach",
            )
        pause_s = min(2 * pause_s, _LAST_LOOK_S)


def _attempt(session: RunSession, part: TicketPart) -> SaveAttempt:
    plan = session.control.step("ticket", lambda: part.plan, agreed_plan)
    name = part_name(plan.name, plan.part)
    spec = SaveSpec(name, plan.step, artifact=Kind.DIRECTORY, run=plan.word.generation)
    return part_attempt(session, plan, spec)


def _alike(parts: list[WrittenPart]) -> Mapping[str, bytes]:
    """Check that something was written, and no name by two ranks with different bytes."""
    written: dict[tuple[str | None, str], tuple[int, str | None]] = {}
    for rank, part in enumerate(parts):
        for record in part.files:
            key = (record.domain, record.path)
            first, digest = written.setdefault(key, (rank, record.digest))
            if digest != record.digest:
                raise StateError(
                    f"ranks {first} and {rank} wrote different files {record.path!r}",
                    hint="put the rank into the file's name",
                )
    if not written:
        raise IncompleteCheckpointError("no rank wrote a file")
    return {}
