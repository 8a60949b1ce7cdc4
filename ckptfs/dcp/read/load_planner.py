"""The load planner: every check that needs no data is made before the first byte is read.

    keys      missing from the checkpoint ("missing"), or saved but not requested ("extra")
    kinds     a tensor requested where an object was saved ("dtype"), or the reverse
    tensors   global shape, and dtype ("dtype": torch converts)

    create_reads         this rank's Reads, for ckptfs' own loads: no torch object per tensor
    create_local_plan    the same as torch's ReadItems, for callers that use it as torch does

Plain tensors and DTensors are planned here. torch plans everything else: ShardedTensors, subclasses that
shard themselves, and states that torch before 2.4 flattened in another way. Objects load with
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
from ckptfs.dcp.metadata.metadata_reader import Inventory, SavedTensor
from ckptfs.dcp.metadata.torch_inventory import TorchInventory
from ckptfs.dcp.planning.leaves import WAYS_OUT, Objects, load_leaf
from ckptfs.dcp.planning.state_dicts import Path, containers, flat_to_load, listed, unmarked_key
from ckptfs.dcp.python_gc import gc_paused
from ckptfs.dcp.read.read_plan import (
    PLAIN,
    PlannedRead,
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


_OWN = ("state", "param_groups")  # the keys of an optimizer's state dict
OPTIMIZER_HINT = (
    "pass what torch's get_state_dict(model, optimizer) returns, use "
    "CheckpointManager.restore, or leave the optimizer out"
)


class Allowed(ArgumentChoice, parameter="allow"):
    """How a state dict may differ from the checkpoint."""

    EXTRA = "extra"  # keys of the checkpoint that no rank requests
    MISSING = "missing"  # keys that are requested but were not saved: they keep their values
    DTYPE = "dtype"  # dtypes, which are converted; an object replaces a tensor
    STOCK = "stock"  # what torch's dcp.load allows: "extra" and "dtype"


Allow = str | Collection[str]


def allowed_of(allow: Allow, *, strict: bool = True) -> frozenset[Allowed]:
    """Return the words of an ``allow=``, one or several. StateError for any other word."""
    words = {Allowed(word) for word in ([allow] if isinstance(allow, str) else allow)}
    if not strict:
        words |= {Allowed.EXTRA, Allowed.MISSING, Allowed.DTYPE}
    if Allowed.STOCK in words:
        words |= {Allowed.EXTRA, Allowed.DTYPE}
    return frozenset(words)


class LoadPlanner(DefaultLoadPlanner):
    """Plans a load into a state dict, in place, with any sharding.

    Keys that are missing from the checkpoint and dtypes that differ are StateErrors, unless ``allow`` names
    them (see ``Allowed``): then such keys keep their values (``missing`` has their names), and torch converts.

    Args:
        strict: False allows everything.
        allow: The allowed differences.
        weights_only: False executes what the objects' pickles say; only for checkpoints that you trust as you
            trust code.
        objects: "refuse" loads no objects except plain values, whatever ``weights_only`` says.
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
        # Top-level keys of the objects with load_state_dict that receive what was loaded.
        self.receiver_keys: Collection[str] = ()
        self._containers: dict[str, Any] = {}  # dicts and lists that are requested as one object
        self._made: frozenset[str] = frozenset()  # meta tensors that were given memory

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,  # noqa: FBT001, FBT002 - torch's signature
    ) -> None:
        """Flatten the state dict; give tensors on the meta device memory. All ranks."""
        self._containers = {}
        with gc_paused():
            if (found := flat_to_load(state_dict)) is not None:
                self.original_state_dict = state_dict
                self.state_dict, self.mappings = found
                self.metadata = metadata
                self.is_coordinator = is_coordinator
                return
            # When torch gives meta tensors memory, it replaces every object that it does not know by None.
            objects = [*_objects((), state_dict)]
            self._made = frozenset(_without_memory("", state_dict))
            try:
                super().set_up_planner(state_dict, metadata, is_coordinator)
            except ValueError as error:
                raise StateError(f"the state dict cannot be flattened: {error}") from error
            for path, value in objects:
                _put(state_dict, path, value)

    def create_local_plan(self) -> LoadPlan:
        """Return what this rank reads. All ranks. StateError names every key that does not fit."""
        assert self.metadata is not None  # noqa: S101 - torch gives it to set_up_planner
        with gc_paused():
            self._request_tensors(TorchInventory(self.metadata))
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

    def create_reads(self, inventory: Inventory) -> list[PlannedRead]:
        """Return what this rank reads, each PlannedRead with the memory that it fills.

        All ranks call this instead of ``create_local_plan``. StateError is raised for the same reasons.
        ManifestError: the metadata lacks the place of an item.
        """
        with gc_paused():
            keys = inventory.keys
            self.missing = self._not_in(keys)
            if len(self.state_dict) - len(self.missing) < len(keys):
                self._request_tensors(inventory)
                self.missing = self._not_in(keys)
            if self.missing and len(self.state_dict) - len(self.missing) < len(keys):
                # Some requested keys were not saved, and some saved keys are not requested: they may
                # be the same values, flattened by an older torch.
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

    def _request_tensors(self, inventory: Inventory) -> None:
        """Request a dict or a list as a whole if it was saved as one object.

        A manager saves the states of objects like this, empty ones too. Flattening an empty one leaves no key
        that could be requested.

        A container with tensors is not requested as a whole, because its tensors are to be filled in place. The
        exception is the state of an object that receives what was loaded.
        """
        if not self.flatten_state_dict:
            return
        keys = inventory.keys
        inside: dict[Path, list[str]] = {}
        candidates: list[tuple[str, Path, Any]] = []
        for key, path, value in containers(self.original_state_dict):
            if key not in keys or key in self.state_dict or inventory.tensor(key) is not None:
                continue
            if not any(path[:depth] in inside for depth in range(1, len(path))):
                candidates.append((key, path, value))
                inside[path] = []
        for key, path in self.mappings.items() if candidates else ():
            for depth in range(1, len(path)):
                if path[:depth] in inside:
                    inside[path[:depth]].append(key)
        for key, path, value in candidates:
            if any(part in keys for part in inside[path]):
                continue  # its parts were saved too, and they are requested
            if path[0] not in self.receiver_keys and any(
                isinstance(self.state_dict[part], torch.Tensor) for part in inside[path]
            ):
                continue  # replacing the dict by an object would leave its tensors unchanged
            for part in inside[path]:
                del self.state_dict[part], self.mappings[part]
            self.state_dict[key], self.mappings[key] = value, path
            # An object that receives what was loaded checks it by itself.
            if path[0] not in self.receiver_keys:
                self._containers[key] = value

    def refuse_empty(self, inventory: Inventory) -> None:
        """Raise StateError for values that ``allow`` would silently leave unchanged.

        These are an optimizer before its first step, and an object with a state inside another container; such
        an object is not asked for its state.
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
        """Fill meta tensors that are not in the checkpoint with zeros: their memory is fresh."""
        for key in self.missing:
            value = self.state_dict[key] if key in self._made else None
            if isinstance(value, torch.Tensor):
                value.detach().zero_()

    def _reads(self, inventory: Inventory) -> list[PlannedRead]:
        reads: list[PlannedRead] = []
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
                reads.append(PlannedRead(key, *inventory.place(key, None)))
            elif type(value) in PLAIN:
                read_box(reads, inventory, key, saved, value, (0,) * len(saved.sizes))
            elif (local_shards := shardings.of(value)) is not None:
                for memory, offsets in local_shards:
                    read_box(reads, inventory, key, saved, memory, offsets)
            else:
                reads += self._as_torch(inventory, {key: value})
        return reads

    def _as_torch(self, inventory: Inventory, state_dict: dict[str, Any]) -> list[PlannedRead]:
        """Return what torch itself plans: only torch knows how these values are sharded."""
        metadata = inventory.metadata()
        plan = create_default_local_load_plan(state_dict, metadata, strict=False)
        refuse_untiled(plan, state_dict, state_dict)
        return self._in_our_words(plan, metadata)

    def _in_our_words(self, plan: LoadPlan, metadata: Metadata) -> list[PlannedRead]:
        reads = reads_of(plan, metadata)
        return [
            read._replace(target=None if read.dtype is None else target_of(self, read))
            for read in reads
        ]

    @contextlib.contextmanager
    def _as_flattened(self) -> Iterator[None]:
        """Keep torch from flattening as before 2.4 if all requested keys were saved.

        torch does this if any saved key is not requested, for example a sharded tensor without a part on this
        rank, and then requests lists of dicts as a whole.
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
        """Put one object into the state dict. StateError if that would execute code."""
        self.load_object(read_item.dest_index.fqn, value)

    def load_object(self, key: str, stream: io.BytesIO) -> None:
        """Put the object that ``stream`` holds under ``key``. StateError as for ``load_bytes``."""
        try:
            leaf = load_leaf(stream, weights_only=self.weights_only, objects=self.objects)
        except Exception as error:
            if self.objects is Objects.REFUSE:
                raise StateError(
                    f"the object under {key!r} is not a plain value: {error}",
                    hint='pass objects="load" to load objects that contain only data',
                ) from error
            # The unpickler describes a refusal in a dozen ways; all mean the same here.
            raise StateError(
                f"the object under {key!r} does not load without executing code: {error}",
                hint=WAYS_OUT,
            ) from error
        container = self._containers.get(key)
        if container is not None and not isinstance(
            leaf, Mapping if isinstance(container, Mapping) else MutableSequence
        ):
            raise StateError(
                f"the checkpoint has a {type(leaf).__name__} under {key!r}, but the state "
                f"dict has a {type(container).__name__}"
            )
        if self.flatten_state_dict:
            _put(self.original_state_dict, self.mappings[key], leaf)
        else:
            self.state_dict[key] = leaf

    def _check(self) -> None:
        assert self.metadata is not None  # noqa: S101 - torch's own base class has checked it
        self._refuse(TorchInventory(self.metadata))

    def _refuse(self, inventory: Inventory) -> None:
        """Raise StateError that names every key that does not fit."""
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
    """The keys that one rank requests: either these, or the saved keys that it does not request.

    A rank sends the shorter of the two lists.
    """

    keys: tuple[str, ...]
    is_complement: bool

    @classmethod
    def of(cls, saved: Collection[str], requested: Collection[str]) -> RequestedKeys:
        """Compare the ``saved`` keys of the checkpoint with those that this rank requests.

        A key that another rank kept for itself (per_rank=) counts as requested if this rank requests its own.
        """
        others = tuple(key for key in saved if not _is_requested(key, requested))
        is_complement = len(others) < len(requested)
        return cls(others if is_complement else tuple(requested), is_complement)


def unexpected_keys(saved: Collection[str], requested: Sequence[RequestedKeys]) -> tuple[str, ...]:
    """Return the keys of the checkpoint that no rank requests."""
    left: Collection[str] = saved
    for one in requested:
        keys = frozenset(one.keys)
        if one.is_complement:
            left = [key for key in left if key in keys]
        else:
            left = [key for key in left if not _is_requested(key, keys)]
    return tuple(left)


def empty_optimizers(state: Mapping[Any, Any], saved: Collection[str]) -> list[str]:
    """Return the names of optimizers that report no state although some was saved.

    An optimizer has no state before its first step: its own state_dict() then requests nothing.
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
    """Return whether the optimizer at this path has parameters here; a pipeline stage may not."""
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
    """Return whether a plain tensor has the saved shape and dtype, so that nothing must be checked."""
    return (
        saved is not None
        and type(value) in PLAIN
        and value.shape == saved.sizes
        and value.dtype is saved.dtype
    )


def _mismatch(value: object, saved: SavedTensor | None, allowed: Collection[Allowed]) -> str | None:
    """Return why what was saved (None: an object) cannot go into ``value``; None if it can."""
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
    """Yield the leaves that are neither tensors nor plain values, with their paths."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _objects((*path, key), inner)
    elif isinstance(value, list):
        for place, inner in enumerate(value):
            yield from _objects((*path, place), inner)
    elif value is not None and not isinstance(value, (torch.Tensor, int, float, str, bytes)):
        yield path, value


def _without_memory(before: str, value: Any) -> Iterator[str]:
    """Yield the flattened keys of tensors on the meta device."""
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

    Flattening wrote every dict key as text. An int key is found again by its text; stock DCP would add a
    second key next to it.
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
