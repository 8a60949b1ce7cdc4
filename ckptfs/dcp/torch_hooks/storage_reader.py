"""StorageReader: torch's own ``dcp.load`` from ckptfs' checkpoints, and from stock ones.

    dcp.load(state, storage_reader=ckptfs.StorageReader("s3://bucket/run/step_100"))

Every rank finds the checkpoint and reads its metadata by itself; the coordinator then checks that all found
the same save. Nothing is written or repaired. ``read_metadata`` takes no keyword arguments: with them torch
would, after a transient error on one rank, retry there without collectives, and the other ranks would hang.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import logging
import os
from collections.abc import Mapping
from typing import Any, Literal

from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader as TorchStorageReader
from torch.futures import Future

from ckptfs import _torch
from ckptfs.commit.catalog.catalog import LocatedCheckpoint
from ckptfs.commit.catalog.locate import locate
from ckptfs.commit.session import Place, open_session
from ckptfs.control.control import SoloControl
from ckptfs.control.world import World
from ckptfs.dcp.loading import read_metadata, who_holds
from ckptfs.dcp.planning.leaves import WAYS_OUT, load_leaf
from ckptfs.dcp.planning.state_dicts import listed, view_for
from ckptfs.dcp.read.data_file import Verify, source_of
from ckptfs.dcp.read.load_planner import OPTIMIZER_HINT, empty_optimizers
from ckptfs.dcp.read.read_plan import refuse_untiled
from ckptfs.dcp.read.scheduler import fetch
from ckptfs.dcp.torch_hooks.boundary import Given, StockPlace, crossing, one_place
from ckptfs.errors import IncompleteCheckpointError, StateError
from ckptfs.storage.base import Storage
from ckptfs.uri import Uri, options_of

__all__ = ["StorageReader"]

logger = logging.getLogger("ckptfs.dcp")


@dataclasses.dataclass(slots=True)
class _Open:
    """A checkpoint that was found; ``closing`` closes its clients."""

    storage: Storage
    found: LocatedCheckpoint
    metadata: Metadata
    closing: contextlib.ExitStack


class StorageReader(StockPlace, TorchStorageReader):
    """Loads the checkpoint at ``uri`` in ``torch.distributed.checkpoint.load``.

    Pass it as ``storage_reader=``. Errors arrive as torch's CheckpointException with ckptfs's errors in
    ``failures[rank]``; torch turns an error of ``read_metadata`` into an AssertionError with ckptfs's text.

    Args:
        uri: Run and name; None if every call has a checkpoint_id.
        path: Stock's name for ``uri``; None: see ``uri``.
        storage_options: What fsspec's filesystem of that protocol takes; None: those of ``uri``, if it has
            some.
        verify: "read" compares every block that is read with its digest; "off" does not.
        weights_only: Refuse objects that execute code when they are loaded, with any planner; use False only
            for a checkpoint that you trust as you trust code.
        process_group: The group given to ``dcp.load``; None: the default one.
    """

    def __init__(
        self,
        uri: str | os.PathLike[str] | Uri | None = None,
        *,
        path: str | os.PathLike[str] | Uri | None = None,
        storage_options: Mapping[str, Any] | None = None,
        verify: Literal["read", "off"] = "read",
        weights_only: bool = True,
        process_group: Any = None,
        _extension_registry: Any = None,
    ) -> None:
        super().__init__()
        if _extension_registry is not None:
            raise StateError(
                "_extension_registry has no effect: ckptfs does not read files that "
                "extensions have changed",
                hint="torch.distributed.checkpoint.FileSystemReader reads them",
            )
        uri = one_place(uri, path)
        self._uri: Given = uri
        self._place = Place({**options_of(uri), **(storage_options or {})})
        self._verify = Verify(verify)
        self._weights_only = weights_only
        self._group = process_group
        self._rank = 0
        self._open: _Open | None = None

    # -- torch's hooks, in their order ---------------------------------------------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new load, from ``checkpoint_id`` if given. All ranks. No I/O."""
        self._close()
        if checkpoint_id is not None:
            self._uri = checkpoint_id

    def read_metadata(self) -> Metadata:
        """Find the checkpoint and read its ``.metadata``, executing nothing. All ranks.

        Returns:
            The metadata, for torch's planner.

        Raises:
            NotFoundError: There is no such checkpoint.
            IncompleteCheckpointError: Not all of it is there.
            AmbiguousCheckpointError: Stock torch saved over this checkpoint.
            ManifestError: The description is damaged or too new.
            IntegrityError: The metadata differ from what was written.
            StateError: There is no URI.
        """
        self._close()
        self._rank = self._size_and_rank(None)[1]
        with crossing(self._rank), contextlib.ExitStack() as stack:
            if self._uri is None:
                raise StateError(
                    "the reader has no URI", hint="StorageReader(uri), or checkpoint_id=uri"
                )
            target = Uri.parse(self._uri)
            control = SoloControl(World.solo())
            session = stack.enter_context(
                open_session(target.parent, control, self._place, write=False)
            )
            found = locate(session, target.name)
            metadata = read_metadata(session.storage, found)
            metadata.storage_meta = metadata.storage_meta or StorageMeta()
            self._open = _Open(session.storage, found, metadata, stack.pop_all())
        return metadata

    def set_up_storage_reader(
        self,
        metadata: Metadata,
        is_coordinator: bool,  # noqa: FBT001 - torch's signature
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Show this rank its own ``per_rank`` keys, before the planner plans. All ranks."""
        size, self._rank = self._size_and_rank(kwargs.get("rank"))
        with crossing(self._rank):
            manifest = self._opened.found.manifest
            saved = None if manifest is None else manifest.world_size
            view = view_for(metadata, self._rank, size, saved, ())
            if view is not metadata:
                # The planner has this very object already, and torch offers no later point to replace it.
                metadata.state_dict_metadata = view.state_dict_metadata
                metadata.planner_data = view.planner_data
                metadata.storage_data = view.storage_data
            self._opened.metadata = metadata

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Add to ``plan`` which save this rank found. All ranks."""
        manifest = self._opened.found.manifest
        return dataclasses.replace(plan, storage_data=manifest and manifest.save_id)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Check that all ranks found the same save. Coordinator.

        Raises:
            IncompleteCheckpointError: Ranks found different saves: it was replaced just now.
        """
        with crossing(self._rank):
            saves = {plan.storage_data: rank for rank, plan in enumerate(plans)}
            if len(saves) > 1:
                raise IncompleteCheckpointError(
                    f"ranks {sorted(saves.values())} found different saves: "
                    f"{', '.join(str(save) for save in saves)}",
                    uri=self._shown,
                    hint="it has just been replaced: load again",
                )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read this rank's part, verified, into the planner's tensors. All ranks; local."""
        with crossing(self._rank):
            opened = self._opened
            size, _ = self._size_and_rank(self._rank)
            source = source_of(opened.storage, opened.found, self._verify, self._rank, size)
            _warn_of_optimizers(self._shown, planner, opened.metadata)
            guarded: Any = planner
            if self._weights_only and _is_stock(planner):
                guarded = _SafeLeaves(planner)
            if _plans_as_stock(planner):
                saved = opened.metadata.state_dict_metadata.items()
                tensors = {key for key, one in saved if isinstance(one, TensorStorageMetadata)}
                refuse_untiled(plan, guarded.state_dict, tensors)
            try:
                fetch(source, plan, guarded, opened.metadata)
            except IncompleteCheckpointError as error:
                error.hint = who_holds(error.uri or "", opened.found) or error.hint
                raise
            finally:
                self._close()
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without group and clients."""
        return self.__dict__ | {"_group": None, "_open": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Set the state. Never raises."""
        self.__dict__.update(state)

    # -- the rest ------------------------------------------------------------------------

    @property
    def _opened(self) -> _Open:
        if self._open is None:
            raise StateError("torch did not call read_metadata", uri=self._shown)
        return self._open

    def _close(self) -> None:
        opened, self._open = self._open, None
        if opened is not None:
            opened.closing.close()

    def _size_and_rank(self, given_rank: int | None) -> tuple[int, int]:
        if not _torch.has_default_group():
            return 1, 0
        rank, size = _torch.rank_and_size(self._group)
        return size, rank if given_rank is None else given_rank


def _warn_of_optimizers(where: str, planner: Any, metadata: Metadata) -> None:
    """Warn of optimizers that stock would silently leave without their saved state."""
    state = getattr(planner, "original_state_dict", None)
    if isinstance(state, Mapping) and getattr(planner, "flatten_state_dict", False):
        empty = empty_optimizers(state, metadata.state_dict_metadata)
        if empty:
            logger.warning(
                "%s: %s has no state before its first step, so the saved state is not loaded "
                "into it: %s",
                where,
                listed(empty),
                OPTIMIZER_HINT,
            )


def _is_stock(planner: LoadPlanner) -> bool:
    """Return whether the planner would unpickle objects with everything allowed, as torch's does."""
    return getattr(type(planner), "load_bytes", None) is DefaultLoadPlanner.load_bytes


def _plans_as_stock(planner: LoadPlanner) -> bool:
    """Return whether the planner has to fill every requested tensor that was saved.

    A planner with its own hooks may want to fill fewer.
    """
    hooks = ("create_local_plan", "create_global_plan", "finish_plan")
    return all(
        getattr(type(planner), hook, None) is getattr(DefaultLoadPlanner, hook) for hook in hooks
    )


class _SafeLeaves:
    """A planner of torch's, or one that derives from it, with objects that ``load_leaf`` makes."""

    def __init__(self, planner: Any) -> None:
        self._planner = planner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._planner, name)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Do as torch's planners do, with an object that was made without executing anything."""
        key, planner = read_item.dest_index.fqn, self._planner
        try:
            leaf = load_leaf(value)
        except Exception as error:
            # The unpickler describes a refusal in a dozen ways; all mean the same here.
            raise StateError(
                f"the object under {key!r} does not load without executing code: {error}",
                hint=WAYS_OUT,
            ) from error
        if planner.flatten_state_dict:
            _torch.set_element(planner.original_state_dict, planner.mappings[key], leaf)
        else:
            planner.state_dict[key] = leaf
