"""The load planner: every check that needs no data comes before the first byte.

    keys      missing from the checkpoint ("missing"), or there and not asked for ("extra")
    kinds     a tensor asked for where an object was saved ("dtype"), or the reverse
    tensors   global shape, and dtype ("dtype": torch converts)

    create_reads         this rank's Reads, for ckptfs' own loads: no object of torch's per tensor
    create_local_plan    the same as torch's ReadItems, for whoever drives it as torch does

Plain tensors and DTensors are planned here; what else there is (ShardedTensor, subclasses that cut
themselves, states that torch before 2.4 flattened otherwise) torch plans. Objects load with
``weights_only=True``: a checkpoint is data, never a program.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
from collections.abc import Collection, Iterator, Mapping, MutableMapping, MutableSequence, Sequence
from typing import Any, Literal

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.default_planner import create_default_local_load_plan
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.stateful import Stateful

from ckptfs import _torch
from ckptfs.dcp.metadata.metadata_reader import Inventory, SavedTensor, Whole
from ckptfs.dcp.planning.leaves import WAYS_OUT, Objects, load_leaf
from ckptfs.dcp.planning.state_dicts import Path, containers, flat_to_load, listed, unmarked_key
from ckptfs.dcp.python_gc import gc_paused
from ckptfs.dcp.read.read_plan import (
    PLAIN,
    Read,
    Shardings,
    read_box,
    reads_of,
    refuse_untiled,
    target_of,
)
from ckptfs.errors import ArgumentChoice, CkptfsError, StateError

__all__ = [
    "OPTIMIZER_HINT",
    "Allow",
    "Allowed",
    "LoadPlanner",
    "RequestedKeys",
    "allowed_of",
    "empty_optimizers",
    "unexpected_keys",
]


_OWN = ("state", "param_groups")  # of an optimizer
OPTIMIZER_HINT = (
    "pass what torch's get_state_dict(model, optimizer) returns, use "
    "CheckpointManager.restore, or leave the optimizer out"
)


class Allowed(ArgumentChoice, parameter="allow"):
    """What of a state dict may differ from the checkpoint."""

    EXTRA = "extra"  # keys of the checkpoint that nobody asks for
    MISSING = "missing"  # keys that are asked for and not there: they keep their values
    DTYPE = "dtype"  # dtypes, which are converted; an object takes the place of a tensor
    STOCK = "stock"  # what torch's dcp.load allows: "extra" and "dtype"


Allow = str | Collection[str]


def allowed_of(allow: Allow, *, strict: bool = True) -> frozenset[Allowed]:
    """The words of an ``allow=``, one or several. StateError for any other word."""
    words = {Allowed(word) for word in ([allow] if isinstance(allow, str) else allow)}
    if not strict:
        words |= {Allowed.EXTRA, Allowed.MISSING, Allowed.DTYPE}
    if Allowed.STOCK in words:
        words |= {Allowed.EXTRA, Allowed.DTYPE}
    return frozenset(words)


class LoadPlanner(DefaultLoadPlanner):
    """Plans a load into a state dict, in place, with any sharding.

    Keys missing from the checkpoint and dtypes that differ are StateErrors, unless ``allow`` names them
    (see ``Allowed``): then such keys keep their values (``missing``), and torch converts. strict: False
    allows all. weights_only: False executes what the
    objects' pickles say; only for checkpoints that you trust as you trust code. objects: "refuse" loads no
    object but plain values, whatever ``weights_only`` says.
    """

    def __init__(
        self,
        *,
        strict: bool = True,
        allow: Allow = (),
        weights_only: bool = True,
        objects: Literal["load", "refuse"] = "load",
    ) -> None:
        super().__init__(allow_partial_load=True)
        self.allowed = allowed_of(allow, strict=strict)
        self.weights_only = weights_only
        self.objects = Objects(objects)
        self.missing: tuple[str, ...] = ()
        # Top-level keys of objects that get their states back.
        self.handed_over: Collection[str] = ()
        self._whole: dict[str, Any] = {}  # dicts and lists that are asked for as one object
        self._made: frozenset[str] = frozenset()  # had no memory of their own, and were given some

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,  # noqa: FBT001, FBT002 - torch's signature
    ) -> None:
        """Flatten the state dict; tensors on the meta device get memory. All ranks."""
        self._whole = {}
        with gc_paused():
            if (found := flat_to_load(state_dict)) is not None:
                self.original_state_dict = state_dict
                self.state_dict, self.mappings = found
                self.metadata = metadata
                self.is_coordinator = is_coordinator
                return
            # Where torch gives meta tensors memory, it makes None of every object it does not know.
            kept = [*_objects((), state_dict)]
            self._made = frozenset(_without_memory("", state_dict))
            try:
                super().set_up_planner(state_dict, metadata, is_coordinator)
            except ValueError as error:
                raise StateError(f"the state dict cannot be flattened: {error}") from error
            for path, value in kept:
                _put(state_dict, path, value)

    def create_local_plan(self) -> LoadPlan:
        """What this rank reads. All ranks. StateError names every key that does not fit."""
        assert self.metadata is not None  # noqa: S101 - torch gives it to set_up_planner
        with gc_paused():
            self._ask_for_whole(Whole(self.metadata))
        with gc_paused(), self._as_flattened():
            try:
                plan = super().create_local_plan()
            except (ValueError, RuntimeError) as error:
                self._check()
                raise StateError(f"the state dict does not fit: {error}") from error
            self._check()
            self._zero_missing()
            refuse_untiled(plan, self.state_dict, _tensors_of(self.metadata))
            return plan

    def create_reads(self, inventory: Inventory) -> list[Read]:
        """What this rank reads, each with the memory that it fills. All ranks, instead of
        ``create_local_plan``; StateError as there. ManifestError: the metadata lacks a place.
        """
        with gc_paused():
            keys = inventory.keys
            self.missing = self._not_in(keys)
            if len(self.state_dict) - len(self.missing) < len(keys):
                self._ask_for_whole(inventory)
                self.missing = self._not_in(keys)
            if self.missing and len(self.state_dict) - len(self.missing) < len(keys):
                # Something is asked for and not there, something else is there and not asked for:
                # they may be the same, flattened by an older torch.
                self.metadata = inventory.metadata()
                return self._in_our_words(self.create_local_plan(), self.metadata)
            try:
                reads = self._reads(inventory)
            except CkptfsError:
                raise
            except (ValueError, RuntimeError) as error:
                self._refuse(inventory)
                raise StateError(f"the state dict does not fit: {error}") from error
            self._zero_missing()
            return reads

    def _ask_for_whole(self, inventory: Inventory) -> None:
        """Ask for a dict or a list whole where it was saved as one object. A manager saves the states of
        objects so, empty ones too, and of an empty one flattening leaves nothing that could be asked for.

        Not where tensors lie in it, which are to be filled, but for the state of an object that gets it.
        """
        if not self.flatten_state_dict:
            return
        keys = inventory.keys
        inside: dict[Path, list[str]] = {}
        whole: list[tuple[str, Path, Any]] = []
        for key, path, value in containers(self.original_state_dict):
            if key not in keys or key in self.state_dict or inventory.tensor(key) is not None:
                continue
            if not any(path[:depth] in inside for depth in range(1, len(path))):
                whole.append((key, path, value))
                inside[path] = []
        for key, path in self.mappings.items() if whole else ():
            for depth in range(1, len(path)):
                if path[:depth] in inside:
                    inside[path[:depth]].append(key)
        for key, path, value in whole:
            if any(part in keys for part in inside[path]):
                continue  # its parts were saved too, and those are asked for
            if path[0] not in self.handed_over and any(
                isinstance(self.state_dict[part], torch.Tensor) for part in inside[path]
            ):
                continue  # an object in the dict's place would leave them as they are
            for part in inside[path]:
                del self.state_dict[part], self.mappings[part]
            self.state_dict[key], self.mappings[key] = value, path
            if path[0] not in self.handed_over:  # an object knows itself what it takes
                self._whole[key] = value

    def refuse_empty(self, inventory: Inventory) -> None:
        """StateError for what would be left as it is without a word, where that is allowed of its keys: an
        optimizer before its first step, and an object within a nest, which nobody asks for its state.
        """
        empty = empty_optimizers(self.original_state_dict, inventory.keys)
        if empty:
            raise StateError(
                f"{listed(empty)}: an optimizer without state, and the checkpoint has its state",
                hint=OPTIMIZER_HINT,
            )
        objects = [key for key in self.missing if isinstance(self.state_dict[key], Stateful)]
        if objects:
            raise StateError(
                f"{listed(objects)}: an object with a state is inside another container",
                hint="move it to the top level, or put its state_dict() in its place",
            )

    def _not_in(self, keys: Collection[str]) -> tuple[str, ...]:
        return tuple(key for key in self.state_dict if key not in keys)

    def _zero_missing(self) -> None:
        """What came without memory and is not in the checkpoint: fresh memory holds anything."""
        for key in self.missing:
            value = self.state_dict[key] if key in self._made else None
            if isinstance(value, torch.Tensor):
                value.detach().zero_()

    def _reads(self, inventory: Inventory) -> list[Read]:
        reads: list[Read] = []
        shardings = Shardings()
        keys = inventory.keys
        for key, value in self.state_dict.items():
            if key not in keys:
                if Allowed.MISSING not in self.allowed:
                    self._refuse(inventory)
                continue
            saved = inventory.tensor(key)
            if not _is_alike(value, saved) and _mismatch(value, saved, self.allowed):
                self._refuse(inventory)
            if saved is None:
                reads.append(Read(key, *inventory.place(key, None)))
            elif type(value) in PLAIN:
                read_box(reads, inventory, key, saved, value, (0,) * len(saved.sizes))
            elif (mine := shardings.of(value)) is not None:
                for memory, offsets in mine:
                    read_box(reads, inventory, key, saved, memory, offsets)
            else:
                reads += self._as_torch(inventory, {key: value})
        return reads

    def _as_torch(self, inventory: Inventory, state_dict: dict[str, Any]) -> list[Read]:
        """What torch itself plans: only it knows how that is cut."""
        metadata = inventory.metadata()
        plan = create_default_local_load_plan(state_dict, metadata, strict=False)
        refuse_untiled(plan, state_dict, state_dict)
        return self._in_our_words(plan, metadata)

    def _in_our_words(self, plan: LoadPlan, metadata: Metadata) -> list[Read]:
        reads = reads_of(plan, metadata)
        return [
            read._replace(target=None if read.dtype is None else target_of(self, read))
            for read in reads
        ]

    @contextlib.contextmanager
    def _as_flattened(self) -> Iterator[None]:
        """Keep torch from flattening anew, as before 2.4, where nothing that is asked for is missing.

        It does where anything is not asked for, such as a sharded tensor of which this rank has no
        part, and then asks for lists of dicts whole.
        """
        flatten, saved = self.flatten_state_dict, self.metadata
        known = saved is not None and all(
            key in saved.state_dict_metadata for key in self.state_dict
        )
        self.flatten_state_dict = flatten and not known
        try:
            yield
        finally:
            self.flatten_state_dict = flatten

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put one object into the state dict. StateError when it would execute code."""
        self.load_object(read_item.dest_index.fqn, value)

    def load_object(self, key: str, stream: io.BytesIO) -> None:
        """Put the object that ``stream`` holds under ``key``. StateError as ``load_bytes``."""
        try:
            leaf = load_leaf(stream, weights_only=self.weights_only, objects=self.objects)
        except Exception as error:
            if self.objects is Objects.REFUSE:
                raise StateError(
                    f"the object under {key!r} is not a plain value: {error}",
                    hint='pass objects="load" to load objects that contain only data',
                ) from error
            # The unpickler names what it refuses in a dozen ways; all mean the same here.
            raise StateError(
                f"the object under {key!r} does not load without executing code: {error}",
                hint=WAYS_OUT,
            ) from error
        whole = self._whole.get(key)
        if whole is not None and not isinstance(
            leaf, Mapping if isinstance(whole, Mapping) else MutableSequence
        ):
            raise StateError(
                f"the checkpoint has a {type(leaf).__name__} under {key!r}, but the state "
                f"dict has a {type(whole).__name__}"
            )
        if self.flatten_state_dict:
            _put(self.original_state_dict, self.mappings[key], leaf)
        else:
            self.state_dict[key] = leaf

    def _check(self) -> None:
        assert self.metadata is not None  # noqa: S101 - torch's own base class has checked it
        self._refuse(Whole(self.metadata))

    def _refuse(self, inventory: Inventory) -> None:
        """StateError that names every key that does not fit."""
        keys = inventory.keys
        problems = []
        self.missing = self._not_in(keys)
        if self.missing and Allowed.MISSING not in self.allowed:
            problems.append(f"not in the checkpoint: {listed(self.missing)}")
        for key, value in self.state_dict.items():
            if key not in keys:
                continue
            saved = inventory.tensor(key)
            if problem := _mismatch(value, saved, self.allowed):
                problems.append(f"{key!r}: {problem}")
        if problems:
            shown = "; ".join(problems[:10])
            more = f"; and {len(problems) - 10} more" if len(problems) > 10 else ""  # noqa: PLR2004
            raise StateError(
                f"the state dict does not fit the checkpoint: {shown}{more}",
                hint='allow="missing" leaves such keys as they are, allow="dtype" converts; '
                "shapes must be equal",
            )


@dataclasses.dataclass(frozen=True, slots=True)
class RequestedKeys:
    """What one rank tells of the keys it asks for: those, or all others, whichever are fewer."""

    keys: tuple[str, ...]
    is_complement: bool

    @classmethod
    def of(cls, saved: Collection[str], requested: Collection[str]) -> RequestedKeys:
        """saved: keys of the checkpoint. What other ranks kept for themselves (per_rank=) is asked for
        where this rank asks for its own.
        """
        others = tuple(key for key in saved if not _is_requested(key, requested))
        is_complement = len(others) < len(requested)
        return cls(others if is_complement else tuple(requested), is_complement)


def unexpected_keys(saved: Collection[str], requested: Sequence[RequestedKeys]) -> tuple[str, ...]:
    """Keys of the checkpoint that no rank asks for."""
    left: Collection[str] = saved
    for one in requested:
        keys = frozenset(one.keys)
        if one.is_complement:
            left = [key for key in left if key in keys]
        else:
            left = [key for key in left if not _is_requested(key, keys)]
    return tuple(left)


def empty_optimizers(state: Mapping[Any, Any], saved: Collection[str]) -> list[str]:
    """The names of optimizers that say of themselves that they have no state, where some was saved. One has
    none before its first step: its own state_dict() then asks for nothing.
    """
    found = []
    empty = [
        key
        for key, path, value in containers(state)
        if not value and path[-1] == "state" and _has_parameters(state, path[:-1])
    ]
    for key in empty:
        name = key.removesuffix("state")
        below = {kind for one in saved for kind in _OWN if one.startswith(f"{name}{kind}.")}
        if len(below) == len(_OWN) or ("state" in below and f"{name}param_groups" in saved):
            found.append(name.removesuffix(".") or "the state dict")
    return found


def _has_parameters(state: Any, path: Path) -> bool:
    """Whether an optimizer lies there with parameters on this rank: a pipeline stage may have none."""
    for part in path:
        state = state[_key_of(state, part)]
    groups = state.get("param_groups", ()) if isinstance(state, Mapping) else ()
    return any(isinstance(group, Mapping) and group.get("params") for group in groups)


def _is_requested(key: str, requested: Collection[str]) -> bool:
    return key in requested or ((own := unmarked_key(key)) is not None and own[0] in requested)


def _tensors_of(metadata: Metadata) -> frozenset[str]:
    saved = metadata.state_dict_metadata.items()
    return frozenset(key for key, one in saved if isinstance(one, TensorStorageMetadata))


def _is_alike(value: Any, saved: SavedTensor | None) -> bool:
    """Whether there is nothing to compare: a plain tensor, and the same shape and dtype saved."""
    return (
        saved is not None
        and type(value) in PLAIN
        and value.shape == saved.sizes
        and value.dtype is saved.dtype
    )


def _mismatch(value: object, saved: SavedTensor | None, allowed: Collection[Allowed]) -> str | None:
    """Why what was saved (None: an object) cannot go into ``value``; None when it can."""
    wants_tensor = isinstance(value, torch.Tensor)
    if (saved is not None) != wants_tensor:
        if wants_tensor and Allowed.DTYPE in allowed:
            return None  # stock's behaviour: the object replaces the tensor
        has, asks = ("an object", "a tensor") if wants_tensor else ("a tensor", "an object")
        return f"the checkpoint has {has}, the state dict {asks}"
    if not isinstance(value, torch.Tensor) or saved is None:
        return None
    if tuple(saved.sizes) != tuple(value.size()):
        return f"shape {tuple(saved.sizes)} saved, {tuple(value.size())} asked for"
    if saved.dtype != value.dtype and Allowed.DTYPE not in allowed:
        return f"{saved.dtype} saved, {value.dtype} asked for"
    return None


def _objects(path: tuple[Any, ...], value: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The leaves that are neither tensors nor plain values, and where they lie."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _objects((*path, key), inner)
    elif isinstance(value, list):
        for place, inner in enumerate(value):
            yield from _objects((*path, place), inner)
    elif value is not None and not isinstance(value, (torch.Tensor, int, float, str, bytes)):
        yield path, value


def _without_memory(before: str, value: Any) -> Iterator[str]:
    """The flattened keys of tensors on the meta device."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _without_memory(f"{before}{key}.", inner)
    elif isinstance(value, list):
        for place, inner in enumerate(value):
            yield from _without_memory(f"{before}{place}.", inner)
    elif isinstance(value, torch.Tensor) and not _torch.is_sharded_tensor(value) and value.is_meta:
        yield before.removesuffix(".")


def _put(root: Any, path: tuple[str | int, ...], leaf: object) -> None:
    """Replace the value at a flattened path.

    Flattening wrote every dict key as text; an int key is found again by its text, where stock
    DCP would add a second one beside it.
    """
    container = root
    for part in path[:-1]:
        container = container[_key_of(container, part)]
    if not isinstance(container, (MutableMapping, MutableSequence)):
        raise StateError(
            f"{'.'.join(map(str, path))} is inside a {type(container).__name__}, which cannot be "
            "changed"
        )
    container[_key_of(container, path[-1])] = leaf


def _key_of(container: Any, part: str | int) -> Any:
    if not isinstance(container, Mapping) or part in container:
        return part
    return next((key for key in container if str(key) == part), part)
