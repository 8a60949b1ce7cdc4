"""A checkpoint of parts, copied: gathered into one run, as the parts that it had.

    claim     the target's run: what several groups wrote is committed by whoever holds it
    each      part by part, a save of its own, sealed for the ticket
    commit    one seal over all of them

The processes that copy must see all of its parts. An interrupted copy of this kind begins anew; the
claim of a process that died is taken over.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from collections.abc import Iterator
from dataclasses import replace

from ckptfs.commit.catalog import find
from ckptfs.commit.claim import claim
from ckptfs.commit.copying import CopyTask, Writable, copy_share
from ckptfs.commit.entries import Seal
from ckptfs.commit.manifest import FileRecord
from ckptfs.commit.ops import drive
from ckptfs.commit.parts import PartAttempt
from ckptfs.commit.pieces import part_name, piece
from ckptfs.commit.resuming import AGAIN
from ckptfs.commit.run import Caller, Run
from ckptfs.commit.seat import Seat
from ckptfs.commit.spec import Committed, IfExists
from ckptfs.commit.tickets import SealedPart, Ticket, begin_parts
from ckptfs.dcp.copy_source import Original, find_held
from ckptfs.dcp.copying import Manner, copy_files, spec_of
from ckptfs.errors import NotFoundError, StateError
from ckptfs.storage.registry import open_storage
from ckptfs.tools.copy_plan import Item, Status

__all__ = ["copy_parts"]


def copy_parts(source: Seat, seal: Seal, target: Seat, item: Item, manner: Manner) -> Committed:
    """Collective. Copy a whole of parts; committed when it returns. Errors as for ``copy_to``."""
    if_exists = IfExists.REPLACE if item.status is Status.TO_REPLACE else IfExists.ERROR
    control = source.control
    fresh = f"{item.origin}{AGAIN}{secrets.token_hex(4)}"
    save_id = control.step("copy id", lambda: None, lambda _: fresh)
    manner = replace(manner, kept=False)
    with claim(target, caller=Caller("cp", for_call=True)) as run:
        ticket = begin_parts(
            run,
            item.name,
            item.step,
            [ref.name for ref in seal.parts],
            if_exists=if_exists,
            artifact=seal.artifact,
            save_id=save_id,
        )
        try:
            with _beside(source, seal, manner) as beside:
                sealed = _copy_each(source, seal, run, ticket, manner)
                ticket.commit(sealed, metrics=dict(seal.metrics), beside=beside)
        except BaseException:
            ticket.abandon()
            raise
    return Committed(save_id, (), 0.0)


def _copy_each(
    source: Seat, seal: Seal, run: Run, ticket: Ticket, manner: Manner
) -> list[SealedPart]:
    sealed = []
    for ref in seal.parts:
        one = piece(seal, ref)
        held = find_held(source, Original(one.name, one))
        plan = ticket.part(ref.name).plan
        name = part_name(ticket.uri.name, ref.name)
        spec = spec_of(held, one, name, run.generation, ref.save_id)
        attempt = PartAttempt(run.seat, plan, spec)
        committed = copy_files(source, held, attempt, manner)
        result = committed.result(str(ticket.uri / ref.name), seal.step, source.control.rank, 0.0)
        sealed.append(SealedPart(ref.name, plan.of, attempt.ref, result))
    return sealed


@contextlib.contextmanager
def _beside(source: Seat, seal: Seal, manner: Manner) -> Iterator[str | None]:
    """A local directory with the files that lie beside the parts; None where there are none."""

    def listed() -> tuple[str, tuple[FileRecord, ...]]:
        try:
            found = drive(find(seal, source.caps.shape, source.storage.root), source.storage)
        except NotFoundError:
            return "", ()  # its home is a disk that this node does not see
        return found.home, () if found.manifest is None else found.manifest.files

    home, files = listed() if source.placement.mine.id in seal.domains else ("", ())
    here = source.control.step("beside the parts", lambda: bool(files))
    if any(here) and not here[0]:
        raise StateError(
            f"rank 0 does not see the files beside the parts of {seal.name}",
            uri=source.storage.uri(seal.name),
            hint="start rank 0 on the node that committed it",
        )
    if source.control.rank or not files:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="ckptfs-") as scratch:
        with contextlib.closing(open_storage(scratch, {})) as storage:
            tasks = [CopyTask(file) for file in files]
            place = Writable(storage, "", "", None, plain=True)
            reading = manner.readable(source.storage, home, source.control.rank)
            for file in files:
                os.makedirs(os.path.dirname(os.path.join(scratch, file.path)), exist_ok=True)
            copy_share(tasks, reading, place, seal.save_id, tally=manner.tally)
        yield scratch
