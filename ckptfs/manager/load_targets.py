"""What a state is loaded into, and how the loaded values get back into its objects. Local.

    blank = blank_of(state, saved, ...)       -> .state_dict for the load's plan
    read ...                                   tensors are filled in place, leaves replaced
    blank.give_back()                          modules, optimizers, other objects and RNG get their states

Per-rank state that another number of ranks saved is *moved*: either it is dropped, or a hook makes
new state from the states of all old ranks. What happens to each key was decided before, for all
ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ckptfs.dcp.planning.saved_state import (
    NOT_LOADED,
    NOT_SAVED,
    Path,
    Saved,
    get_at,
    is_loaded,
    is_void,
    key_of,
    put_at,
)
from ckptfs.dcp.planning.state_dicts import unmarked_key
from ckptfs.errors import StateError
from ckptfs.manager.rng import RngState
from ckptfs.manager.state_dict import (
    PerRank,
    StoredObject,
    as_object,
    children_of,
    in_order,
    names_in,
    rooted,
)

__all__ = ["Blank", "Marks", "Moving", "Reshard", "blank_of", "moved_keys"]

# A hook that returns the state of a new rank. Its arguments: the states that all old ranks kept (None:
# that rank kept none), the new rank, and the new number of ranks.
Reshard = Callable[[list[Any], int, int], Any]

Give = Callable[[Any], Any]


class Marks:
    """Which old ranks kept which keys, in a checkpoint that another number of ranks saved.

    Empty if the number of ranks is the same.
    """

    def __init__(self, saved: Saved, *, moves: bool) -> None:
        self._saved = saved
        self._ranks: dict[str, list[int]] = {}
        for root in saved.roots() if moves else ():
            own = unmarked_key(root)
            if own is not None:
                self._ranks.setdefault(own[0], []).append(own[1])

    def of(self, path: Path) -> dict[int, Path]:
        """Return the paths under which old ranks kept what ``path`` names, by old rank."""
        root = str(path[0])
        paths = {r: (f"{root}@rank{r}", *path[1:]) for r in sorted(self._ranks.get(root, ()))}
        return {rank: old for rank, old in paths.items() if self._saved.exists(old)}

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys that ranks kept for themselves, without the marks of the ranks."""
        return tuple(sorted(self._ranks))


@dataclass(frozen=True, slots=True)
class Moving:
    """What happens to per-rank state: ``hooks`` by key; moved keys without a hook are dropped."""

    marks: Marks
    hooks: Mapping[str, Reshard]
    rank: int
    size: int


@dataclass(slots=True)
class Blank:
    """A target of a load.

    Attributes:
        state_dict: The state dict to load into.
    """

    state_dict: dict[str, Any]
    _give: Give
    _puts: list[tuple[int, str, Any, Callable[[], None]]] = field(default_factory=list)

    def give_back(self) -> None:
        """Give the loaded values to the objects of the state. Local.

        Raises StateError, which names the object that did not accept its state.
        """
        self._puts.clear()
        self._give(self.state_dict)
        for _, key, value, put in sorted(self._puts, key=lambda one: one[:2]):
            try:
                put()
            except Exception as error:
                # Any error here, a ckptfs error too, means that the object refused the state, not that
                # the checkpoint is damaged.
                kind = type(value)
                raise StateError(
                    f"{key!r}: {kind.__module__}.{kind.__qualname__} does not take the state that "
                    f"was saved: {type(error).__name__}: {error}",
                    hint="it was saved by another kind of object, or by another version of it",
                ) from error


def moved_keys(state: Any, marks: Marks) -> tuple[str, ...]:
    """Return the keys of ``state`` that ranks of another world kept for themselves."""
    return tuple(key_of(path) for path in _moved((), rooted(state), marks))


def _moved(path: Path, value: Any, marks: Marks) -> Iterator[Path]:
    children = None if isinstance(value, PerRank) else children_of(value)
    if children is not None:
        for part, child in children:
            yield from _moved((*path, str(part)), child, marks)
    elif path and marks.of(path):
        yield path


def blank_of(state: Any, saved: Saved, moving: Moving) -> Blank:
    """Return the target of a load, made from this rank's state and the keys of the checkpoint.

    ``saved`` is the checkpoint as this rank sees it, with its own keys under their plain names.
    Raises StateError if it is already clear that an object does not fit.
    """
    root = rooted(state)
    walk = _Loading(saved, moving, names_in(root))
    blank, give = walk.container((), root, [*root.items()])
    walk.loaded |= blank
    return Blank(walk.loaded, give, walk.puts)


class _Loading:
    """One walk over a state to load: makes a target for each part, and a way to give it back."""

    def __init__(self, saved: Saved, moving: Moving, names: Any) -> None:
        self._saved = saved
        self._moving = moving
        self._names = names
        self.loaded: dict[str, Any] = {}  # the whole target, including what old ranks kept
        self.puts: list[tuple[int, str, Any, Callable[[], None]]] = []

    def enter(self, path: Path, value: Any) -> tuple[Any, Give]:
        if isinstance(value, PerRank) or children_of(value) is None:
            old = self._moving.marks.of(path)
            if old:
                return self._move(path, value, old)
        if isinstance(value, PerRank):
            blank, give = self.enter(path, value.value)
            return blank, lambda loaded: _refill(value, give(loaded))
        stored = as_object(value, self._names)
        if stored is not None:
            return self._object(path, value, stored)
        children = children_of(value)
        if children is not None:
            return self.container(path, value, children)
        if isinstance(value, torch.Tensor):
            return value, lambda loaded: loaded
        return self._plain(path, value)

    def container(
        self, path: Path, value: Any, children: Sequence[tuple[Any, Any]]
    ) -> tuple[dict[Any, Any], Give]:
        parts = {key: self.enter((*path, str(key)), child) for key, child in in_order(children)}
        # Lists become dicts too: DCP would treat a list of blank leaves as one leaf.
        blank = {str(key): blank for key, (blank, _) in parts.items() if blank is not NOT_SAVED}

        def give(loaded: Mapping[str, Any]) -> Any:
            got = {key: part(loaded.get(str(key))) for key, (_, part) in parts.items()}
            return _refilled(value, got)

        return blank, give

    def _object(self, path: Path, value: Any, stored: StoredObject) -> tuple[Any, Give]:
        if isinstance(value, RngState) and not self._saved.exists(path):
            return NOT_SAVED, self._skipped(value, "not in the checkpoint")

        target = stored.target(self._saved, path)

        def give(loaded: Any) -> Any:
            if is_loaded(loaded):
                got = {} if target is NOT_SAVED else loaded
                self._later(stored.order, path, value, lambda: stored.put(got))
            return value

        return target, give

    def _skipped(self, value: Any, why: str) -> Give:
        def give(_: Any) -> Any:
            if isinstance(value, RngState):
                value.skipped = ()
                value.skip(f"all: {why}")
            return value

        return give

    def _later(self, order: int, path: Path, value: Any, put: Callable[[], None]) -> None:
        self.puts.append((order, key_of(path), value, put))

    def _plain(self, path: Path, value: Any) -> tuple[Any, Give]:
        if is_void(value) and not self._saved.exists(path):
            return NOT_SAVED, lambda _: value
        # A dict that is empty here may have been filled when it was saved.
        blank = self._saved.blank(path) if self._saved.exists(path) else NOT_LOADED

        def give(loaded: Any) -> Any:
            if not is_loaded(loaded):
                return value
            if isinstance(value, MutableMapping) and isinstance(loaded, Mapping):
                value.update(loaded)
                return value
            return loaded

        return blank, give

    def _move(self, path: Path, value: Any, old: Mapping[int, Path]) -> tuple[Any, Give]:
        hook = self._moving.hooks.get(key_of(path))
        if hook is None:
            return NOT_SAVED, self._skipped(value, "kept per rank by another number of ranks")
        for place in old.values():
            put_at(self.loaded, place, self._saved.blank(place))

        def give(_: Any) -> Any:
            states = [
                get_at(self.loaded, old[rank]) if rank in old else None
                for rank in range(max(old) + 1)
            ]
            made = hook(states, self._moving.rank, self._moving.size)
            return self._hand(path, value, made)

        return NOT_SAVED, give

    def _hand(self, path: Path, value: Any, made: Any) -> Any:
        """Give a state that a hook made to the part of the state that it is for."""
        if isinstance(value, PerRank):
            return _refill(value, self._hand(path, value.value, made))
        stored = as_object(value, self._names)
        if stored is not None:
            self._later(stored.order, path, value, lambda: value.load_state_dict(made))
            return value
        children = children_of(value)
        if children is None or not isinstance(value, MutableMapping):
            return made
        got = {
            key: self._hand((*path, str(key)), child, made[key])
            for key, child in in_order(children)
        }
        return _refilled(value, {**made, **got})


def _refill(marker: PerRank, value: Any) -> PerRank:
    marker.value = value
    return marker


def _refilled(value: Any, got: Mapping[Any, Any]) -> Any:
    """Return the container with its new parts; the same object if it is mutable."""
    if isinstance(value, (MutableMapping, list)):
        for key, part in got.items():
            if not (isinstance(value, Mapping) and key not in value) and value[key] is part:
                continue
            value[key] = part
        return value
    if isinstance(value, Mapping):
        return {**value, **got}
    parts = [got[n] for n in range(len(value))]
    return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
