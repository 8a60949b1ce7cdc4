"""The save planner: stock's plan, plus every check that can be made before a file is.

    local plan       stock's items; each leaf and tensor checked by key; a fingerprint per key
    global plan      fingerprints compared, then stock's deduplication and validation

``ckptfs.save`` asks it for local plans, and decides over them as columns (``exchange``); stock's
``dcp.save`` calls both. It never caches plans: stock's cache ignores dtypes and is keyed by the class's
name.
"""

from __future__ import annotations

import dataclasses
import functools
import io
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from ckptfs.dcp.collector import gc_paused
from ckptfs.dcp.flattening import flat_to_save
from ckptfs.dcp.leaves import fingerprint_of, serialise_leaf
from ckptfs.dcp.local_items import Itemiser
from ckptfs.dcp.per_rank import LocalFacts, listed
from ckptfs.errors import StateError

__all__ = [
    "SavePlanner",
    "fingerprints",
    "refuse_divergence",
    "shard_fingerprint",
]


class SavePlanner(DefaultSavePlanner):
    """Plans a save so that what it accepts loads again, the same on every rank.

    Use it with ``dcp.save(state, storage_writer=ckptfs.StorageWriter(uri), planner=SavePlanner())``;
    ``ckptfs.save`` uses it by itself. Raises StateError, before any file is made, for leaves that
    ``torch.load(weights_only=True)`` could not load, dtypes that do not round trip, equal
    flattened keys, and values that several ranks have under one key and that differ
    (``compare_ranks``; pointless where there is one rank).
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
        """Flatten the state dict. All ranks. StateError for two values under one flat key."""
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
        """This rank's items, checked; fingerprints travel in ``planner_data``. All ranks."""
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

        StateError names keys that differ and the ranks that disagree.
        """
        with gc_paused():
            facts = [
                p.planner_data if isinstance(p.planner_data, LocalFacts) else None
                for p in all_plans
            ]
            refuse_divergence([f.fingerprints if f else {} for f in facts])
            bare = [
                dataclasses.replace(plan, planner_data=dict(f.mappings)) if f else plan
                for plan, f in zip(all_plans, facts, strict=True)
            ]
            try:
                plans, metadata = super().create_global_plan(bare)
            except (ValueError, AssertionError) as error:
                raise StateError(
                    f"the ranks' plans do not make one checkpoint: {error}",
                    hint="every rank must describe the same global tensors",
                ) from error
            # Paths are in the metadata now; sending all of them back to every rank helps nobody.
            return [dataclasses.replace(plan, planner_data=None) for plan in plans], metadata

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:  # noqa: A002 - torch's
        """A leaf's bytes as stock makes them; a tensor as it is. Any thread, as often as liked."""
        if write_item.type is WriteItemType.BYTE_IO:
            return serialise_leaf(object)
        return object

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """The data of one item of this rank's plan. Any thread."""
        data: torch.Tensor | io.BytesIO = self.transform_object(
            write_item, self.lookup_object(write_item.index)
        )
        return data


def _refuse_unloadable(reasons: Mapping[str, str]) -> None:
    """StateError with every key that could be written but not read back."""
    if reasons:
        told = "; ".join(f"{key!r}: {reason}" for key, reason in list(reasons.items())[:10])
        more = f"; and {len(reasons) - 10} more" if len(reasons) > 10 else ""  # noqa: PLR2004
        raise StateError(
            f"{len(reasons)} leaves could not be loaded again: {told}{more}",
            hint="save plain values, tensors and containers of them; "
            "or allow a class with torch.serialization.add_safe_globals on both sides",
        )


def fingerprints(
    items: Sequence[WriteItem], value_of: Callable[[WriteItem], Any]
) -> dict[str, int]:
    """Key -> fingerprint, for all that DCP would deduplicate by key.

    Of a sharded tensor the ranks must agree on dtype and global size, which DCP takes from one; its
    value is not asked for.
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
    """What ranks must agree on that have shards of one tensor."""
    return fingerprint_of(("shard", str(dtype), tuple(size)))


def refuse_divergence(ranks: Sequence[Mapping[str, int]]) -> None:
    """StateError for every key whose value is not the same on all ranks that have it."""
    by_key: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, prints in enumerate(ranks):
        for key, value in prints.items():
            by_key[key][value].append(rank)
    differing = {key: groups for key, groups in by_key.items() if len(groups) > 1}
    if not differing:
        return
    told = "; ".join(
        f"{key!r}: " + " and ".join(f"ranks {_spans(g)}" for g in groups.values()) + " differ"
        for key, groups in list(differing.items())[:5]
    )
    patterns = listed(sorted(differing), most=3)
    raise StateError(
        f"{len(differing)} keys have different values on different ranks: {told}",
        hint=f"pass per_rank=[{patterns}] to keep every rank's own, "
        "or make the ranks agree: DCP itself would keep one and drop the others",
    )


def _spans(ranks: Sequence[int]) -> str:
    """0-3,7 for [0, 1, 2, 3, 7]: a thousand ranks fit in one line."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
