"""A state dict flattened as torch flattens it, in one pass instead of three.

    {"a": {"b": t, 3: [u, {}]}}   ->   {"a.b": t, "a.3.0": u}   and   the path of each

torch's load planner goes over the state three times: to give tensors on the meta device memory, to
unwrap ShardedTensors in ShardedTensors, and to flatten. Most states need only the last; ``flattened``
does that, or says (None) that there is something for the others to do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ckptfs import _torch

__all__ = ["Path", "flattened"]

Path = tuple[str | int, ...]

_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
_PLAIN = frozenset({int, float, str, bytes, bool, type(None)})


def flattened(state: Mapping[Any, Any]) -> tuple[dict[str, Any], dict[str, Path]] | None:
    """Key -> leaf and key -> path, in torch's order. None: torch's own way must be taken, because of
    a tensor on the meta device, a ShardedTensor, or two values under one key.
    """
    walk = _Walk()
    try:
        walk.mapping(state, (), "")
    except _NotHereError:
        return None
    return walk.flat, walk.paths


class _NotHereError(Exception):
    """Something that only torch's own passes handle."""


class _Walk:
    def __init__(self) -> None:
        self.flat: dict[str, Any] = {}
        self.paths: dict[str, Path] = {}

    def mapping(self, values: Mapping[Any, Any], path: Path, before: str) -> None:
        flat, paths = self.flat, self.paths
        for key, value in values.items():
            name = str(key)
            kind = type(value)
            # Written out: a call for each of 20,000 leaves would be a third of all this.
            if kind in _PLAIN or (kind in _TENSORS and not value.is_meta):
                whole = before + name
                if whole in flat:
                    raise _NotHereError
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
            if key in self.flat or _is_for_torch(value):
                raise _NotHereError
            self.flat[key] = value
            self.paths[key] = path


def _is_leaf(values: list[Any]) -> bool:
    """Whether torch keeps a list whole: there is no tensor and no mapping in it, however deep."""
    return not any(
        isinstance(value, (torch.Tensor, Mapping))
        or (isinstance(value, list) and not _is_leaf(value))
        for value in values
    )


def _is_for_torch(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.is_meta or _torch.is_sharded_tensor(value)
    if isinstance(value, (list, tuple)):
        return any(_is_for_torch(inner) for inner in value)
    if isinstance(value, Mapping):
        return any(_is_for_torch(inner) for inner in value.values())
    return _torch.is_sharded_tensor(value)
