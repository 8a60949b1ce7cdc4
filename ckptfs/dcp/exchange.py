"""What a rank says when a save is planned, and what the coordinator makes of it.

    rank         Saying.of(plan, memory)     -> .whole, or .short where the coordinator knows the rest
    coordinator  decide(said, memory, ...)   -> Described, or None: say it whole

A message is a version, a hash of the plan's structure, fingerprints of values, and the structure
itself. Whoever keeps a ``PlanMemory`` from save to save sends the structure once: the hash stands for
it, and covers dtypes, shapes, pieces, keys and what ``per_rank`` made of them. A coordinator that does
not know a hash asks for all plans whole, so a memory that is lost costs a step and nothing else. The
decision is kept as well, for the same plans of all ranks in the same domains. Values are compared in
every save.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash
from torch.distributed.checkpoint.planner import SavePlan

from ckptfs.dcp.columns import (
    SHARD,
    Columns,
    Interned,
    Names,
    Prints,
    decode_prints,
    decode_structure,
    prints_of,
    structure_of,
)
from ckptfs.dcp.emit import Described
from ckptfs.dcp.packed import Ints
from ckptfs.dcp.planner import refuse_divergence, shard_fingerprint
from ckptfs.dcp.world_plan import world_of
from ckptfs.dcp.world_table import Table, table_of
from ckptfs.errors import StateError

__all__ = ["Decision", "PlanMemory", "Saying", "decide"]

_VERSION = 1
_HEAD = struct.Struct("<BB16sI")  # version, whether it is whole, hash, bytes of prints

_Key = tuple[tuple[bytes, ...], tuple[bool, ...], tuple[tuple[int, ...], ...], bool]


@dataclass(frozen=True, slots=True, eq=False)
class Decision:
    """What was decided over which plans. structures: of all ranks, by their hashes."""

    key: _Key
    structures: Mapping[bytes, Columns]
    described: Described


@dataclass(slots=True)
class PlanMemory:
    """What is known of the last planned save, from one save of this process to the next.

    agreed: hash of the structure that the coordinator has from this rank. decision: the last one, on
    the coordinator. Saves may use it at once: each field changes as a whole, and a hash that is not
    known any more costs a step.
    """

    agreed: bytes | None = None
    decision: Decision | None = None


@dataclass(frozen=True, slots=True)
class Saying:
    """One rank's plan in bytes. digest: the hash of its structure."""

    digest: bytes
    prints: bytes
    structure: bytes

    @classmethod
    def of(cls, plan: SavePlan) -> Saying:
        """StateError for items that ``SavePlanner`` does not make."""
        structure = structure_of(plan)
        return cls(xxhash.xxh3_128_digest(structure), prints_of(plan), structure)

    @property
    def whole(self) -> bytes:
        """All of it."""
        head = _HEAD.pack(_VERSION, 1, self.digest, len(self.prints))
        return head + self.prints + self.structure

    @property
    def short(self) -> bytes:
        """The hash in place of the structure."""
        return _HEAD.pack(_VERSION, 0, self.digest, len(self.prints)) + self.prints


@dataclass(frozen=True, slots=True)
class _Said:
    """A rank's message, taken apart. columns: None where the hash says nothing here."""

    digest: bytes
    raw: bytes
    prints: Prints
    columns: Columns | None


def decide(
    said: Sequence[bytes],
    memory: PlanMemory,
    *,
    domains: Sequence[Sequence[int]] = (),
    to_lowest_rank: bool = False,
) -> Described | None:
    """Coordinator only. What all ranks agreed on; None where some plans have to be said whole.

    StateError where values differ between ranks, where the plans do not make one checkpoint, and for
    bytes that this version cannot read.
    """
    interned = Interned()
    last = memory.decision
    structures = dict(last.structures) if last else {}
    plans = [_read(rank, data, structures, interned) for rank, data in enumerate(said)]
    columns = [plan.columns for plan in plans if plan.columns is not None]
    if len(columns) < len(plans):
        return None
    compared = tuple(plan.prints.compared for plan in plans)
    places = tuple(tuple(ranks) for ranks in domains)
    key = (tuple(plan.digest for plan in plans), compared, places, to_lowest_rank)
    if last is not None and last.key == key:
        described = last.described
        _compare_values(described.world.table, plans, columns)
    else:
        table = table_of(columns)
        if not _shards_agree(table, np.array(compared)):
            _tell_divergence(plans, columns)
        _compare_values(table, plans, columns)
        world = world_of(table, domains=domains, to_lowest_rank=to_lowest_rank)
        described = Described(world)
    mine = {plan.digest: found for plan, found in zip(plans, columns, strict=True)}
    memory.decision = Decision(key, mine, described)
    return described


def _read(rank: int, data: bytes, structures: dict[bytes, Columns], interned: Interned) -> _Said:
    if not data or data[0] != _VERSION:
        raise StateError(
            f"rank {rank} sent a save plan of version {data[0] if data else 'none'}, "
            f"and version {_VERSION} is read here",
            rank=rank,
            hint="run the same version of ckptfs on all ranks",
        )
    try:
        if len(data) < _HEAD.size:
            raise ValueError("it ends too early")
        _, is_whole, digest, length = _HEAD.unpack_from(data)
        end = _HEAD.size + length
        raw, rest = data[_HEAD.size : end], data[end:]
        if len(raw) != length or is_whole > 1 or (rest and not is_whole):
            raise ValueError("its parts do not fit together")
        if is_whole and digest != xxhash.xxh3_128_digest(rest):
            raise ValueError("its hash is another's")
        if is_whole and digest not in structures:
            structures[digest] = decode_structure(rest, interned)
        columns = structures.get(digest)
        prints = interned.get(raw, decode_prints)
        if columns and len(prints.keys) and prints.keys[-1] >= len(columns.names.keys):
            raise ValueError("a fingerprint of no key")
    except ValueError as error:
        raise StateError(
            f"the save plan of rank {rank} cannot be read: {error}",
            rank=rank,
            hint="run the same version of ckptfs on all ranks",
        ) from error
    return _Said(digest, raw, prints, columns)


# -- whether ranks have the same values -----------------------------------------------------------


def _shards_agree(table: Table, compared: Ints) -> bool:
    """Whether each key is sharded on all compared ranks, with one dtype and size, or on none."""
    kinds: dict[object, int] = {}
    properties = zip(table.properties, table.sizes, strict=True)
    number = [kinds.setdefault((p.dtype, size), len(kinds)) for p, size in properties]
    rows = np.flatnonzero(compared[table.ranks])
    keys = table.keys[rows]
    told = np.where(table.kinds[rows] == SHARD, np.array([*number, -1])[table.shapes[rows]], -1)
    first = np.zeros(len(table.names), np.int64)
    first[keys] = told
    return bool(np.array_equal(first[keys], told))


def _compare_values(table: Table, plans: Sequence[_Said], columns: Sequence[Columns]) -> None:
    """StateError where two ranks have other fingerprints of one key."""
    seen: set[tuple[Names, bytes]] = set()
    values = np.zeros(len(table.names), np.uint64)
    known = np.zeros(len(table.names), np.bool_)
    for plan, mine in zip(plans, columns, strict=True):
        if not len(plan.prints.keys) or (mine.names, plan.raw) in seen:
            continue
        seen.add((mine.names, plan.raw))
        keys = table.numbers[mine.names][plan.prints.keys]
        if np.any(known[keys] & (values[keys] != plan.prints.values)):
            _tell_divergence(plans, columns)
        values[keys] = plan.prints.values
        known[keys] = True


def _tell_divergence(plans: Sequence[_Said], columns: Sequence[Columns]) -> None:
    """StateError with keys and ranks, where any differ indeed."""
    refuse_divergence(
        [_prints_by_key(plan.prints, mine) for plan, mine in zip(plans, columns, strict=True)]
    )


def _prints_by_key(prints: Prints, columns: Columns) -> dict[str, int]:
    names, rows, shapes = columns.names.keys, columns.rows, columns.shapes
    found = {
        names[key]: value
        for key, value in zip(prints.keys.tolist(), prints.values.tolist(), strict=True)
    }
    if not prints.compared:
        return found
    keys, firsts = np.unique(rows.keys, return_index=True)
    for key, row in zip(keys.tolist(), firsts.tolist(), strict=True):
        if rows.kinds[row] == SHARD:
            shape = columns.shape_of[rows.places[row]]
            dtype, size = shapes.properties[shape].dtype, shapes.sizes[shape]
            found[names[key]] = shard_fingerprint(dtype, size)
    return found
