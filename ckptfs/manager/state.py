"""What a manager saves and restores: any nest of tensors, plain values and objects with a state.

    state = {"model": model, "optim": [optim_a, optim_b], "sched": sched, "step": 7,
             "loader": loader, "rng": RngState(), "mine": PerRank({"seed": 3})}

    saveable(state)      -> a state dict that DCP can flatten, and what is kept per rank
    as_object(value)     -> how an object is saved and loaded, None for plain values
    children_of(value)   -> what lies in a container that holds tensors or objects

Modules and optimizers become flattened state dicts, every other object with state_dict and
load_state_dict one leaf, at any depth of dicts, lists and tuples. RngState and torchdata's loaders are
kept per rank by themselves, anything else where ``PerRank`` says so. What only rank 0 has, or all have
alike, is written once. The way back is ``ckptfs.manager.blanks``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ckptfs._torch import is_flat
from ckptfs.dcp.leaves import Leaf
from ckptfs.manager.fsdp import FlatModule, FlatOptimizer
from ckptfs.manager.objects import (
    ModuleObject,
    OptimizerObject,
    ParameterNames,
    StatefulObject,
    StoredObject,
    is_traversed,
)
from ckptfs.manager.rng import RngState
from ckptfs.manager.saved import Path, key_of

__all__ = [
    "PerRank",
    "Saveable",
    "as_object",
    "children_of",
    "in_order",
    "names_in",
    "rooted",
    "saveable",
]

ROOT = "state"  # where a state that is no dict lies in its checkpoint
_LOADERS = "torchdata.stateful_dataloader"  # by name: it need not be installed


class PerRank:
    """Marks a part of a state that every rank keeps for itself.

    value: an object with state_dict, or any nest of plain values, tensors and objects; after a
    restore, what this rank had. Restoring on another number of ranks is StateError unless a reshard
    hook or ``per_rank="drop"`` says what becomes of it.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"PerRank({self.value!r})"


@dataclass(frozen=True, slots=True)
class Saveable:
    """A state as ``save_at`` takes it. per_rank: fnmatch patterns for ``SaveSpec.per_rank``."""

    state_dict: dict[str, Any]
    per_rank: tuple[str, ...]


class Untold(dict[str, Any]):
    """Stands for a state that could not be told: whoever looks at it meets the error.

    A rank that raised by itself would leave the others waiting in the save that it never begins.
    """

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error

    def items(self) -> Any:
        """Raise it."""
        raise self.error


def saveable(state: Any) -> Saveable:
    """Local. The state dict of a state, as it is now: its tensors are the live ones.

    Keys are told by the save's plan: two parts under one key, and what could not be loaded again
    without executing code, are StateErrors that name key and class before a file is made.
    """
    root = rooted(state)
    saving = _Saving(names_in(root))
    made = {key: saving.convert((str(key),), value) for key, value in in_order(root.items())}
    state_dict = {key: made[key] for key in root}
    return Saveable(state_dict, tuple(p for path in saving.per_rank for p in _patterns(path)))


def _patterns(path: Path) -> tuple[str, str]:
    exact = re.sub(r"([*?\[])", r"[\1]", key_of(path))
    return exact, f"{exact}.*"


class _Saving:
    """One walk over a state that is saved."""

    def __init__(self, names: ParameterNames) -> None:
        self._names = names
        self.per_rank: list[Path] = []

    def convert(self, path: Path, value: Any) -> Any:
        if isinstance(value, PerRank):
            self.per_rank.append(path)
            return self.convert(path, value.value)
        stored = as_object(value, self._names)
        if stored is not None:
            if _is_of_one_rank(value):
                self.per_rank.append(path)
            return stored.save()
        children = children_of(value)
        if children is None:
            # As it is, DCP would drop an empty dict, also within a list.
            return Leaf(value) if isinstance(value, (Mapping, list)) else value
        made = {k: self.convert((*path, k), child) for k, child in in_order(children)}
        found = {k: made[k] for k, _ in children}
        if isinstance(value, Mapping):
            return found
        items = [*found.values()]
        # DCP takes a list without tensors and dicts for one leaf, whatever else is in it.
        return items if is_traversed(items) else {str(k): v for k, v in found.items()}


def rooted(state: Any) -> Mapping[Any, Any]:
    """The state as a dict; anything else lies under "state"."""
    is_dict = isinstance(state, Mapping) and not _is_stateful(state)
    return state if is_dict else {ROOT: state}


def names_in(root: Any) -> ParameterNames:
    """What the parameters of all modules of a state are called."""
    return ParameterNames(list(_modules((), root)))


def _modules(path: Path, value: Any) -> Iterator[tuple[Path, torch.nn.Module]]:
    if isinstance(value, torch.nn.Module):
        yield path, value
    elif isinstance(value, PerRank):
        yield from _modules(path, value.value)
    else:
        for part, child in children_of(value) or ():
            yield from _modules((*path, part), child)


def as_object(value: Any, names: ParameterNames) -> StoredObject | None:
    """How an object is saved and loaded; None for tensors, containers and plain values."""
    if isinstance(value, torch.nn.Module):
        return FlatModule(value) if is_flat(value) else ModuleObject(value)
    if isinstance(value, torch.optim.Optimizer):
        home = names.flat_home(value)
        return OptimizerObject(value, names) if home is None else FlatOptimizer(value, home)
    if not _is_stateful(value):
        return None
    # Whatever else loads may draw numbers.
    return StatefulObject(value, order=3 if isinstance(value, RngState) else 2)


def _is_stateful(value: Any) -> bool:
    if isinstance(value, (type, torch.Tensor)):
        return False
    return all(callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict"))


def _is_of_one_rank(value: Any) -> bool:
    """Objects that belong to one rank by what they are."""
    return isinstance(value, RngState) or any(
        cls.__module__.startswith(_LOADERS) for cls in type(value).__mro__
    )


def children_of(value: Any) -> list[tuple[Any, Any]] | None:
    """The parts of a container that is walked into; None for leaves.

    Filled dicts are, and lists and tuples that hold tensors, dicts or objects; others are one leaf, as
    for DCP. Named tuples always are: as a leaf one could not be loaded without executing code.
    """
    if _is_stateful(value):
        return None
    if isinstance(value, Mapping):
        return [*value.items()] or None
    if isinstance(value, (list, tuple)):
        is_walked = hasattr(value, "_fields") or any(map(_is_part, value))
        return ([*enumerate(value)] or None) if is_walked else None
    return None


def in_order(children: Iterable[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Parts in the order in which every rank calls the objects in them, whatever order it has them in:
    states that talk to other ranks would else wait for each other for ever.
    """
    return sorted(children, key=lambda part: str(part[0]))


def _is_part(value: Any) -> bool:
    if isinstance(value, (torch.Tensor, PerRank)) or _is_stateful(value):
        return True
    return children_of(value) is not None
