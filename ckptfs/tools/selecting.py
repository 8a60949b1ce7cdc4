"""Which leaves are exported, and what they are called there. Pure.

Selection(filters=("model.*",), strip="model.", prefix="base.", dtype=torch.bfloat16)

model.layers.0.weight  float32    ->  base.layers.0.weight  bfloat16
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from ckptfs.errors import StateError
from ckptfs.tools.contents import DEEPEST, Leaf, ObjectLeaf, TensorLeaf
from ckptfs.tools.inspecting import matching

__all__ = ["Chosen", "Selection", "nested"]

Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Chosen:
    """A leaf to export.

    Attributes:
        leaf: The leaf.
        key: Its new key.
        path: Its new path.
        dtype: Of a tensor, as it is written; None: as it is.
    """

    leaf: Leaf
    key: str
    path: Path
    dtype: torch.dtype | None

    @property
    def size_bytes(self) -> int:
        """Of a tensor as it is written; of an object, of its pickle."""
        if isinstance(self.leaf, ObjectLeaf) or self.dtype is None:
            return self.leaf.size_bytes
        return self.leaf.size_bytes // self.leaf.dtype.itemsize * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Selection:
    """Which leaves are exported, and as what.

    Attributes:
        filters: fnmatch patterns of the keys as they were saved; empty: all.
        strip: Removed from the front of keys that begin with it.
        prefix: Put in front of all keys.
        dtype: Of floating point tensors; None leaves it.
    """

    filters: Sequence[str] = ()
    strip: str = ""
    prefix: str = ""
    dtype: torch.dtype | None = None

    def of(self, leaves: Iterable[Leaf]) -> list[Chosen]:
        """Choose those of a checkpoint's leaves that are exported, in its order.

        Args:
            leaves: All leaves.

        Returns:
            The chosen ones, with their new names.

        Raises:
            StateError: There is none, or two would have one name.
        """
        found = [self._chosen(leaf) for leaf in matching(leaves, self.filters)]
        if not found:
            raise StateError(
                "there is nothing to export",
                hint="no key fits the filter" if self.filters else "it holds no tensors",
            )
        seen: dict[str, str] = {}
        for one in found:
            other = seen.setdefault(one.key, one.leaf.key)
            if other != one.leaf.key:
                raise StateError(f"{other!r} and {one.leaf.key!r} would both be called {one.key!r}")
            if not one.key:
                raise StateError(f"nothing is left of {one.leaf.key!r}", hint="strip less")
        return found

    def _chosen(self, leaf: Leaf) -> Chosen:
        key, path = leaf.key, leaf.path or (leaf.key,)
        if self.strip and key.startswith(self.strip):
            key, path = key[len(self.strip) :], _stripped(path, self.strip)
        if self.prefix:
            key, path = self.prefix + key, (f"{self.prefix}{path[0]}", *path[1:])
        if isinstance(leaf, ObjectLeaf):
            return Chosen(leaf, key, path, None)
        return Chosen(leaf, key, path, self._dtype_of(leaf))

    def _dtype_of(self, leaf: TensorLeaf) -> torch.dtype:
        return self.dtype if self.dtype is not None and leaf.dtype.is_floating_point else leaf.dtype


def nested(leaves: Sequence[tuple[Path, object]]) -> object:
    """Make dicts and lists of these leaves, by their paths. Pure.

    What was a list stays one if all of it is there. Keys of dicts are text, as DCP saves them.

    Args:
        leaves: Path and value of each.

    Returns:
        The outermost dict or list.

    Raises:
        StateError: A path is too long, or below another leaf.
    """
    root: dict[str | int, object] = {}
    for path, value in leaves:
        if len(path) > DEEPEST:
            raise StateError(f"a value is {len(path)} levels deep, more than {DEEPEST}")
        node = root
        for part in path[:-1]:
            inner = node.setdefault(part, {})
            if not isinstance(inner, dict):
                raise StateError(f"{path!r} is below another leaf")
            node = inner
        node[path[-1]] = value
    return _listed(root)


def _listed(node: object) -> object:
    if type(node) is not dict:
        return node
    inner = {key: _listed(value) for key, value in node.items()}
    if inner and all(type(key) is int for key in inner) and set(inner) == set(range(len(inner))):
        return [inner[n] for n in range(len(inner))]
    return inner


def _stripped(path: Path, strip: str) -> Path:
    """The path whose joined text begins with ``strip``, without it."""
    left, rest = list(path), strip
    while rest and len(left) > 1:
        first = str(left[0])
        if not rest.startswith(f"{first}."):
            break
        rest = rest[len(first) + 1 :]
        left.pop(0)
    if rest and left and str(left[0]).startswith(rest):
        left[0] = str(left[0])[len(rest) :]
    return tuple(left)
