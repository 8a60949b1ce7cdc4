"""Keys that every rank keeps for itself: their names in a checkpoint, and the way back.

    state dict of rank 3, per_rank=["loader.*"]        in the checkpoint
      {"loader": {"seed": 7, "pos": 12}}       ->      loader@rank3.seed, loader@rank3.pos

The mark goes to the first component, so the checkpoint unflattens into one sub-tree per rank and
stock DCP reads it like any other key. On loading, ``view_for`` shows each rank its own sub-tree
under the plain name, so any load planner finds it. Patterns are those of fnmatch, on flattened keys.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from ckptfs.errors import StateError

__all__ = [
    "LocalFacts",
    "listed",
    "marked_key",
    "original_item",
    "own_keys",
    "rename_plan",
    "renamed_metadata",
    "unmarked_key",
    "view_for",
]

_MARKED = re.compile(r"(?P<root>.*?)@rank(?P<rank>\d+)(?P<rest>(\..*)?)", re.DOTALL)

Path = tuple[str | int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class LocalFacts:
    """What a rank's plan carries to the coordinator: key -> path, and key -> fingerprint."""

    mappings: Mapping[str, Path]
    fingerprints: Mapping[str, int]


def marked_key(key: str, path: Path, rank: int) -> tuple[str, Path]:
    """The key and path under which rank ``rank`` keeps ``key``."""
    root = str(path[0]) if path else key
    marked = f"{root}@rank{rank}"
    return marked + key[len(root) :], (marked, *path[1:])


def unmarked_key(key: str) -> tuple[str, int] | None:
    """The plain key and the rank it belongs to; None for a key of all ranks."""
    found = _MARKED.fullmatch(key)
    return None if found is None else (found["root"] + found["rest"], int(found["rank"]))


def rename_plan(plan: SavePlan, patterns: Sequence[str], rank: int) -> SavePlan:
    """The plan with every key that a pattern matches stored for this rank alone.

    StateError for keys that already look like that, and for sharded tensors: their parts belong
    together.
    """
    mappings, rebuild = _mappings_of(plan)
    # Asked of every key of every save, and few look like that.
    marked = {i.index.fqn for i in plan.items if "@rank" in i.index.fqn}
    if taken := sorted(filter(unmarked_key, marked)):
        raise StateError(
            f"keys with '@rank<number>' are reserved: {listed(taken)}",
            rank=rank,
            hint="rename them, or let per_rank= make such names",
        )
    mine = {i.index.fqn for i in plan.items if _matches(i.index.fqn, patterns)} if patterns else ()
    if not mine:
        return plan
    sharded = {i.index.fqn for i in plan.items if i.type is WriteItemType.SHARD} & mine
    if sharded:
        raise StateError(
            f"per_rank= matches sharded tensors: {listed(sorted(sharded))}",
            rank=rank,
            hint="their parts are one tensor over all ranks; narrow the pattern",
        )
    names = {key: marked_key(key, mappings.get(key, (key,)), rank) for key in mine}
    items = [_renamed(item, names) for item in plan.items]
    return rebuild(items, names)


def original_item(item: WriteItem, rank: int) -> WriteItem:
    """The item as the planner knows it: without the mark of ``rank``."""
    plain = unmarked_key(item.index.fqn)
    if plain is None or plain[1] != rank:
        return item
    index = MetadataIndex(plain[0], item.index.offset, item.index.index)
    return dataclasses.replace(item, index=index)


def own_keys(
    keys: Iterable[str], rank: int, world: int, saved_world: int | None, wanted: Iterable[str]
) -> dict[str, str]:
    """Marked key -> plain key, of what rank ``rank`` of ``world`` kept for itself.

    StateError when a key in ``wanted`` was saved per rank by another number of ranks
    (``saved_world``; None: as many as left a mark).
    """
    marked = {key: found for key in keys if "@rank" in key and (found := unmarked_key(key))}
    if not marked:
        return {}
    saved = saved_world or 1 + max(owner for _, owner in marked.values())
    if saved != world:
        needed = {plain for plain, _ in marked.values()} & set(wanted)
        if needed:
            raise StateError(
                f"saved per rank by {saved} ranks, loaded by {world}: {listed(sorted(needed))}",
                rank=rank,
                hint="leave these keys out of the state dict, or load with as many ranks",
            )
        return {}
    return {key: plain for key, (plain, owner) in marked.items() if owner == rank}


def view_for(
    metadata: Metadata, rank: int, world: int, saved_world: int | None, wanted: Iterable[str]
) -> Metadata:
    """The metadata as rank ``rank`` of ``world`` sees it: its own keys under their plain names.

    The other ranks' keys stay under their marked names. StateError as for ``own_keys``.
    """
    mine = own_keys(metadata.state_dict_metadata, rank, world, saved_world, wanted)
    return renamed_metadata(metadata, mine) if mine else metadata


def renamed_metadata(metadata: Metadata, mine: Mapping[str, str]) -> Metadata:
    """The metadata with other names for some keys (as they are -> as they shall be)."""
    paths: Mapping[str, Path] | None = metadata.planner_data
    return dataclasses.replace(
        metadata,
        state_dict_metadata={mine.get(k, k): v for k, v in metadata.state_dict_metadata.items()},
        planner_data=paths
        and {mine.get(k, k): _unmarked_path(v) if k in mine else v for k, v in paths.items()},
        storage_data={
            MetadataIndex(mine.get(i.fqn, i.fqn), i.offset, i.index): info
            for i, info in metadata.storage_data.items()
        },
    )


def _unmarked_path(path: Path) -> Path:
    found = unmarked_key(str(path[0]))
    return path if found is None else (found[0], *path[1:])


def _mappings_of(
    plan: SavePlan,
) -> tuple[
    Mapping[str, Path], Callable[[list[WriteItem], Mapping[str, tuple[str, Path]]], SavePlan]
]:
    """The plan's key -> path, and how to make the plan anew with some keys renamed.

    planner_data is ours (LocalFacts), stock's (a dict), or none (flatten_state_dict=False).
    """
    data = plan.planner_data
    if isinstance(data, LocalFacts):

        def facts(items: list[WriteItem], names: Mapping[str, tuple[str, Path]]) -> SavePlan:
            renamed = LocalFacts(
                _rekeyed(data.mappings, names),
                {names[k][0] if k in names else k: v for k, v in data.fingerprints.items()},
            )
            return dataclasses.replace(plan, items=items, planner_data=renamed)

        return data.mappings, facts
    if isinstance(data, dict):
        return data, lambda items, names: dataclasses.replace(
            plan, items=items, planner_data=_rekeyed(data, names)
        )
    return {}, lambda items, _: dataclasses.replace(plan, items=items)


def _rekeyed(
    mappings: Mapping[str, Path], names: Mapping[str, tuple[str, Path]]
) -> dict[str, Path]:
    return dict(names.get(key, (key, path)) for key, path in mappings.items())


def _renamed(item: WriteItem, names: Mapping[str, tuple[str, Path]]) -> WriteItem:
    if item.index.fqn not in names:
        return item
    index = MetadataIndex(names[item.index.fqn][0], item.index.offset, item.index.index)
    return dataclasses.replace(item, index=index)


def _matches(key: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns)


def listed(keys: Sequence[str], most: int = 10) -> str:
    """The first keys, and how many more there are."""
    more = f" and {len(keys) - most} more" if len(keys) > most else ""
    return ", ".join(repr(key) for key in keys[:most]) + more
