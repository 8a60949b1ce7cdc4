"""A state as a state dict: what is saved of each kind of object, and how the object gets it back.

A manager saves and restores any nest of tensors, plain values and objects with a state:

    state = {"model": model, "optim": [optim_a, optim_b], "sched": sched, "step": 7,
             "loader": loader, "rng": RngState(), "mine": PerRank({"seed": 3})}

    saveable(state)      -> a state dict that DCP can flatten, and what is kept per rank
    as_object(value)     -> how an object is saved and loaded, None for plain values
    children_of(value)   -> the items of a container that holds tensors or objects

Modules and optimizers become flattened state dicts. Every other object with state_dict and
load_state_dict becomes one leaf, at any depth of dicts, lists and tuples. RngState and torchdata's
loaders are kept per rank by themselves, anything else if ``PerRank`` marks it. What only rank 0
has, or all ranks have alike, is written once. ``ckptfs.manager.load_targets`` is the way back.

Each kind of object has a class that says how it is saved, what it is loaded into, and how it gets
the loaded values back. Local:

    ModuleObject       parameters and buffers by name, flattened; loaded in place
    OptimizerObject    state by the parameters' names, flattened; a fresh one gets what was saved
    StatefulObject     anything else with state_dict: one leaf; flattened if it holds model tensors

Names do not contain what wrappers add (DistributedDataParallel, torch.compile), so a state can be
loaded with another wrapper. Nor do they contain numbers if a module of the same state has the
parameter, so pipeline stages and parameter groups do not collide.

``FlatModule`` and ``FlatOptimizer`` are for modules under torch's older FullyShardedDataParallel,
and for their optimizers. It flattens parameters into pieces without names. torch's own helpers take
them apart and put them together: they run collectives on the group that the module is sharded over,
so these two are local in form only, and they create a fresh optimizer's state by a step with zero
gradients. FSDP2 (``fully_shard``) needs none of this.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from ckptfs import _torch
from ckptfs._torch import is_flat
from ckptfs.dcp.planning.leaves import Leaf
from ckptfs.dcp.planning.saved_state import (
    NOT_LOADED,
    NOT_SAVED,
    Path,
    Saved,
    is_loaded,
    is_void,
    key_of,
    put_at,
)
from ckptfs.errors import StateError
from ckptfs.manager.rng import RngState

__all__ = [
    "FlatModule",
    "FlatOptimizer",
    "ModuleObject",
    "OptimizerObject",
    "ParameterNames",
    "PerRank",
    "Saveable",
    "StatefulObject",
    "StoredObject",
    "as_object",
    "children_of",
    "in_order",
    "names_in",
    "plain_state",
    "rooted",
    "saveable",
]

_PARAMS = "params"
_OWN = ("state", "param_groups")


class StoredObject(Protocol):
    """One object of a state. Objects with a lower ``order`` get their states back first."""

    order: int

    def save(self) -> Any:
        """Return what is saved: nested dicts and lists, or a Leaf."""

    def target(self, saved: Saved, path: Path) -> Any:
        """Return what the checkpoint's state of this object, at ``path``, is loaded into.

        NOT_SAVED means that the checkpoint has nothing there, and the object's state is empty now.
        """

    def put(self, loaded: Any) -> None:
        """Give the object the values that were loaded into its target."""


# -- modules -----------------------------------------------------------------------------------


class ModuleObject:
    """A torch module. Tensors are loaded into its own memory, sharded as they are."""

    order = 0

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = _torch.unwrapped(module)

    def save(self) -> Any:
        """Return parameters and buffers by name."""
        return plain_state({name: value for name, _, value in self._entries()})

    def target(self, saved: Saved, path: Path) -> Any:
        """Return its own tensors, and blanks for extra state as it was saved."""
        meta = [name for name, _, value in self._entries() if _is_meta(value)]
        if meta:
            raise StateError(
                f"{key_of(path)}: {meta[0]!r} is on the meta device",
                hint="give the module memory first: module.to_empty(device=...)",
            )
        own = {
            name: value
            if isinstance(value, torch.Tensor)
            else saved.blank((*path, name)) or NOT_LOADED
            for name, _, value in self._entries()
            if not (is_void(value) and not saved.exists((*path, name)))
        }
        return own or (NOT_LOADED if saved.exists(path) else NOT_SAVED)

    def put(self, loaded: Any) -> None:
        """Load through load_state_dict, so that its hooks run."""
        got = {
            full: loaded[name]
            for name, full, _ in self._entries()
            if name in loaded and is_loaded(loaded[name])
        }
        # What is missing was refused or allowed when the load was planned.
        self._module.load_state_dict(got, strict=False)

    def _entries(self) -> Iterator[tuple[str, str, Any]]:
        for full, value in self._module.state_dict().items():
            yield _torch.clean_name(full), full, value


def _is_meta(value: object) -> bool:
    # is_meta cannot be read of a ShardedTensor without a shard here, or with several.
    sharded = _torch.is_sharded_tensor(value)
    return isinstance(value, torch.Tensor) and not sharded and value.is_meta


# -- optimizers --------------------------------------------------------------------------------


class ParameterNames:
    """The names of the parameters of a state's modules."""

    def __init__(self, modules: list[tuple[Path, torch.nn.Module]]) -> None:
        self._names: dict[int, tuple[str, str]] = {}
        self._flat: dict[int, torch.nn.Module] = {}
        for path, module in modules:
            if _torch.is_flat(module):
                self._flat |= {id(p): module for p in module.parameters()}
            for full, parameter in _torch.unwrapped(module).named_parameters():
                named = (key_of(path), _torch.clean_name(full))
                self._names.setdefault(id(parameter), named)

    def flat_home(self, optimizer: torch.optim.Optimizer) -> torch.nn.Module | None:
        """Return the FullyShardedDataParallel module with the optimizer's parameters, or None."""
        parameters = (p for group in optimizer.param_groups for p in group[_PARAMS])
        homes = (self._flat.get(id(p)) for p in parameters)
        return next((home for home in homes if home is not None), None)

    def of(self, optimizer: torch.optim.Optimizer) -> list[str]:
        """Return a name for each parameter of the optimizer, in order; numbers if one has none."""
        parameters = [p for group in optimizer.param_groups for p in group[_PARAMS]]
        named = [self._names.get(id(p)) for p in parameters]
        known = [one for one in named if one is not None]
        if len(known) < len(named):
            return [str(number) for number in range(len(named))]
        short = [name for _, name in known]
        if len(set(short)) == len(short):
            return short
        return [f"{home}.{name}" for home, name in known]


class OptimizerObject:
    """A torch optimizer. Its state is saved by parameter names; a fresh one takes what was saved.

    No step is made to create state: a fresh optimizer is given tensors shaped and sharded like its
    parameters, of the dtypes that were saved.
    """

    order = 1

    def __init__(self, optimizer: torch.optim.Optimizer, names: ParameterNames) -> None:
        self._optimizer = optimizer
        self._names = names.of(optimizer)
        self._parameters = [p for group in optimizer.param_groups for p in group[_PARAMS]]
        # Numbers map to themselves, for checkpoints that were saved with numbers.
        self._numbers = {str(n): n for n in range(len(self._names))}
        self._numbers |= {name: n for n, name in enumerate(self._names)}
        self._primed = False

    def save(self) -> Any:
        """Return the state by name, and the groups with their options."""
        full_state = self._optimizer.state_dict()
        return {
            **{k: plain_state(v) for k, v in full_state.items() if k not in _OWN},
            "state": plain_state(self._named(full_state["state"])),
            "param_groups": [self._group(group) for group in full_state["param_groups"]],
        }

    def _named(self, state: Mapping[Any, Any]) -> dict[str, Any]:
        return {self._name(number): value for number, value in state.items()}

    def _name(self, number: Any) -> str:
        ours = isinstance(number, int) and number < len(self._names)
        return self._names[number] if ours else str(number)

    def _group(self, group: Mapping[str, Any]) -> dict[str, Any]:
        options = {k: plain_state(v) for k, v in group.items() if k != _PARAMS}
        # Pipeline stages have other parameters in the same group; a load does not need the list.
        return {**options, _PARAMS: Leaf([*map(self._name, group[_PARAMS])], any_rank=True)}

    def target(self, saved: Saved, path: Path) -> Any:
        """Return blanks for this rank's parameters and for everything else that was saved."""
        found: dict[str, Any] = {}
        for subpath, key in saved.below(path):
            if subpath[0] == "state" and len(subpath) > 1 and subpath[1] not in self._numbers:
                continue  # of another pipeline stage, or of a parameter that no longer exists
            put_at(found, subpath, self._blank(saved, subpath, key))
        groups = len(found.get("param_groups", ()))
        here = len(self._optimizer.param_groups)
        if groups not in (0, here):
            raise StateError(
                f"{key_of(path)}: {groups} parameter groups were saved, but the optimizer has "
                f"{here}"
            )
        return found or NOT_LOADED

    def _blank(self, saved: Saved, below: Path, key: str) -> Any:
        described = saved.tensor(key)
        if described is None:
            return NOT_LOADED
        if below[0] != "state" or len(below) != 3:  # noqa: PLR2004 - state, parameter, name
            return saved.blank_of(key)
        parameter = self._parameters[self._numbers[str(below[1])]]
        present = self._optimizer.state.get(parameter, {}).get(below[2])
        if isinstance(present, torch.Tensor) and present.size() == described.size:
            return saved.blank_of(key, present)
        if parameter.size() == described.size:
            return torch.empty_like(parameter, dtype=described.properties.dtype).detach()
        if _torch.is_dtensor(parameter) and described.size and not self._primed:
            # Sharded in a way that only the optimizer knows (factored moments): it has to make them.
            self._primed = True
            _torch.prime_optimizer(self._optimizer)
            return self._blank(saved, below, key)
        return saved.blank_of(key)

    def put(self, loaded: Any) -> None:
        """Load through load_state_dict, with this optimizer's own parameters in its groups."""
        numbers, current = self._numbers, self._optimizer.state_dict()["param_groups"]
        state = {numbers.get(name, name): v for name, v in loaded.get("state", {}).items()}
        saved = self._as_ours(loaded.get("param_groups") or [{}] * len(current))
        groups = [
            {**now, **{k: v for k, v in then.items() if is_loaded(v)}, _PARAMS: now[_PARAMS]}
            for now, then in zip(current, saved, strict=True)
        ]
        others = {k: v for k, v in loaded.items() if k not in _OWN}
        self._optimizer.load_state_dict({**others, "state": state, "param_groups": groups})
        self._keep_dtypes(state)

    def _as_ours(self, saved: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """Return the saved groups in this optimizer's order, by their parameters' names.

        State is assigned by name, and the weight decay of another group would be silently wrong. If
        the names do not decide, the groups stay in the order in which they were saved.
        """
        names = iter(self._names)
        ours = [
            {name for _, name in zip(g[_PARAMS], names)}  # noqa: B905 - each takes its share
            for g in self._optimizer.param_groups
        ]
        saved_names = [
            set(params) if isinstance(params := group.get(_PARAMS), list) else set()
            for group in saved
        ]
        order = [
            max(range(len(saved)), key=lambda at: (len(group_names & saved_names[at]), at == n))
            for n, group_names in enumerate(ours)
        ]
        return [saved[at] for at in order] if len(set(order)) == len(saved) else saved

    def _keep_dtypes(self, state: Mapping[Any, Any]) -> None:
        """Restore the saved dtypes: torch casts state to the parameter's dtype.

        Moments in single precision would lose bits.
        """
        if type(self._optimizer).load_state_dict is not torch.optim.Optimizer.load_state_dict:
            return  # an optimizer with its own load_state_dict decides this itself
        for number, parameter in enumerate(self._parameters):
            for name, value in state.get(number, {}).items():
                now = self._optimizer.state[parameter].get(name)
                tensors = isinstance(now, torch.Tensor) and isinstance(value, torch.Tensor)
                if tensors and now.dtype != value.dtype:
                    self._optimizer.state[parameter][name] = value.to(now.device)


# -- everything else ---------------------------------------------------------------------------


class StatefulObject:
    """Anything with state_dict and load_state_dict."""

    order = 2

    def __init__(self, stateful: Any, order: int = 2) -> None:
        self._stateful = stateful
        self.order = order

    def save(self) -> Any:
        """Return one leaf; or flattened state if it holds sharded or possibly large tensors."""
        state = self._stateful.state_dict()
        if _is_flattened(state):
            return plain_state(state)
        kind = type(self._stateful)
        return Leaf(state, f"{kind.__module__}.{kind.__qualname__}")

    def target(self, saved: Saved, path: Path) -> Any:
        """Return the target for the form in which it was saved."""
        if saved.has(path):
            return NOT_LOADED
        if not saved.exists(path):
            return NOT_SAVED if is_void(self._stateful.state_dict()) else NOT_LOADED
        return saved.blank(path, self._stateful.state_dict())

    def put(self, loaded: Any) -> None:
        """Load through load_state_dict."""
        self._stateful.load_state_dict(loaded)


def _is_flattened(state: Any) -> bool:
    """Whether to flatten a state instead of saving it as one leaf.

    A fresh object may lack parts of a saved one, so one leaf is the rule. Weights are the
    exception: they are sharded, or too large for every rank to read all of them.
    """
    if not isinstance(state, Mapping):
        return False
    leaves = list(_values(state))
    if any(_torch.is_dtensor(v) or _torch.is_sharded_tensor(v) for v in leaves):
        return True
    weights = any(isinstance(v, torch.Tensor) and v.dim() and v.is_floating_point() for v in leaves)
    return weights and _has_text_keys(state)


def _values(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        for inner in value.values():
            yield from _values(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _values(inner)
    else:
        yield value


def _has_text_keys(value: Any) -> bool:
    """Whether all keys are text.

    Flattening writes keys as text: {0: ...} would come back as {"0": ...}.
    """
    if isinstance(value, Mapping):
        return all(isinstance(k, str) and _has_text_keys(v) for k, v in value.items())
    return not isinstance(value, list) or all(map(_has_text_keys, value))


def plain_state(value: Any) -> Any:
    """Return nested plain values in a form that DCP's flattening keeps: it drops empty dicts."""
    if isinstance(value, Mapping):
        return {k: plain_state(v) for k, v in value.items()} if value else Leaf(value)
    if isinstance(value, list):
        return [plain_state(v) for v in value] if is_traversed(value) else Leaf(value)
    return value


def is_traversed(value: list[Any]) -> bool:
    """Whether DCP flattens this list: it does if a tensor or a filled dict is among its items."""
    return any(
        isinstance(v, torch.Tensor)
        or (isinstance(v, Mapping) and bool(v))
        or (isinstance(v, list) and is_traversed(v))
        for v in value
    )


class FlatModule:
    """A module under FullyShardedDataParallel, sharded by parameters. A ``StoredObject``."""

    order = 0

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module

    def save(self) -> Any:
        """Return parameters and buffers by name: this rank's shards of them."""
        return plain_state(get_model_state_dict(self._module))

    def target(self, saved: Saved, path: Path) -> Any:
        """Return the same, to load into."""
        return get_model_state_dict(self._module)

    def put(self, loaded: Any) -> None:
        """Flatten the parameters again."""
        set_model_state_dict(self._module, loaded)


class FlatOptimizer:
    """The optimizer of a FlatModule. A ``StoredObject``."""

    order = 1

    def __init__(self, optimizer: torch.optim.Optimizer, module: torch.nn.Module) -> None:
        self._optimizer = optimizer
        self._module = module

    def save(self) -> Any:
        """Return the same as for other optimizers: state by name, groups with their options."""
        full_state: dict[str, Any] = get_optimizer_state_dict(self._module, self._optimizer)
        groups = [
            {k: Leaf(v, any_rank=True) if k == "params" else plain_state(v) for k, v in g.items()}
            for g in full_state["param_groups"]
        ]
        return {"state": plain_state(full_state["state"]), "param_groups": groups}

    def target(self, saved: Saved, path: Path) -> Any:
        """Return shards like this optimizer's own, for all that was saved of its parameters."""
        like = get_optimizer_state_dict(self._module, self._optimizer)
        found: dict[str, Any] = {}
        for subpath, key in saved.below(path):
            own_state: Any = like.get("state", {})
            if subpath[0] == "state" and len(subpath) > 2:  # noqa: PLR2004 - state, parameter, name
                if subpath[1] not in own_state:
                    continue
                put_at(found, subpath, saved.blank_of(key, own_state[subpath[1]].get(subpath[2])))
            else:
                put_at(found, subpath, saved.blank_of(key))
        return found or NOT_LOADED

    def put(self, loaded: Any) -> None:
        """Flatten the state again, with this optimizer's own parameters in its groups."""
        like: dict[str, Any] = get_optimizer_state_dict(self._module, self._optimizer)
        groups = [
            {**now, **{k: v for k, v in then.items() if is_loaded(v)}, "params": now["params"]}
            for now, then in zip(like["param_groups"], loaded["param_groups"], strict=True)
        ]
        state = loaded.get("state") or {}
        set_optimizer_state_dict(
            self._module, self._optimizer, {"state": state, "param_groups": groups}
        )


ROOT = "state"  # the key in the checkpoint of a state that is no dict
_LOADERS = "torchdata.stateful_dataloader"  # by name: it need not be installed


class PerRank:
    """Marks a part of a state that every rank keeps for itself.

    Restoring it on another number of ranks is a StateError, unless a reshard hook makes the new
    state or ``per_rank="drop"`` leaves it out.

    Args:
        value: An object with ``state_dict``, or any nest of plain values, tensors and objects;
            after a restore, what this rank had.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"PerRank({self.value!r})"


@dataclass(frozen=True, slots=True)
class Saveable:
    """A state as ``save_at`` takes it. ``per_rank``: fnmatch patterns for ``SaveSpec.per_rank``."""

    state_dict: dict[str, Any]
    per_rank: tuple[str, ...]


class Untold(dict[str, Any]):
    """Replaces a state that could not be read: reading its items raises the error.

    A rank that raised by itself would leave the others waiting in the save that it never begins.
    """

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error

    def items(self) -> Any:
        """Raise the error."""
        raise self.error


def saveable(state: Any) -> Saveable:
    """Return the state dict of a state as it is now, with its live tensors. Local.

    The save's plan checks the keys: two parts under one key, and anything that could not be loaded
    again without executing code, are StateErrors that name key and class before a file is made.
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
    """One walk over a state to save."""

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
            # Without the Leaf, DCP would drop an empty dict, also within a list.
            return Leaf(value) if isinstance(value, (Mapping, list)) else value
        made = {k: self.convert((*path, k), child) for k, child in in_order(children)}
        found = {k: made[k] for k, _ in children}
        if isinstance(value, Mapping):
            return found
        items = [*found.values()]
        # DCP treats a list without tensors and dicts as one leaf, whatever else is in it.
        return items if is_traversed(items) else {str(k): v for k, v in found.items()}


def rooted(state: Any) -> Mapping[Any, Any]:
    """Return the state as a dict; anything else becomes its item "state"."""
    is_dict = isinstance(state, Mapping) and not _is_stateful(state)
    return state if is_dict else {ROOT: state}


def names_in(root: Any) -> ParameterNames:
    """Return the names of the parameters of all modules of a state."""
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
    """Return how an object is saved and loaded; None for tensors, containers and plain values."""
    if isinstance(value, torch.nn.Module):
        return FlatModule(value) if is_flat(value) else ModuleObject(value)
    if isinstance(value, torch.optim.Optimizer):
        home = names.flat_home(value)
        return OptimizerObject(value, names) if home is None else FlatOptimizer(value, home)
    if not _is_stateful(value):
        return None
    # The generators come last: loading any other object may draw numbers.
    return StatefulObject(value, order=3 if isinstance(value, RngState) else 2)


def _is_stateful(value: Any) -> bool:
    if isinstance(value, (type, torch.Tensor)):
        return False
    return all(callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict"))


def _is_of_one_rank(value: Any) -> bool:
    """Whether an object belongs to one rank by its type."""
    return isinstance(value, RngState) or any(
        cls.__module__.startswith(_LOADERS) for cls in type(value).__mro__
    )


def children_of(value: Any) -> list[tuple[Any, Any]] | None:
    """Return the parts of a container that is walked into; None for leaves.

    Filled dicts are walked into, and lists and tuples that hold tensors, dicts or objects; others
    are one leaf, as for DCP. Named tuples always are walked into: as a leaf they could not be
    loaded without executing code.
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
    """Return parts in the order in which every rank calls the objects in them.

    The order does not depend on the rank's own container: states that communicate with other ranks
    would otherwise wait for each other without end.
    """
    return sorted(children, key=lambda part: str(part[0]))


def _is_part(value: Any) -> bool:
    if isinstance(value, (torch.Tensor, PerRank)) or _is_stateful(value):
        return True
    return children_of(value) is not None
