"""One rank's share of a save: planned by itself, agreed on later, its data handed out item by item.

    Share       what ``plan_save`` and ``write`` need of a rank's state: a plan, and the data of items
    LiveShare   the caller's own state dict, read while it is written (``save``)
    as_state_dict(given)   a module, or another object with state_dict, in the place of a dict

``ckptfs.dcp.staging`` has the other one: a copy, made before the ranks talk (``async_save``).
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.stateful import Stateful

from ckptfs import _torch
from ckptfs.dcp.per_rank import rename_plan
from ckptfs.dcp.planner import SavePlanner
from ckptfs.dcp.resolve import Loan
from ckptfs.errors import StateError

__all__ = [
    "ROOT",
    "LiveShare",
    "Share",
    "as_state_dict",
    "local_plan",
    "module_of",
    "stateful_keys",
    "unwrap_stateful",
]

ROOT = "state"  # where a state that is no dict lies in its checkpoint


class Share(Protocol):
    """What one rank brings to a save. The thread that saves calls these, in this order."""

    @property
    def planner(self) -> SavePlanner:
        """Makes the global plan, on the coordinator."""

    def plan(self, rank: int, per_rank: Sequence[str]) -> SavePlan:
        """This rank's plan with its own keys renamed. StateError; local."""

    def take_on(self, items: Sequence[WriteItem]) -> None:
        """What of the plan this rank is to write, under the names that the planner knows."""

    def resolve(self, item: WriteItem) -> torch.Tensor | io.BytesIO | Loan:
        """The data of one such item. Any thread."""


class LiveShare:
    """The caller's own state dict: it must not change until the save has returned."""

    def __init__(self, state_dict: Mapping[str, Any], planner: SavePlanner) -> None:
        self._state_dict = state_dict
        self.planner = planner

    def plan(self, rank: int, per_rank: Sequence[str]) -> SavePlan:
        """As ``Share.plan``."""
        return local_plan(self.planner, self._state_dict, rank, per_rank)

    def take_on(self, items: Sequence[WriteItem]) -> None:
        """Nothing to prepare."""

    def resolve(self, item: WriteItem) -> torch.Tensor | io.BytesIO | Loan:
        """As ``Share.resolve``."""
        return self.planner.resolve_data(item)


def local_plan(
    planner: SavePlanner, state_dict: Mapping[str, Any], rank: int, per_rank: Sequence[str]
) -> SavePlan:
    """One rank's plan: flattened, checked, its own keys renamed. Local."""
    planner.set_up_planner(unwrap_stateful(state_dict), None, is_coordinator=rank == 0)
    return rename_plan(planner.create_local_plan(), per_rank, rank)


class _NamedModule:
    """A module's state under the names that it has without wrappers (DistributedDataParallel, torch.compile),
    so that it loads with another wrapper, as ``CheckpointManager`` has it.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.module: torch.nn.Module = _torch.unwrapped(module)

    def state_dict(self) -> dict[str, Any]:
        """Parameters and buffers."""
        return {_torch.clean_name(name): v for name, v in self.module.state_dict().items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Through the module's own, so that its hooks run."""
        full = {_torch.clean_name(name): name for name in self.module.state_dict()}
        self.module.load_state_dict({full.get(name, name): v for name, v in state_dict.items()})


class _Stateless:
    """Stands for what is no state dict."""

    def __init__(self, name: str) -> None:
        self._name = name

    def state_dict(self) -> dict[str, Any]:
        """StateError."""
        name = self._name
        raise StateError(
            f"{'an' if name[:1] in 'aeiouAEIOU' else 'a'} {name} is no state dict",
            hint='give a dict, such as {"state": value}; a module or another object with state_dict is taken too',
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Never called: to load, its state is needed first."""


def module_of(value: object) -> torch.nn.Module | None:
    """The module whose state this is; None for any other object."""
    if isinstance(value, _NamedModule):
        return value.module
    return value if isinstance(value, torch.nn.Module) else None


def as_state_dict(given: Any) -> Any:
    """What ``save`` and ``load`` were given as a state dict: a module, an optimizer or another object with
    state_dict and load_state_dict lies under "state", as ``CheckpointManager`` has it.

    What is neither, such as a tensor or a list, lies there as an object whose state_dict raises StateError:
    within a step, so that the other ranks, which may have been given what they need, hear of it.
    """
    if isinstance(given, Mapping):
        return given
    if isinstance(given, torch.nn.Module):
        return {ROOT: _NamedModule(given)}
    if isinstance(given, Stateful) and not isinstance(given, (type, torch.Tensor)):
        return {ROOT: given}
    return {ROOT: _Stateless(type(given).__name__)}


def unwrap_stateful(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """A shallow copy in which every top-level Stateful is its state dict, as stock DCP does.

    They are called in sorted order of their keys: state dicts that talk to other ranks would wait for
    each other for ever where two ranks were given them in another order.
    """
    found = {key: state_dict[key].state_dict() for key in stateful_keys(state_dict)}
    return {key: found.get(key, value) for key, value in state_dict.items()}


def stateful_keys(state_dict: Mapping[str, Any]) -> list[str]:
    """The keys of the Stateful objects, in the order in which every rank calls them."""
    # Tensors first: asking whether something is Stateful costs more than planning it.
    found = [
        key
        for key, value in state_dict.items()
        if not isinstance(value, torch.Tensor) and isinstance(value, Stateful)
    ]
    return sorted(found, key=str)
