"""One rank's part of a save that takes over what has not changed: compare, take, write the rest.

    filesystem     __0_0.distcp  a link to the base's file      __0_1.distcp  written
    object store   <origin>/__0_3.distcp  listed by its key     <own>/__0_0.distcp  written to _data/

Durable when it returns, names too. Local; every failure of taking something over means writing it.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem

from ckptfs.commit.entries import Seal
from ckptfs.commit.manifest import FileRecord
from ckptfs.commit.ops import drive
from ckptfs.commit.shared_data import is_there, link_file
from ckptfs.commit.spec import WrittenPart
from ckptfs.dcp.engine import auto_engine
from ckptfs.dcp.layout import (
    Placed,
    WriteEngine,
    Written,
    data_name,
    files_for,
    sidecar_name,
    write_files,
)
from ckptfs.dcp.pipeline import encode_placed, written_part
from ckptfs.dcp.resolve import Loan, Resolve
from ckptfs.dcp.reuse import Base, HeldFile, HeldItem, Memory, Site, base_of
from ckptfs.dcp.reuse_compare import is_alike, is_unchanged
from ckptfs.dcp.reuse_plan import bundles, files_in_use
from ckptfs.errors import StorageError, UnsupportedError
from ckptfs.storage.base import Shape

__all__ = ["Mine", "write_changed"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Mine:
    """What one rank writes: its items in the order of its plan, and how their data is got."""

    rank: int
    items: Sequence[WriteItem]
    resolve: Resolve


@dataclass(frozen=True, slots=True)
class _Taken:
    """A file of the base that this save uses, as its own manifest lists it."""

    file: HeldFile
    positions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What was written, what was taken over, and all that could have been."""

    written: Written
    taken: tuple[_Taken, ...]
    unchanged: Mapping[int, HeldItem]


@dataclass(frozen=True, slots=True)
class _Same:
    """An item that the base holds unchanged. done: to be told when nobody needs its data any more."""

    held: HeldItem
    done: Callable[[], None]


def write_changed(
    mine: Mine,
    site: Site,
    previous: Seal | None,
    memory: Memory,
    *,
    threads: int | None = None,
    engine: WriteEngine = auto_engine,
) -> WrittenPart:
    """Write this rank's items but those that the save ``previous`` holds unchanged.

    memory: of the saves before; knows this one when it returns. Errors are those of writing.
    """
    started = time.perf_counter()
    wanted = [item.index for item in mine.items]
    base = base_of(previous, site, wanted, memory)
    same = {} if base is None else _compare(mine, base)
    unchanged = {position: one.held for position, one in same.items()}
    in_use = {} if base is None else files_in_use(base, unchanged)
    taken = [] if base is None else _take(base, in_use, site, mine.rank)
    used = {position for taking in taken for position in taking.positions}
    for position in used:
        same[position].done()
    compare_s = time.perf_counter() - started
    rest = [position for position in range(len(mine.items)) if position not in used]
    files = files_for(site.storage, site.prefix, [mine.items[at] for at in rest], threads)
    written = write_files(
        site.storage,
        site.prefix,
        mine.rank,
        mine.items,
        mine.resolve,
        engine=engine,
        threads=files,
        buckets=bundles(mine.items, rest, unchanged.keys() - used, memory.cut, files),
        first=0 if site.is_shared else len(in_use),
    )
    if taken and not written.names:
        site.storage.sync(site.prefix.rstrip("/"))
    outcome = _Outcome(written, tuple(taken), unchanged)
    part = _part_of(site, outcome)
    memory.learn(_as_base(mine, site, part, outcome))
    counters = dataclasses.replace(part.counters, verify_s=part.counters.verify_s + compare_s)
    return dataclasses.replace(part, counters=counters)


def _compare(mine: Mine, base: Base) -> dict[int, _Same]:
    """By position in the plan. What has changed is resolved once more when it is written."""
    same = {}
    for position, item in enumerate(mine.items):
        held = base.items.get(item.index)
        if held is None or not is_alike(item, held):
            continue
        data = mine.resolve(item)
        loan = data if isinstance(data, Loan) else Loan(data)
        if is_unchanged(held, loan.data):
            same[position] = _Same(held, loan.done)
        else:
            loan.back()
    return same


def _take(base: Base, in_use: Mapping[str, list[int]], site: Site, rank: int) -> list[_Taken]:
    taken: list[_Taken] = []
    for number, (path, positions) in enumerate(in_use.items()):
        held = base.files[path]
        if site.keys.shape is Shape.OBJECT:
            file = _listed(held, site) if held.record.is_shared else None
        else:
            # No number twice: a link that was half made would pass for the next one.
            name = f"{site.keys.save_id}/{data_name(rank, number)}"
            file = _linked(base, held, site, name)
        if file is not None:
            taken.append(_Taken(file, tuple(positions)))
    return taken


def _linked(base: Base, held: HeldFile, site: Site, path: str) -> HeldFile | None:
    """The base's file and sidecar under names of our own, or None: they are written."""
    origin = base.origin_of(held)
    data = FileRecord(path, held.record.size_bytes, site.domain, sidecar_name(path), origin=origin)
    sidecar = dataclasses.replace(
        held.sidecar, path=sidecar_name(path), domain=site.domain, origin=origin
    )
    folder = site.prefix.rstrip("/").rsplit("/", 1)[0]
    for old, new in ((held.record, data), (held.sidecar, sidecar)):
        program = link_file(base.homes, old.path, f"{folder}/{new.path}")
        try:
            linked = drive(program, site.storage)
        except UnsupportedError as error:
            logger.debug("written, not linked: %s", error)
            return None
        except StorageError as error:
            logger.warning("written, not linked: %s", error)
            return None
        if not linked:
            logger.debug("written, not linked: %s of save %s is gone", old.path, base.save_id)
            return None
    return HeldFile(data, sidecar)


def _listed(held: HeldFile, site: Site) -> HeldFile | None:
    """The base's file by its key, or None where it is not there with its size."""
    try:
        if drive(is_there(held.record), site.storage):
            return HeldFile(
                dataclasses.replace(held.record, domain=site.domain),
                dataclasses.replace(held.sidecar, domain=site.domain),
            )
    except StorageError as error:
        logger.warning("written, not referenced: %s", error)
        return None
    logger.warning("%s of an earlier save is not there any more: written", held.record.path)
    return None


def _part_of(site: Site, outcome: _Outcome) -> WrittenPart:
    """What the coordinator is told: the files taken over first, then those written."""
    save_id, written, unchanged = site.keys.save_id, outcome.written, outcome.unchanged
    own = written_part(written, save_id, site.domain, save_id if site.is_shared else None)
    placed = [
        tuple(
            Placed(p, unchanged[p].digests.offset, unchanged[p].digests.length)
            for p in taking.positions
        )
        for taking in outcome.taken
    ]
    files = [record for t in outcome.taken for record in (t.file.record, t.file.sidecar)]
    kept = [place.length for places in placed for place in places]
    counters = dataclasses.replace(
        own.counters, items=own.counters.items + len(kept), referenced_bytes=sum(kept)
    )
    payload = encode_placed([*placed, *written.placed])
    return WrittenPart((*files, *own.files), counters, payload)


def _as_base(mine: Mine, site: Site, part: WrittenPart, outcome: _Outcome) -> Base:
    """This save, for the next one, should it be the one that the log calls the last committed."""
    records = {record.path: record for record in part.files}
    files = {r.path: HeldFile(r, records[r.digests]) for r in part.files if r.digests is not None}
    items: dict[MetadataIndex, HeldItem] = {}
    for taking in outcome.taken:
        for position in taking.positions:
            moved = dataclasses.replace(outcome.unchanged[position], path=taking.file.record.path)
            items[mine.items[position].index] = moved
    written = outcome.written
    for name, placed, digests in zip(written.names, written.placed, written.digests, strict=True):
        path = f"{site.keys.save_id}/{name}"
        for place, known in zip(placed, digests.items, strict=True):
            item = mine.items[place.position]
            data = item.tensor_data
            dtype = None if data is None else data.properties.dtype
            sizes = () if data is None else tuple(data.chunk.sizes)
            items[item.index] = HeldItem(path, known, dtype, sizes)
    return Base(site.keys.save_id, site.homes, items, files)
