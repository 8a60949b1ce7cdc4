"""A state dict flattened as torch flattens it, in one pass.

    {"a": {"b": t, 3: [u, {}]}}   ->   {"a.b": t, "a.3.0": u}   and   the path of each

    flat_to_save(state)    None: a ShardedTensor is inside; torch takes those apart that hold others
    flat_to_load(state)    None: that, a tensor on the meta device, or two values under one key
    containers(state)      what is taken apart: key and path of each dict and list, empty ones too

torch's load planner goes over the state three times: to give tensors on the meta device memory, to
unwrap ShardedTensors in ShardedTensors, and to flatten. Most states need only the last. None says that
there is something for the others to do. Used by the two planners; pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ckptfs import _torch
from ckptfs.dcp.per_rank import Path

__all__ = ["Flat", "containers", "flat_to_load", "flat_to_save"]

Flat = tuple[dict[str, Any], dict[str, Path]]  # key -> leaf, key -> path, in torch's order

_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
_ATOMS = frozenset({type(None), bool, int, float, str, bytes})
# Leaves in which no ShardedTensor is looked for when they are saved: it could not be saved from there.
_NOT_SHARDED = _TENSORS | _ATOMS | {complex, tuple, list, dict, DTensor}


def flat_to_save(state: Mapping[str, Any]) -> Flat | None:
    """As torch's ``flatten_state_dict``; ValueError for two values under one key. None: see above."""
    flat, paths = _walked(state)
    kinds = {type(value) for value in flat.values()} - _NOT_SHARDED
    if any(issubclass(kind, torch.Tensor) for kind in kinds) and any(
        map(_torch.is_sharded_tensor, flat.values())
    ):
        return None
    return flat, paths


def flat_to_load(state: Mapping[Any, Any]) -> Flat | None:
    """As torch's load planner flattens. None: torch's own way must be taken, see above."""
    try:
        flat, paths = _walked(state)
    except ValueError:
        return None
    for value in flat.values():
        kind = type(value)
        # Written out: a call for each of 20,000 leaves would be a third of all this.
        if kind in _TENSORS:
            if value.is_meta:
                return None
        elif kind not in _ATOMS and _is_for_torch(value):
            return None
    return flat, paths


def containers(state: Mapping[Any, Any]) -> Iterator[tuple[str, Path, Any]]:
    """Key, path and value of each dict and list inside that flattening takes apart, outer ones first."""
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
            if kind in _TENSORS or kind in _ATOMS:  # most are; to ask for a Mapping is slow
                whole = before + name
                if whole in flat:
                    raise _twice(whole)
                flat[whole] = value
                paths[whole] = (*path, name)
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
    """Whether torch keeps a list whole: there is no tensor and no mapping in it, however deep."""
    return not any(
        isinstance(value, (torch.Tensor, Mapping))
        or (isinstance(value, list) and not _is_leaf(value))
        for value in values
    )


def _is_for_torch(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        # In this order: a ShardedTensor without a shard here, or with several, cannot be asked.
        return _torch.is_sharded_tensor(value) or value.is_meta
    if isinstance(value, (list, tuple)):
        return any(_is_for_torch(inner) for inner in value)
    if isinstance(value, Mapping):
        return any(_is_for_torch(inner) for inner in value.values())
    return _torch.is_sharded_tensor(value)
