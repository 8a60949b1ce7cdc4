"""What a checkpoint holds below a path, and blanks of the same shape to load it into. Local.

    saved = Saved(metadata)
    saved.below(("optim", "state"))     -> (("w", "exp_avg"), "optim.state.w.exp_avg"), ...
    saved.blank(("sched",), like)       -> nested dicts and lists of tensors and empty leaves

A new object seldom has the structure that was saved: a fresh optimizer has no state, and a
scheduler of another version has other fields. Therefore the checkpoint determines what is loaded,
and the object accepts or refuses it when it gets it.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from ckptfs._torch import is_sharded_tensor
from ckptfs.errors import ManifestError

__all__ = [
    "NOT_LOADED",
    "NOT_SAVED",
    "Path",
    "Saved",
    "get_at",
    "is_loaded",
    "is_void",
    "key_of",
    "put_at",
]

Path = tuple[str | int, ...]

# How many items of a list a checkpoint may lack before one that it has. Flattening drops empty dicts,
# so there are such gaps; but a forged number must not allocate memory.
_MOST_LEFT_OUT = 4096

# Any leaf will do to request an object; torch passes a text through unchanged.
NOT_LOADED: str = str.__new__(type("_NotLoaded", (str,), {}), "not loaded yet")

# Left out of a load's target: the checkpoint has nothing there, and does not need to.
NOT_SAVED: Any = object()


def key_of(path: Path) -> str:
    """The flattened key of a path, as DCP writes it."""
    return ".".join(map(str, path))


def is_loaded(value: object) -> bool:
    """Whether this value came from the checkpoint."""
    return value is not NOT_LOADED


def is_void(value: object) -> bool:
    """Whether flattening leaves nothing of it: a dict that is empty or holds only void values."""
    if isinstance(value, Mapping):
        return all(map(is_void, value.values()))
    return isinstance(value, list) and bool(value) and all(map(is_void, value))


class Saved:
    """The keys of one checkpoint, found by path. Fast to make, even of 100,000 keys."""

    def __init__(self, metadata: Metadata) -> None:
        self._entries = metadata.state_dict_metadata
        self._paths: Mapping[str, Path] = metadata.planner_data or {}
        self._keys = sorted(self._entries)
        self._order = {key: n for n, key in enumerate(self._paths or self._entries)}

    def has(self, path: Path) -> bool:
        """Whether one object or tensor was saved under exactly this path."""
        return key_of(path) in self._entries

    def is_object(self, path: Path) -> bool:
        """Whether an object, and no tensor, was saved under exactly this path."""
        entry = self._entries.get(key_of(path))
        return entry is not None and not isinstance(entry, TensorStorageMetadata)

    def below(self, path: Path) -> list[tuple[Path, str]]:
        """Return the keys below a path in the order in which they were saved.

        Each comes with the part of its own path that follows ``path``.
        """
        first, prefix = self._first_below(path)
        keys = itertools.takewhile(lambda k: k.startswith(prefix), self._keys[first:])
        found = sorted(keys, key=lambda k: self._order.get(k, 0))
        return [(self._path_below(key, prefix, path), key) for key in found]

    def _first_below(self, path: Path) -> tuple[int, str]:
        prefix = f"{key_of(path)}."
        return bisect_left(self._keys, prefix), prefix

    def _path_below(self, key: str, prefix: str, path: Path) -> Path:
        full_path = self._paths.get(key)
        # Stock checkpoints of flat state dicts have no paths, or paths of a single name: the text of the
        # key is used then. A path that is not the key's own would make a blank that nothing fills.
        fits = full_path is not None and key_of(full_path) == key
        if full_path is None or not fits or key_of(full_path[: len(path)]) != key_of(path):
            return tuple(key[len(prefix) :].split("."))
        return full_path[len(path) :]

    def roots(self) -> list[str]:
        """Return the first components of all keys."""
        firsts = (
            str(self._paths[k][0]) if k in self._paths else k.split(".")[0] for k in self._keys
        )
        return sorted(set(firsts))

    def exists(self, path: Path) -> bool:
        """Whether anything was saved at or below a path."""
        first, prefix = self._first_below(path)
        below = first < len(self._keys) and self._keys[first].startswith(prefix)
        return self.has(path) or below

    def tensor(self, key: str) -> TensorStorageMetadata | None:
        """Return the description of a tensor, None for an object."""
        entry = self._entries[key]
        return entry if isinstance(entry, TensorStorageMetadata) else None

    def blank(self, path: Path, like: Any = None) -> Any:
        """Return what to load a path into: the saved structure of new tensors and empty leaves.

        If ``like`` has a tensor of the same size and dtype, that one is loaded into, sharded as it
        is.
        """
        if self.has(path):
            return self.blank_of(key_of(path), like)
        root: dict[Any, Any] = {}
        for subpath, key in self.below(path):
            put_at(root, subpath, self.blank_of(key, get_at(like, subpath)), like)
        return root

    def blank_of(self, key: str, like: Any = None) -> Any:
        """Return the blank of one key, as ``blank`` does."""
        saved = self.tensor(key)
        if saved is None:
            return NOT_LOADED
        if _fits(like, saved):
            return like
        try:
            return torch.empty(saved.size, dtype=saved.properties.dtype)
        except (RuntimeError, TypeError, ValueError) as error:
            # Memory was only reserved: sizes are checked against the file before a byte is read.
            raise ManifestError(
                f"there is no memory for {key!r} of size {saved.size!r:.100}: {error}",
                hint="a host with more memory, a sharded target, or .metadata was changed",
            ) from error


def _fits(like: Any, saved: TensorStorageMetadata) -> bool:
    return (
        isinstance(like, torch.Tensor)
        # is_meta cannot be read of a sharded tensor without a shard here.
        and (is_sharded_tensor(like) or not like.is_meta)
        and like.size() == saved.size
        and like.dtype == saved.properties.dtype
    )


def get_at(root: Any, path: Path) -> Any:
    """Return the value at a path of nested dicts and lists, None if there is none."""
    for part in path:
        if isinstance(root, Mapping):
            root = root.get(_name_in(root, part))
        elif isinstance(root, (list, tuple)) and isinstance(part, int) and part < len(root):
            root = root[part]
        else:
            return None
    return root


def _name_in(mapping: Any, part: str | int) -> Any:
    """Return a part of a path as the mapping spells it: flattening writes every key as text."""
    if not isinstance(mapping, Mapping) or part in mapping:
        return part
    return next((key for key in mapping if str(key) == part), part)


def put_at(root: Any, path: Path, value: Any, like: Any = None) -> None:
    """Put a value at a path of nested dicts and lists, making them; an int is a place in a list."""
    for part, following in itertools.pairwise(path):
        fresh: Any = [] if isinstance(following, int) else {}
        root = _enter(root, _name_in(like, part), fresh)
        like = get_at(like, (part,))
    _assign(root, _name_in(like, path[-1]), value)


def _enter(container: Any, part: Any, fresh: Any) -> Any:
    if isinstance(container, list):
        _grow(container, part)
        if container[part] is None:
            container[part] = fresh
        return container[part]
    return container.setdefault(part, fresh)


def _assign(container: Any, part: Any, value: Any) -> None:
    if isinstance(container, list):
        _grow(container, part)
    container[part] = value


def _grow(container: list[Any], index: int) -> None:
    more = index + 1 - len(container)
    if index < 0 or more > _MOST_LEFT_OUT:
        raise ManifestError(
            f".metadata has a list with item {index}, and {len(container)} items before it",
            hint="it was changed, or written by something else; load another checkpoint",
        )
    container.extend([None] * more)
