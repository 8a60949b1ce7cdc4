"""State dicts: what is accepted as one, how it is flattened, and the keys of single ranks.

    as_state_dict(given)     a module, or another object with state_dict, in the place of a dict
    unwrap_stateful(state)   every Stateful at the top level replaced by its own state dict

Flattened as torch flattens it, in one pass:

    {"a": {"b": t, 3: [u, {}]}}   ->   {"a.b": t, "a.3.0": u}   and   the path of each

    flat_to_save(state)    None: a ShardedTensor is inside; torch splits those that contain others
    flat_to_load(state)    None: that, a tensor on the meta device, or two values under one key
    containers(state)      the containers that flattening splits: key and path of each, empty ones too

torch's load planner visits the state three times: to give tensors on the meta device memory, to unwrap
ShardedTensors in ShardedTensors, and to flatten. Most states need only the last. None means that one of the
other passes has something to do.

Keys that every rank keeps for itself:

    state dict of rank 3, per_rank=["loader.*"]        in the checkpoint
      {"loader": {"seed": 7, "pos": 12}}       ->      loader@rank3.seed, loader@rank3.pos

The mark goes to the first component, so the checkpoint unflattens into one sub-tree per rank and stock DCP
reads it like any other key. On loading, ``view_for`` shows each rank its own sub-tree under the plain name, so
any load planner finds it. Patterns are those of fnmatch, on flattened keys.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

from ckptfs import _torch
from ckptfs.errors import StateError

__all__ = [
    "ROOT",
    "Flat",
    "LocalFacts",
    "as_state_dict",
    "containers",
    "flat_to_load",
    "flat_to_save",
    "listed",
    "marked_key",
    "module_of",
    "original_item",
    "own_keys",
    "rename_plan",
    "renamed_metadata",
    "stateful_keys",
    "unmarked_key",
    "unwrap_stateful",
    "view_for",
]

Path = tuple[str | int, ...]

ROOT = "state"  # the key of a state that is not a dict


class _NamedModule:
    """A module with the names of its parameters that it has without wrappers.

    Wrappers are, for example, DistributedDataParallel and torch.compile. A checkpoint with plain names loads
    with another wrapper; ``CheckpointManager`` does the same.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.module: torch.nn.Module = _torch.unwrapped(module)

    def state_dict(self) -> dict[str, Any]:
        """Return parameters and buffers."""
        return {_torch.clean_name(name): v for name, v in self.module.state_dict().items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load through the module's own method, so that its hooks run."""
        full = {_torch.clean_name(name): name for name in self.module.state_dict()}
        self.module.load_state_dict({full.get(name, name): v for name, v in state_dict.items()})


class _Stateless:
    """A placeholder for a value that is not a state dict."""

    def __init__(self, name: str) -> None:
        self._name = name

    def state_dict(self) -> dict[str, Any]:
        """Raise StateError."""
        name = self._name
        raise StateError(
            f"{'an' if name[:1] in 'aeiouAEIOU' else 'a'} {name} is not a state dict",
            hint='give a dict, such as {"state": value}; a module or another object with state_dict is taken too',
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do nothing: this is never called, because a load calls ``state_dict`` first."""


def module_of(value: object) -> torch.nn.Module | None:
    """Return the module that this state belongs to; None for any other object."""
    if isinstance(value, _NamedModule):
        return value.module
    return value if isinstance(value, torch.nn.Module) else None


def as_state_dict(given: Any) -> Any:
    """Return the argument of ``save`` or ``load`` as a dict.

    A module, an optimizer or another object with state_dict and load_state_dict is put under "state", as in
    ``CheckpointManager``.

    Any other value, such as a tensor or a list, is put there as an object with a state_dict that raises
    StateError. This happens inside a collective step, so that other ranks, which may have valid arguments,
    receive the error too.
    """
    if isinstance(given, Mapping):
        return given
    if isinstance(given, torch.nn.Module):
        return {ROOT: _NamedModule(given)}
    if isinstance(given, Stateful) and not isinstance(given, (type, torch.Tensor)):
        return {ROOT: given}
    return {ROOT: _Stateless(type(given).__name__)}


def unwrap_stateful(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return a shallow copy in which every top-level Stateful is its state dict, as in stock DCP.

    The objects are called in sorted order of their keys. If two ranks called them in different orders, state
    dicts that communicate with other ranks would wait for each other without end.
    """
    found = {key: state_dict[key].state_dict() for key in stateful_keys(state_dict)}
    return {key: found.get(key, value) for key, value in state_dict.items()}


def stateful_keys(state_dict: Mapping[str, Any]) -> list[str]:
    """Return the keys of the Stateful objects, in the order in which every rank calls them."""
    # Tensors are checked first: to test whether a value is Stateful takes longer than to plan it.
    found = [
        key
        for key, value in state_dict.items()
        if not isinstance(value, torch.Tensor) and isinstance(value, Stateful)
    ]
    return sorted(found, key=str)


# -- flattening ------------------------------------------------------------------------------------

Flat = tuple[dict[str, Any], dict[str, Path]]  # key -> leaf, key -> path, in torch's order

_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
_ATOMS = frozenset({type(None), bool, int, float, str, bytes})
# Leaves that are not searched for ShardedTensors when they are saved: inside them none could be saved.
_NOT_SHARDED = _TENSORS | _ATOMS | {complex, tuple, list, dict, DTensor}


def flat_to_save(state: Mapping[str, Any]) -> Flat | None:
    """Flatten as torch's ``flatten_state_dict``; None: see the module's description.

    ValueError if two values have one key.
    """
    flat, paths = _walked(state)
    kinds = {type(value) for value in flat.values()} - _NOT_SHARDED
    if any(issubclass(kind, torch.Tensor) for kind in kinds) and any(
        map(_torch.is_sharded_tensor, flat.values())
    ):
        return None
    return flat, paths


def flat_to_load(state: Mapping[Any, Any]) -> Flat | None:
    """Flatten as torch's load planner; None: torch has to do it, see the module's description."""
    try:
        flat, paths = _walked(state)
    except ValueError:
        return None
    for value in flat.values():
        kind = type(value)
        # Inlined: a call for each of 20,000 leaves would take a third of the time.
        if kind in _TENSORS:
            if value.is_meta:
                return None
        elif kind not in _ATOMS and _is_for_torch(value):
            return None
    return flat, paths


def containers(state: Mapping[Any, Any]) -> Iterator[tuple[str, Path, Any]]:
    """Yield key, path and value of each dict and list that flattening splits, outer ones first."""
    return _containers(state, (), "")


def _containers(value: Any, path: Path, before: str) -> Iterator[tuple[str, Path, Any]]:
    named = isinstance(value, Mapping)
    for part, inner in value.items() if named else enumerate(value):
        if isinstance(inner, Mapping) or (isinstance(inner, list) and not _is_leaf(inner)):
            own = (*path, str(part) if named else part)
            yield f"{before}{part}", own, inner
            yield from _containers(inner, own, f"{before}{part}.")


def _walked(state: Mapping[Any, Any]) -> Flat:
    walk = _Walk()
    walk.mapping(state, (), "")
    return walk.flat, walk.paths


class _Walk:
    def __init__(self) -> None:
        self.flat: dict[str, Any] = {}
        self.paths: dict[str, Path] = {}

    def mapping(self, values: Mapping[Any, Any], path: Path, before: str) -> None:
        flat, paths = self.flat, self.paths
        for key, value in values.items():
            name = str(key)
            kind = type(value)
            if kind in _TENSORS or kind in _ATOMS:  # most are; a test for Mapping is slow
                full_key = before + name
                if full_key in flat:
                    raise _twice(full_key)
                flat[full_key] = value
                paths[full_key] = (*path, name)
            else:
                self.anything(value, (*path, name), before + name)

    def anything(self, value: Any, path: Path, key: str) -> None:
        if isinstance(value, Mapping):
            self.mapping(value, path, f"{key}.")
        elif isinstance(value, list) and not _is_leaf(value):
            for place, inner in enumerate(value):
                self.anything(inner, (*path, place), f"{key}.{place}")
        else:
            if key in self.flat:
                raise _twice(key)
            self.flat[key] = value
            self.paths[key] = path


def _twice(key: str) -> ValueError:
    return ValueError(f"duplicated flatten key {key}")  # torch's words


def _is_leaf(values: list[Any]) -> bool:
    """Return whether torch keeps a list whole: it contains no tensor and no mapping at any depth."""
    return not any(
        isinstance(value, (torch.Tensor, Mapping))
        or (isinstance(value, list) and not _is_leaf(value))
        for value in values
    )


def _is_for_torch(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        # In this order: is_meta fails for a ShardedTensor without a shard here, or with several.
        return _torch.is_sharded_tensor(value) or value.is_meta
    if isinstance(value, (list, tuple)):
        return any(_is_for_torch(inner) for inner in value)
    if isinstance(value, Mapping):
        return any(_is_for_torch(inner) for inner in value.values())
    return _torch.is_sharded_tensor(value)


# -- keys of one rank ------------------------------------------------------------------------------

_MARKED = re.compile(r"(?P<root>.*?)@rank(?P<rank>\d+)(?P<rest>(\..*)?)", re.DOTALL)


@dataclasses.dataclass(frozen=True, slots=True)
class LocalFacts:
    """What a rank's plan sends to the coordinator: key -> path, and key -> fingerprint."""

    mappings: Mapping[str, Path]
    fingerprints: Mapping[str, int]


def marked_key(key: str, path: Path, rank: int) -> tuple[str, Path]:
    """Return the key and path under which rank ``rank`` keeps ``key``."""
    root = str(path[0]) if path else key
    marked = f"{root}@rank{rank}"
    return marked + key[len(root) :], (marked, *path[1:])


def unmarked_key(key: str) -> tuple[str, int] | None:
    """Return the plain key and the rank that it belongs to; None for a key of all ranks."""
    found = _MARKED.fullmatch(key)
    return None if found is None else (found["root"] + found["rest"], int(found["rank"]))


def rename_plan(plan: SavePlan, patterns: Sequence[str], rank: int) -> SavePlan:
    """Return the plan with every key that matches a pattern stored for this rank alone.

    StateError for keys that have such a mark already, and for sharded tensors, because their parts belong
    together.
    """
    mappings, rebuild = _mappings_of(plan)
    # This tests every key of every save, and few have a mark; the substring test is quick.
    marked = {i.index.fqn for i in plan.items if "@rank" in i.index.fqn}
    if reserved := sorted(filter(unmarked_key, marked)):
        raise StateError(
            f"keys with '@rank<number>' are reserved: {listed(reserved)}",
            rank=rank,
            hint="rename them, or use per_rank=, which makes such names",
        )
    matched = (
        {i.index.fqn for i in plan.items if _matches(i.index.fqn, patterns)} if patterns else ()
    )
    if not matched:
        return plan
    sharded = {i.index.fqn for i in plan.items if i.type is WriteItemType.SHARD} & matched
    if sharded:
        raise StateError(
            f"per_rank= matches sharded tensors: {listed(sorted(sharded))}",
            rank=rank,
            hint="their parts form one tensor over all ranks; narrow the pattern",
        )
    names = {key: marked_key(key, mappings.get(key, (key,)), rank) for key in matched}
    items = [_renamed(item, names) for item in plan.items]
    return rebuild(items, names)


def original_item(item: WriteItem, rank: int) -> WriteItem:
    """Return the item as the planner knows it: without the mark of ``rank``."""
    plain = unmarked_key(item.index.fqn)
    if plain is None or plain[1] != rank:
        return item
    index = MetadataIndex(plain[0], item.index.offset, item.index.index)
    return dataclasses.replace(item, index=index)


def own_keys(
    keys: Iterable[str], rank: int, world: int, saved_world: int | None, wanted: Iterable[str]
) -> dict[str, str]:
    """Return marked key -> plain key for what rank ``rank`` of ``world`` kept for itself.

    StateError if a key in ``wanted`` was saved per rank by another number of ranks (``saved_world``; None: the
    number follows from the marks).
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
    """Return the metadata as rank ``rank`` of ``world`` sees it: its own keys under plain names.

    The other ranks' keys keep their marked names. StateError as for ``own_keys``.
    """
    own = own_keys(metadata.state_dict_metadata, rank, world, saved_world, wanted)
    return renamed_metadata(metadata, own) if own else metadata


def renamed_metadata(metadata: Metadata, names: Mapping[str, str]) -> Metadata:
    """Return the metadata with other names for some keys (old name -> new name)."""
    paths: Mapping[str, Path] | None = metadata.planner_data
    return dataclasses.replace(
        metadata,
        state_dict_metadata={names.get(k, k): v for k, v in metadata.state_dict_metadata.items()},
        planner_data=paths
        and {names.get(k, k): _unmarked_path(v) if k in names else v for k, v in paths.items()},
        storage_data={
            MetadataIndex(names.get(i.fqn, i.fqn), i.offset, i.index): info
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
    """Return the plan's key -> path, and a function that rebuilds the plan with renamed keys.

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
    """Return the first keys as text, and how many more there are."""
    more = f" and {len(keys) - most} more" if len(keys) > most else ""
    return ", ".join(repr(key) for key in keys[:most]) + more
