"""The save planner: torch's plan of one rank, and all checks that need no file.

    Itemiser().items(flat)   the items of a flat dict, with few Python calls per tensor, and why a value
                             could not be loaded again
    Share, LiveShare         one rank's share of a save: planned by itself, agreed on later, its data handed out
                             item by item. ``ckptfs.dcp.staging.staging`` has another one: a copy, made before
                             the ranks talk (``async_save``)
    SavePlanner              local plan: those items; each leaf and tensor checked; a fingerprint per key
                             global plan: fingerprints compared, then torch's deduplication and validation

``ckptfs.save`` takes local plans from it and decides on them as columns (``ckptfs.dcp.write.pipeline``);
torch's ``dcp.save`` calls both. Plans are never cached: torch's cache ignores dtypes, and its key is the name of the
class.

Tensors of one shape and kind share the object that describes them (``TensorWriteData``). The geometry of
DTensors is computed once for each mesh, placement and shape. Any value that is neither a plain tensor nor a
DTensor over one goes to torch's planner, because its class may define its own way to be saved.
"""

from __future__ import annotations

import dataclasses
import functools
import io
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from ckptfs.dcp.planning.leaves import check_leaf, check_tensor, fingerprint_of, serialise_leaf
from ckptfs.dcp.planning.state_dicts import (
    LocalFacts,
    flat_to_save,
    listed,
    rename_plan,
    unwrap_stateful,
)
from ckptfs.dcp.python_gc import gc_paused
from ckptfs.dcp.write.host_memory import Loan
from ckptfs.errors import StateError

__all__ = [
    "Itemiser",
    "LiveShare",
    "SavePlanner",
    "Share",
    "fingerprints",
    "local_plan",
    "refuse_divergence",
    "shard_fingerprint",
]

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_ATOMS = (type(None), bool, int, float, complex, str, bytes, tuple, list, dict)
_Known = tuple[TensorWriteData, torch.Size, str | None]


class Itemiser:
    """Makes items, and caches what tensors have in common. For one plan of one rank."""

    def __init__(self) -> None:
        self.reasons: dict[str, str] = {}  # key -> why it could not be loaded again
        self._known: dict[object, _Known] = {}
        self._meshes: dict[int, bool] = {}
        self._live = torch.is_grad_enabled()

    def items(self, flat: Mapping[str, Any]) -> list[WriteItem]:
        """Return the items of all values, in order."""
        found: list[WriteItem] = []
        known, add = self._known, found.append
        for key, value in flat.items():
            if type(value) in _PLAIN:
                kind = (
                    value.shape,
                    value.dtype,
                    value.layout,
                    value.requires_grad,
                    value.is_pinned(),
                    value.is_meta,
                )
                data, offsets, reason = known.get(kind) or self._describe(kind, value)
                if reason is not None:
                    self.reasons[key] = reason
                add(WriteItem(MetadataIndex(key, offsets), WriteItemType.TENSOR, tensor_data=data))
            elif type(value) is DTensor:
                self._distributed(key, value, found)
            else:
                self._other(key, value, found)
        return found

    def _describe(self, kind: object, value: torch.Tensor) -> _Known:
        offsets = torch.Size([0] * value.dim())
        data = TensorWriteData(
            ChunkStorageMetadata(offsets, value.size()),
            TensorProperties.create_from_tensor(value),
            value.size(),
        )
        self._known[kind] = data, offsets, check_tensor(value)
        return self._known[kind]

    def _distributed(self, key: str, value: DTensor, found: list[WriteItem]) -> None:
        mesh = value.device_mesh
        here = self._meshes.get(id(mesh))
        if here is None:
            here = self._meshes[id(mesh)] = mesh.get_coordinate() is not None
        with torch.no_grad():  # a view that autograd tracks takes longer than everything else here
            local = value.to_local()
        if not here or type(local) is not torch.Tensor:
            self._other(key, value, found)
            return
        grad = value.requires_grad if self._live else local.requires_grad
        kind = (
            (mesh, value.placements, value.shape, local.shape, local.dtype, local.layout),
            (grad, local.is_pinned(), local.is_meta),
        )
        known = self._known.get(kind)
        if known is None:
            [item] = create_default_local_save_plan({key: value}, is_coordinator=False).items
            data = item.tensor_data
            assert data is not None  # noqa: S101 - DTensor's own items have it
            known = self._known[kind] = data, data.chunk.offsets, check_tensor(local)
        data, offsets, reason = known
        if reason is not None:
            self.reasons[key] = reason
        found.append(WriteItem(MetadataIndex(key, offsets), WriteItemType.SHARD, tensor_data=data))

    def _other(self, key: str, value: Any, found: list[WriteItem]) -> None:
        if type(value) in _ATOMS:
            items = [WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO)]
        else:
            items = create_default_local_save_plan({key: value}, is_coordinator=False).items
        found += items
        if not items:
            return
        if items[0].type is WriteItemType.BYTE_IO:
            reason = check_leaf(value)
        else:
            reason = check_tensor(_local_of(value))
        if reason is not None:
            self.reasons[key] = reason


def _local_of(value: Any) -> torch.Tensor:
    """Return this rank's memory of a sharded tensor, or the tensor itself."""
    if hasattr(value, "local_shards"):
        shards = value.local_shards()
        return shards[0].tensor if shards else torch.empty(0)
    if hasattr(value, "to_local"):
        local: torch.Tensor = value.to_local()
        return local
    tensor: torch.Tensor = value
    return tensor


class SavePlanner(DefaultSavePlanner):
    """Plans a save so that what it accepts loads again, the same on every rank.

    Use it with ``dcp.save(state, storage_writer=ckptfs.StorageWriter(uri), planner=SavePlanner())``;
    ``ckptfs.save`` uses it by itself. Before any file is made it refuses, with a StateError, leaves that
    ``torch.load(weights_only=True)`` could not load, dtypes that do not round trip, equal flattened keys, and
    values that several ranks have under one key and that differ.

    Args:
        compare_ranks: Look for values that differ between ranks; pointless where there is one rank.
        dedup_save_to_lowest_rank: As for torch's DefaultSavePlanner.
    """

    def __init__(
        self, *, compare_ranks: bool = True, dedup_save_to_lowest_rank: bool = False
    ) -> None:
        super().__init__(dedup_save_to_lowest_rank=dedup_save_to_lowest_rank)
        self.compare_ranks = compare_ranks

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,  # noqa: FBT001, FBT002 - torch's signature
    ) -> None:
        """Flatten the state dict. All ranks.

        Raises:
            StateError: Two values have one flat key.
        """
        with gc_paused():
            try:
                flattened = flat_to_save(state_dict)
                if flattened is None:
                    super().set_up_planner(state_dict, storage_meta, is_coordinator)
                else:
                    self.state_dict, self.mappings = flattened
                    self.is_coordinator = is_coordinator
            except ValueError as error:
                raise StateError(
                    f"the state dict cannot be flattened: {error}",
                    hint='"a.b" and {"a": {"b": ...}} are one key; rename one of them',
                ) from error

    def create_local_plan(self) -> SavePlan:
        """Return this rank's items, checked; fingerprints are in ``planner_data``. All ranks."""
        with gc_paused():
            itemiser = Itemiser()
            items = itemiser.items(self.state_dict)
            _refuse_unloadable(itemiser.reasons)
            prints: dict[str, int] = {}
            if self.compare_ranks:
                prints = fingerprints(items, lambda item: self.state_dict[item.index.fqn])
            self.plan = SavePlan(items, planner_data=LocalFacts(self.mappings, prints))
            return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Deduplicate, validate, describe. Coordinator only.

        Raises:
            StateError: Keys differ between ranks; it names the keys and the ranks that disagree.
        """
        with gc_paused():
            facts = [
                p.planner_data if isinstance(p.planner_data, LocalFacts) else None
                for p in all_plans
            ]
            refuse_divergence([f.fingerprints if f else {} for f in facts])
            plain_plans = [
                dataclasses.replace(plan, planner_data=dict(f.mappings)) if f else plan
                for plan, f in zip(all_plans, facts, strict=True)
            ]
            try:
                plans, metadata = super().create_global_plan(plain_plans)
            except (ValueError, AssertionError) as error:
                raise StateError(
                    f"the ranks' plans do not make one checkpoint: {error}",
                    hint="describe the same global tensors on every rank",
                ) from error
            # Paths are in the metadata now; there is no use in sending all of them back to every rank.
            return [dataclasses.replace(plan, planner_data=None) for plan in plans], metadata

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:  # noqa: A002 - torch's
        """Return a leaf's bytes as stock makes them; a tensor as it is. Any thread, repeatable."""
        if write_item.type is WriteItemType.BYTE_IO:
            return serialise_leaf(object)
        return object

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Return the data of one item of this rank's plan. Any thread."""
        data: torch.Tensor | io.BytesIO = self.transform_object(
            write_item, self.lookup_object(write_item.index)
        )
        return data


def _refuse_unloadable(reasons: Mapping[str, str]) -> None:
    """Raise StateError with every key that could be written but not read back."""
    if reasons:
        text = "; ".join(f"{key!r}: {reason}" for key, reason in list(reasons.items())[:10])
        more = f"; and {len(reasons) - 10} more" if len(reasons) > 10 else ""  # noqa: PLR2004
        raise StateError(
            f"{len(reasons)} values could not be loaded again: {text}{more}",
            hint="save plain values, tensors and containers of them; "
            "or allow a class with torch.serialization.add_safe_globals on both sides",
        )


def fingerprints(
    items: Sequence[WriteItem], value_of: Callable[[WriteItem], Any]
) -> dict[str, int]:
    """Return key -> fingerprint for everything that DCP would deduplicate by key.

    For a sharded tensor the ranks must agree on dtype and global size, which DCP takes from one of them. Its
    values are not needed.
    """
    found: dict[str, int] = {}
    for item in items:
        key = item.index.fqn
        if key in found:
            continue
        if item.type is WriteItemType.SHARD:
            assert item.tensor_data is not None  # noqa: S101 - the type of the item says so
            data = item.tensor_data
            found[key] = shard_fingerprint(data.properties.dtype, data.size)
        else:
            found[key] = fingerprint_of(value_of(item))
    return found


@functools.lru_cache(maxsize=1 << 16)
def shard_fingerprint(dtype: torch.dtype, size: torch.Size) -> int:
    """Return a fingerprint of what ranks with shards of one tensor must agree on."""
    return fingerprint_of(("shard", str(dtype), tuple(size)))


def refuse_divergence(ranks: Sequence[Mapping[str, int]]) -> None:
    """Raise StateError for every key with different values on the ranks that have it."""
    by_key: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, prints in enumerate(ranks):
        for key, value in prints.items():
            by_key[key][value].append(rank)
    differing = {key: groups for key, groups in by_key.items() if len(groups) > 1}
    if not differing:
        return
    differences = "; ".join(
        f"{key!r}: " + " and ".join(f"ranks {_spans(g)}" for g in groups.values()) + " differ"
        for key, groups in list(differing.items())[:5]
    )
    patterns = listed(sorted(differing), most=3)
    raise StateError(
        f"{len(differing)} keys have different values on different ranks: {differences}",
        hint=f"pass per_rank=[{patterns}] to keep each rank's value, or make the ranks agree: DCP "
        "itself would keep one value and drop the others",
    )


def _spans(ranks: Sequence[int]) -> str:
    """Return 0-3,7 for [0, 1, 2, 3, 7]: a thousand ranks fit in one line."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


# -- a rank's share of a save ----------------------------------------------------------------------


class Share(Protocol):
    """What one rank contributes to a save. The thread that saves calls these methods in this order."""

    @property
    def planner(self) -> SavePlanner:
        """Makes the global plan, on the coordinator."""

    def plan(self, rank: int, per_rank: Sequence[str]) -> SavePlan:
        """Return this rank's plan with its own keys renamed. StateError; local."""

    def take_on(self, items: Sequence[WriteItem]) -> None:
        """Take the items that this rank is to write, under the names that the planner knows."""

    def resolve(self, item: WriteItem) -> torch.Tensor | io.BytesIO | Loan:
        """Return the data of one of these items. Any thread."""


class LiveShare:
    """The caller's own state dict: it must not change until the save has returned."""

    def __init__(self, state_dict: Mapping[str, Any], planner: SavePlanner) -> None:
        self._state_dict = state_dict
        self.planner = planner

    def plan(self, rank: int, per_rank: Sequence[str]) -> SavePlan:
        """As ``Share.plan``."""
        return local_plan(self.planner, self._state_dict, rank, per_rank)

    def take_on(self, items: Sequence[WriteItem]) -> None:
        """Do nothing: there is nothing to prepare."""

    def resolve(self, item: WriteItem) -> torch.Tensor | io.BytesIO | Loan:
        """As ``Share.resolve``."""
        return self.planner.resolve_data(item)


def local_plan(
    planner: SavePlanner, state_dict: Mapping[str, Any], rank: int, per_rank: Sequence[str]
) -> SavePlan:
    """Return one rank's plan: flattened, checked, its own keys renamed. Local."""
    planner.set_up_planner(unwrap_stateful(state_dict), None, is_coordinator=rank == 0)
    return rename_plan(planner.create_local_plan(), per_rank, rank)
